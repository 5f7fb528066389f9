"""What amp does around a model's forward: autocast, inputs cast to half, outputs cast to float32."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._notices import warn_once
from ._amp_state import _amp_state

__all__ = [
    "CPU_HALF",
    "ForwardCasts",
    "cast_floating",
    "ddp_groups",
    "device_type",
    "find_ddp",
    "half_type",
    "is_wrapped",
    "unwrap",
    "without_sync",
    "wrap",
]

_seen_ddp: weakref.WeakSet = weakref.WeakSet()

CPU_HALF = torch.bfloat16
"""Half precision on the CPU, where float16 is slow and its range is not worth the scaling."""


@dataclass(frozen=True)
class ForwardCasts:
    """What happens around one model's forward.

    Args:
        autocast: whether it runs under torch.autocast.
        autocast_type: autocast's dtype; None is float16, and bfloat16 on the CPU.
        inputs: dtype of floating-point inputs; None leaves them.
        outputs: dtype of floating-point outputs; None leaves them.
    """

    autocast: bool = False
    autocast_type: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


def half_type(device: torch.device | str) -> torch.dtype:
    """float16, and `CPU_HALF` on the CPU."""
    if torch.device(device).type != "cpu" or CPU_HALF is torch.float16:
        return torch.float16
    if not torch.compiler.is_compiling():
        warn_once(
            "amp: on the CPU half precision is bfloat16; cast_model_type=torch.float16 asks for float16"
        )
    return CPU_HALF


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor inside tuples, lists and mappings cast to `dtype`.

    Other objects with a `to` method (a PackedSequence, say) are cast by it; the rest comes back as it is.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, nn.Module):
        return value
    if hasattr(value, "to"):
        return value.to(dtype)
    if isinstance(value, Mapping):
        cast = {key: cast_floating(item, dtype) for key, item in value.items()}
        return cast if type(value) is dict else type(value)(cast)
    if isinstance(value, (tuple, list)):
        items = [cast_floating(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def device_type(model: nn.Module) -> str:
    """Where the parameters of `model` are; "cpu" when it has none."""
    tensor = next(model.parameters(), None)
    return "cpu" if tensor is None else tensor.device.type


class _AmpForward:
    """Mixed in before a model's class, so that copies, replicas and subclasses' `super()` keep working."""

    _amp_casts: ForwardCasts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        casts = self._amp_casts
        if not torch.compiler.is_compiling():
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if ddp is not None:
                _seen_ddp.add(ddp)
        if casts.inputs is not None:
            args, kwargs = cast_floating(args, casts.inputs), cast_floating(kwargs, casts.inputs)
        # A forward that was put on the instance comes before the class's.
        inner = self.__dict__.get("_amp_own_forward") or super().forward
        handle = _amp_state.handle
        if casts.autocast and (handle is None or handle.is_active()):
            device = device_type(self)
            with torch.autocast(device, casts.autocast_type or half_type(device)):
                outputs = inner(*args, **kwargs)
        else:
            outputs = inner(*args, **kwargs)
        return outputs if casts.outputs is None else cast_floating(outputs, casts.outputs)

    def __reduce_ex__(self, protocol: int) -> tuple:
        # The class exists in this process alone; a pickle names the one it was made from.
        reduced = list(super().__reduce_ex__(protocol))
        reduced[:2] = _rebuild, (type(self).__bases__[1],)
        return tuple(reduced)


@functools.cache
def _amp_class(base: type) -> type:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_AmpForward, base), names)


def _rebuild(base: type) -> nn.Module:
    made = _amp_class(base)
    return made.__new__(made)


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, _AmpForward)


def wrap(model: nn.Module, casts: ForwardCasts) -> None:
    """Puts `casts` around the forward of `model`, in place of those it may have."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("amp.initialize: a torch.jit.ScriptModule has a fixed forward; script it afterwards")
    if not is_wrapped(model):
        if "forward" in model.__dict__:
            model._amp_own_forward = model.__dict__.pop("forward")
        model.__class__ = _amp_class(type(model))
    model._amp_casts = casts


def unwrap(model: nn.Module) -> None:
    """Gives `model` its own class and forward back."""
    if is_wrapped(model):
        model.__class__ = type(model).__bases__[1]
        del model._amp_casts
        if "_amp_own_forward" in model.__dict__:
            model.forward = model.__dict__.pop("_amp_own_forward")


def find_ddp() -> None:
    """Takes note of every DDP model there is: a forward inside a compiled graph does not tell of its own."""
    if dist.is_available() and dist.is_initialized():
        # the type, as isinstance would ask proxies, which may raise
        _seen_ddp.update(o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))


def ddp_groups(parameters: Iterable[Tensor]) -> dict[Tensor, set[dist.ProcessGroup]]:
    """For each of these parameters the process groups over which a DDP model keeps it equal."""
    groups: dict[Tensor, set[dist.ProcessGroup]] = {parameter: set() for parameter in parameters}
    for ddp in list(_seen_ddp):
        for parameter in ddp.parameters():
            if parameter in groups:
                groups[parameter].add(ddp.process_group)
    return groups


def without_sync(parameters: set[Tensor]) -> bool:
    """Whether a DDP model with some of these parameters is in `no_sync`, so that their gradients are this
    rank's alone and wait for the backward that reduces them.
    """
    return any(
        not ddp.require_backward_grad_sync and not parameters.isdisjoint(ddp.parameters())
        for ddp in list(_seen_ddp)
    )
