"""Casts around a model's forward: autocast, inputs to half, outputs to float32."""

import copy
import functools
import operator
import platform
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..._cpu_half import cpu_half
from .._notices import warn_once
from ._amp_state import Properties, _amp_state
from .weights import HALF_TYPES, cast_weights, swap_back


@dataclass
class ForwardCasts:
    """The casts around one model's forward.

    Args:
        options: of `amp.initialize`.
        outputs: dtype of floating-point outputs; None casts those in half to float32, and no others.
    """

    options: Properties
    outputs: torch.dtype | None = None
    running: int = 0  # forwards of the model, in which all its weights are cast
    nodes: deque[range] = field(default_factory=lambda: deque(maxlen=10_000))
    """The sequence numbers of the autograd nodes that each of the last of them made."""

    def __getstate__(self) -> dict[str, Any]:  # a copy has graphs of its own
        return vars(self) | {"nodes": deque(maxlen=self.nodes.maxlen)}

    @property
    def dtype(self) -> torch.dtype | None:
        """Of floating-point inputs and weights; None for no cast."""
        return None if self.options.opt_level == "O1" else self.options.cast_model_type


_SLOW = (
    ". This CPU has no instructions for bfloat16: O1 to O3 are 20 to 30 times slower than O0 here"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported()
    else ""
)


def half_type(device: torch.device | str) -> torch.dtype:
    """float16, and `cpu_half()` on the CPU."""
    if torch.device(device).type != "cpu":
        return torch.float16
    if not torch.compiler.is_compiling() and cpu_half() is torch.bfloat16:
        warn_once("amp: on the CPU half precision is bfloat16; FASTVIT_HALF=float16 asks for float16" + _SLOW)
    return cpu_half()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to the tensors inside tuples, lists, mappings, dataclasses and objects
    with a `to` method, by which a container of tensors is known.

    What holds a new tensor is a shallow copy of its own type; all else is returned as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    fields: Any
    write: Callable[[Any, Any, Any], None]
    if isinstance(value, list):
        fields, write = enumerate(value), type(value).__setitem__
    elif isinstance(value, MutableMapping):
        fields, write = value.items(), type(value).__setitem__
    elif hasattr(value, "__dict__") and (hasattr(value, "to") or is_dataclass(value)):
        if isinstance(value, (type, nn.Module)):
            return value
        fields, write = vars(value).items(), object.__setattr__  # of a frozen dataclass too
    else:
        return value
    mapped = [(name, field, map_tensors(field, function)) for name, field in fields]
    if new := {name: result for name, field, result in mapped if result is not field}:
        value = copy.copy(value)
        for name, result in new.items():
            write(value, name, result)
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors cast to `dtype`, see `map_tensors`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def device_type(model: nn.Module) -> str:
    """The device type of the parameters of `model`; "cpu" without parameters."""
    tensor = next(model.parameters(), None)
    return "cpu" if tensor is None else tensor.device.type


