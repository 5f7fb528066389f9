"""What autograd's graph lacks, taken from the calls themselves: a torch function mode.

A node of the graph lacks the eps of a normalisation, a number that is added, and a bias without gradient. A
tensor's version tells that it was written to, and not by which op. The mode sees each call of a torch
function in Python with its arguments, and changes none. It does not see calls from TorchScript and from
compiled code: what they make in these ways is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from .graph import CALL, VALUE, VERSION
from .masks import GATES
from .policy import Policy
from .record import Record, Value
from .views import of_unsafe_view


class Context(Protocol):
    """What the calls tell a scope, and what they ask of it."""

    policy: Policy
    dropout: float | None
    unread: torch.Size | None
    written: tuple[Tensor, int] | None
    aliases: Aliases

    def is_filed(self, node) -> bool: ...
    def decide(self) -> None: ...


See = Callable[[Context, Callable, tuple, dict], Any]  # runs the call


def _argument(args: tuple, kwargs: dict, index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _norm(eps: int, bias: int) -> See:
    """Sees a normalisation, whose eps and bias have these positions."""

    def see(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
        y = func(*args, **kwargs)
        return _noted(y, _argument(args, kwargs, eps, "eps", 1e-5), _argument(args, kwargs, bias, "bias"))

    return see


def _batch_norm(weight: int, bias: int) -> See:
    """Sees a BatchNorm, whose weight and bias have these positions; the graph has its eps.

    In evaluation the backward reads the input for the gradient of the weight alone.
    """

    def see(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
        x, scale = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, weight, "weight")
        training = _argument(args, kwargs, 5, "training", False)
        if training or not _is_frozen(x, scale):
            y = func(*args, **kwargs)
        else:
            y = _without(scope, x, func, args, kwargs)
        return _noted(y, None, _argument(args, kwargs, bias, "bias"))

    return see


def _instance_norm(bias: int) -> See:
    """Sees an instance norm: a BatchNorm of other sizes, which repeats the bias. A frozen one is not seen."""

    def see(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
        y = func(*args, **kwargs)
        return _noted(y, None, None) if _argument(args, kwargs, bias, "bias") is None else y

    return see


def _noted(y: Any, number: float | None, bias: Tensor | None) -> Any:
    """`y`, at whose node the number of its call is noted, and the bias where it has no gradient."""
    if type(y) is Tensor:
        base = y if y._base is None else y._base
        if base.grad_fn is not None:
            frozen = None if bias is None or bias.requires_grad else bias
            of_unsafe_view(base.grad_fn).metadata[CALL] = number, frozen
    return y


def _linear(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    y = func(*args, **kwargs)
    node: Any = y.grad_fn if type(y) is Tensor and y._base is None else None
    if node is not None and y._version:
        node.metadata[VERSION] = y._version  # torch adds the bias in place, for inputs of other strides
    x, bias = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "bias")
    if _is_frozen(x, _argument(args, kwargs, 1, "weight")):
        _want_gate(x.grad_fn)
    return y if bias is None or bias.requires_grad else _noted(y, None, bias)


def _sum(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees a sum or a difference, of which the graph lacks a term that is a number."""
    y, other = func(*args, **kwargs), _argument(args, kwargs, 1, "other")
    return _noted(y, other, None) if type(other) in (int, float) else y


