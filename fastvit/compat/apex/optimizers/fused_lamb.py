"""FusedLAMB: Adam whose step is scaled, layer by layer, to the size of the layer's weights.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._fused_optimizer import FusedOptimizer, ParamGroup, TensorList, tensor_norms


class FusedLAMB(FusedOptimizer):
    """LAMB, with the gradients of all groups clipped together first.

    Args:
        bias_correction: divide the moments by 1 - beta^step.
        adam_w_mode: add `weight_decay * w` to the update; False adds it to the gradient.
        grad_averaging: the first moment takes `(1 - beta1) * g`; False takes g.
        max_grad_norm: largest norm of all gradients together; 0 does not clip.
        use_nvlamb: scale the step of parameters without weight decay too.
    """

    operation_names = ("multi_tensor_lamb", "multi_tensor_l2norm")
    moment_names = ("exp_avg", "exp_avg_sq")

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
        self.global_grad_norm: Tensor | None = None
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        defaults |= {"max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def _prepare_step(self) -> None:
        super()._prepare_step()
        gradients = [p.grad.float() for g in self.param_groups for p in g["params"] if p.grad is not None]
        if self.defaults["max_grad_norm"] and gradients:
            gradient_norms = torch.stack([norm.to(gradients[0].device) for norm in tensor_norms(gradients)])
            self.global_grad_norm = gradient_norms.norm() / getattr(self, "grad_scale", 1.0)  # GradScaler's

    def _update_parameters(self, group: ParamGroup, *operands: TensorList) -> None:
        super()._update_parameters({**group, "max_grad_norm": self.defaults["max_grad_norm"]}, *operands)
