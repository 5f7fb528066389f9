"""FusedAdagrad over torch's Adagrad.

Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization",
JMLR 12, 2011.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from .._fused import Batch, FusedOptimizer, steps_per_parameter

__all__ = ["FusedAdagrad"]


class FusedAdagrad(FusedOptimizer):
    """Adagrad.

    Args:
        set_grad_none: `zero_grad()` sets gradients to None.
        adagrad_w_mode: decay the weights by `lr * weight_decay`; False adds `weight_decay * w` to the
            gradient.
    """

    moments = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        steps_per_parameter(self)

    def _start(self, state: dict[str, Any], value: Tensor, group: dict[str, Any]) -> None:
        super()._start(state, value, group)
        if "step" not in state:
            state["step"] = torch.zeros(())

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        decay = group["weight_decay"]
        if decay and self.adagrad_w_mode:
            torch._foreach_mul_(batch.values, 1.0 - group["lr"] * decay)
            decay = 0.0
        adagrad(
            batch.values, batch.gradients, batch.state("sum"), batch.state("step"), foreach=True,
            lr=group["lr"], weight_decay=decay, lr_decay=0.0, eps=group["eps"], maximize=False,
        )  # fmt: skip
