"""`scale_loss` around each backward, `disable_casts`, and the handle of `amp.init`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._notices import warn_once
from ._amp_state import _amp_state
from .opt import OptimWrapper
from .optimizer import AmpOptimizer, of, scaled
from .scaler import LossScaler

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | Sequence[nn.Module] | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss in float32, times its scale; at the end unscales the gradients of the backward.

    Gradients of several losses and of several backwards add up unscaled. With a dynamic scale a gradient that
    is not finite halves the scale, and the next step of each of these optimizers is skipped with a message.

    Args:
        optimizers: those whose parameters receive gradients from this loss.
        loss_id: the index of the scale, below `num_losses`.
        model: has no effect, as in apex.
        delay_unscale: do not unscale gradients; for all but the last backward before a step. Under DDP's
            `no_sync` this is automatic.
        delay_overflow_check: has no effect, since the check must come before the step.

    Raises:
        RuntimeError: before `amp.initialize`, or for an optimizer that it was not given.
    """
    properties = _amp_state.opt_properties
    if properties is None:
        raise RuntimeError("amp.scale_loss: call amp.initialize first")
    if not properties.enabled:
        yield loss
        return
    if delay_overflow_check:
        warn_once("amp.scale_loss: delay_overflow_check has no effect; overflow is checked on leaving")
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise RuntimeError(
            f"amp.scale_loss: loss_id {loss_id} needs amp.initialize(..., num_losses={loss_id + 1}) or more, "
            f"got {len(_amp_state.loss_scalers)}"
        )
    scaler = _amp_state.loss_scalers[loss_id]
    several = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    attached = [_attached(optimizer) for optimizer in several]
    if not scaler.dynamic and scaler.loss_scale() == 1.0 and not any(a.pairs for a in attached):
        yield loss.float()
        return
    with scaled(loss, attached, scaler, f"loss scaler {loss_id}", delay_unscale) as value:
        yield value


def _attached(optimizer: Optimizer) -> AmpOptimizer:
    attached = of(optimizer)
    if attached is None:
        raise RuntimeError(f"amp.scale_loss: this {type(optimizer).__name__} was not given to amp.initialize")
    return attached


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No casts inside: disables torch.autocast, on the CPU and on CUDA, and the casts of `amp.init`."""
    handle = _amp_state.handle
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        if handle is not None and handle.everywhere:
            stack.enter_context(handle._disable_casts())
        yield


class AmpHandle:
    """The result of `amp.init`, and under O1 `_amp_state.handle`.

    There are no casts while `_is_active` is False. `_deactivate()` restores torch's functions and ends the
    casts.

    Args:
        everywhere: torch's functions cast; False is O1, with casts only inside a model's forward.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        everywhere: bool = False,
    ) -> None:
        self.has_cache = enable_caching
        self.cache: dict[Tensor, tuple[int, Tensor]] = {}
        self.verbose = verbose
        self.everywhere = everywhere
        self._scaler: LossScaler | None = LossScaler(loss_scale)
        self._is_active = True
        self._replaced: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        was, self._is_active = self._is_active, False
        try:
            yield
        finally:
            self._is_active = was

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> Any:
        """An `OptimWrapper` with a loss scale for each of `num_loss` losses in one iteration."""
        self._scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """As `amp.scale_loss`, for any optimizer.

        Raises:
            RuntimeError: after `wrap_optimizer`, whose result has its own scales.
        """
        if not self._is_active:
            yield loss
            return
        if self._scaler is None:
            raise RuntimeError(
                "amp: after handle.wrap_optimizer use the wrapper's scale_loss(loss), not the handle's"
            )
        attached = of(optimizer) or AmpOptimizer(optimizer, False, {})
        with scaled(loss, [attached], self._scaler, "loss scaler 0") as value:
            yield value
        self._clear_cache()

    def _clear_cache(self) -> None:
        self.cache.clear()

    def remove_cache(self, param: Tensor) -> None:
        self.cache.pop(param, None)

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        """Records that `_deactivate` restores `func`, or deletes the name where `mod` inherits it."""
        if isinstance(mod, dict):
            self._replaced.append(lambda: mod.__setitem__(fn, func))
        elif fn in vars(mod):
            self._replaced.append(lambda: setattr(mod, fn, func))
        else:
            self._replaced.append(lambda: delattr(mod, fn))

    def _deactivate(self) -> None:
        for restore in reversed(self._replaced):
            restore()
        self._replaced.clear()
        self._clear_cache()
        self._is_active = False


class NoOpHandle(AmpHandle):
    """The handle of `amp.init(enabled=False)`: no casts, no loss scale."""

    def __init__(self) -> None:
        super().__init__(enable_caching=False)
        self._is_active = False
