"""FusedMixedPrecisionLamb: LAMB over half weights, with float32 masters and torch's GradScaler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._fused import Batch
from .fused_lamb import FusedLAMB

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` whose learning rate and step count are tensors in the groups, to be written in place.

    `torch.amp.GradScaler.step(optimizer)` passes scaled gradients: they are unscaled in float32, and the step
    is skipped if one of them is not finite.

    Args:
        step: the initial step count.
        reduced_precision_dtype: parameters of this dtype have a float32 master, made at the first step; None
            rounds every step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self._first_step = step
        self.reduced_precision_dtype = reduced_precision_dtype
        self._step_supports_amp_scaling = True
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging,
            max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._as_tensors(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._as_tensors(group)

    def _as_tensors(self, group: dict[str, Any]) -> None:
        device = group["params"][0].device
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        group["step"] = torch.as_tensor(
            group.get("step", self._first_step), dtype=torch.int, device=device
        ).clone()

    def _float32(self, parameter: nn.Parameter, state: dict[str, Any]) -> Tensor:
        self.master_weights = parameter.dtype == self.reduced_precision_dtype
        return super()._float32(parameter, state)

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        super()._update({**group, "lr": group["lr"].item(), "step": group["step"].item()}, batch)
