"""The ops that are repeated to rebuild a tensor: a table by the names of autograd's nodes.

A rule reads a node and returns a function and its arguments: the same op on the same memory layout, for the
same bits. A rule raises `Unknown` where the node lacks an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from . import norms
from .graph import LEAF, PRODUCTS, RULES, Node, is_lost
from .kept import Kept
from .layers import layer
from .saved import Recipe
from .values import Argument, Copied, Rebuild, Unknown, Value, View
from .views import itself


class Pointwise:
    """An op on elements, which can write its result into a tensor of any strides."""

    __slots__ = ("op", "options")

    def __init__(self, op: Callable[..., Tensor], *options):
        self.op = op
        self.options = options  # arguments behind the tensors

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Tensor:
        return self.op(*tensors, *self.options, out=out)


def _cast(tensor: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return tensor.to(dtype, copy=True) if out is None else out.copy_(tensor)


def _unary(function: Callable[[Tensor], Tensor], saves_input: bool = True) -> Callable[[Node], Rebuild]:
    return lambda read: (function, (read.input("self", 0) if saves_input else read.edge(0),))


def _product(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    op = Pointwise(function)
    return lambda read: (op, (read.input("self", 0), read.input("other", 1)))


def _sum(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    def rule(read: Node) -> Rebuild:
        # The sum is mostly a residual stream, and a later op saves a term only rarely. So a recipe does not
        # wait for a term that no op has saved yet.
        if any(is_lost(term, read.policy) for term, _ in read.edges):
            raise Unknown("a term of the sum is not kept", lasts=True)
        if read.policy.products and read.is_residual():
            raise Unknown("the sum is kept instead of repeating the product that is its term", lasts=True)
        alpha, arguments = read.number("alpha"), (read.edge(0), read.edge(1))
        return function if alpha == 1 else partial(function, alpha=alpha), arguments

    return rule


def _gelu(read: Node) -> Rebuild:
    return _gelu_of(read.number("approximate")), (read.input("self", 0),)


@lru_cache
def _gelu_of(approximate: str) -> Callable[[Tensor], Tensor]:
    """Cached, since every new object makes the garbage collector run sooner."""
    return lambda t: F.gelu(t, approximate=approximate)


def _leaky_relu(read: Node, in_place: bool = False) -> Rebuild:
    slope = read.number("negative_slope")
    return lambda t: F.leaky_relu(t, slope), (read.edge(0) if in_place else read.input("self", 0),)


def _elu(read: Node, in_place: bool = False) -> Rebuild:
    options = [read.number(name) for name in ("alpha", "scale", "input_scale")]
    argument = read.edge(0) if in_place else read.input("self", 0)
    return lambda t: torch.ops.aten.elu(t, *options), (argument,)


def _clamp(read: Node) -> Rebuild:
    low, high = read.number("min"), read.number("max")
    return lambda t: t.clamp(low, high), (read.input("self", 0),)


def _hardtanh(read: Node) -> Rebuild:
    low, high = read.number("min_val"), read.number("max_val")
    return lambda t: F.hardtanh(t, low, high), (read.input("self", 0),)


def _scaled(read: Node) -> Rebuild:
    return Pointwise(torch.mul, read.number("other")), (read.edge(0),)


def _padded(read: Node) -> Rebuild:
    if any(read.integers("pad")):
        raise Unknown  # the padding value
    return torch.clone, (read.edge(0),)


def _pow(read: Node) -> Rebuild:
    exponent = read.number("exponent")
    return lambda t: t.pow(exponent), (read.input("self", 0),)


def _glu(read: Node) -> Rebuild:
    dim = read.integer("dim")
    return lambda t: F.glu(t, dim), (read.input("self", 0),)


def _addcmul(read: Node) -> Rebuild:
    value = read.number("value")
    arguments = (read.edge(0), read.input("tensor1", 1), read.input("tensor2", 2))
    return lambda a, b, c: torch.addcmul(a, b, c, value=value), arguments


def _joined(function: Callable[..., Tensor]) -> Callable[[Node], Rebuild]:
    def rule(read: Node) -> Rebuild:
        dim = read.integer("dim")
        arguments = tuple(read.edge(i) for i in range(len(read.edges)))
        return lambda *tensors: function(tensors, dim), arguments

    return rule


def _roll(read: Node) -> Rebuild:
    shifts, dims = read.integers("shifts"), read.integers("dims")
    return lambda t: t.roll(shifts, dims), (read.edge(0),)


def _repeat(read: Node) -> Rebuild:
    repeats = read.integers("repeats")
    return lambda t: t.repeat(repeats), (read.edge(0),)


def _clone(read: Node) -> Rebuild:
    if read.like is None:
        raise Unknown  # the memory format
    size, stride = read.like.size(), read.like.stride()

    def copy(t: Tensor) -> Tensor:
        if t.stride() == stride and t.size() == size:
            return t
        return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)

    return copy, (read.edge(0),)


def _to_copy(read: Node) -> Rebuild:
    made, source = read.metadata(), read.edges[0][0]
    if source is None or source._input_metadata[0].device != made.device:
        raise Unknown
    if source.name() != LEAF:
        return _cast_to(made.dtype), (read.edge(0),)
    weight = source.variable
    if read.level and weight.dim() <= 1 and type(weight) is Parameter:  # the bias of a product
        return _cast_to(made.dtype), (Copied(Kept(weight.detach().clone())),)
    if not read.policy.weight_casts or type(weight) is not Parameter:
        raise Unknown("the cast of a weight, which is not cast again without weight_casts=True")
    return _cast_to(made.dtype), (Copied(Kept(weight)),)


@lru_cache
def _cast_to(dtype: torch.dtype) -> Pointwise:
    return Pointwise(_cast, dtype)


def _reshaped(read: Node) -> Rebuild:
    """The view after a clone, in a reshape that copies, or after a product of more than two dimensions."""
    source = read.edges[0][0]
    if source is None:
        raise Unknown
    shape = tuple(read.metadata().shape)
    if source.name() == "CloneBackward0":
        copy = read.behind(source)
        inner = copy.edge(0)
        return _written_at_once(inner, copy, shape) or (lambda t: t.contiguous().view(shape), (inner,))
    if read.policy.products and (rule := PRODUCTS.get(source.name())):
        inner = read.behind(source)
        product, arguments = rule(inner)
        read.flops = inner.flops
        return lambda *tensors: product(*tensors).view(shape), arguments
    raise Unknown


def _written_at_once(inner: Argument, copy: Node, shape: tuple[int, ...]) -> Rebuild | None:
    """For a copy of a pointwise op's result that no op has saved: the op writes the copy. None for others."""
    value, views = (inner.value, inner.views) if type(inner) is View else (inner, ())
    if type(value) is not Value or type(value.function) is not Pointwise:
        return None
    if value.nbytes or any(argument.gather([]) is not None for argument in value.arguments):
        return None  # saved before, or perhaps later: then the copy is made from it
    op, made = value.function, copy.metadata()
    size, dtype, device = tuple(made.shape), made.dtype, made.device
    # Loops over complex numbers of other strides may round otherwise.
    if dtype.is_complex or any(view[0] not in (itself, Tensor.transpose) for view in views):
        return None
    swaps = [dims for function, *dims in reversed(views) if function is Tensor.transpose]

    def write(*tensors: Tensor) -> Tensor:
        whole = out = torch.empty(size, dtype=dtype, device=device)
        for dims in swaps:
            out = out.transpose(*dims)
        op(*tensors, out=out)
        return whole.view(shape)

    return write, value.arguments


