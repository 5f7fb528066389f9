"""The loss scalers of FP16_Optimizer."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


def to_python_float(t: Any) -> float:
    """Returns the one number in a tensor or sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A static loss scale, which checks for no overflow."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns whether a gradient is not finite; always False with a static scale."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing, because the scale is static."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that is divided by `scale_factor` at an overflow, down to 1, and multiplied by `scale_factor`
    after `scale_window` clean steps.
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return not all(p.grad.isfinite().all() for p in params if p.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
