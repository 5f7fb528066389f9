"""The state that a step changes: model, optimizer, loss scale and averaged weights."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from ..compat.apex._fused import lay_out
from ..compat.apex.optimizers import FusedAdam
from ..conversion import Report, convert, report
from .config import Config, ConfigError, TrainingError
from .distributed import Ranks, broadcast_weights
from .precision import Precision

PARTS = ("model", "average", "optimizer", "precision")  # of a checkpoint


@dataclass
class TrainState:
    """The objects that training changes, with the device and the configuration."""

    model: nn.Module  # without DistributedDataParallel
    parallel: Any  # the module that a training step calls
    optimizer: Optimizer
    precision: Precision
    average: AveragedModel | None
    memory: Report | None  # of the converted model
    device: torch.device
    config: Config
    schedule: Callable[[int], float]  # the learning rate by step

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device and in the memory format of the model."""
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.to(self.device, non_blocking=True, memory_format=layout)
        return images, labels.to(self.device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {name: None if part is None else part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            TrainingError: it is of another model.
        """
        for name in PARTS:
            part = getattr(self, name)
            if part is None:
                continue
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TrainingError(f"--resume: {name} of the checkpoint does not fit: {what}") from error


def make_train_state(
    model: nn.Module,
    config: Config,
    ranks: Ranks,
    shape: tuple[int, int, int],
    steps_per_epoch: int,
    saved: dict[str, Any] | None,
) -> TrainState:
    """Move the model to the device, and make optimizer, precision and data parallelism for it.

    The order matters. Weights are equal on all ranks before the average is a copy of the converted model.
    amp changes the forward before DistributedDataParallel wraps it.

    Args:
        shape: C, H, W of the images.
        steps_per_epoch: steps of the optimizer.
        saved: the checkpoint to continue from.
    """
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model = model.to(ranks.device, memory_format=layout)  # type: ignore[call-overload]  # lacks this one
    broadcast_weights(model)
    precision = Precision(config, ranks.device)
    memory = _save_memory(model, config, shape, precision)
    average = make_average(model, config.ema) if config.ema else None
    lr = config.lr * (ranks.world * config.accumulate if config.scale_lr else 1)
    optimizer = make_optimizer(model, config.optimizer, lr, config.weight_decay)
    model, optimizer = precision.prepare(model, optimizer)
    schedule = make_schedule(lr, config.epochs * steps_per_epoch, config.warmup_epochs * steps_per_epoch)
    train_state = TrainState(
        model, model, optimizer, precision, average, memory, ranks.device, config, schedule
    )
    if saved is not None:
        train_state.load(saved)
    if config.compile:
        model.compile()
    train_state.parallel = data_parallel(model, ranks)
    return train_state


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


def _save_memory(
    model: nn.Module, config: Config, shape: tuple[int, int, int], precision: Precision
) -> Report | None:
    """Convert the model by `--memory`, and measure what a training step keeps; None without it."""
    if config.memory == "off":
        return None
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    device = next(model.parameters()).device
    images = torch.zeros(config.batch_size, *shape, device=device).to(memory_format=layout)
    kind, _, budget = config.memory.partition("=")
    with precision.half():
        try:
            if kind == "budget":
                convert(model, budget=budget, example_inputs=images)
            else:
                convert(model, products=kind == "products")
        except ValueError as error:  # it is no budget, or less than is possible
            raise ConfigError(f"--memory {config.memory}: {str(error).removeprefix('convert: ')}") from None
        return report(model, images)


def data_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model in DistributedDataParallel; the model itself when there is one rank."""
    if ranks.world < 2:
        return model
    devices = [ranks.device] if ranks.device.type == "cuda" else None
    # DDP must not broadcast buffers: those of synchronised layers are equal, the others are averaged once per
    # epoch. torch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {}
    options["forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"] = False
    # DDP orders its buckets anew after the first backward, unless it looks for unused parameters. With three
    # or more ranks the rounding of a sum depends on the place in a bucket, also of the first after a resume.
    options["find_unused_parameters"] = ranks.world > 2 and devices is None
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    # A kernel with one input channel has two valid strides; DDP and the convolution choose different ones.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=devices, **options)
