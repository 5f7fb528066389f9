"""FusedNovoGrad: momentum over gradients normalised layer by layer.

Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
Networks", arXiv:1905.11286, algorithm 1.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from .._fused_optimizer import FusedOptimizer, ParamGroup, TensorList, compute_dtype, tensor_norms


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

    operation_names = ("multi_tensor_novograd",)
    moment_names = ("exp_avg",)

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
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        defaults |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # As in apex, a group holds the norms of its parameters: first half, then float32. While a step
        # runs, each norm is in the state of its parameter, since gradients may begin at different steps.
        for group in self.param_groups:
            if "exp_avg_sq" in group:
                parameters = chain(*self._split_by_precision(group))
                norms = chain(*group.pop("exp_avg_sq"))
                for parameter, norm in zip(parameters, norms, strict=True):
                    self.state[parameter]["exp_avg_sq"] = norm.to(parameter.device)
        result = super().step(closure)
        for group in self.param_groups:
            group["exp_avg_sq"] = [
                torch.stack([self.state[p].pop("exp_avg_sq") for p in params]) if params else torch.empty(0)
                for params in self._split_by_precision(group)
            ]
        return result

    def _split_by_precision(self, group: ParamGroup) -> list[list[torch.nn.Parameter]]:
        """Returns the stepped parameters in two lists: those of half precision, and those of float32."""
        stepped_parameters = [p for p in group["params"] if self.state.get(p)]
        half = [p for p in stepped_parameters if p.dtype != torch.float32]
        return [half, [p for p in stepped_parameters if p.dtype == torch.float32]]

    def _update_parameters(
        self, group: ParamGroup, parameters: TensorList, values: TensorList, gradients: TensorList
    ) -> None:
        states = [self.state[p] for p in parameters]
        if "exp_avg_sq" in states[0]:
            averages = torch.stack([state["exp_avg_sq"] for state in states])
        else:
            ord, dtype = group["norm_type"] or float("inf"), compute_dtype(values[0])
            averages = torch.stack(tensor_norms(gradients, ord, dtype))
            averages *= not group["init_zero"]  # init_zero starts at 0
        super()._update_parameters({**group, "grad_norms": averages}, parameters, values, gradients)
        for state, norm in zip(states, averages, strict=True):
            state["exp_avg_sq"] = norm