def _addmm(read: Node) -> Rebuild:
    alpha, beta = read.number("alpha"), read.number("beta")
    x, weight = read.input("mat1", 1), read.input("mat2", 2)
    _widens(read, "mat2")
    bias = read.bias(0)
    if bias is None:
        raise Unknown
    return lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), (bias, x, weight)


def _mm(read: Node) -> Rebuild:
    x, weight = read.input("self", 0), read.input("mat2", 1)
    _widens(read, "mat2")
    return torch.mm, (x, weight)


def _widens(read: Node, weight: str) -> None:
    """Raises Unknown for a product whose result is narrower than its input: it takes too much arithmetic."""
    packed = getattr(read.node, "_raw_saved_" + weight).data
    if type(packed) not in (Kept, Recipe):
        raise Unknown
    shape = packed.tensor.shape if type(packed) is Kept else packed.geometry[0]
    if shape[0] > shape[1]:
        raise Unknown
    read.flops = 2 * shape[0]


def _max_pool2d(read: Node) -> Rebuild:
    sizes = [read.integers(name) for name in ("kernel_size", "stride", "padding", "dilation")]
    ceil = read.number("ceil_mode")
    return lambda x: torch.ops.aten.max_pool2d_with_indices(x, *sizes, ceil)[0], (read.input("self", 0),)


