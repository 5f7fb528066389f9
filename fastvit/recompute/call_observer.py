"""`CallObserver` is a torch function mode that stores on autograd nodes what the graph lacks.

A node lacks the eps of a normalisation, an added number, and the operands that its op does not save. A
handler runs the call and stores these facts from the arguments of the call. The mode lies below all other
modes, and lets subclasses of Tensor handle a call first. The mode therefore sees the arguments that torch
gets. It changes no call. Calls from TorchScript and from compiled code do not reach the mode: their outputs
are recomputed only if the graph has all that their ops need.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from . import write_handlers
from .masks import ACTIVATION_MASKS
from .packed_tensor import PackedTensor, Recomputed
from .pins import PinnedTensor
from .policy import Policy, RecomputeLevel
from .recipe import CallArgs, OutputInfo
from .storage import has_storage, storage_id, view_base
from .views import skip_unsafe_view
from .weak_list import WeakList
from .write_handlers import get_argument
from .write_tracker import WriteTracker

_push, _pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack
_next_sequence_nr = torch._C._autograd._get_sequence_nr  # Returns the number of the next node of this thread.


def pop_modes() -> list[Any]:
    """Removes all torch function modes from the stack; returns them, the top one first."""
    return [_pop() for _ in range(torch._C._len_torch_function_stack())]


class OwnerScope(Protocol):
    """The methods of the owning scope that the observer calls."""

    policy: Policy

    def check_open(self) -> None: ...

    def prepare_write(self, tensor: Tensor, is_shown: bool) -> None: ...

    def has_outer_hooks(self) -> bool: ...

    def plan_pending(self) -> None: ...

    def replace_by_mask(self, packed: PackedTensor) -> None: ...


class CallObserver(TorchFunctionMode):
    """Observes calls of torch functions for a scope.

    Handlers pass facts of the running call to the scope's pack hook by attributes.
    """

    is_closed = False
    running_dropout_p: float | None = None  # the probability of the dropout that runs
    shape_only_size: torch.Size | None = None  # the size of an input whose backward reads the shape alone
    pinned_operand: Any = ...  # the only small operand that the scope pins; `...` for all small operands
    expected_write: tuple[Tensor, int] | None = None  # a tensor that the op may write to; its version then
    in_place_copies: WeakList | None = None  # the copies that an op in place on a view saves

    def __init__(self, scope: OwnerScope):
        super().__init__()
        self.scope = scope
        self.tracker = WriteTracker()
        # The biases of SyncBatchNorms, by the storage of 1 / std, until the op saves 1 / std.
        self.biases: dict[int, PinnedTensor] = {}
        self._pinned: WeakList[OutputInfo] = WeakList()

    def push_below(self) -> None:
        """Puts the mode below all others."""
        above = pop_modes()
        for mode in [self, *reversed(above)]:
            _push(mode)

    def remove(self) -> bool:
        """Removes the mode. Returns False inside an observed call, after which torch pushes the mode again.

        A mode that is pushed again observes nothing.
        """
        self.is_closed = True
        modes = pop_modes()
        for mode in reversed(modes):
            if mode is not self:
                _push(mode)
        return self in modes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if is_compiling():
            name = getattr(func, "__name__", "")
            if name in _PYTHON_METHODS and args and isinstance(args[0], Tensor):
                return getattr(args[0], name)(*args[1:], **kwargs or {})
            return func(*args, **kwargs or {})
        if self.is_closed:
            return func(*args, **kwargs or {})
        if types and (overriding_classes := _find_overrides(types)) and torch._C._is_torch_function_enabled():
            return self._call_subclasses(func, overriding_classes, types, args, kwargs or {})
        writes_out = kwargs and kwargs.get("out") is not None
        handler = write_handlers.in_place_handler if writes_out else _find_handler(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.scope.check_open()
        return handler(self, func, args, kwargs or {})

    def _call_subclasses(
        self, func: Callable, overriding_classes: tuple, types: tuple, args: tuple, kwargs: dict
    ) -> Any:
        """Calls as torch does without a mode. Calls that a subclass makes in turn are observed."""
        _push(self)
        try:
            for cls in overriding_classes:
                result = cls.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        finally:
            _pop()
        raise TypeError(f"no implementation found for {func} on types {list(types)}")

    def with_attribute(self, name: str, value: object, call: Callable[[], Any]) -> Any:
        """Runs `call()` while the attribute `name` is `value`, and restores the attribute."""
        outer_value = getattr(self, name)
        setattr(self, name, value)
        try:
            return call()
        finally:
            setattr(self, name, outer_value)

    def store_call_args(self, node: Any, call: CallArgs) -> None:
        info = OutputInfo.of_node(node)
        info.call_args = call
        if call.bias is not None or call.leaves:
            self._pinned.append(info)

    def drop_pins(self) -> None:
        """Drops the pins that no recipe reads. Recipes hold the pins that they read."""
        for info in self._pinned:
            info.call_args = None
        self._pinned.clear()

    def pin(self, tensor: Tensor, dtype: torch.dtype | None = None) -> PinnedTensor:
        """Pins an operand of the op that runs."""
        pinned = PinnedTensor(tensor, dtype)
        if pinned.tensor is not None:
            pinned.writes = self.tracker.count_writes(pinned.tensor)
        return pinned


@functools.cache
def _find_overrides(types: tuple) -> tuple:
    """Returns the subclasses of Tensor among `types` that handle calls of torch functions."""
    disabled = torch._C._disabled_torch_function_impl
    return tuple(cls for cls in types if cls is not Tensor and cls.__torch_function__ is not disabled)


_MAX_COMPOSITE_CALLS = 256  # calls of composite functions whose pins are stored
Handler = Callable[[CallObserver, Callable, tuple, dict], Any]  # runs and observes a call


def _node_of(y: Any, *names: str) -> Any:
    """Returns the node of the output `y`, if the node has one of the names; None if another op has run."""
    if not isinstance(y, Tensor):
        return None
    node = view_base(y).grad_fn
    if node is None:
        return None
    node = skip_unsafe_view(node)
    return node if node.name() in names else None


def _store_call_args(observer: CallObserver, y: Any, call: CallArgs, *names: str) -> Any:
    """Stores `call` on the node of `y`, if the node has one of the names. Returns `y`."""
    if (node := _node_of(y, *names)) is not None:
        observer.store_call_args(node, call)
    return y


def _norm_handler(name: str, eps: int, default: float | None = 1e-5, bias: int | None = None) -> Handler:
    """Returns a handler of a normalisation. `eps` and `bias` are positions; None if the op saves its bias."""

    def handle(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
        pinned = _pin_bias(observer, args, kwargs, bias)
        scalar = get_argument(args, kwargs, eps, "eps", default)
        return _store_call_args(observer, func(*args, **kwargs), CallArgs(scalar, pinned), name)

    return handle


def _pin_bias(observer: CallObserver, args: tuple, kwargs: dict, position: int | None) -> PinnedTensor | None:
    bias = None if position is None else get_argument(args, kwargs, position, "bias")
    return None if bias is None or not bias.is_leaf else observer.pin(bias)


def _store_bias(observer: CallObserver, y: Any, bias: Any, first_sequence_nr: int, *names: str) -> Any:
    """Stores a bias that is a leaf on the node of `y`, the output of an op whose operands autocast may cast.

    Args:
        first_sequence_nr: the sequence number of the first node that the call has made.
    """
    node = _node_of(y, *names)
    if node is not None and isinstance(bias, Tensor) and bias.is_leaf:
        pinned = _pin_cast_bias(observer, node, bias, y.dtype, first_sequence_nr)
        if pinned is not None:
            # The graph of a sum has a bias that requires a gradient. The term that it lacks is the product.
            is_in_graph = bias.requires_grad and node.name() == "AddBackward0"
            observer.store_call_args(node, CallArgs(bias=None if is_in_graph else pinned, leaves=(pinned,)))
    return y


def _pin_cast_bias(
    observer: CallObserver, node: Any, bias: Tensor, dtype: torch.dtype, first_sequence_nr: int
) -> PinnedTensor | None:
    """Pins a bias as the op of `node` has read it: autocast may have cast it for an earlier op.

    Returns None if that op's call was not observed.
    """
    if dtype is bias.dtype or not bias.requires_grad:  # Autocast stores no cast of the bias.
        return observer.pin(bias, dtype)
    for cast, _ in node.next_functions:
        if cast is None or cast.name() != "ToCopyBackward0":
            continue
        if getattr(cast.next_functions[0][0], "variable", None) is bias:
            call = OutputInfo.of_node(cast).call_args
            if call is None or call.bias is None:
                if cast._sequence_nr() < first_sequence_nr:
                    return None
                call = CallArgs(bias=observer.pin(bias, dtype))
                observer.store_call_args(cast, call)
            return call.bias
    return None


_BATCH_NORM_NODES = "NativeBatchNormBackward0", "CudnnBatchNormBackward0"


def _batch_norm_handler(weight: int, bias: int) -> Handler:
    """Returns a handler of a BatchNorm; `weight` and `bias` are positions.

    In evaluation the backward reads the input only for the gradient of the weight. In training the scope pins
    no small operand but the weight: the backward reads no running statistics, and only the op has the
    statistics that it saves.
    """

    def handle(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
        x, scale = get_argument(args, kwargs, 0, "input"), get_argument(args, kwargs, weight, "weight")
        pinned, call = _pin_bias(observer, args, kwargs, bias), partial(func, *args, **kwargs)
        if get_argument(args, kwargs, 5, "training", False):
            y = observer.with_attribute("pinned_operand", scale, call)
        elif _is_frozen(x, scale):
            y = observer.with_attribute("shape_only_size", x.size(), call)
        else:
            y = call()
        return _store_call_args(observer, y, CallArgs(bias=pinned), *_BATCH_NORM_NODES)

    return handle


def _instance_norm_handler(bias: int) -> Handler:
    """Returns a handler of an instance norm: a BatchNorm of N * C channels, with N copies of the bias."""

    def handle(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
        x, bias_vector = get_argument(args, kwargs, 0, "input"), get_argument(args, kwargs, bias, "bias")
        has_bias = bias_vector is not None and isinstance(x, Tensor)
        pinned = observer.pin(bias_vector.detach().repeat(len(x))) if has_bias else None
        return _store_call_args(observer, func(*args, **kwargs), CallArgs(bias=pinned), *_BATCH_NORM_NODES)

    return handle


def _linear_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    first_sequence_nr = _next_sequence_nr()
    y = func(*args, **kwargs)
    if not isinstance(y, Tensor):
        return y
    node = y.grad_fn  # None in inference mode, where tensors have no version counter
    if node is not None and y._version and y._base is None:
        # If the input is not contiguous, torch may add the bias in place.
        OutputInfo.of_node(node).expected_version = y._version
    x, weight = get_argument(args, kwargs, 0, "input"), get_argument(args, kwargs, 1, "weight")
    if not weight.requires_grad and _is_frozen(x, weight):
        _request_mask(observer, x.grad_fn)
    if observer.scope.policy.level < RecomputeLevel.MATMULS:
        return y
    bias = get_argument(args, kwargs, 2, "bias")
    y = _store_bias(observer, y, bias, first_sequence_nr, "AddmmBackward0", "AddBackward0")
    if observer.scope.policy.level < RecomputeLevel.EVERY_OP or x.requires_grad or not weight.is_leaf:
        return y
    # The op saves no weight, because the input needs no gradient.
    if (node := _node_of(y, "AddmmBackward0")) is not None:
        call = OutputInfo.of_node(node).call_args
        if call is not None:
            observer.store_call_args(node, call._replace(leaves=(*call.leaves, observer.pin(weight))))
    return y


def _addmm_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    first_sequence_nr = _next_sequence_nr()
    y = func(*args, **kwargs)
    if observer.scope.policy.level < RecomputeLevel.MATMULS or not isinstance(y, Tensor):
        return y
    return _store_bias(
        observer, y, get_argument(args, kwargs, 0, "input"), first_sequence_nr, "AddmmBackward0"
    )


_SUM_NODES = "AddBackward0", "SubBackward0"


def _sum_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a sum or a difference, which saves none of its terms."""
    other = get_argument(args, kwargs, 1, "other")
    if type(other) in (int, float):
        return _store_call_args(observer, func(*args, **kwargs), CallArgs(scalar=other), *_SUM_NODES)
    terms = get_argument(args, kwargs, 0, "input"), other
    constant = _find_constant(terms) if observer.scope.policy.level >= RecomputeLevel.EVERY_OP else None
    if constant is None:
        return _call_with_leaves(observer, func, args, kwargs, terms, *_SUM_NODES)
    call = CallArgs(bias=observer.pin(constant), leaves=_pin_leaves(observer, terms))
    return _store_call_args(observer, func(*args, **kwargs), call, *_SUM_NODES)


