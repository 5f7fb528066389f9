"""FusedMixedPrecisionLamb: LAMB over half weights, with float32 masters and torch's GradScaler."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` whose learning rate and step count are tensors in the groups, to be written in place.

    `torch.amp.GradScaler.step(optimizer)` leaves the gradients scaled. This class unscales them in float32,
    and skips the step if a gradient is not finite.

    Args:
        step: the initial step count.
        reduced_precision_dtype: parameters of this dtype get a float32 master at the first step; with None
            every step rounds parameters.
        lamb_arguments: the other arguments of `FusedLAMB`.
    """

    has_tensor_lr_and_step = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        step: int = 0,
        *,
        reduced_precision_dtype: torch.dtype | None = None,
        **lamb_arguments: Any,
    ) -> None:
        self.reduced_precision_dtype = self.master_weights = reduced_precision_dtype
        self._step_supports_amp_scaling = True
        super().__init__(params, lr, **lamb_arguments)
        for group in self.param_groups:
            group["step"].fill_(step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found_inf = getattr(self, "found_inf", None)  # GradScaler sets found_inf
        return super().step(closure) if found_inf is None or not found_inf.item() else None

    def _update_parameters(self, group: dict[str, Any], *operands: Any) -> None:
        numbers = {name: group[name].item() for name in ("lr", "step")}
        super()._update_parameters({**group, **numbers}, *operands)
