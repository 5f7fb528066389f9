"""The optimizer that `amp.init`'s handle wraps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .optimizer import AmpOptimizer, of, scaled
from .scaler import LossScaler

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer with `scale_loss`, called for each of `num_loss` losses in turn before `step`.

    Each loss has its own dynamic scale. If one of them overflows, the step is skipped with a message. All
    other attributes are those of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        self._loss_idx = 0
        self._attached = of(optimizer) or AmpOptimizer(optimizer, False, {})

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        if not self._amp_handle.is_active():
            yield loss
            return
        index = self._loss_idx
        if index == len(self._loss_scaler):
            raise RuntimeError(
                f"amp: {index + 1} losses before a step need handle.wrap_optimizer(optimizer, "
                f"num_loss={index + 1}), got {index}"
            )
        with scaled(loss, [self._attached], self._loss_scaler[index], f"loss scaler {index}") as value:
            yield value
        self._loss_idx += 1

    def step(self, closure: None = None) -> Any:
        """One step of the optimizer.

        Raises:
            NotImplementedError: with a closure, whose backward would come after the check for overflow.
        """
        if closure is not None and self._amp_handle.is_active():
            raise NotImplementedError(
                "amp: the step of a wrapped optimizer takes no closure; call backward before it"
            )
        self._loss_idx = 0
        self._amp_handle._clear_cache()
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, attr: str) -> Any:
        if attr == "_optimizer":  # while being unpickled
            raise AttributeError(attr)
        return getattr(self._optimizer, attr)

    def __repr__(self) -> str:
        return f"OptimWrapper({self._optimizer!r})"
