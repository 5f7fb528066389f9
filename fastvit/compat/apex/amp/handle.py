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
from .._fused import lay_out
from ..parallel.distributed import without_sync
from ..parallel.LARC import LARC
from ._amp_state import _amp_state, maybe_print
from .scaler import LossScaler

SCALE = "_amp_scale"
"""Attribute of a parameter whose gradient is not unscaled yet: its scale, and the scaler of its next step."""

_attached: weakref.WeakSet[AmpOptimizer] = weakref.WeakSet()
_open: list[LossScaler] = []  # of the `scale_loss` blocks that are open


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a LARC, or `optimizer` itself."""
    while isinstance(optimizer, LARC):
        optimizer = optimizer.optim
    return optimizer


def several(value: Any) -> list[Any]:
    """The models or optimizers in an iterable, or the one that was given."""
    one = isinstance(value, (nn.Module, Optimizer, dict)) or not isinstance(value, Iterable)
    return [value] if one else list(value)


# Gradients of parameters


def parameters_of(optimizers: Iterable[Any]) -> list[nn.Parameter]:
    """All parameters of these optimizers, each once."""
    return list(dict.fromkeys(p for o in optimizers for group in o.param_groups for p in group["params"]))


Earlier = dict[nn.Parameter, Tensor | None]
"""Unscaled gradients that are kept apart from those of a backward."""


@torch.no_grad()
def before_backward(parameters: Iterable[nn.Parameter], scale: float, scaler: Any) -> Earlier:
    """Prepares gradients for those of a loss times `scale`, which backward adds to them.

    They are scaled until `unscale`, which `scaler` counts. Those that are scaled already get that scale. The
    unscaled ones of earlier losses, and None, are taken away and returned.
    """
    earlier: Earlier = {}
    for parameter in parameters:
        held = vars(parameter).get(SCALE)
        if parameter.grad is None or held is None:
            earlier[parameter], parameter.grad = parameter.grad, None
        elif held[0] != scale:
            parameter.grad.mul_(scale / held[0])
        setattr(parameter, SCALE, (scale, scaler))
    return earlier


@torch.no_grad()
def unscale(parameters: Iterable[nn.Parameter]) -> dict[Any, list[Tensor]]:
    """Divides gradients that are scaled, in place; devices and dtypes may be mixed.

    Returns for each scaler one float32 scalar per device, 1 where any gradient there is not finite. Does not
    wait for the device.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if SCALE in vars(parameter):
            groups[vars(parameter).pop(SCALE)].append(parameter)
    flags: dict[Any, list[Tensor]] = defaultdict(list)
    for (scale, scaler), group in groups.items():
        optimizer: Any = SimpleNamespace(param_groups=[{"params": group}])
        factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=group[0].device)
        found = torch.zeros_like(factor)
        flags[scaler] += GradScaler(enabled=False)._unscale_grads_(optimizer, factor, found, True).values()
    return flags


@torch.no_grad()
def put_back(earlier: Earlier) -> None:
    """Adds `earlier` to the gradients, times the scale of those that are left scaled."""
    for parameter, gradient in earlier.items():
        if gradient is not None:
            if held := vars(parameter).get(SCALE):
                gradient.mul_(held[0])
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


