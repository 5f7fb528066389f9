"""The loss scale: static, or from 2^16 on doubled after 2000 clean steps and halved by each overflow.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, arXiv:1710.03740, section 3.2.
"""

# Gradients that overflow at this scale overflow at any scale.
_SMALLEST = 2.0**-24


class LossScaler:
    """The scale of one loss.

    Args:
        loss_scale: a number, or "dynamic".
        min_loss_scale: floor of the dynamic scale; None is 2^-24.
        max_loss_scale: its ceiling.
    """

    def __init__(
        self, loss_scale: float | str, *, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._min_loss_scale = min_loss_scale or _SMALLEST
        self._max_loss_scale = max_loss_scale
        if self.dynamic and self._min_loss_scale > max_loss_scale:
            raise ValueError(
                f"LossScaler: min_loss_scale {min_loss_scale} is above max_loss_scale {max_loss_scale}"
            )
        self._loss_scale = self._bounded(2.0**16) if self.dynamic else float(loss_scale)
        self._unskipped = 0

    def _bounded(self, scale: float) -> float:
        return min(max(scale, self._min_loss_scale), self._max_loss_scale)

    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied."""
        return self._loss_scale

    def update_scale(self, overflow: bool) -> bool:
        """Counts one step; returns whether it must be skipped, False with a static scale."""
        if self.dynamic and overflow:
            self._loss_scale = self._bounded(self._loss_scale / 2.0)
            self._unskipped = 0
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped == 2000:
            self._loss_scale = self._bounded(self._loss_scale * 2.0)
            self._unskipped = 0
        return False

    def state_dict(self) -> dict[str, float | int]:
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])
