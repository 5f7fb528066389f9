"""The state that a step changes: model, optimizer, mixed precision and averaged weights."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from .distributed import Ranks, broadcast_weights

PARTS = ("model", "average", "optimizer", "precision")  # of a checkpoint


class Precision:
    """fp32, torch.autocast in bfloat16 around the forward pass, or O0 to O3 of `fastvit.compat.apex.amp`.

    amp scales the loss, and divides the gradients by the scale before the step. Parameters, gradients and
    checkpoints are float32 at every level.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.scales_loss = config.amp.startswith("O")  # amp skips a step whose gradients are not finite

    @property
    def loss_scale(self) -> float:
        return float(amp.state_dict()["loss_scaler0"]["loss_scale"]) if self.scales_loss else 1.0

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Prepare model and optimizer for this level; called once, before DistributedDataParallel."""
        if not self.scales_loss:
            return model, optimizer
        scale = self.config.loss_scale
        value = None if scale == "auto" else scale if scale == "dynamic" else float(scale)
        return amp.initialize(model, optimizer, opt_level=self.config.amp, loss_scale=value, verbosity=0)

    def forward(self) -> AbstractContextManager:
        """The context of a forward pass, in training and in evaluation."""
        on = self.config.amp == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if on else nullcontext()

    def half(self) -> AbstractContextManager:
        """Autocast to the dtype that activations have at this level, of a model that is not prepared."""
        half = torch.bfloat16 if self.device.type == "cpu" or self.config.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, half, enabled=self.config.amp not in ("off", "O0"))

    def backward(self, loss: Tensor, optimizer: Optimizer, last: bool) -> None:
        """Add the gradients of `loss`; `last` means that a step of the optimizer follows."""
        if not self.scales_loss:
            loss.backward()
            return
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
            scaled.backward()

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict() if self.scales_loss else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scales_loss:
            amp.load_state_dict(state)


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
        """Restore the result of `state_dict`."""
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
