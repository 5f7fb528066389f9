"""`scale_loss`, the scale of gradients, and optimizers that skip their step after an overflow."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..._import_hook import missing_attribute_getter
from .._fused_optimizer import match_strides_before_step
from ..parallel.distributed import parameters_without_sync
from ..parallel.LARC import LARC
from ._amp_state import _amp_state, maybe_print
from .scaler import LossScaler

SCALE = "_amp_scale"
"""Attribute of a parameter with a scaled gradient: the scale, and the scaler that gets its overflow flag."""

_amp_optimizers: weakref.WeakSet[AmpOptimizer] = weakref.WeakSet()
_open_scalers: list[LossScaler] = []  # the scalers of the `scale_loss` blocks that are open


def unwrap_larc(optimizer: Any) -> Optimizer:
    """Returns the torch optimizer inside a LARC, or `optimizer` itself."""
    while isinstance(optimizer, LARC):
        optimizer = optimizer.optim
    return optimizer


def as_list(value: Any) -> list[Any]:
    """Returns a list of the models or optimizers in an iterable, or of `value` alone."""
    is_single = isinstance(value, (nn.Module, Optimizer, dict)) or not isinstance(value, Iterable)
    return [value] if is_single else list(value)


# Gradients of parameters


def unique_parameters(optimizers: Iterable[Any]) -> list[nn.Parameter]:
    """Returns all parameters of these optimizers, each once."""
    return list(dict.fromkeys(p for o in optimizers for group in o.param_groups for p in group["params"]))


StashedGradients = dict[nn.Parameter, Tensor | None]
"""Unscaled gradients that are kept apart from those of a backward."""


@torch.no_grad()
def stash_unscaled_gradients(
    parameters: Iterable[nn.Parameter], scale: float, scaler: Any
) -> StashedGradients:
    """Prepares gradients for the backward of a loss times `scale`, and returns those that it takes away.

    Backward adds to the gradients. So unscaled gradients of earlier losses, and None, are taken away, and
    scaled gradients get this scale. All count as scaled until `unscale_gradients`, whose flags are
    for `scaler`.
    """
    stashed: StashedGradients = {}
    for parameter in parameters:
        scale_and_scaler = vars(parameter).get(SCALE)
        if parameter.grad is None or scale_and_scaler is None:
            stashed[parameter], parameter.grad = parameter.grad, None
        elif scale_and_scaler[0] != scale:
            parameter.grad.mul_(scale / scale_and_scaler[0])
        setattr(parameter, SCALE, (scale, scaler))
    return stashed


@torch.no_grad()
def unscale_gradients(parameters: Iterable[nn.Parameter]) -> dict[Any, list[Tensor]]:
    """Divides gradients that are scaled, in place; devices and dtypes may be mixed.

    Returns for each scaler a float32 scalar per device, 1 if a gradient on the device is not finite. This
    function does not wait for the device.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if SCALE in vars(parameter):
            groups[vars(parameter).pop(SCALE)].append(parameter)
    flags: dict[Any, list[Tensor]] = defaultdict(list)
    for (scale, scaler), group in groups.items():
        optimizer: Any = SimpleNamespace(param_groups=[{"params": group}])
        inv_scale = torch.full((), 1.0 / scale, dtype=torch.float32, device=group[0].device)
        found_inf = torch.zeros_like(inv_scale)
        flag_by_device = GradScaler(enabled=False)._unscale_grads_(optimizer, inv_scale, found_inf, True)
        flags[scaler] += flag_by_device.values()
    return flags


@torch.no_grad()
def add_stashed_gradients(stashed: StashedGradients) -> None:
    """Adds stashed gradients to the gradients, times the scale of those that are still scaled."""
    for parameter, gradient in stashed.items():
        if gradient is not None:
            if scale_and_scaler := vars(parameter).get(SCALE):
                gradient.mul_(scale_and_scaler[0])
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


