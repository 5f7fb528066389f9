"""FusedSGD over torch's fused SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.sgd import sgd

from .._fused import FusedOptimizer, State, Tensors
from .._notices import warn_once


class FusedSGD(FusedOptimizer):
    """SGD with momentum as torch.optim.SGD defines it.

    Args:
        wd_after_momentum: decay the weights by `lr * weight_decay` instead of adding `weight_decay * w` to
            the gradient before the momentum.
        materialize_master_grads: False has no effect, and warns: amp has no masters beside the weights.
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
            warn_once("FusedSGD: materialize_master_grads=False has no effect; there are no masters")
        self.wd_after_momentum = wd_after_momentum
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def _update(self, group: State, values: Tensors, gradients: Tensors, states: list[State]) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        if decay and self.wd_after_momentum:
            torch._foreach_mul_(values, 1.0 - group["lr"] * decay)
            decay = 0.0
        buffers = [state.get("momentum_buffer") for state in states]
        # torch's fused SGD starts all buffers of a call at once, but gradients may begin at different steps.
        fused = not momentum or all(buffer is not None for buffer in buffers)
        sgd(
            values,
            gradients,
            buffers,
            foreach=not fused,
            fused=fused,
            weight_decay=decay,
            momentum=momentum,
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if momentum:
            for state, buffer in zip(states, buffers, strict=True):
                state["momentum_buffer"] = buffer
