"""`scale_loss`, around each backward, and `disable_casts`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._notices import warn_once
from ._amp_state import _amp_state
from .optimizer import AmpOptimizer, of

__all__ = ["disable_casts", "scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | Sequence[nn.Module] | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss in float32, times its scale; on leaving, unscales the gradients that backward made.

    Gradients of several losses and of several backwards add up unscaled. With a dynamic scale a gradient that
    is not finite halves the scale, and the next step of each of these optimizers does nothing and says so.

    Args:
        optimizers: those whose parameters receive gradients from this loss.
        loss_id: which of the `num_losses` scales to use.
        model: has no effect, as with apex.
        delay_unscale: leave gradients scaled; for all but the last backward before a step. Under DDP's
            `no_sync` that happens by itself.
        delay_overflow_check: has no effect: the check decides about the step, so it cannot wait for it.

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
    attached = [_attached(o) for o in (optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])]
    if not scaler.dynamic and scaler.loss_scale() == 1.0 and not any(a.pairs for a in attached):
        yield loss.float()
        return
    scale = scaler.loss_scale()
    for optimizer in attached:
        optimizer.before_backward(scale)
    try:
        yield loss.float() * scale
    except BaseException:  # running out of memory may be caught outside
        for optimizer in attached:
            optimizer.abandon_backward()
        raise
    due = []
    for optimizer in attached:
        if delay_unscale or optimizer.must_hold():
            optimizer.hold(scale, scaler)
        else:
            due.append(optimizer)
    if not due:
        return
    flags = [flag for optimizer in due for flag in optimizer.unscale(scale)]
    overflow = scaler.dynamic and any(flag.item() for flag in flags)
    if scaler.update_scale(overflow):
        for optimizer in due:
            optimizer.skip(
                f"Gradient overflow. Skipping step, loss scaler {loss_id} reducing loss scale to "
                f"{scaler.loss_scale()}"
            )


def _attached(optimizer: Optimizer) -> AmpOptimizer:
    attached = of(optimizer)
    if attached is None:
        raise RuntimeError(
            f"amp.scale_loss: this {type(optimizer).__name__} did not go through amp.initialize"
        )
    return attached


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No casts inside: torch.autocast is off, on the CPU and on CUDA."""
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
