"""FusedAdam over torch's fused Adam.

Source: Kingma and Ba, "Adam", arXiv:1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", arXiv:1711.05101.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._fused_optimizer import FusedOptimizer, ParamGroup, TensorList, compute_dtype, tensor_norms


class FusedAdam(FusedOptimizer):
    """AdamW, whose weight decay is decoupled, or with `adam_w_mode=False` Adam.

    Args:
        bias_correction: divide the moments by 1 - beta^step.
        adam_w_mode: decay the weights by `lr * weight_decay`; False adds `weight_decay * w` to the gradient.
        capturable: let CUDA graphs capture the step, and GradScaler step half parameters, whose gradients are
            then unscaled in float32.
        master_weights: keep float32 copies of half parameters; amp's parameters are float32.
        max_grad_norm: largest norm of the gradients of each group, from apex before 2020; 0 does not clip.
    """

    operation_names = ("multi_tensor_adam", "multi_tensor_adam_capturable")
    moment_names = ("exp_avg", "exp_avg_sq")
    eps_mode = 1  # eps is added to the square root; apex.contrib.optimizers has this attribute

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
        **removed_options: Any,
    ) -> None:
        if removed_options:
            raise TypeError(
                f"FusedAdam takes no {', '.join(removed_options)}; leave out eps_inside_sqrt (eps is added "
                "to the square root), use_mt (tensors are always stepped together) and amp_scale_adjustment"
            )
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        if capturable:
            self.operation_names = self.operation_names[::-1]
        self.capturable = self.has_tensor_lr_and_step = self._step_supports_amp_scaling = capturable
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        super().__init__(params, defaults, set_grad_none, amsgrad)

    def step(self, closure: Callable[[], Any] | None = None, *old_args: Any, **old_kwargs: Any) -> Any:
        old_names = ("grads", "output_params", "scale", "grad_norms", "grad_scaler")
        arguments = dict(zip(old_names, old_args, strict=False)) | old_kwargs
        if names := [name for name, value in arguments.items() if value is not None]:
            raise RuntimeError(
                f"FusedAdam.step takes a closure alone, got {', '.join(names)}; write p.grad = gradient and "
                "optimizer.step(), inside amp.scale_loss or scaler.step(optimizer) if gradients are scaled"
            )
        return super().step(closure)

    def _prepare_step(self) -> None:
        super()._prepare_step()
        if self.capturable:
            flag = self._dummy_overflow_buf
            found_inf = vars(self).get("found_inf", torch.zeros_like(flag))  # GradScaler sets found_inf
            flag.copy_(found_inf.sign())  # 1 if a gradient is not finite
            for group in self.param_groups:  # a skipped step does not count
                group["step"] -= flag.to(group["step"].device)

    def _update_parameters(
        self, group: ParamGroup, parameters: TensorList, values: TensorList, gradients: TensorList
    ) -> None:
        if group["max_grad_norm"] > 0:
            gradients = [g.to(compute_dtype(g)) for g in gradients]
            clip_divisor = torch.stack(tensor_norms(gradients)).norm() / group["max_grad_norm"]
            gradients = list(torch._foreach_div(gradients, clip_divisor.clamp_min(1.0)))
        inv_scale = torch.ones(1, device=values[0].device)  # the gradients are unscaled already
        super()._update_parameters({**group, "inv_scale": inv_scale}, parameters, values, gradients)
