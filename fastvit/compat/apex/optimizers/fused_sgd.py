"""FusedSGD over torch's fused SGD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.sgd import sgd

from .._fused import Batch, FusedOptimizer
from .._notices import warn_once

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD with momentum as torch.optim.SGD defines it.

    Args:
        wd_after_momentum: decay the weights by `lr * weight_decay` instead of adding `weight_decay * w` to
            the gradient before the momentum.
        materialize_master_grads: False has no effect, and warns: amp's masters always have gradients.
        set_grad_none: `zero_grad()` sets gradients to None.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}.items():
            if value < 0:
                raise ValueError(f"FusedSGD: {name} must be at least 0, got {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("FusedSGD: nesterov needs momentum above 0 and dampening 0")
        if not materialize_master_grads:
            warn_once("FusedSGD: materialize_master_grads=False has no effect; masters have gradients")
        self.wd_after_momentum = wd_after_momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        decay = group["weight_decay"]
        if decay and self.wd_after_momentum:
            torch._foreach_mul_(batch.values, 1.0 - group["lr"] * decay)
            decay = 0.0
        # torch starts all buffers of a call at once, and a parameter may get its first gradient late.
        started = [state.get("momentum_buffer") is not None for state in batch.states]
        for which in (True, False):
            chosen = [index for index, has in enumerate(started) if has is which]
            if not chosen:
                continue
            buffers = [batch.states[i].get("momentum_buffer") for i in chosen]
            sgd(
                [batch.values[i] for i in chosen], [batch.gradients[i] for i in chosen], buffers,
                foreach=False, fused=True, weight_decay=decay, momentum=group["momentum"], lr=group["lr"],
                dampening=group["dampening"], nesterov=group["nesterov"], maximize=False,
            )  # fmt: skip
            if group["momentum"]:
                for index, buffer in zip(chosen, buffers, strict=True):
                    batch.states[index]["momentum_buffer"] = buffer