def _avg_pool2d(read: Node) -> Rebuild:
    sizes = [read.integers(name) for name in ("kernel_size", "stride", "padding")]
    flags = [read.number(name) for name in ("ceil_mode", "count_include_pad", "divisor_override")]
    return lambda x: F.avg_pool2d(x, *sizes, *flags), (read.input("self", 0),)


RULES |= {
    "NativeLayerNormBackward0": norms.layer_norm,
    "FusedRmsNormBackward0": norms.rms_norm,
    "NativeGroupNormBackward0": norms.group_norm,
    "NativeBatchNormBackward0": norms.batch_norm,
    "CudnnBatchNormBackward0": norms.cudnn_batch_norm,
    "SyncBatchNormBackward": norms.sync_batch_norm,
    "MaxPool2DWithIndicesBackward0": _max_pool2d,
    "AvgPool2DBackward0": _avg_pool2d,
    "GeluBackward0": _gelu,
    "SiluBackward0": _unary(F.silu),
    "MishBackward0": _unary(F.mish),
    "HardswishBackward0": _unary(F.hardswish),
    "HardsigmoidBackward0": _unary(F.hardsigmoid),
    "HardtanhBackward0": _hardtanh,
    "LeakyReluBackward0": _leaky_relu,
    "LeakyReluBackward1": partial(_leaky_relu, in_place=True),
    "EluBackward0": _elu,
    "EluBackward1": partial(_elu, in_place=True),
    "ClampBackward1": _clamp,
    "GluBackward0": _glu,
    "ReluBackward0": _unary(torch.relu, saves_input=False),
    "SigmoidBackward0": _unary(torch.sigmoid, saves_input=False),
    "TanhBackward0": _unary(torch.tanh, saves_input=False),
    "NegBackward0": _unary(torch.neg, saves_input=False),
    "PowBackward0": _pow,
    "MulBackward0": _product(torch.mul),
    "MulBackward1": _scaled,
    "DivBackward0": _product(torch.div),
    "AddBackward0": _sum(torch.add),
    "SubBackward0": _sum(torch.sub),
    "AddcmulBackward0": _addcmul,
    "CatBackward0": _joined(torch.cat),
    "StackBackward0": _joined(torch.stack),
    "RollBackward0": _roll,
    "RepeatBackward0": _repeat,
    "ConstantPadNdBackward0": _padded,
    "CloneBackward0": _clone,
    "UnsafeViewBackward0": _reshaped,
    "ToCopyBackward0": _to_copy,
    "BatchNormFunctionBackward": layer,
    "LayerNormFunctionBackward": layer,
    "ActFunctionBackward": layer,
    "GluFunctionBackward": layer,
}

PRODUCTS |= {"AddmmBackward0": _addmm, "MmBackward0": _mm}
