"""FusedAdam over torch's fused Adam.

Source: Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", arXiv:1711.05101.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .._fused import FusedOptimizer, State, Tensors, norms


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay (AdamW) unless told otherwise.

    Args:
        bias_correction: divide the moments by 1 - beta^step.
        adam_w_mode: decay the weights by `lr * weight_decay`; False adds `weight_decay * w` to the gradient.
        capturable: the step can be captured in a CUDA graph; torch's GradScaler then steps half parameters
            too, unscaled in float32.
        master_weights: keep float32 copies of half parameters; amp's parameters are float32.
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
        self.capturable = self._step_supports_amp_scaling = capturable
        super().__init__(
            params,
            set_grad_none,
            amsgrad,
            master_weights,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if (step := group.pop("step", None)) is not None:  # apex's files have one step for all parameters
                for state in (self.state[p] for p in group["params"] if p in self.state):
                    state["step"] = torch.tensor(float(step))

    def _start(self, state: State, value: Tensor) -> None:
        super()._start(state, value)
        # A fused kernel needs its count on the device of the parameter; a loaded one may be on another.
        step = state.get("step")
        state["step"] = torch.zeros((), device=value.device) if step is None else step.to(value.device)

    def _update(self, group: State, values: Tensors, gradients: Tensors, states: list[State]) -> None:
        if group["max_grad_norm"] > 0:
            excess = torch.stack(norms(gradients)).norm() / group["max_grad_norm"]
            gradients = list(torch._foreach_div(gradients, excess.clamp_min(1.0)))
        means, squares, steps = ([state[n] for state in states] for n in ("exp_avg", "exp_avg_sq", "step"))
        found_inf = getattr(self, "found_inf", None)  # GradScaler sets it
        if not group["bias_correction"]:  # as after infinitely many steps, where beta^step is 0
            counts, steps = steps, [torch.full_like(step, float("inf")) for step in steps]
            for count in counts:
                count += 1.0 if found_inf is None else 1.0 - found_inf.to(count.device)
        beta1, beta2 = group["betas"]
        adam(
            values,
            gradients,
            means,
            squares,
            [],
            steps,
            foreach=False,
            fused=True,
            capturable=self.capturable,
            amsgrad=False,
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            found_inf=found_inf,
        )
