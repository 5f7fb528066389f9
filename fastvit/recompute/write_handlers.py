"""Handlers of calls that write to tensors, or lend their memory.

The version counter of a tensor shows that it was written to, and not by which op. A handler runs the call and
stores whether only the op of the new node has written. The handler adds other writes to the scope's tracker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from .packed_tensor import AsStridedArgs, PackedTensor
from .recipe import CallArgs, InPlaceCall, OutputInfo
from .storage import has_storage, storage_id, view_base
from .weak_list import WeakList
from .write_tracker import WriteTracker


class WriteObserver(Protocol):
    """The attributes of the call observer that a handler of writes reads."""

    scope: Any
    tracker: WriteTracker

    def with_attribute(self, name: str, value: object, call: Callable[[], Any]) -> Any: ...


def get_argument(args: tuple, kwargs: dict, index: int, name: str, default: Any = None) -> Any:
    """Returns the argument of a call at position `index`, or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def inplace_option_handler(observer: WriteObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a function with the option `inplace`, which torch's modules and functions pass by name."""
    is_in_place = kwargs.get("inplace")
    return in_place_handler(observer, func, args, kwargs) if is_in_place else func(*args, **kwargs)


def in_place_handler(observer: WriteObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes an op that writes into its first argument, a tensor or several, or into `out`."""
    call, targets = partial(func, *args, **kwargs), kwargs.get("out")
    if targets is None:
        # torch.nn.init passes the tensor by name.
        targets = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if isinstance(targets, Tensor):
        if getattr(func, "__name__", "") in _METADATA_ONLY and targets.is_leaf:
            return _observe_metadata_write(observer, targets, call)
        return _observe_write(observer, targets, call, partial(_make_write, func, args[1:], kwargs))
    for x in targets if isinstance(targets, (list, tuple)) else ():
        if isinstance(x, Tensor):
            call = partial(_observe_write, observer, x, call)
    return call()


def _observe_write(
    observer: WriteObserver,
    x: Tensor,
    call: Callable,
    make_write: Callable[[], Callable | None] = lambda: None,
) -> Any:
    """Runs an op that may write into `x`.

    If the op creates an autograd node and the version counter rises by one, this op alone wrote the tensor.
    The recipe of its output then computes the op. The function of `make_write()` repeats a write to a view.
    """
    if not has_storage(x) or x.is_inference():
        return call()
    base = view_base(x)
    tracker, node = observer.tracker, base.grad_fn
    base_version, version = base._version, x._version
    observer.scope.prepare_write(x, is_shown=node is not None)
    if node is None:
        try:
            return call()
        finally:
            if base.grad_fn is None and x._version != version and not tracker.is_unshared_number(x):
                tracker.add_write(x)
    is_tracked = base_version == (OutputInfo.of_node(node).expected_version or 0) and torch.is_grad_enabled()
    is_view = is_tracked and base is not x and not base.storage_offset()
    args = (AsStridedArgs.of_tensor(x), AsStridedArgs.of_tensor(base)) if is_view else None
    copies: WeakList[PackedTensor] = WeakList()
    if args is not None:
        call = partial(observer.with_attribute, "in_place_copies", copies, call)
    try:
        return observer.with_attribute(
            "expected_write", (base, base_version + 1) if is_tracked else None, call
        )
    finally:
        if base._version != base_version:
            new_node: Any = base.grad_fn
            if new_node is node:
                OutputInfo.of_node(node).is_content_known = False
            elif is_tracked and base._version == base_version + 1:
                info = OutputInfo.of_node(new_node)
                info.expected_version = base_version + 1
                if args is not None and (function := make_write()) is not None:
                    info.call_args = CallArgs(in_place=InPlaceCall(function, *args, copies))


def _observe_metadata_write(observer: WriteObserver, x: Tensor, call: Callable) -> Any:
    """Runs an op that raises the version counter of a tensor without a graph, and writes nothing."""
    info, version = observer.tracker.find_owner(x), x._version
    result = call()
    if info is not None and x._version == version + 1 and (info.expected_version or 0) == version:
        info.expected_version = version + 1
    return result


def _make_write(func: Callable, args: tuple, kwargs: dict) -> Callable[[Tensor], Any] | None:
    """Returns the function that repeats an op in place; None if its other arguments are not all numbers."""
    numbers = (int, float, bool, type(None))
    if func in _RECOMPUTABLE_WRITES and all(type(one) in numbers for one in (*args, *kwargs.values())):
        return lambda t: func(t, *args, **kwargs)
    return None


def _set_data_handler(observer: WriteObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes `tensor.data = other`, which gives the tensor other memory. Both count as written to.

    If an op has saved the tensor as an input, autograd holds the tensor, and the backward reads the other
    memory.
    """
    x, tracker = args[0], observer.tracker
    node = view_base(x).grad_fn
    if not has_storage(x):
        return func(*args, **kwargs)
    observer.scope.plan_pending()
    tracker.save_pre_write_copies(x)
    tracker.write_counts[storage_id(x)] += 1
    result = func(*args, **kwargs)
    tracker.write_counts[storage_id(x)] += 1
    if node is not None:
        info = OutputInfo.of_node(node)
        info.is_content_known = False
        if observer.scope.has_outer_hooks():  # the outer hooks have packed the earlier memory
            return result
        for packed in info.packed_tensors:
            if packed.is_of(x) and not _is_saved_by(node, packed):
                packed.keep(x.detach())
    return result


def _is_saved_by(node: Any, packed: PackedTensor) -> bool:
    """Returns whether the op of `node` has saved `packed`."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # the backward of the node has run and freed what it saved
                return False
            for one in saved if isinstance(saved, tuple) else (saved,):
                if getattr(one, "data", None) is packed:
                    return True
    return False


def _alias_handler(observer: WriteObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes `detach()` and `.data`, which return the memory without the graph."""
    y = func(*args, **kwargs)
    x = get_argument(args, kwargs, 0, "input")
    if isinstance(x, Tensor) and isinstance(y, Tensor) and has_storage(y):
        node = view_base(x).grad_fn
        if node is not None:
            observer.tracker.add_alias(y, node)
    return y


def _lend_handler(observer: WriteObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a call that lends the memory to NumPy or other libraries, which may read or write it."""
    if isinstance(args[0], Tensor) and has_storage(args[0]):
        if observer.scope.has_outer_hooks():  # outer hooks may copy what they pack
            observer.scope.prepare_write(args[0], is_shown=False)
        observer.tracker.lend(args[0])
    return func(*args, **kwargs)


def find_schema(func: Any) -> Any:
    """Returns the schema of an op of torch.ops; None for other functions."""
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    return func._schema if isinstance(func, OpOverload) else None


def is_in_place(func: Callable) -> bool:
    """Returns whether the name of a function says that it writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


def find_inplace_options() -> Iterator[Callable]:
    """Yields the functions of torch.nn.functional with the option `inplace`."""
    for name, function in vars(F).items():
        if not name.startswith("_") and inspect.isfunction(function):
            if "inplace" in inspect.signature(function).parameters:
                yield function


_IN_PLACE_DUNDERS = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
# These methods change the metadata of a tensor that no op of the graph made, and not its memory.
_METADATA_ONLY = frozenset(
    f"{name}_"
    for name in (
        "as_strided detach requires_grad rename share_memory squeeze swapaxes swapdims t transpose unsqueeze"
    ).split()
)
_RECOMPUTABLE_METHODS = "relu sigmoid tanh mul div add sub neg clamp clamp_min clamp_max abs exp square sqrt"
_RECOMPUTABLE_WRITES: set[Callable] = {
    *(one for one in find_inplace_options() if not ("dropout" in one.__name__ or "rrelu" in one.__name__)),
    *(getattr(Tensor, f"{name}_") for name in _RECOMPUTABLE_METHODS.split()),
    *(getattr(Tensor, name) for name in ("__imul__", "__iadd__", "__isub__", "__itruediv__")),
    *(torch.relu_, F.relu_, F.leaky_relu_, F.elu_, F.hardtanh_, F.selu_, F.celu_),
}
_data_property: Any = Tensor.data
HANDLERS: dict[Callable, Callable] = {
    **dict.fromkeys((Tensor.detach, torch.detach, _data_property.__get__), _alias_handler),
    _data_property.__set__: _set_data_handler,
    **dict.fromkeys(
        (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage), _lend_handler
    ),
}
