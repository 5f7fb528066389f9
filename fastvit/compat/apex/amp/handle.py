"""`scale_loss` around each backward, and `disable_casts`."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._notices import warn_once
from ..parallel.distributed import without_sync
from ._amp_state import _amp_state
from .optimizer import (
    AmpOptimizer,
    before_backward,
    leave_scaled,
    of,
    parameters_of,
    scaled,
    several,
    unscale,
)


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Iterable[Optimizer],
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
    attached: list[AmpOptimizer] = []
    for stepped in several(optimizers):
        if (found := of(stepped)) is None:
            kind = type(stepped).__name__
            raise RuntimeError(f"amp.scale_loss: this {kind} was not given to amp.initialize")
        attached.append(found)
    scale = scaler.loss_scale()
    if not scaler.dynamic and scale == 1.0:
        yield loss.float()
        return
    parameters = parameters_of(a.optimizer for a in attached)  # one may be in several optimizers
    for optimizer in attached:
        optimizer.look_for_overflow()
    earlier = before_backward(parameters, scale)
    try:
        yield loss.float() * scale
    except BaseException:  # a caller may catch it (out of memory) and continue
        for parameter in parameters:
            if parameter not in scaled:  # to scaled gradients the backward has added
                parameter.grad = earlier.get(parameter)
        raise
    held = set(parameters) if delay_unscale else without_sync()
    leave_scaled([p for p in parameters if p in held], scale, scaler, earlier)
    due = [p for p in parameters if p not in held]
    if not due:
        return
    flags = unscale(due, scale, earlier)
    if scaler.update_scale(scaler.dynamic and any(flag.item() for flag in flags)):
        for optimizer in attached:
            optimizer.overflow = (
                f"Gradient overflow. Skipping step, loss scaler {loss_id} reducing loss scale to "
                f"{scaler.loss_scale()}"
            )


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No casts inside: disables torch.autocast, on the CPU and on CUDA."""
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