class AmpOptimizer:
    """Attached to a torch optimizer, and to those that it has inside, by their step hooks. It is found under
    apex's name, `_amp_stash`, and has the lists of parameters that apex has there.

    Args:
        half: the lists of half parameters and of their masters have all parameters, each of which is its own
            master; otherwise those of float32 parameters have them.
    """

    def __init__(self, optimizer: Optimizer, half: bool) -> None:
        self.optimizer, self._half = optimizer, half
        self.lazy_init_called = False
        self._withheld: Earlier = {}
        # Of a loss that overflowed: the next step does nothing, unless the script drops its gradients.
        self.overflow: LossScaler | None = None
        self.counts = False  # that step lowers the scale, which the loss has not
        # A wrapper of an optimizer (Lookahead) may not call Optimizer.__init__, without which torch runs no
        # hooks. __setstate__ adds what is missing.
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        # SAM steps its inner optimizer without a step of its own.
        inside = [o for o in vars(optimizer).values() if isinstance(o, Optimizer)]
        self._handles = [
            handle
            for stepped in (optimizer, *inside)
            for handle in (
                stepped.register_step_pre_hook(self._before_step),
                stepped.register_step_post_hook(self._after_step),
            )
        ]
        self._names: dict[str, Any] = {
            "_amp_stash": self,
            "_amp_lazy_init": lambda: setattr(self, "lazy_init_called", True),
            "_lazy_init_maybe_master_weights": lambda: None,
            "_master_params_to_model_params": lambda: None,
        }
        vars(optimizer).update(self._names)
        _attached.add(self)

    def remove(self) -> None:
        """Undoes all changes of the optimizer."""
        _attached.discard(self)
        for handle in self._handles:
            handle.remove()
        for name in self._names:
            del self.optimizer.__dict__[name]

    @property
    def already_patched(self) -> bool:
        """Whether the next step is skipped."""
        return self.overflow is not None

    def __getattr__(self, name: str) -> list[Any]:
        if not re.fullmatch("(all_fp32|(all_)?(fp16|fp32_from_fp(16|32)))_(groups|params)", name):
            missing_attribute_getter("apex.amp.AmpOptimizerState")(name)
        filled = self._half is ("fp16" in name)
        groups = [[*group["params"]] if filled else [] for group in self.optimizer.param_groups]
        return sum(groups, []) if name.startswith("all") else groups

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad.to_dense() for p in parameters_of([self.optimizer]) if p.grad is not None)

    def look_for_overflow(self) -> None:
        """Forgets the overflow if the script has dropped or zeroed its gradients."""
        if self.overflow and not any(gradient.any() for gradient in self._gradients()):
            self.overflow = None

    def has_infinite_gradients(self) -> bool:
        return not all(gradient.isfinite().all() for gradient in self._gradients())

    def unscale_rest(self) -> None:
        """Unscales gradients that were left scaled, and skips the step after an overflow."""
        for scaler, flags in unscale(parameters_of([self.optimizer])).items():
            scaler.look_at(flags)
            if scaler.update_scale():
                self.overflow, self.counts = scaler, False

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is not None and any(s.dynamic for s in _amp_state.loss_scalers):
            raise RuntimeError(
                "amp: optimizer.step takes no closure, because the gradients decide whether the step is "
                "skipped; compute them before"
            )
        self.unscale_rest()
        # A step that calls the step of its base class runs this twice, the second time without gradients.
        self.look_for_overflow()
        if (scaler := self.overflow) is not None:
            if self.counts:
                scaler._has_overflow = True
                scaler.update_scale()
            maybe_print(
                f"Gradient overflow. Skipping step, loss scaler {scaler.loss_id} reducing loss scale to "
                f"{scaler.loss_scale()}",
                rank0=True,
            )
            # An optimizer changes neither a parameter without a gradient nor its state.
            self._withheld = {p: p.grad for p in parameters_of([self.optimizer])}
            for parameter in self._withheld:
                parameter.grad = None
        lay_out(optimizer)

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for parameter, gradient in self._withheld.items():
            parameter.grad = gradient
        self._withheld.clear()
        self.overflow = None


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

    Gradients that the loss has for other optimizers of `amp.initialize` are unscaled too. One that is not
    finite halves the scale at the next step of such an optimizer, which is skipped, unless the script drops
    the gradient before.

    Args:
        optimizers: those that the loss trains.
        loss_id: the index of the scale, below `num_losses`.
        model: has no effect, as in apex.
        delay_unscale: do not unscale gradients; for all but the last backward before a step. Under DDP's
            `no_sync` this is automatic.
        delay_overflow_check: only note an overflow in the scaler; for scripts that call its `update_scale`.

    Raises:
        RuntimeError: before `amp.initialize`, or for an optimizer that it was not given.
        TypeError: a loss that is no tensor.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("amp.scale_loss: call amp.initialize first")
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise RuntimeError(
            f"amp.scale_loss: loss_id {loss_id} needs amp.initialize(..., num_losses={loss_id + 1}) or more, "
            f"got {len(_amp_state.loss_scalers)}"
        )
    if not hasattr(loss, "float"):
        kind = type(loss).__name__
        raise TypeError(f"amp.scale_loss: loss takes a tensor, got {kind}; give it the sum of the losses")
    scaler = _amp_state.loss_scalers[loss_id]
    given: list[AmpOptimizer] = []
    for stepped in several(optimizers):
        if not hasattr(stepped, "_amp_stash"):
            kind = type(stepped).__name__
            raise RuntimeError(f"amp.scale_loss: this {kind} was not given to amp.initialize")
        given.append(stepped._amp_stash)
    scale = scaler.loss_scale()
    if not scaler.dynamic and scale == 1.0:
        yield loss.float()
        return
    for optimizer in _attached:
        optimizer.look_for_overflow()
    own = parameters_of(o.optimizer for o in given)  # one may be in several optimizers
    # The backward may reach parameters of other optimizers too. A block inside leaves them to the outer one.
    reached = parameters_of(o.optimizer for o in (given if _open else [*given, *_attached]))[len(own) :]
    earlier, others = before_backward(own, scale, scaler), before_backward(reached, scale, scaler)
    put_back(others)  # where the block may drop them
    _open.append(scaler)
    try:
        yield loss.float() * scale
    except BaseException:  # a caller may catch it (out of memory) and continue
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
            vars(parameter).pop(SCALE, None)
        unscale(others)  # with what the backward has added, as without amp
        raise
    finally:
        _open.pop()
    held = {*own, *others} if delay_unscale else without_sync()
    lost = scaler.look_at(unscale(p for p in others if p not in held)[scaler])
    flags, skips = unscale(p for p in own if p not in held), False
    put_back(earlier)
    if scaler in flags:
        scaler.look_at(flags[scaler])
        skips = not delay_overflow_check and scaler.update_scale()
    for optimizer in given if skips else ():
        optimizer.overflow, optimizer.counts = scaler, False
    for optimizer in _attached.difference(given) if lost or skips else ():
        if not optimizer.already_patched and optimizer.has_infinite_gradients():
            optimizer.overflow, optimizer.counts = scaler, not skips


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """No casts inside: disables torch.autocast, on the CPU and on CUDA."""
    with torch.autocast("cpu", enabled=False), contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
