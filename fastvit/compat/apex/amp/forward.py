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
from .._warn_once import warn_once
from ._amp_state import Properties, _amp_state
from .weights import HALF_DTYPES, cast_weights, restore_weights


@dataclass
class ForwardCasts:
    """The casts around one model's forward.

    Args:
        options: the options of `amp.initialize`.
        output_dtype: the dtype of floating-point outputs. None casts only outputs in half, to
            float32.
    """

    options: Properties
    output_dtype: torch.dtype | None = None
    num_active_forwards: int = 0
    """Forwards of the whole model that run now. All its weights are cast meanwhile."""
    node_ranges: deque[range] = field(default_factory=lambda: deque(maxlen=10_000))
    """The sequence numbers of the autograd nodes that each of the last forwards made."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no graphs yet.
        return vars(self) | {"node_ranges": deque(maxlen=self.node_ranges.maxlen)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles may have these other names.
        names = {"outputs": "output_dtype", "running": "num_active_forwards", "nodes": "node_ranges"}
        vars(self).update({names.get(name, name): value for name, value in state.items()})

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point inputs and weights are cast; None for no cast."""
        return None if self.options.opt_level == "O1" else self.options.cast_model_type


_SLOW_BF16_NOTE = (
    ". This CPU has no instructions for bfloat16: O1 to O3 are 20 to 30 times slower than O0 here"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported()
    else ""
)


def half_dtype(device: torch.device | str) -> torch.dtype:
    """Returns the half precision of `device`: float16, or `cpu_half()` on the CPU."""
    if torch.device(device).type != "cpu":
        return torch.float16
    if not torch.compiler.is_compiling() and cpu_half() is torch.bfloat16:
        notice = "amp: on the CPU half precision is bfloat16; FASTVIT_HALF=float16 asks for float16"
        warn_once(notice + _SLOW_BF16_NOTE)
    return cpu_half()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with `function` applied to the tensors in it.

    The tensors may be in tuples, lists, mappings, dataclasses, and objects with a `to` method, which marks a
    container of tensors. A container of a new tensor is a shallow copy of its own type; everything else is
    the very object of `value`.
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
        fields, write = vars(value).items(), object.__setattr__  # works on a frozen dataclass too
    else:
        return value
    results = [(name, item, map_tensors(item, function)) for name, item in fields]
    if new_items := {name: result for name, item, result in results if result is not item}:
        value = copy.copy(value)
        for name, result in new_items.items():
            write(value, name, result)
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors cast to `dtype`; see `map_tensors`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def model_device_type(model: nn.Module) -> str:
    """Returns the device type of the parameters of `model`; "cpu" without parameters."""
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


