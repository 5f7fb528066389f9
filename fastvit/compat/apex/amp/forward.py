"""Casts around a model's forward: autocast, inputs to half, outputs to float32."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._notices import warn_once
from ..parallel import distributed
from ._amp_state import _amp_state

_seen_ddp: weakref.WeakSet = weakref.WeakSet()

CPU_HALF = torch.bfloat16
"""Half precision on the CPU: bfloat16, since float16 is slow there and needs loss scaling."""


@dataclass(frozen=True)
class ForwardCasts:
    """The casts around one model's forward.

    Args:
        autocast: run it under torch.autocast.
        autocast_type: autocast's dtype; None is float16, and bfloat16 on the CPU.
        inputs: dtype of floating-point inputs; None for no cast.
        outputs: dtype of floating-point outputs; None for no cast.
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

    Other objects with a `to` method (a PackedSequence, for example) are cast by it, all others returned as
    they are.
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
    """The device type of the parameters of `model`; "cpu" without parameters."""
    tensor = next(model.parameters(), None)
    return "cpu" if tensor is None else tensor.device.type


class _AmpForward:
    """First base of the class that `wrap` gives a model, whose own class is the second.

    A class and not hooks, which a KeyboardInterrupt in forward would leave inside autocast, and not a
    function on the instance, which replicas and shallow copies would share: copies, replicas and pickles have
    casts of their own.
    """

    _amp_casts: ForwardCasts | None  # None after `unwrap`, where another class lies above this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        casts = self._amp_casts or ForwardCasts()
        if not torch.compiler.is_compiling():
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if ddp is not None:
                _seen_ddp.add(ddp)
        if casts.inputs is not None:
            args, kwargs = cast_floating(args, casts.inputs), cast_floating(kwargs, casts.inputs)
        # A forward that was set on the instance overrides that of the class.
        inner = self.__dict__.get("_amp_own_forward") or super().forward
        handle = _amp_state.handle
        if casts.autocast and (handle is None or handle._is_active):
            device = device_type(cast("nn.Module", self))
            with torch.autocast(device, casts.autocast_type or half_type(device)):
                outputs = inner(*args, **kwargs)
        else:
            outputs = inner(*args, **kwargs)
        return outputs if casts.outputs is None else cast_floating(outputs, casts.outputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        made, arguments, *state = reduced
        if made is copyreg.__newobj__ and type(self).__bases__[0] is _AmpForward:
            # No module has this class, so a pickle names the model's own.
            made, arguments = _blank, type(self).__bases__[1:]
        return (made, arguments, *state)


@cache
def _class(own: type) -> type:
    """The class for models of class `own`, whose name and metaclass it has."""
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own)(own.__name__, (_AmpForward, own), names)


def _blank(own: type) -> Any:
    made = _class(own)
    return made.__new__(made)


def wrap(model: nn.Module, casts: ForwardCasts) -> None:
    """Puts `casts` around the forward of `model`; they replace earlier ones."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("amp.initialize: a torch.jit.ScriptModule has a fixed forward; script it afterwards")
    model.__dict__["_amp_casts"] = casts
    if not isinstance(model, _AmpForward):
        if "forward" in model.__dict__:
            model.__dict__["_amp_own_forward"] = model.__dict__.pop("forward")
        model.__class__ = _class(type(model))


def unwrap(model: nn.Module) -> None:
    """Restores the class and the forward of a wrapped `model`.

    Where torch has put another class above (FSDP, parametrize), the class stays, without casts.
    """
    model.__dict__["_amp_casts"] = None
    if type(model).__bases__[0] is _AmpForward:
        del model.__dict__["_amp_casts"]
        model.__class__ = type(model).__bases__[1]
        if "_amp_own_forward" in model.__dict__:
            model.__dict__["forward"] = model.__dict__.pop("_amp_own_forward")


def find_ddp() -> None:
    """Records all DDP models of the process, since forwards inside a compiled graph do not record theirs."""
    if dist.is_available() and dist.is_initialized():
        # By type(), since isinstance reads an attribute of proxies, which may raise.
        _seen_ddp.update(o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))


def ddp_groups(parameters: Iterable[Tensor]) -> dict[Tensor, set[dist.ProcessGroup]]:
    """For each of these parameters, the process groups of the DDP models that reduce its gradient."""
    groups: dict[Tensor, set[dist.ProcessGroup]] = {parameter: set() for parameter in parameters}
    for ddp in [*_seen_ddp, *distributed.wrapped]:
        for parameter in ddp.parameters():
            if parameter in groups:
                groups[parameter].add(getattr(ddp, "process_group", dist.group.WORLD))
    return groups


def without_sync(parameters: set[Tensor]) -> bool:
    """Whether a DDP model with some of these parameters is in `no_sync`, so that their gradients are not
    reduced yet.
    """
    return any(
        not ddp.require_backward_grad_sync and not parameters.isdisjoint(ddp.parameters())
        for ddp in [*_seen_ddp, *distributed.wrapped]
    )