def _rms_norm(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    return _noted(func(*args, **kwargs), _argument(args, kwargs, 3, "eps"), None)


def _dropout(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    p = _argument(args, kwargs, 1, "p", 0.5)
    in_training = _argument(args, kwargs, 2, "train", kwargs.get("training", True)) is not False
    if type(p) is not float or not 0 < p < 1 or not in_training:
        return _maybe_in_place(scope, func, args, kwargs)
    outer, scope.dropout = scope.dropout, p
    try:
        result = _maybe_in_place(scope, func, args, kwargs)
    finally:
        scope.dropout = outer
    y = result[0] if type(result) is tuple else result
    if type(y) is Tensor and y.grad_fn is not None and y.grad_fn.name() == "NativeDropoutBackward0":
        _noted(y, None, None)
    return result


def _reads_sizes(weight: int | None = None) -> See:
    """Sees an op that saves its input, of which its backward reads the sizes alone.

    So it is in a max pooling, which has indices, and in a convolution whose weight, at this position, has no
    gradient (pytorch#133566). What an activation before it has saved is then reduced to a gate.
    """

    def see(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
        x = _argument(args, kwargs, 0, "input")
        if not _is_frozen(x, None if weight is None else _argument(args, kwargs, weight, "weight")):
            return func(*args, **kwargs)
        y = _without(scope, x, func, args, kwargs)
        _want_gate(x.grad_fn)
        return y

    return see


def _want_gate(node) -> None:
    """Of what an activation has saved a bit an element is enough, where its node alone reads that."""
    found = GATES.get(node.name())
    if found is not None:
        attribute, gate_of = found
        record = getattr(node, attribute).data
        if type(record) is Record and record.recipe is None:
            record.gate_of = partial(gate_of, node)
            if record.made is None:
                record.reduce_to_gate()


def _is_frozen(x: Any, weight: Any) -> bool:
    """Whether the gradient of `x` is all that an op with this weight has to compute."""
    return type(x) is Tensor and x.grad_fn is not None and (weight is None or not weight.requires_grad)


def _without(scope: Context, x: Tensor, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs an op that saves `x`, of which its backward reads the size alone."""
    outer, scope.unread = scope.unread, x.size()
    try:
        return func(*args, **kwargs)
    finally:
        scope.unread = outer


def _maybe_in_place(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees a function of torch.nn.functional with the option `inplace`, which it passes by name."""
    return _written(scope, func, args, kwargs) if kwargs.get("inplace") else func(*args, **kwargs)


def _written(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees an op that writes into its first argument, a tensor or several, or into `out`."""
    call, targets = partial(func, *args, **kwargs), kwargs.get("out")
    if targets is None:
        targets = _argument(args, kwargs, 0, "input")
    for x in targets if isinstance(targets, (list, tuple)) else (targets,):
        if type(x) is Tensor:
            call = partial(_writing, scope, x, call)
    return call()


def _writing(scope: Context, x: Tensor, call: Callable) -> Any:
    """Runs an op that writes into `x`.

    Where it does, and makes a node, the tensor has one more version than before by this very op. Where it
    makes none, as under no_grad, the graph no longer shows what the tensor holds.
    """
    base = x if x._base is None else x._base
    if base.grad_fn is None:
        of = scope.aliases.source(base) if scope.aliases else None
        return _forgotten(scope, of, call) if of is not None else call()
    node: Any = base.grad_fn
    before = base._version
    _copied_for_recipes(scope, node)
    known = base is x and before == node.metadata.get(VERSION, 0) and torch.is_grad_enabled()
    outer, scope.written = scope.written, (x, before + 1) if known else None
    try:
        return call()
    finally:
        scope.written = outer
        if base._version != before:
            made: Any = base.grad_fn
            if made is node:
                _forget(node)
            elif known and base._version == before + 1:
                made.metadata[VERSION] = before + 1


def _forgotten(scope: Context, base: Tensor, call: Callable) -> Any:
    """Sees a write into the memory of `base` of which autograd's graph knows nothing.

    Without a new version autograd does not notice it either: an op that saved the tensor reads what was
    written, and so do recipes.
    """
    node: Any = base.grad_fn
    if node is None:
        return call()
    scope.decide()
    kept = _copied_for_recipes(scope, node)
    value, version, memory = node.metadata.get(VALUE), base._version, base.detach()
    _forget(node)
    result = call()
    if value is not None and base._version == version:
        if value.recipe is not None and (recipe := value.recipe()) is not None:
            recipe.memory = memory
        for one in kept:
            one.is_unfit = True
    return result


def _forget(node) -> None:
    """The graph no longer shows what the result of `node` holds."""
    value = node.metadata[VALUE] = Value()
    value.is_known = False


def _copied_for_recipes(scope: Context, node) -> list[Record]:
    """Before a write to the tensor that `node` made: recipes so far take a copy, and no later one takes it.

    Eager code may write to a saved tensor whose reader never runs a backward. Returns what has saved it.
    """
    if scope.is_filed(node):
        scope.decide()
    value = node.metadata.get(VALUE)
    if value is None:
        return []
    every, value.records = value.saved(), []
    for one in every:
        one.copy_for_recipes()
    return every


def _replaced(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees `tensor.data = other`."""
    return _forgotten(scope, args[0], partial(func, *args, **kwargs))


def _aliased(scope: Context, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees `detach()` and `.data`, whose result has the memory and not the graph."""
    y = func(*args, **kwargs)
    x = _argument(args, kwargs, 0, "input")
    if type(x) is Tensor and type(y) is Tensor and has_memory(y):
        base = x if x._base is None else x._base
        if base.grad_fn is not None:
            scope.aliases.add(y, base)
    return y


def has_memory(tensor: Tensor) -> bool:
    """Whether it is a plain tensor, and not one of torch.func's."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class Aliases:
    """Tensors outside of the graph with the memory of one inside of it."""

    def __init__(self):
        self._sources: dict[int, tuple[StorageWeakRef, TensorWeakRef]] = {}  # by the address of the storage

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, alias: Tensor, base: Tensor) -> None:
        storage = alias.untyped_storage()
        self._sources[storage._cdata] = StorageWeakRef(storage), TensorWeakRef(base)

    def source(self, alias: Tensor) -> Tensor | None:
        """The tensor of the graph whose memory `alias` has."""
        found = self._sources.get(alias.untyped_storage()._cdata) if has_memory(alias) else None
        return found and found[1]()

    def sweep(self) -> None:
        self._sources = {
            address: source for address, source in self._sources.items() if not source[0].expired()
        }


_data: Any = Tensor.data
_SEEN: dict[Callable, See] = {
    F.layer_norm: _norm(4, 3),
    torch.layer_norm: _norm(4, 3),
    F.group_norm: _norm(4, 3),
    torch.group_norm: _norm(4, 3),
    F.linear: _linear,
    **dict.fromkeys((Tensor.add, torch.add, Tensor.sub, torch.sub), _sum),
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.batch_norm: _batch_norm(3, 4),
    torch.batch_norm: _batch_norm(1, 2),
    F.instance_norm: _instance_norm(4),
    torch.instance_norm: _instance_norm(2),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution), _reads_sizes(1)),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d), _reads_sizes(1)),
    torch.conv_transpose3d: _reads_sizes(1),
    **dict.fromkeys((F.max_pool2d, F.max_pool3d, torch.max_pool2d, torch.max_pool3d), _reads_sizes()),
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.native_dropout: _dropout,
    Tensor.detach: _aliased,
    torch.detach: _aliased,
    _data.__get__: _aliased,
    _data.__set__: _replaced,
    Tensor.numpy: _written,
    Tensor.__array__: _written,
}
_SEEN.update(
    (function, _maybe_in_place)
    for name, function in vars(F).items()
    if not name.startswith("_")
    and inspect.isfunction(function)
    and function not in _SEEN
    and "inplace" in inspect.signature(function).parameters
)
_WRITING = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)


class _Seers(dict):
    """By function, what sees its calls; None where nothing does. Filled at the first call of a function."""

    def __missing__(self, func: Callable) -> See | None:
        name = getattr(func, "__name__", "")
        writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        see = self[func] = _SEEN.get(func) or (_written if writes else None)
        return see


_seers = _Seers()


# Methods that torch.Tensor defines in Python: Dynamo traces their `super()` in the call of a method alone.
_PYTHON_METHODS = frozenset(name for name, f in vars(Tensor).items() if inspect.isfunction(f))


class Calls(TorchFunctionMode):
    """The mode of a scope."""

    def __init__(self, scope: Context):
        super().__init__()
        self.scope = scope

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if is_compiling():
            name = getattr(func, "__name__", "")
            if name in _PYTHON_METHODS and args and isinstance(args[0], Tensor):
                return getattr(args[0], name)(*args[1:], **kwargs or {})
            return func(*args, **kwargs or {})
        see = _seers[func] or (_written if kwargs and "out" in kwargs else None)
        if see is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return see(self.scope, func, args, kwargs or {})
