"""The state that a step changes: model, optimizer, averaged weights and the scale of amp."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from ..compat.apex import amp
from ..compat.apex._fused import lay_out
from ..compat.apex.optimizers import FusedAdam
from ..conversion import Report, convert, report
from .config import Config, ConfigError, TrainingError
from .distributed import broadcast_weights, get_world_size


class TrainState:
    """Model, optimizer, averaged weights and amp, with the device and the configuration.

    Forward passes are in fp32, under torch.autocast in bfloat16, or by O0 to O3 of
    `fastvit.compat.apex.amp`. Parameters, gradients and checkpoints are float32 in all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: torch.device,
        shape: tuple[int, int, int],
        steps_per_epoch: int,
        state: dict[str, Any] | None,
    ) -> None:
        """Move the model to the device, and make the others for it; `state` is of a checkpoint.

        The order matters. Weights are equal on all ranks before the average is a copy of the converted model.
        amp changes the forward before DistributedDataParallel wraps it.
        """
        self.config, self.device = config, device
        self.scales_loss = config.amp.startswith("O")  # amp skips a step whose gradients are not finite
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        model.to(self.device, memory_format=layout)  # type: ignore[call-overload]  # lacks this one
        broadcast_weights(model)
        self.memory = self._save_memory(model, shape)
        self.average = make_average(model, config.ema) if config.ema else None
        lr = config.lr * (get_world_size() * config.accumulate if config.scale_lr else 1)
        self.schedule = make_schedule(
            lr, config.epochs * steps_per_epoch, config.warmup_epochs * steps_per_epoch
        )
        self.model, self.optimizer = amp.initialize(
            model,
            make_optimizer(model, config.optimizer, lr, config.weight_decay),
            enabled=self.scales_loss,
            opt_level=config.amp,
            loss_scale=None if config.loss_scale == "auto" else config.loss_scale,
            verbosity=0,
        )
        if state is not None:
            self._load(state)
        if config.compile:
            model.compile()
        self.parallel: Any = data_parallel(model, device)  # what a training step calls

    @property
    def loss_scale(self) -> float:
        return float(amp.state_dict()["loss_scaler0"]["loss_scale"]) if self.scales_loss else 1.0

    def autocast(self) -> AbstractContextManager:
        """The context of a forward pass, in training and in evaluation."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp == "bf16")

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device and in the memory format of the model."""
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.to(self.device, non_blocking=True, memory_format=layout)
        return images, labels.to(self.device, non_blocking=True)

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer, "precision": amp}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TrainingError(
                    f"{self.config.continued}: {name} of the checkpoint does not fit: {what}"
                ) from error

    def _save_memory(self, model: nn.Module, shape: tuple[int, int, int]) -> Report | None:
        """Convert the model by `--memory`, and measure what a training step keeps; None without it."""
        config, kind = self.config, self.device.type
        if config.memory == "off":
            return None
        images, _ = self.to_device(torch.zeros(config.batch_size, *shape), torch.zeros(0))
        # The dtype that activations have with amp, for which the model is not prepared yet.
        half = torch.bfloat16 if kind == "cpu" or config.amp == "bf16" else torch.float16
        with torch.autocast(kind, half, enabled=config.amp not in ("off", "O0")):
            try:
                if config.budget is not None:
                    convert(model, budget=config.budget, example_inputs=images)
                else:
                    convert(model, matmuls=config.memory == "products")
            except ValueError as error:  # the budget is less than is possible
                raise ConfigError(
                    f"--memory {config.memory}: {str(error).removeprefix('convert: ')}"
                ) from None
            return report(model, images)


def make_optimizer(model: nn.Module, name: str, lr: float, weight_decay: float) -> Optimizer:
    """`sgd` (momentum 0.9), `adamw`, or `fused-adam`, which is that of `fastvit.compat.apex`.

    Vectors (biases, gamma, beta) and the parameters of the model's `no_weight_decay()` have no weight decay.
    """
    spared: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim < 2 or key in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    if name == "fused-adam":
        return FusedAdam(groups, lr=lr)
    optimizer = SGD(groups, lr, momentum=0.9, fused=True) if name == "sgd" else AdamW(groups, lr, fused=True)
    optimizer.register_step_pre_hook(lay_out)  # a resumed run may have another layout
    return optimizer


def make_schedule(lr: float, steps: int, warmup: int) -> Callable[[int], float]:
    """Learning rate by step: linear from `lr / warmup` to `lr`, then half a cosine, 0 after `steps`.

    With a warm-up as long as the run there is no cosine.
    """

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return rate


def make_average(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of the model whose parameters are an exponential moving average; its buffers are copies.

    The decay begins at `(1 + n) / (10 + n)` after n steps, so that the initial weights lose their share soon.
    """

    def average(mean: Tensor, value: Tensor, steps: Tensor | int) -> Tensor:
        n = int(steps)
        return mean.lerp(value.to(mean.dtype), 1 - min(decay, (1 + n) / (10 + n)))

    return AveragedModel(model, avg_fn=average)


def data_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """The model in DistributedDataParallel; the model itself when there is one rank."""
    if get_world_size() < 2:
        return model
    devices = [device] if device.type == "cuda" else None
    # DDP must not broadcast buffers: those of synchronised layers are equal, the others are averaged once per
    # epoch. torch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {}
    options["forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"] = False
    # DDP orders its buckets anew after the first backward, unless it looks for unused parameters. With three
    # or more ranks the rounding of a sum depends on where a bucket has it, also of the first after a resume.
    options["find_unused_parameters"] = get_world_size() > 2 and devices is None
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    # A kernel with one input channel has two valid strides; DDP and the convolution choose different ones.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=devices, **options)