class AmpOptimizer:
    """Makes a torch optimizer, and the optimizers that it has inside, skip steps after an overflow.

    An AmpOptimizer works by step hooks. Scripts find it under apex's name, `_amp_stash`, with the lists of
    parameters that apex has there.

    Args:
        has_cast_weights: True if the lists of half parameters and of their masters have all parameters, each
            of which is its own master. If False, the lists of float32 parameters have all.
    """

    def __init__(self, optimizer: Optimizer, has_cast_weights: bool) -> None:
        self.optimizer, self._has_cast_weights = optimizer, has_cast_weights
        self.lazy_init_called = False
        self._stashed_gradients: StashedGradients = {}
        # The scaler of a loss that overflowed: the next step does nothing, unless the script drops the
        # gradients of that loss before.
        self.overflowed_scaler: LossScaler | None = None
        self.needs_scale_update = False  # the skipped step lowers the scale, because scale_loss did not
        # A wrapper of an optimizer (Lookahead) may not call Optimizer.__init__, without which torch runs no
        # hooks. __setstate__ adds what is missing.
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        # SAM steps its inner optimizer without a step of its own.
        inner_optimizers = [o for o in vars(optimizer).values() if isinstance(o, Optimizer)]
        self._handles = [
            handle
            for stepped_optimizer in (optimizer, *inner_optimizers)
            for handle in (
                stepped_optimizer.register_step_pre_hook(self._step_pre_hook),
                stepped_optimizer.register_step_post_hook(self._step_post_hook),
            )
        ]
        self._optimizer_attributes: dict[str, Any] = {
            "_amp_stash": self,
            "_amp_lazy_init": lambda: setattr(self, "lazy_init_called", True),
            "_lazy_init_maybe_master_weights": lambda: None,
            "_master_params_to_model_params": lambda: None,
        }
        vars(optimizer).update(self._optimizer_attributes)
        _amp_optimizers.add(self)

    def remove(self) -> None:
        """Undoes all changes of the optimizer."""
        _amp_optimizers.discard(self)
        for handle in self._handles:
            handle.remove()
        for name in self._optimizer_attributes:
            del self.optimizer.__dict__[name]

    @property
    def already_patched(self) -> bool:
        """Whether the next step is skipped."""
        return self.overflowed_scaler is not None

    def __getattr__(self, name: str) -> list[Any]:
        if not re.fullmatch("(all_fp32|(all_)?(fp16|fp32_from_fp(16|32)))_(groups|params)", name):
            missing_attribute_getter("apex.amp.AmpOptimizerState")(name)
        has_parameters = self._has_cast_weights is ("fp16" in name)
        groups = [[*group["params"]] if has_parameters else [] for group in self.optimizer.param_groups]
        return sum(groups, []) if name.startswith("all") else groups

    def _dense_gradients(self) -> Iterator[Tensor]:
        return (p.grad.to_dense() for p in unique_parameters([self.optimizer]) if p.grad is not None)

    def clear_overflow_if_gradients_dropped(self) -> None:
        """Clears the pending overflow if the script dropped or zeroed all gradients since the overflow."""
        if self.overflowed_scaler and not any(gradient.any() for gradient in self._dense_gradients()):
            self.overflowed_scaler = None

    def has_infinite_gradients(self) -> bool:
        return not all(gradient.isfinite().all() for gradient in self._dense_gradients())

    def skip_next_step(self, scaler: LossScaler, needs_scale_update: bool) -> None:
        self.overflowed_scaler, self.needs_scale_update = scaler, needs_scale_update

    def unscale_scaled_gradients(self) -> None:
        """Unscales gradients that are still scaled, and skips the step after an overflow."""
        for scaler, flags in unscale_gradients(unique_parameters([self.optimizer])).items():
            scaler.record_overflow(flags)
            if scaler.update_scale():
                self.skip_next_step(scaler, needs_scale_update=False)

    def _step_pre_hook(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None and any(s.dynamic for s in _amp_state.loss_scalers):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step takes no closure after amp.initialize with a dynamic loss "
                "scale, because the gradients decide whether the step is skipped; call backward before step"
            )
        self.unscale_scaled_gradients()
        # If a step calls the step of its base class, this hook runs twice, the second time without gradients.
        self.clear_overflow_if_gradients_dropped()
        if (scaler := self.overflowed_scaler) is not None:
            if self.needs_scale_update:
                scaler._has_overflow = True
                scaler.update_scale()
            maybe_print(
                f"Gradient overflow. Skipping step, loss scaler {scaler.loss_id} reducing loss scale to "
                f"{scaler.loss_scale()}",
                rank0=True,
            )
            # An optimizer changes neither a parameter without a gradient nor its state.
            self._stashed_gradients = {p: p.grad for p in unique_parameters([self.optimizer])}
            for parameter in self._stashed_gradients:
                parameter.grad = None
        match_strides_before_step(optimizer)

    def _step_post_hook(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for parameter, gradient in self._stashed_gradients.items():
            parameter.grad = gradient
        self._stashed_gradients.clear()
        self.overflowed_scaler = None


def _resolve_scale_loss_arguments(
    loss: Any, optimizers: Any, loss_id: int
) -> tuple[LossScaler, list[AmpOptimizer]]:
    """Returns the scaler of `loss_id` and the AmpOptimizers of `optimizers`.

    Raises:
        RuntimeError: an unknown loss_id, or an optimizer that was not passed to `amp.initialize`.
        TypeError: a loss that is no tensor.
    """
    scalers = _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        raise RuntimeError(
            f"amp.scale_loss: loss_id {loss_id} needs amp.initialize(..., num_losses={loss_id + 1}) or more, "
            f"got {len(scalers)}"
        )
    if not hasattr(loss, "float"):
        kind = type(loss).__name__
        raise TypeError(f"amp.scale_loss: loss takes a tensor, got {kind}; give it the sum of the losses")
    amp_optimizers = []
    for optimizer in as_list(optimizers):
        if not hasattr(optimizer, "_amp_stash"):
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"amp.scale_loss: this {kind} was not given to amp.initialize; give it all optimizers"
            )
        amp_optimizers.append(optimizer._amp_stash)
    return scalers[loss_id], amp_optimizers