class _PromoteOperandsMode(TorchFunctionMode):
    """Runs calls that autocast on the CPU refuses: operands of different dtypes, and oneDNN's LSTM on a CPU
    without instructions for half.

    As in apex, operands are cast to the widest dtype. An op in place casts them to the dtype of the tensor
    that it writes.
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
            is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            dtype = args[0].dtype if is_in_place else functools.reduce(torch.promote_types, dtypes)
            with torch.autocast("cpu", enabled=False):
                return func(*cast_floating(args, dtype), **cast_floating(kwargs, dtype))


class AmpForward:
    """Replaces the `forward` of a module by the original forward with casts around it.

    An AmpForward imitates the bound method that it replaces, so that inspect, torch.jit.script and torch.fx
    find the original signature and source. Copies, pickles and replicas of a model get an AmpForward of their
    own.

    Submodules get an AmpForward too if weights are cast, because a submodule may run outside of the model's
    forward: in backward, in a checkpoint, or called by the script. A submodule then casts its weights for
    inputs in half, and in the backward of a forward that cast them.

    Args:
        casts: the casts of the model; None for no casts.
        instance_forward: a forward that was set on the instance before.
        is_submodule: whether `module` is a submodule of a model that was passed to `amp.initialize`.
    """

    __class__ = property(lambda self: MethodType)

    def __init__(
        self,
        module: nn.Module,
        casts: ForwardCasts | None,
        instance_forward: Callable[..., Any] | None,
        is_submodule: bool,
    ) -> None:
        self.module, self.casts = module, casts
        self.instance_forward, self.is_submodule = instance_forward, is_submodule

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.instance_forward or MethodType(type(self.module).forward, self.module)

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self):  # a copy has no attributes while it is made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> Any:
        return AmpForward, (self.module, self.casts, self.instance_forward, self.is_submodule)

    def replicate(self) -> nn.Module:
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        forward = AmpForward(replica, self.casts, self.instance_forward, self.is_submodule)
        vars(replica).update(_forward_attributes(forward))
        return replica

    def _call_original(self, *args: Any, **kwargs: Any) -> Any:
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)  # torch.compile traces no MethodType

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = self.casts
        if casts is None or (self.is_submodule and not self._needs_casts(casts, args, kwargs)):
            return self._call_original(*args, **kwargs)
        if self.is_submodule:
            return self._call_with_cast_weights(casts, args, kwargs)
        outputs = self._call_model(casts, args, kwargs)
        if casts.output_dtype is not None:
            return cast_floating(outputs, casts.output_dtype)
        return map_tensors(outputs, lambda t: t.float() if t.dtype in HALF_DTYPES else t)

    @staticmethod
    def _needs_casts(casts: ForwardCasts, args: Any, kwargs: Any) -> bool:
        """Returns whether a submodule, which runs outside of the model's forward, casts its weights."""
        if casts.num_active_forwards:
            return False
        if any(isinstance(v, Tensor) and v.dtype in HALF_DTYPES for v in (*args, *kwargs.values())):
            return True
        node = torch._C._current_autograd_node()
        return node is not None and any(node._sequence_nr() in r for r in reversed(casts.node_ranges))

    def _call_model(self, casts: ForwardCasts, args: Any, kwargs: Any) -> Any:
        """Calls the forward of the whole model with cast inputs and weights, or under autocast."""
        options, handle = casts.options, getattr(_amp_state, "handle", None)
        if casts.model_dtype is not None:
            args, kwargs = cast_floating(args, casts.model_dtype), cast_floating(kwargs, casts.model_dtype)
            return self._call_with_cast_weights(casts, args, kwargs)
        uses_autocast = options.patch_torch_functions and options.cast_model_type is not torch.float32
        if not uses_autocast or not (handle is None or handle._is_active):
            return self._call_original(*args, **kwargs)
        device = model_device_type(self.module)
        needs_promotion = device == "cpu" and not torch.compiler.is_compiling()
        with (
            torch.autocast(device, options.cast_model_type or half_dtype(device)),
            _PromoteOperandsMode() if needs_promotion else nullcontext(),
        ):
            return self._call_original(*args, **kwargs)

    def _call_with_cast_weights(self, casts: ForwardCasts, args: Any, kwargs: Any) -> Any:
        assert casts.model_dtype is not None
        swaps = cast_weights(self.module, casts.model_dtype, casts.options.keep_batchnorm_fp32)
        casts.num_active_forwards += 1
        is_compiling = torch.compiler.is_compiling()
        # Each thread has sequence numbers of its own, so forwards inside a backward are left out.
        is_counted = not is_compiling and torch._C._current_graph_task_id() == -1
        first_number = torch.autograd._get_sequence_nr() if is_counted else 0
        try:
            return self._call_original(*args, **kwargs)
        finally:
            casts.num_active_forwards -= 1
            if is_counted and (node_range := range(first_number, torch.autograd._get_sequence_nr())):
                casts.node_ranges.append(node_range)
            restore_weights(swaps, self.module.training and not is_compiling)


def _forward_attributes(forward: AmpForward) -> dict[str, Any]:
    """Returns the attributes of a module by which torch calls `forward`."""
    return {"forward": forward, "_amp_forward": forward, "_replicate_for_data_parallel": forward.replicate}


def install_casts(model: nn.Module, casts: ForwardCasts) -> None:
    """Puts `casts` around the forward of `model`, in place of earlier casts.

    Raises:
        TypeError: for a torch.jit.ScriptModule.
    """
    for module in [model] if casts.model_dtype in (None, torch.float32) else model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "amp.initialize takes models whose forward can be replaced, got a torch.jit.ScriptModule; "
                "script the model after amp.initialize"
            )
        is_submodule, amp_forward = module is not model, vars(module).get("_amp_forward")
        if amp_forward is None:
            forward = AmpForward(module, casts, vars(module).get("forward"), is_submodule)
            vars(module).update(_forward_attributes(forward))
        elif not is_submodule or amp_forward.is_submodule or amp_forward.casts is None:
            # An initialised model inside another model keeps its own casts.
            amp_forward.casts, amp_forward.is_submodule = casts, is_submodule


def remove_casts(module: nn.Module) -> None:
    """Restores the forward of `module`, if `install_casts` replaced it.

    If another forward was set on the instance since, the AmpForward stays beneath that one without casts.
    """
    forward: AmpForward | None = vars(module).get("_amp_forward")
    if forward is None:
        return
    forward.casts = None
    is_outermost = vars(module).get("forward") is forward
    if is_outermost:
        for name in _forward_attributes(forward):
            del vars(module)[name]
        if forward.instance_forward is not None:
            vars(module)["forward"] = forward.instance_forward
