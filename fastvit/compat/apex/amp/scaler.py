"""The loss scale: a number, or dynamic. A dynamic scale begins at 2^16. An overflow halves it, and 2000 clean
steps, which have no overflow, double it.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740, section 3.2.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..._import_hook import missing_attribute_getter

# The smallest positive float16. An overflow at it has another cause than the scale.
_MIN_SCALE = 2.0**-24


class LossScaler:
    """The scale of one loss, with the attributes of apex's LossScaler that scripts read and write.

    Args:
        loss_scale: a number, or "dynamic".
        scale_window: after so many clean steps the dynamic scale is doubled.
        min_loss_scale: the floor of the dynamic scale; None is 2^-24, or a lower ceiling.
        max_loss_scale: the ceiling of the dynamic scale.
    """

    loss_id = 0  # the loss's index in `scale_loss`; `initialize` sets it
    has_fused_kernel = True  # for scripts
    warned_no_fused_kernel = warned_unscaling_non_fp32_grad = False  # for scripts
    __getattr__ = missing_attribute_getter("apex.amp.scaler.LossScaler")  # raises an error

    def __init__(
        self,
        loss_scale: float | str,
        *,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        if self.dynamic and (min_loss_scale or 0.0) > max_loss_scale:
            raise ValueError(
                f"LossScaler: min_loss_scale must be at most max_loss_scale, got {min_loss_scale} and "
                f"{max_loss_scale}"
            )
        self._loss_scale = self._clamp(2.0**16) if self.dynamic else float(loss_scale)
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False  # scripts set it or the next
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def _clamp(self, scale: float) -> float:
        return min(max(scale, self._min_loss_scale or _MIN_SCALE), self._max_loss_scale)

    def loss_scale(self) -> float:
        """Returns the factor by which the next loss is multiplied."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        self._has_overflow = False
        self._overflow_buf.zero_()

    def record_overflow(self, flags: Iterable[Tensor]) -> bool:
        """Lets `update_scale` see only these flags. Returns whether one is set; False if static."""
        self._has_overflow = False
        overflow = self.dynamic and any(flag.item() for flag in flags)
        self._overflow_buf.fill_(overflow)
        return overflow

    def update_scale(self) -> bool:
        """Adapts a dynamic scale to one more step. Returns whether to skip the step; False if static."""
        self._has_overflow = self.dynamic and bool(self._has_overflow or self._overflow_buf.item())
        if self._has_overflow:
            self._loss_scale = self._clamp(self._loss_scale / 2.0)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped == self._scale_seq_len:
            self._loss_scale = self._clamp(self._loss_scale * 2.0)
            self._unskipped = 0
        return False
