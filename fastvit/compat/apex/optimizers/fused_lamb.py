"""FusedLAMB: Adam whose step is scaled, layer by layer, to the size of the layer's weights.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._fused import FusedOptimizer, State, Tensors, norms


class FusedLAMB(FusedOptimizer):
    """LAMB, with the gradients of all groups clipped together first.

    Args:
        bias_correction: divide the moments by 1 - beta^step.
        adam_w_mode: add `weight_decay * w` to the update; False adds it to the gradient.
        grad_averaging: the first moment takes `(1 - beta1) * g`; False takes g.
        max_grad_norm: largest norm of all gradients together; 0 does not clip.
        use_nvlamb: scale the step of parameters without weight decay too.
    """

    moments, counts_steps = ("exp_avg", "exp_avg_sq"), True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        self._clip_divisor: Tensor | None = None  # all gradients are divided by it; at least 1
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
            max_grad_norm=max_grad_norm,
        )

    def _prepare(self) -> None:
        super()._prepare()
        self._clip_divisor = None
        largest = self.defaults["max_grad_norm"]
        gradients = [p.grad.float() for g in self.param_groups for p in g["params"] if p.grad is not None]
        if largest and gradients:
            each = torch.stack([norm.to(gradients[0].device) for norm in norms(gradients)])
            self._clip_divisor = (each.norm() / (largest * getattr(self, "grad_scale", 1.0))).clamp_min(1.0)

    def _update(self, group: State, values: Tensors, gradients: Tensors, states: list[State]) -> None:
        means, squares = ([state[name] for state in states] for name in self.moments)
        modes = self.adam_w_mode, self.use_nvlamb
        lamb_(values, gradients, means, squares, self._clip_divisor, group, *modes)


def lamb_(
    values: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    clip_divisor: Tensor | None,
    group: State,
    adam_w_mode: bool,
    use_nvlamb: bool,
) -> None:
    """Step number `group["step"]` by the options of a group, in place but for the gradients, which stay."""
    (beta1, beta2), weight_decay, step = group["betas"], group["weight_decay"], group["step"]
    correction1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
    correction2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
    if clip_divisor is not None:
        gradients = list(torch._foreach_div(gradients, clip_divisor.to(values[0].device)))
    if weight_decay and not adam_w_mode:
        gradients = list(torch._foreach_add(gradients, values, alpha=weight_decay))
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
    updates = torch._foreach_sqrt(squares)
    torch._foreach_div_(updates, correction2**0.5)
    torch._foreach_add_(updates, group["eps"])
    updates = torch._foreach_div(means, updates)
    torch._foreach_div_(updates, correction1)
    if weight_decay and adam_w_mode:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    if weight_decay or use_nvlamb:
        weight_norms, update_norms = (torch.stack(norms(tensors)) for tensors in (values, updates))
        moving = (weight_norms != 0) & (update_norms != 0)
        ratios = torch.where(moving, weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, ratios.unbind())
    torch._foreach_add_(values, updates, alpha=-group["lr"])
