"""What autograd's graph lacks, taken from the calls themselves: a torch function mode.

A node of the graph lacks the eps of a normalisation, a number that is added, and a bias without gradient. A
tensor's version tells that it was written to, and not by which op. The mode sees each call of a torch
function in Python with its arguments, and changes none. It does not see calls from TorchScript and from
compiled code: what they make in these ways is kept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from .masks import OF_ACTIVATIONS
from .packed_tensor import Record, Value
from .views import of_unsafe_view


class Calls(TorchFunctionMode):
    """The mode: what the calls tell the pack hook of a scope, and what they ask of it."""

    dropout: float | None = None  # the probability of the dropout that runs
    unread: torch.Size | None = None  # of an input that the op's backward does not read
    written: tuple[Tensor, int] | None = None  # what the op that runs may write to; its version then

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if is_compiling():
            name = getattr(func, "__name__", "")
            if name in _PYTHON_METHODS and args and isinstance(args[0], Tensor):
                return getattr(args[0], name)(*args[1:], **kwargs or {})
            return func(*args, **kwargs or {})
        handler = _handler(func) or (_written if kwargs and "out" in kwargs else None)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(self, func, args, kwargs or {})

    def telling(self, name: str, told: object, call: Callable[[], Any]) -> Any:
        """Runs `call` while the attribute `name` is `told`."""
        before = getattr(self, name)
        setattr(self, name, told)
        try:
            return call()
        finally:
            setattr(self, name, before)

    def is_filed(self, node) -> bool:
        """Whether a tensor that `node` made waits for a decision."""
        raise NotImplementedError

    def decide(self) -> None:
        """Decides on all that has been filed, in the order of the graph."""
        raise NotImplementedError


Handler = Callable[[Calls, Callable, tuple, dict], Any]  # runs the call


def _argument(args: tuple, kwargs: dict, index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _norm(eps: int, default: float | None = 1e-5, bias: int = 3) -> Handler:
    """Sees a normalisation, whose eps and bias have these positions."""

    def see(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
        y = func(*args, **kwargs)
        return _noted(y, _argument(args, kwargs, eps, "eps", default), _argument(args, kwargs, bias, "bias"))

    return see


def _batch_norm(weight: int, bias: int) -> Handler:
    """Sees a BatchNorm, whose weight and bias have these positions; the graph has its eps.

    In evaluation the backward reads the input for the gradient of the weight alone.
    """

    def see(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
        x, scale = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, weight, "weight")
        training = _argument(args, kwargs, 5, "training", False)
        if training or not _is_frozen(x, scale):
            y = func(*args, **kwargs)
        else:
            y = scope.telling("unread", x.size(), partial(func, *args, **kwargs))
        return _noted(y, None, _argument(args, kwargs, bias, "bias"))

    return see


def _instance_norm(bias: int) -> Handler:
    """Sees an instance norm: a BatchNorm of other sizes, which repeats the bias. A frozen one is not seen."""

    def see(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
        y = func(*args, **kwargs)
        return _noted(y, None, None) if _argument(args, kwargs, bias, "bias") is None else y

    return see


def _noted(y: Any, number: float | None, bias: Tensor | None) -> Any:
    """`y`, at whose node the number of its call is noted, and the bias where it has no gradient."""
    if type(y) is Tensor:
        base = y if y._base is None else y._base
        if base.grad_fn is not None:
            frozen = None if bias is None or bias.requires_grad else bias
            Value.of(of_unsafe_view(base.grad_fn)).call = number, frozen
    return y


def _linear(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    y = func(*args, **kwargs)
    node: Any = y.grad_fn if type(y) is Tensor and y._base is None else None
    if node is not None and y._version:
        Value.of(node).version = y._version  # torch adds the bias in place, for inputs of other strides
    x, bias = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "bias")
    if _is_frozen(x, _argument(args, kwargs, 1, "weight")):
        _want_mask(x.grad_fn)
    return y if bias is None or bias.requires_grad else _noted(y, None, bias)


def _sum(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees a sum or a difference, of which the graph lacks a term that is a number."""
    y, other = func(*args, **kwargs), _argument(args, kwargs, 1, "other")
    return _noted(y, other, None) if type(other) in (int, float) else y


