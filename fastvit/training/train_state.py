"""`TrainState` is the state that a step changes: model, optimizer, averaged weights and amp's loss scale."""

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
from ..compat.apex._fused_optimizer import match_strides_before_step
from ..compat.apex.optimizers import FusedAdam
from ..conversion import Report, convert, report
from .config import Config, ConfigError, TrainingError
from .distributed import broadcast_weights, get_world_size


class TrainState:
    """Model, optimizer, averaged weights and amp, with the device and the configuration.

    Forward passes run in fp32, under torch.autocast in bfloat16, or by O0 to O3 of
    `fastvit.compat.apex.amp`. Parameters, gradients and checkpoints are float32 in all of them; at
    O2 and O3 this amp, unlike apex's, casts weights for the duration of forward.
    """

    memory_report: Report | None = None  # The report of what --memory saves.
    ema_model: AveragedModel | None = None  # The model with the moving average of --ema.
    model: nn.Module  # without DistributedDataParallel
    ddp_model: Any  # the module that a training step calls; `model` itself on one rank
    optimizer: Optimizer

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: torch.device,
        shape: tuple[int, int, int],
        steps_per_epoch: int,
        state: dict[str, Any] | None,
    ) -> None:
        """Moves the model to the device, and builds optimizer, averaged weights and amp for it.

        `state` is the state of a checkpoint, or None.
        """
        self.config, self.device = config, device
        # O0 to O3 use amp, which scales the loss and skips a step whose gradients are not finite.
        self.uses_loss_scaling = config.amp.startswith("O")
        self._move_to_device(model)
        if config.memory != "off":
            self._convert_and_report(model, shape)
        if config.ema:  # This copies the converted model, whose weights are equal on all ranks by now.
            self.ema_model = make_ema_model(model, config.ema)
        self._prepare_model_and_optimizer(model, steps_per_epoch)
        if state is not None:
            self._load_state_dict(state)
        if config.compile:
            model.compile()
        self.ddp_model = wrap_in_ddp(model, device)  # DDP calls the forward that amp has changed.

    def _move_to_device(self, model: nn.Module) -> None:
        memory_format = torch.channels_last if self.config.channels_last else torch.preserve_format
        model.to(self.device, memory_format=memory_format)  # type: ignore[call-overload]  # no overload has both
        broadcast_weights(model)

    def _convert_and_report(self, model: nn.Module, shape: tuple[int, int, int]) -> None:
        """Converts the model by `--memory`, and measures what a training step keeps."""
        config, device_type = self.config, self.device.type
        images, _ = self.to_device(torch.zeros(config.batch_size, *shape), torch.zeros(0))
        # Autocast stands in for amp, which prepares the model later. Activations will have this dtype.
        half = torch.bfloat16 if device_type == "cpu" or config.amp == "bf16" else torch.float16
        with torch.autocast(device_type, half, enabled=config.amp not in ("off", "O0")):
            try:
                if config.budget is not None:
                    convert(model, budget=config.budget, example_inputs=images)
                else:
                    convert(model, matmuls=config.memory == "matmuls")
            except ValueError as error:  # The budget cannot be met.
                raise ConfigError(
                    f"--memory {config.memory}: {str(error).removeprefix('convert: ')}"
                ) from None
            self.memory_report = report(model, images)

    def _prepare_model_and_optimizer(self, model: nn.Module, steps_per_epoch: int) -> None:
        config = self.config
        lr = config.lr * (get_world_size() * config.accumulate if config.scale_lr else 1)
        self.schedule = make_schedule(
            lr, steps=config.epochs * steps_per_epoch, warmup=config.warmup_epochs * steps_per_epoch
        )
        # amp is a module with global state. amp changes model and optimizer in place, and returns them.
        self.model, self.optimizer = amp.initialize(
            model,
            make_optimizer(model, config.optimizer, lr, config.weight_decay),
            enabled=self.uses_loss_scaling,
            opt_level=config.amp,
            loss_scale=None if config.loss_scale == "auto" else config.loss_scale,
            verbosity=0,
        )

    @property
    def loss_scale(self) -> float:
        # amp numbers scalers by loss; a step has one loss.
        return float(amp.state_dict()["loss_scaler0"]["loss_scale"]) if self.uses_loss_scaling else 1.0

    def autocast(self) -> AbstractContextManager:
        """Returns the context of a forward pass, in training and in evaluation."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp == "bf16")

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a batch on the device, with images contiguous, or channels_last as the model."""
        memory_format = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = images.to(self.device, non_blocking=True, memory_format=memory_format)
        return images, labels.to(self.device, non_blocking=True)

    def _stateful_components(self) -> dict[str, Any]:
        """Returns the objects that a checkpoint saves, by their keys, which existing checkpoints fix."""
        components = {
            "model": self.model,
            "average": self.ema_model,
            "optimizer": self.optimizer,
            "precision": amp,
        }
        return {key: component for key, component in components.items() if component is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint has of model, optimizer, averaged weights and amp."""
        return {key: component.state_dict() for key, component in self._stateful_components().items()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for key, component in self._stateful_components().items():
            try:
                component.load_state_dict(state[key])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise TrainingError(
                    f"{self.config.checkpoint_option}: {key} of the checkpoint does not fit: "
                    f"{type(error).__name__}: {error}"
                ) from error


def make_optimizer(model: nn.Module, name: str, lr: float, weight_decay: float) -> Optimizer:
    """Returns `sgd` (momentum 0.9), `adamw`, or `fused-adam`, which is `fastvit.compat.apex`'s.

    Vectors (biases, gamma, beta) and the parameters of the model's `no_weight_decay()` have no weight decay.
    """
    no_decay_names: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[Tensor] = []
    undecayed: list[Tensor] = []
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            (undecayed if parameter.ndim < 2 or key in no_decay_names else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    if name == "fused-adam":
        return FusedAdam(groups, lr=lr)
    optimizer = SGD(groups, lr, momentum=0.9, fused=True) if name == "sgd" else AdamW(groups, lr, fused=True)
    # Fused steps read flat memory, but the state of a checkpoint may have other strides than the parameters.
    optimizer.register_step_pre_hook(match_strides_before_step)
    return optimizer


def make_schedule(lr: float, steps: int, warmup: int) -> Callable[[int], float]:
    """Returns the learning rate as a function of the step.

    The rate rises linearly from `lr / warmup` to `lr`, and then falls by half a cosine to 0 after `steps`.
    There is no cosine if the warm-up is as long as the run.
    """

    def schedule(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return schedule


def make_ema_model(model: nn.Module, decay: float) -> AveragedModel:
    """Returns a copy of the model whose parameters are an exponential moving average of the model's.

    After n steps the decay is at most `(1 + n) / (10 + n)`, so that the initial weights fade soon.
    """

    def update_average(mean: Tensor, value: Tensor, steps: Tensor | int) -> Tensor:
        n = int(steps)
        return mean.lerp(value.to(mean.dtype), 1 - min(decay, (1 + n) / (10 + n)))

    return AveragedModel(model, avg_fn=update_average)


def wrap_in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns the model in DistributedDataParallel, or the model itself if there is one rank."""
    if get_world_size() < 2:
        return model
    is_cuda = device.type == "cuda"
    # DDP need not broadcast buffers: synchronised layers have equal ones, and all are averaged once an epoch.
    # torch 2.13 renamed the option.
    names = inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {}
    options["forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"] = False
    # DDP reorders its buckets after the first backward, unless it looks for unused parameters. With three or
    # more ranks the rounding of a sum depends on its place in a bucket. A resumed run would differ,
    # but on CPUs it has to have the bits of an uninterrupted one.
    options["find_unused_parameters"] = get_world_size() > 2 and not is_cuda
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    # A kernel with one input channel has two valid strides; DDP and the convolution choose different ones.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=[device] if is_cuda else None, **options)
