"""Mixed precision: the contexts of forward and backward at each level of `--amp`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compat.apex import amp
from .config import Config


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