def _dropout(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    p = _argument(args, kwargs, 1, "p", 0.5)
    in_training = _argument(args, kwargs, 2, "train", kwargs.get("training", True)) is not False
    if type(p) is not float or not 0 < p < 1 or not in_training:
        return _maybe_in_place(scope, func, args, kwargs)
    result = scope.telling("dropout", p, partial(_maybe_in_place, scope, func, args, kwargs))
    y = result[0] if type(result) is tuple else result
    if type(y) is Tensor and y.grad_fn is not None and y.grad_fn.name() == "NativeDropoutBackward0":
        _noted(y, None, None)
    return result


def _reads_sizes(weight: int | None = None) -> Handler:
    """Sees an op that saves its input, of which its backward reads the sizes alone.

    So it is in a max pooling, which has indices, and in a convolution whose weight, at this position, has no
    gradient (pytorch#133566). What an activation before it has saved is then reduced to a mask.
    """

    def see(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
        x = _argument(args, kwargs, 0, "input")
        if not _is_frozen(x, None if weight is None else _argument(args, kwargs, weight, "weight")):
            return func(*args, **kwargs)
        y = scope.telling("unread", x.size(), partial(func, *args, **kwargs))
        _want_mask(x.grad_fn)
        return y

    return see


def _want_mask(node) -> None:
    """Of what an activation has saved a bit an element is enough, where its node alone reads that."""
    found = OF_ACTIVATIONS.get(node.name())
    if found is not None:
        attribute, mask_of = found
        record = getattr(node, attribute).data
        if type(record) is Record and record.recipe is None:
            record.mask_of = partial(mask_of, node)
            if record.producer is None:
                record.reduce_to_mask()


def _is_frozen(x: Any, weight: Any) -> bool:
    """Whether the gradient of `x` is all that an op with this weight has to compute."""
    return type(x) is Tensor and x.grad_fn is not None and (weight is None or not weight.requires_grad)


def _maybe_in_place(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees a function of torch.nn.functional with the option `inplace`, which it passes by name."""
    return _written(scope, func, args, kwargs) if kwargs.get("inplace") else func(*args, **kwargs)


def _written(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees an op that writes into its first argument, a tensor or several, or into `out`."""
    call, targets = partial(func, *args, **kwargs), kwargs.get("out")
    if targets is None:
        targets = _argument(args, kwargs, 0, "input")
    for x in targets if isinstance(targets, (list, tuple)) else (targets,):
        if type(x) is Tensor:
            call = partial(_writing, scope, x, call)
    return call()


def _writing(scope: Calls, x: Tensor, call: Callable) -> Any:
    """Runs an op that writes into `x`.

    Where it does, and makes a node, the tensor has one more version than before by this very op. Where it
    makes none, as under no_grad, the graph no longer shows what the tensor holds.
    """
    base = x if x._base is None else x._base
    if base.grad_fn is None:
        reference = getattr(base.untyped_storage(), _OWNER, None) if has_memory(base) else None
        owner = None if reference is None else reference()
        return call() if owner is None else _forgotten(scope, owner, call)
    node: Any = base.grad_fn
    before = base._version
    _copied_for_recipes(scope, node)
    known = base is x and before == (Value.of(node).version or 0) and torch.is_grad_enabled()
    try:
        return scope.telling("written", (x, before + 1) if known else None, call)
    finally:
        if base._version != before:
            after: Any = base.grad_fn
            if after is node:
                _forget(node)
            elif known and base._version == before + 1:
                Value.of(after).version = before + 1


def _forgotten(scope: Calls, base: Tensor, call: Callable) -> Any:
    """Sees a write into the memory of `base` of which autograd's graph knows nothing.

    Without a new version autograd does not notice it either: an op that saved the tensor reads what was
    written, and so do recipes.
    """
    node: Any = base.grad_fn
    if node is None:
        return call()
    scope.decide()
    kept = _copied_for_recipes(scope, node)
    value, version, memory = Value.of(node), base._version, base.detach()
    _forget(node)
    result = call()
    if base._version == version:
        if value.recipe is not None and (recipe := value.recipe()) is not None:
            recipe.memory = memory
        for one in kept:
            one.is_unfit = True
    return result


def _forget(node) -> None:
    """The graph no longer shows what the result of `node` holds."""
    Value.replaced(node).is_known = False


def _copied_for_recipes(scope: Calls, node) -> list[Record]:
    """Before a write to the tensor that `node` made: recipes so far take a copy, and no later one takes it.

    Eager code may write to a saved tensor whose reader never runs a backward. Returns what has saved it.
    """
    if scope.is_filed(node):
        scope.decide()
    value = Value.of(node)
    every, value.records = value.live_records(), []
    for one in every:
        one.copy_for_recipes()
    return every


def _replaced(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees `tensor.data = other`."""
    return _forgotten(scope, args[0], partial(func, *args, **kwargs))


def _aliased(scope: Calls, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sees `detach()` and `.data`, whose result has the memory and not the graph."""
    y = func(*args, **kwargs)
    x = _argument(args, kwargs, 0, "input")
    if type(x) is Tensor and type(y) is Tensor and has_memory(y):
        base = x if x._base is None else x._base
        if base.grad_fn is not None:
            setattr(y.untyped_storage(), _OWNER, TensorWeakRef(base))
    return y


def has_memory(tensor: Tensor) -> bool:
    """Whether it is a plain tensor, and not one of torch.func's."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


_OWNER = "fastvit_owner"  # of a storage: the tensor of the graph that has this memory
_data: Any = Tensor.data
_HANDLERS: dict[Callable, Handler] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm), _norm(4)),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _norm(3, default=None, bias=4)),
    F.linear: _linear,
    **dict.fromkeys((Tensor.add, torch.add, Tensor.sub, torch.sub), _sum),
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
_HANDLERS.update(
    (function, _maybe_in_place)
    for name, function in vars(F).items()
    if not name.startswith("_")
    and inspect.isfunction(function)
    and function not in _HANDLERS
    and "inplace" in inspect.signature(function).parameters
)
_WRITING = frozenset(
    f"__{name}__"
    for name in "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)


@functools.cache
def _handler(func: Callable) -> Handler | None:
    """What handles the calls of a function; None where nothing does."""
    name = getattr(func, "__name__", "")
    writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    return _HANDLERS.get(func) or (_written if writes else None)


# Methods that torch.Tensor defines in Python: Dynamo traces their `super()` in the call of a method alone.
_PYTHON_METHODS = frozenset(name for name, f in vars(Tensor).items() if inspect.isfunction(f))
