"""FusedAdam over torch's fused Adam.

Source: Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .._fused import Batch, FusedOptimizer, norms

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay (AdamW) unless told otherwise.

    Args:
        bias_correction: divide the moments by 1 - beta^step.
        adam_w_mode: decay the weights by `lr * weight_decay`; False adds `weight_decay * w` to the gradient.
        amsgrad: raises RuntimeError.
        set_grad_none: `zero_grad()` sets gradients to None.
        capturable: the step can be captured in a CUDA graph; torch's GradScaler then steps half parameters
            too, unscaled in float32.
        master_weights: keep float32 copies of half parameters; without amp, which keeps its own.
        max_grad_norm: of apex before 2020: largest norm of the gradients of each group; 0 does not clip.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self._step_supports_amp_scaling = capturable
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none, amsgrad, master_weights)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step takes no grads, output_params, scale or grad_norms; amp.scale_loss unscales"
            )
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if (step := group.pop("step", None)) is not None:  # of apex's files, for all parameters
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    state["step"] = torch.tensor(float(step))

    def _overflowed(self) -> bool:
        on_device = self.capturable and all(group["bias_correction"] for group in self.param_groups)
        return not on_device and super()._overflowed()

    def _start(self, state: dict[str, Any], value: Tensor, group: dict[str, Any]) -> None:
        super()._start(state, value, group)
        # A fused kernel needs its count on the device of the parameter; a loaded one may be on another.
        step = state.get("step")
        state["step"] = torch.zeros((), device=value.device) if step is None else step.to(value.device)

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        if group["max_grad_norm"] > 0:
            size = torch.stack(norms(batch.gradients)).norm()
            shrink = (size / group["max_grad_norm"]).clamp_min(1.0)
            batch.gradients = list(torch._foreach_div(batch.gradients, shrink))
        values, gradients, steps = batch.values, batch.gradients, batch.state("step")
        means, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
        (beta1, beta2), lr, eps, weight_decay = (group[n] for n in ("betas", "lr", "eps", "weight_decay"))
        if group["bias_correction"]:
            adam(
                values, gradients, means, squares, [], steps,
                foreach=False, fused=True, capturable=self.capturable, amsgrad=False, maximize=False,
                decoupled_weight_decay=self.adam_w_mode, beta1=beta1, beta2=beta2, lr=lr,
                weight_decay=weight_decay, eps=eps, found_inf=getattr(self, "found_inf", None),
            )  # fmt: skip
            return
        # torch has no Adam without the correction.
        torch._foreach_add_(steps, 1.0)
        if weight_decay and self.adam_w_mode:
            torch._foreach_mul_(values, 1.0 - lr * weight_decay)
        elif weight_decay:
            gradients = list(torch._foreach_add(gradients, values, alpha=weight_decay))
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(values, means, denominators, -lr)
