"""LARC, which gives each layer a clipped learning rate, over any optimizer.

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, section 4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .._fused_optimizer import tensor_norms


class LARC:
    """Multiplies each parameter's gradient by its layer's rate, then calls the step of `optimizer`.

    With w the parameter, g its gradient and wd the group's weight decay, the rate is
    `trust_coefficient * |w| / (|g| + wd * |w| + eps)`, and g becomes `rate * (g + wd * w)`. The weight decay
    of `optimizer` is 0 during that step. If |w| or |g| of a parameter is 0, its gradient does not change.

    Args:
        optimizer: a torch optimizer, with its groups, state and schedulers.
        trust_coefficient: the largest change of |w| in one step of rate 1, relative to |w|.
        clip: replace the rate by `min(rate / lr, 1)`, so that no layer is faster than lr (LARC); False is
            LARS.
        eps: a term that avoids a division by 0.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:  # passes on state_dict, zero_grad, ...
        if name == "optim" or name.startswith("__"):  # a copy has no `optim` while copy makes it
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise RuntimeError(
                "LARC.step takes no closure, because LARC changes the gradients before the optimizer steps; "
                "call backward before step"
            )
        amp_optimizer = getattr(self.optim, "_amp_stash", None)
        if amp_optimizer is not None:
            amp_optimizer.unscale_scaled_gradients()  # the rates need unscaled gradients
        decays = [group.get("weight_decay", 0.0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                self._scale_gradients(group, decay)
                group["weight_decay"] = 0.0
            return self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _scale_gradients(self, group: dict[str, Any], decay: float) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        weight_norms, gradient_norms = (
            torch.stack([norm.float() for norm in tensor_norms(tensors)])
            for tensors in (parameters, gradients)
        )
        rates = self.trust_coefficient * weight_norms / (gradient_norms + decay * weight_norms + self.eps)
        if self.clip:
            rates = (rates / group["lr"]).clamp_max(1.0)
        has_norms = (weight_norms != 0) & (gradient_norms != 0)
        scales = torch.where(has_norms, rates, 1.0).unbind()
        decays = torch.where(has_norms, decay, 0.0).unbind()
        operands = zip(gradients, parameters, scales, decays, strict=True)
        for gradient, parameter, scale, parameter_decay in operands:
            gradient.addcmul_(parameter, parameter_decay.to(parameter.dtype)).mul_(scale.to(gradient.dtype))