def _find_constant(terms: tuple) -> Tensor | None:
    """Returns the term without gradient, such as an attention mask, if it is half as large at most."""
    if not all(isinstance(one, Tensor) and has_storage(one) and not one.is_nested for one in terms):
        return None
    constant, other = sorted(terms, key=lambda one: one.requires_grad)
    is_small = other.requires_grad and not constant.requires_grad and 2 * constant.nbytes <= other.nbytes
    return constant if is_small else None


def _call_with_leaves(
    observer: CallObserver, func: Callable, args: tuple, kwargs: dict, operands: Any, *names: str
) -> Any:
    """Runs an op that does not save these operands, and pins the leaves among them. Returns its output."""
    leaves = _pin_leaves(observer, operands) if isinstance(operands, (tuple, list)) else ()
    y = func(*args, **kwargs)
    return _store_call_args(observer, y, CallArgs(leaves=leaves), *names) if leaves else y


def _composite_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a function of several ops, which the mode does not see. Pins its leaves for all these ops."""
    if observer.scope.policy.level < RecomputeLevel.MATMULS:
        return func(*args, **kwargs)
    leaves, first_sequence_nr = _pin_leaves(observer, [*args, *kwargs.values()]), _next_sequence_nr()
    y = func(*args, **kwargs)
    if leaves:
        observer.tracker.pins_of_calls.append((range(first_sequence_nr, _next_sequence_nr()), leaves))
        # A scope may contain a whole training loop, so only the last calls are stored.
        del observer.tracker.pins_of_calls[:-_MAX_COMPOSITE_CALLS]
    return y


def _addcmul_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    return _call_with_leaves(observer, func, args, kwargs, args[:1], "AddcmulBackward0")


def _elementwise_norm_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes the normalisation in torch's SyncBatchNorm, whose autograd Function saves all but the bias."""
    bias, invstd = get_argument(args, kwargs, 2, "bias"), get_argument(args, kwargs, 4, "invstd")
    if isinstance(bias, Tensor) and isinstance(invstd, Tensor):
        observer.biases[storage_id(invstd)] = observer.pin(bias)
    return func(*args, **kwargs)