class _ScaledBackward:
    """Prepares the gradients of all optimizers for the backward of a scaled loss, and unscales them after it.

    The loss trains `amp_optimizers`. Its backward may reach parameters of other optimizers too, but a block
    inside another `scale_loss` leaves those parameters to the outer block.
    """

    def __init__(self, scaler: LossScaler, amp_optimizers: list[AmpOptimizer]) -> None:
        for amp_optimizer in _amp_optimizers:
            amp_optimizer.clear_overflow_if_gradients_dropped()
        self.scaler, self.amp_optimizers = scaler, amp_optimizers
        # Optimizers may share parameters, so the other parameters follow in one list without duplicates.
        self.trained_parameters = unique_parameters(o.optimizer for o in amp_optimizers)
        reached_optimizers = amp_optimizers if _open_scalers else [*amp_optimizers, *_amp_optimizers]
        parameters = unique_parameters(o.optimizer for o in reached_optimizers)
        other_parameters = parameters[len(self.trained_parameters) :]
        scale = scaler.loss_scale()
        self.stashed_gradients = stash_unscaled_gradients(self.trained_parameters, scale, scaler)
        self.stashed_gradients_of_others = stash_unscaled_gradients(other_parameters, scale, scaler)
        add_stashed_gradients(self.stashed_gradients_of_others)  # the script may drop these in the block

    def abandon(self) -> None:
        """Restores the gradients of `amp_optimizers`. Others keep what backward added, as without amp."""
        for parameter, gradient in self.stashed_gradients.items():
            parameter.grad = gradient
            vars(parameter).pop(SCALE, None)
        unscale_gradients(self.stashed_gradients_of_others)

    def finish(self, delay_unscale: bool, delay_overflow_check: bool) -> None:
        """Unscales the gradients, updates the scale, and skips the next steps after an overflow."""
        scaler, other_parameters = self.scaler, self.stashed_gradients_of_others
        delayed_parameters = (
            {*self.trained_parameters, *other_parameters} if delay_unscale else parameters_without_sync()
        )
        flags = unscale_gradients(p for p in other_parameters if p not in delayed_parameters)[scaler]
        has_other_overflow = scaler.record_overflow(flags)
        flags_by_scaler = unscale_gradients(p for p in self.trained_parameters if p not in delayed_parameters)
        add_stashed_gradients(self.stashed_gradients)
        needs_skip = False
        if scaler in flags_by_scaler:
            scaler.record_overflow(flags_by_scaler[scaler])
            needs_skip = not delay_overflow_check and scaler.update_scale()
        if needs_skip:
            for amp_optimizer in self.amp_optimizers:
                amp_optimizer.skip_next_step(scaler, needs_scale_update=False)
        if needs_skip or has_other_overflow:
            for amp_optimizer in _amp_optimizers.difference(self.amp_optimizers):
                if not amp_optimizer.already_patched and amp_optimizer.has_infinite_gradients():
                    amp_optimizer.skip_next_step(scaler, needs_scale_update=not needs_skip)


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

    Gradients that the loss has for other optimizers of `amp.initialize` are unscaled too. If such a
    gradient is not finite, the next step of its optimizer is skipped and halves the scale, unless the script
    drops the gradient before.

    Args:
        optimizers: the optimizers that the loss trains.
        loss_id: the index of the scale, below `num_losses`.
        model: has no effect, as in apex.
        delay_unscale: do not unscale gradients; for all but the last backward before a step. Under DDP's
            `no_sync` this is automatic.
        delay_overflow_check: only note an overflow in the scaler; for scripts that call its `update_scale`.

    Raises:
        RuntimeError: before `amp.initialize`, or for an optimizer that was not passed to it.
        TypeError: a loss that is no tensor.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("amp.scale_loss: call amp.initialize first")
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler, amp_optimizers = _resolve_scale_loss_arguments(loss, optimizers, loss_id)
    scale = scaler.loss_scale()
    if not scaler.dynamic and scale == 1.0:
        yield loss.float()
        return
    backward = _ScaledBackward(scaler, amp_optimizers)
    _open_scalers.append(scaler)
    try:
        yield loss.float() * scale
    except BaseException:  # the caller may catch the exception (out of memory) and continue
        backward.abandon()
        raise
    finally:
        _open_scalers.pop()
    backward.finish(delay_unscale, delay_overflow_check)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Disables torch.autocast in the block, on the CPU and on CUDA."""
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
