"""FusedSGD over torch's fused SGD."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._fused_optimizer import FusedOptimizer, ParamGroup, TensorList, compute_dtype
from .._warn_once import warn_once


class FusedSGD(FusedOptimizer):
    """SGD with momentum as torch.optim.SGD defines it.

    Args:
        wd_after_momentum: decay the weights by `lr * weight_decay` instead of adding `weight_decay * w` to
            the gradient before the momentum.
        materialize_master_grads: False has no effect and warns, because there are no masters beside weights.
    """

    operation_names = ("multi_tensor_sgd",)

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
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in defaults.items():
            if value < 0:
                raise ValueError(f"FusedSGD: {name} must be at least 0, got {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("FusedSGD: nesterov needs momentum above 0 and dampening 0")
        if not materialize_master_grads:
            warn_once("FusedSGD: materialize_master_grads=False has no effect, because there are no masters")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0  # the next step divides gradients by this number
        self.scale_set_by_backward = False
        defaults |= {"dampening": dampening, "nesterov": nesterov}
        super().__init__(params, defaults, set_grad_none)

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[TensorList, bool]:
        """Returns the momentum buffers of parameters, and whether this call has made a buffer."""
        params = list(params)
        new_parameters = [p for p in params if self.state[p].get("momentum_buffer") is None]
        for parameter in new_parameters:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(
                parameter, dtype=compute_dtype(parameter)
            )
        return [self.state[p]["momentum_buffer"] for p in params], bool(new_parameters)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        return result

    def _update_parameters(
        self, group: ParamGroup, parameters: TensorList, values: TensorList, gradients: TensorList
    ) -> None:
        buffers, first_run = self.get_momentums(parameters) if group["momentum"] else ([], False)
        options = {"first_run": first_run, "scale": 1.0 / self.most_recent_scale}
        self._call_operation([gradients, values, buffers], group | options)