def _join_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a concatenation, which saves none of its operands."""
    operands = get_argument(args, kwargs, 0, "tensors")
    return _call_with_leaves(observer, func, args, kwargs, operands, "CatBackward0", "StackBackward0")


def _pin_leaves(observer: CallObserver, tensors: tuple | list) -> tuple[PinnedTensor, ...]:
    """Pins the leaves among `tensors`, and the leaves of which `tensors` are views."""
    pinned = []
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            base = view_base(tensor)
            if base.grad_fn is None:
                pinned.append(observer.pin(base))
    return tuple(pinned)


def _dropout_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    p = get_argument(args, kwargs, 1, "p", 0.5)
    in_training = get_argument(args, kwargs, 2, "train", kwargs.get("training", True)) is not False
    if type(p) is not float or not 0 < p < 1 or not in_training:
        return write_handlers.inplace_option_handler(observer, func, args, kwargs)
    run = partial(write_handlers.inplace_option_handler, observer, func, args, kwargs)
    result = observer.with_attribute("running_dropout_p", p, run)
    _store_call_args(
        observer, result[0] if type(result) is tuple else result, CallArgs(), "NativeDropoutBackward0"
    )
    return result


def _shape_only_handler(weight: int | None = None, bias: int | None = None) -> Handler:
    """Returns a handler of an op that saves its input, and whose backward reads only the input's shape.

    Such an op is a max pooling, whose backward reads the indices, or a convolution whose weight needs no
    gradient (pytorch#133566). The handler then asks for a mask in place of what an activation before the op
    has saved. `weight` and `bias` are positions.
    """

    def handle(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
        x, first_sequence_nr = get_argument(args, kwargs, 0, "input"), _next_sequence_nr()
        if _is_frozen(x, None if weight is None else get_argument(args, kwargs, weight, "weight")):
            y = observer.with_attribute("shape_only_size", x.size(), partial(func, *args, **kwargs))
            _request_mask(observer, x.grad_fn)
        else:
            y = func(*args, **kwargs)
        if bias is None or observer.scope.policy.level < RecomputeLevel.EVERY_OP or not isinstance(y, Tensor):
            return y
        bias_vector = get_argument(args, kwargs, bias, "bias")
        return _store_bias(observer, y, bias_vector, first_sequence_nr, "ConvolutionBackward0")

    return handle


def _request_mask(observer: CallObserver, node: Any) -> None:
    """Asks the scope for a bit mask in place of the activation's saved tensor.

    The plan makes the mask only if the policy allows it, no recipe reads the tensor and no other op saved it.
    """
    activation_mask = ACTIVATION_MASKS.get(node.name())
    if activation_mask is not None:
        attribute, make_mask = activation_mask
        packed = getattr(node, attribute).data
        if type(packed) is PackedTensor and type(packed.state) is not Recomputed:
            packed.make_mask, packed.mask_node = partial(make_mask, node), node
            observer.scope.replace_by_mask(packed)


def _is_frozen(x: Any, weight: Any) -> bool:
    """Returns whether the backward of an op has to compute the gradient of `x`, and none of the weight."""
    # In no_grad mode the node is not read: after some writes, torch raises if the node of a view is read.
    is_tracked = isinstance(x, Tensor) and torch.is_grad_enabled() and x.grad_fn is not None
    return is_tracked and (weight is None or not weight.requires_grad)


def _cast_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a cast to a given memory format, which the graph does not show."""
    y = func(*args, **kwargs)
    if any(type(one) is torch.memory_format for one in (*args, *kwargs.values())):
        node = _node_of(y, "ToCopyBackward0")
        if node is not None:
            OutputInfo.of_node(node).is_layout_known = False
    return y


def _index_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes `tensor[indices]` with tensors among the indices, which does not save `tensor`."""
    index = args[1]
    has_tensors = any(isinstance(one, Tensor) for one in (index if type(index) is tuple else (index,)))
    if not has_tensors or observer.scope.policy.level < RecomputeLevel.EVERY_OP:
        return func(*args, **kwargs)
    return _call_with_leaves(observer, func, args, kwargs, args[:1], "IndexBackward0")


def _contiguous_handler(observer: CallObserver, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Observes a copy to a given memory format, which the graph does not show."""
    y = func(*args, **kwargs)
    if y is not args[0]:
        memory_format = get_argument(args, kwargs, 1, "memory_format", torch.contiguous_format)
        _store_call_args(observer, y, CallArgs(scalar=memory_format), "CloneBackward0")
    return y


_HANDLERS: dict[Callable, Handler] = {
    Tensor.__getitem__: _index_handler,
    Tensor.contiguous: _contiguous_handler,
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _norm_handler("NativeLayerNormBackward0", 4)),
    **dict.fromkeys((F.group_norm, torch.group_norm), _norm_handler("NativeGroupNormBackward0", 4, bias=3)),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _norm_handler("FusedRmsNormBackward0", 3, default=None)),
    F.linear: _linear_handler,
    **dict.fromkeys((F.multi_head_attention_forward, F.scaled_dot_product_attention), _composite_handler),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm_handler),
    **dict.fromkeys((Tensor.add, torch.add, Tensor.sub, torch.sub), _sum_handler),
    **dict.fromkeys((torch.addcmul, Tensor.addcmul), _addcmul_handler),
    torch.batch_norm_elemt: _elementwise_norm_handler,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.stack), _join_handler),
    F.batch_norm: _batch_norm_handler(3, 4),
    torch.batch_norm: _batch_norm_handler(1, 2),
    F.instance_norm: _instance_norm_handler(4),
    torch.instance_norm: _instance_norm_handler(2),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, torch.convolution), _shape_only_handler(1, 2)),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d), _shape_only_handler(1, 2)),
    torch.conv_transpose3d: _shape_only_handler(1, 2),
    **dict.fromkeys((F.max_pool2d, F.max_pool3d, torch.max_pool2d, torch.max_pool3d), _shape_only_handler()),
    **dict.fromkeys((F.dropout, torch.dropout, torch.native_dropout), _dropout_handler),
    **dict.fromkeys((Tensor.to, Tensor.type, Tensor.float, Tensor.double), _cast_handler),
    **dict.fromkeys((Tensor.half, Tensor.bfloat16), _cast_handler),
    **write_handlers.HANDLERS,
}
_HANDLERS.update(
    (function, write_handlers.inplace_option_handler)
    for function in write_handlers.find_inplace_options()
    if function not in _HANDLERS
)


@functools.cache
def _find_handler(func: Callable) -> Handler | None:
    """Returns the handler of the calls of a function; None if its calls need no handler."""
    schema = write_handlers.find_schema(func)
    if schema is not None:
        takes_format = any(argument.name == "memory_format" for argument in schema.arguments)
        return (
            write_handlers.in_place_handler if schema.is_mutable else _cast_handler if takes_format else None
        )
    return _HANDLERS.get(func) or (
        write_handlers.in_place_handler if write_handlers.is_in_place(func) else None
    )


# torch.Tensor defines these methods in Python. Dynamo traces their `super()` only in a call of a method.
_PYTHON_METHODS = frozenset(name for name, f in vars(Tensor).items() if inspect.isfunction(f))
