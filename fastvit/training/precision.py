"""Mixed precision: the contexts of forward and backward at each level of `--amp`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .config import Config
from .engine import engine_part


class Precision:
    """fp32, or torch.autocast in `dtype` around the forward pass."""

    scales_loss = False  # if True, the scale may cause gradients that are not finite, and amp skips the step

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device, self.dtype = device, dtype

    @property
    def loss_scale(self) -> float:
        return 1.0

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Prepare model and optimizer for this level; called once, before DistributedDataParallel."""
        return model, optimizer

    def forward(self) -> AbstractContextManager:
        """The context of a forward pass, in training and in evaluation."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def half(self) -> AbstractContextManager:
        """Autocast to the dtype that activations have at this level."""
        return self.forward()

    def backward(self, loss: Tensor, optimizer: Optimizer, last: bool) -> None:
        """Add the gradients of `loss`; `last` means that a step of the optimizer follows."""
        loss.backward()

    def gradient_holders(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """The parameters whose gradients the optimizer reads, to be clipped."""
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def master(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps for a parameter of the model."""
        return parameter

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ApexLevel(Precision):
    """O0 to O3 of apex.amp: the loss is scaled, and gradients are unscaled before the step."""

    scales_loss = True

    def __init__(self, device: torch.device, engine: str, level: str, loss_scale: str) -> None:
        super().__init__(device)
        self.amp, self.level = engine_part(engine, "amp"), level
        self.masters: dict[Tensor, Tensor] = {}  # by parameter of the model
        self.options: dict[str, Any] = {}
        if loss_scale != "auto":
            self.options["loss_scale"] = loss_scale if loss_scale == "dynamic" else float(loss_scale)

    @property
    def loss_scale(self) -> float:
        return float(self.amp.state_dict()["loss_scaler0"]["loss_scale"])

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        parameters = [*super().gradient_holders(optimizer)]
        model, optimizer = self.amp.initialize(
            model, optimizer, opt_level=self.level, verbosity=0, **self.options
        )
        self.masters = dict(zip(parameters, self.gradient_holders(optimizer), strict=True))
        return model, optimizer

    def half(self) -> AbstractContextManager:
        if self.level == "O0":
            return nullcontext()
        dtype = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        return torch.autocast(self.device.type, dtype)

    def backward(self, loss: Tensor, optimizer: Optimizer, last: bool) -> None:
        with self.amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled:
            scaled.backward()

    def gradient_holders(self, optimizer: Optimizer) -> Iterable[Tensor]:
        return self.amp.master_params(optimizer)

    def master(self, parameter: Tensor) -> Tensor:
        return self.masters.get(parameter, parameter)

    def state_dict(self) -> dict[str, Any]:
        return self.amp.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


def make_precision(config: Config, device: torch.device) -> Precision:
    """The precision of `--amp` and `--engine`.

    Raises:
        ConfigError: `--engine apex` without apex's amp.
    """
    if config.amp.startswith("O"):
        return ApexLevel(device, config.engine, config.amp, config.loss_scale)
    return Precision(device, torch.bfloat16 if config.amp == "bf16" else None)
