"""FusedNovoGrad: momentum over gradients normalised layer by layer.

Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks", arXiv:1905.11286, algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._fused import FusedOptimizer, State, Tensors, norms


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad. The second moment of a layer is one number, a norm (not its square).

    Args:
        bias_correction: divide the moments by their sums of weights.
        reg_inside_moment: the paper's form, `m = beta1 m + g / v + weight_decay * w`; False normalises and
            decays after the momentum.
        grad_averaging: the first moment takes `(1 - beta1) * g`; False takes g.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the second moment at 0; False starts it at the first gradient's norm.
    """

    moments, counts_steps = ("exp_avg",), True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type takes 2 or 0 (the largest value), got {norm_type}")
        self.reg_inside_moment = reg_inside_moment
        super().__init__(
            params,
            set_grad_none,
            amsgrad,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            # apex keeps the norms of a group together, half parameters before float32 ones.
            if "exp_avg_sq" in group:
                stepped = [p for p in group["params"] if p in self.state]
                stepped.sort(key=lambda p: p.dtype == torch.float32)
                for parameter, norm in zip(stepped, torch.cat(group.pop("exp_avg_sq")), strict=True):
                    self.state[parameter]["exp_avg_sq"] = norm.clone().to(parameter.device)

    def _update(self, group: State, values: Tensors, gradients: Tensors, states: list[State]) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        correction1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correction2 = (1.0 - beta2**step) ** 0.5 if group["bias_correction"] else 1.0
        means = [state["exp_avg"] for state in states]
        moments = self._blend(group, gradients, states)
        divisors = (moments / correction2 + group["eps"]).unbind()
        if self.reg_inside_moment:
            gradients = list(torch._foreach_div(gradients, divisors))
            if decay:
                torch._foreach_add_(gradients, values, alpha=decay)
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        updates = torch._foreach_div(means, correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, divisors)
            if decay:
                torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_add_(values, updates, alpha=-lr)

    @staticmethod
    def _blend(group: State, gradients: Tensors, states: list[State]) -> Tensor:
        """The norms of the gradients, averaged over the steps."""
        beta2 = group["betas"][1]
        fresh = torch.stack(norms(gradients, group["norm_type"] or float("inf")))
        start = torch.zeros_like(fresh) if group["init_zero"] else fresh
        before = torch.stack([s.get("exp_avg_sq", first) for s, first in zip(states, start, strict=True)])
        if group["norm_type"] == 2:
            blended = (beta2 * before.square() + (1.0 - beta2) * fresh.square()).sqrt()
        else:
            blended = beta2 * before + (1.0 - beta2) * fresh
        for state, norm in zip(states, blended, strict=True):
            state["exp_avg_sq"] = norm.clone()
        return blended
