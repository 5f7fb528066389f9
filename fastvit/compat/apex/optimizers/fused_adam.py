"""FusedAdam over torch's fused Adam.

Source: Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", arXiv:1711.05101.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._fused import FusedOptimizer, State, Tensors, norms, wide


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

    operations = ("multi_tensor_adam", "multi_tensor_adam_capturable")
    moments = ("exp_avg", "exp_avg_sq")
    eps_mode = 1  # eps is added to the square root; its name in apex.contrib.optimizers

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
        **old: Any,
    ) -> None:
        if old:
            raise TypeError(
                f"FusedAdam takes no {', '.join(old)}; leave out eps_inside_sqrt (eps is added to the square "
                "root), use_mt (tensors are always stepped together) and amp_scale_adjustment"
            )
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        if capturable:
            self.operations = self.operations[::-1]
        self.capturable = self.tensors_in_groups = self._step_supports_amp_scaling = capturable
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def step(self, closure: Callable[[], Any] | None = None, *old: Any, **named: Any) -> Any:
        names = ("grads", "output_params", "scale", "grad_norms", "grad_scaler")
        given = dict(zip(names, old, strict=False)) | named
        if given := {name: value for name, value in given.items() if value is not None}:
            raise RuntimeError(
                f"FusedAdam.step takes a closure alone, got {', '.join(given)}; write p.grad = gradient and "
                "optimizer.step(), inside amp.scale_loss or scaler.step(optimizer) if gradients are scaled"
            )
        return super().step(closure)

    def _prepare(self) -> None:
        super()._prepare()
        if self.capturable:
            flag = self._dummy_overflow_buf
            flag.copy_(vars(self).get("found_inf", torch.zeros_like(flag)).sign())  # GradScaler sets it
            for group in self.param_groups:  # a skipped step does not count
                group["step"] -= flag.to(group["step"].device)

    def _update(self, group: State, parameters: Tensors, values: Tensors, gradients: Tensors) -> None:
        if group["max_grad_norm"] > 0:
            gradients = [g.to(wide(g)) for g in gradients]
            excess = torch.stack(norms(gradients)).norm() / group["max_grad_norm"]
            gradients = list(torch._foreach_div(gradients, excess.clamp_min(1.0)))
        inv_scale = torch.ones(1, device=values[0].device)  # gradients are unscaled
        super()._update({**group, "inv_scale": inv_scale}, parameters, values, gradients)