class _Promotion(TorchFunctionMode):
    """Runs what autocast on the CPU refuses: operands of different dtypes, and oneDNN's LSTM on a CPU
    without instructions for half.

    As in apex, operands are cast to the widest dtype, and in place to that of the tensor which is written.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            operands = pytree.tree_leaves((args, kwargs))
            dtypes = {t.dtype for t in operands if isinstance(t, Tensor) and t.is_floating_point()}
            if len(dtypes) < 2 and "could not create a primitive" not in str(error):
                raise
            name = getattr(func, "__name__", "")
            in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            dtype = args[0].dtype if in_place else functools.reduce(torch.promote_types, dtypes)
            with torch.autocast("cpu", enabled=False):
                return func(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))


class AmpForward:
    """The `forward` of an initialised model: its own, with casts around it.

    It passes for that bound method, so that signatures, sources, torch.jit.script and torch.fx find what
    they would without amp. Copies, pickles and replicas of the model have one of their own.

    Modules inside have one too where weights are cast, since they may run without the model's: in backward,
    of a checkpoint, or called by the script. There weights are cast for inputs in half, and in the backward
    of what ran in a forward that cast them.

    Args:
        casts: None for none.
        own: a forward that was set on the instance before.
        part: of a module inside.
    """

    __class__ = property(lambda self: MethodType)

    def __init__(
        self, model: nn.Module, casts: ForwardCasts | None, own: Callable[..., Any] | None, part: bool
    ) -> None:
        self.model, self.casts, self.own, self.part = model, casts, own, part

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.own or MethodType(type(self.model).forward, self.model)

    def __getattr__(self, name: str) -> Any:
        if "model" not in vars(self):  # while being copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> Any:
        return AmpForward, (self.model, self.casts, self.own, self.part)

    def replicate(self) -> nn.Module:
        replica = type(self.model)._replicate_for_data_parallel(self.model)
        vars(replica).update(_hooks(AmpForward(replica, self.casts, self.own, self.part)))
        return replica

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)  # torch.compile traces no MethodType

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = self.casts
        if casts is None:
            return self._run(*args, **kwargs)
        if self.part:
            given, node = (*args, *kwargs.values()), torch._C._current_autograd_node()
            alone = not casts.running and (
                any(isinstance(value, Tensor) and value.dtype in HALF_TYPES for value in given)
                or (node is not None and any(node._sequence_nr() in n for n in reversed(casts.nodes)))
            )
            return self._cast(casts, args, kwargs) if alone else self._run(*args, **kwargs)
        options, handle = casts.options, getattr(_amp_state, "handle", None)
        autocasts = options.patch_torch_functions and options.cast_model_type is not torch.float32
        if casts.dtype is not None:
            args, kwargs = cast_floating(args, casts.dtype), cast_floating(kwargs, casts.dtype)
            outputs = self._cast(casts, args, kwargs)
        elif autocasts and (handle is None or handle._is_active):
            device = device_type(self.model)
            promotes = device == "cpu" and not torch.compiler.is_compiling()
            with (
                torch.autocast(device, options.cast_model_type or half_type(device)),
                _Promotion() if promotes else nullcontext(),
            ):
                outputs = self._run(*args, **kwargs)
        else:
            outputs = self._run(*args, **kwargs)
        if casts.outputs is not None:
            return cast_floating(outputs, casts.outputs)
        return map_tensors(outputs, lambda t: t.float() if t.dtype in HALF_TYPES else t)

    def _cast(self, casts: ForwardCasts, args: Any, kwargs: Any) -> Any:
        """The forward with cast weights."""
        assert casts.dtype is not None
        swaps = cast_weights(self.model, casts.dtype, casts.options.keep_batchnorm_fp32)
        casts.running += 1
        compiling = torch.compiler.is_compiling()
        counted = not compiling and torch._C._current_graph_task_id() == -1  # each thread counts its own
        first = torch.autograd._get_sequence_nr() if counted else 0
        try:
            return self._run(*args, **kwargs)
        finally:
            casts.running -= 1
            if counted and (nodes := range(first, torch.autograd._get_sequence_nr())):
                casts.nodes.append(nodes)
            swap_back(swaps, self.model.training and not compiling)


def _hooks(forward: AmpForward) -> dict[str, Any]:
    """The attributes by which torch calls it."""
    return {"forward": forward, "_amp_forward": forward, "_replicate_for_data_parallel": forward.replicate}


def wrap(model: nn.Module, casts: ForwardCasts) -> None:
    """Puts `casts` around the forward of `model`; they replace earlier ones.

    Raises:
        TypeError: for a torch.jit.ScriptModule.
    """
    for module in [model] if casts.dtype in (None, torch.float32) else model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "amp.initialize: a torch.jit.ScriptModule has a fixed forward; script it afterwards"
            )
        part, present = module is not model, vars(module).get("_amp_forward")
        if present is None:
            vars(module).update(_hooks(AmpForward(module, casts, vars(module).get("forward"), part)))
        elif not part or present.part or present.casts is None:  # a model inside a model keeps its own
            present.casts, present.part = casts, part


def unwrap(module: nn.Module) -> None:
    """Restores the forward of a wrapped `module`.

    Where another forward was set on the instance since, ours stays beneath it, without casts.
    """
    forward: AmpForward | None = vars(module).get("_amp_forward")
    if forward is None:
        return
    forward.casts = None
    is_outermost = vars(module).get("forward") is forward
    if is_outermost:
        for name in _hooks(forward):
            del vars(module)[name]
        if forward.own is not None:
            vars(module)["forward"] = forward.own
