"""What autograd's graph tells of how a tensor came about.

A node has the op's name, what the op saved, and edges to the nodes that made its inputs. That is enough to
do it again, with the same op on the same memory layout and so to the same bits, for ops that do little
arithmetic: they are in a table here. What is in no table is never rebuilt. Views are followed to the memory
that they are views of.

What the graph does not tell stays unknown: a number that was added, the value of padding, a tensor without
gradient that an op did not save.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .saved import Kept, Recipe
from .values import Argument, Held, Value

KEY = "fastvit.value"
EPS = "fastvit.eps"
_LEAF = "torch::autograd::AccumulateGrad"
_DEEPEST = 12  # ops in a row of which nobody has saved anything


class _Unknown(Exception):
    pass


def value_of(node, products: bool, like: Tensor | None = None, level: int = 0) -> Value:
    """The value that `node` made; with `products`, rebuilt by a matrix product too.

    `like` is all of it, if at hand.
    """
    metadata = node.metadata
    value = metadata.get(KEY)
    if value is None:
        value = metadata[KEY] = Value()
        value.name = node.name()
        rule = _RULES.get(value.name) or (_PRODUCTS.get(value.name) if products else None)
        if rule is not None and level < _DEEPEST:
            try:
                value.made_by(*rule(_Node(node, products, like, level)))
            except _Unknown:
                pass
    return value


def remember_eps(y: Tensor, eps: float | None) -> None:
    """`y` comes out of a normalisation, whose node does not know its eps."""
    base = y if y._base is None else y._base
    node = base.grad_fn
    for _ in range(2):  # the result may have been cast
        if node is None:
            return
        if node.name() in ("NativeLayerNormBackward0", "FusedRmsNormBackward0"):
            node.metadata[EPS] = eps
            return
        node = node.next_functions[0][0] if node.name() == "ToCopyBackward0" else None


def _signed(number: int) -> int:
    """Nodes give their integers as if they were unsigned."""
    return number - 2**64 if number >= 2**63 else number


class _Node:
    """A node as its rule reads it."""

    def __init__(self, node, products: bool, like: Tensor | None, level: int):
        self.node = node
        self.products = products
        self.like = like
        self.level = level

    def number(self, name: str):
        return getattr(self.node, f"_saved_{name}")

    def integer(self, name: str) -> int:
        return _signed(self.number(name))

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(_signed(i) for i in self.number(name))

    def saved(self, name: str) -> Argument | None:
        """An input that the op saved; None where it saved nothing."""
        packed = getattr(self.node, f"_raw_saved_{name}").data
        if type(packed) is Kept:
            return Argument(Held(weakref.ref(packed)))
        if type(packed) is Recipe:
            geometry = packed.geometry
            return Argument(packed.value, (lambda t: torch.as_strided(t, *geometry),))
        if isinstance(packed, Tensor) and packed.numel() == 1 and packed.grad_fn is None:
            number = Kept(packed)
            return Argument(Held(lambda: number))
        if packed is not None:
            raise _Unknown  # saved outside of the scope
        return None

    def edge(self, index: int) -> Argument:
        """An input that requires a gradient."""
        node, number = self.node.next_functions[index]
        views = []
        while node is not None and (view := _VIEWS.get(node.name())) is not None:
            views.append(view(_Node(node, self.products, None, self.level), number))
            node, number = node.next_functions[0]
        if node is None or number:
            raise _Unknown
        views = tuple(reversed(views))
        if node.name() == _LEAF:
            return Argument(self.leaf(node.variable), views)
        return Argument(value_of(node, self.products, None, self.level + 1), views)

    def leaf(self, tensor: Tensor) -> Held:
        """A copy: the op has not saved it, so it may be written to before the backward."""
        shape = self.metadata().shape
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.numel() * 64 > math.prod(shape):
            raise _Unknown
        kept = Kept(tensor.detach().clone())
        return Held(lambda: kept)

    def input(self, name: str, index: int) -> Argument:
        return self.saved(name) or self.edge(index)

    def metadata(self):
        return self.node._input_metadata[0]


def _of_shape(read: _Node, _: int) -> Callable[[Tensor], Tensor]:
    shape = tuple(read.metadata().shape)
    return lambda t: t.view(shape)


def _expand(read: _Node, _: int) -> Callable[[Tensor], Tensor]:
    shape = tuple(read.metadata().shape)
    return lambda t: t.expand(shape)


def _method(name: str, *integers: str, part: bool = False) -> Callable:
    """A view by a method of tensors that takes these integers; with `part`, one of several."""

    def rule(read: _Node, number: int) -> Callable[[Tensor], Tensor]:
        given = [read.number(i) for i in integers]
        given = [tuple(map(_signed, g)) if isinstance(g, tuple) else _signed(g) for g in given]
        if part:
            return lambda t: getattr(t, name)(*given)[number]
        return lambda t: getattr(t, name)(*given)

    return rule


def _slice(read: _Node, _: int) -> Callable[[Tensor], Tensor]:
    given = [read.integer(name) for name in ("dim", "start", "end", "step")]
    return lambda t: torch.ops.aten.slice.Tensor(t, *given)


_VIEWS: dict[str, Callable[[_Node, int], Callable[[Tensor], Tensor]]] = {
    "ViewBackward0": _of_shape,
    "ReshapeAliasBackward0": _of_shape,
    "AliasBackward0": lambda read, _: lambda t: t,
    "ExpandBackward0": _expand,
    "PermuteBackward0": _method("permute", "dims"),
    "TransposeBackward0": _method("transpose", "dim0", "dim1"),
    "TBackward0": _method("t"),
    "UnbindBackward0": _method("unbind", "dim", part=True),
    "SplitBackward0": _method("split", "split_size", "dim", part=True),
    "SplitWithSizesBackward0": _method("split_with_sizes", "split_sizes", "dim", part=True),
    "SelectBackward0": _method("select", "dim", "index"),
    "SliceBackward0": _slice,
    "UnsqueezeBackward0": _method("unsqueeze", "dim"),
    "SqueezeBackward0": _method("squeeze"),
    "SqueezeBackward1": _method("squeeze", "dim"),
    "UnfoldBackward0": _method("unfold", "dimension", "size", "step"),
}

Rebuild = tuple[Callable[..., Tensor], tuple[Argument, ...]]


def _unary(function: Callable[[Tensor], Tensor], saves_input: bool = True) -> Callable[[_Node], Rebuild]:
    return lambda read: (function, (read.input("self", 0) if saves_input else read.edge(0),))


def _product(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[_Node], Rebuild]:
    return lambda read: (function, (read.input("self", 0), read.input("other", 1)))


def _sum(function: Callable[..., Tensor]) -> Callable[[_Node], Rebuild]:
    def rule(read: _Node) -> Rebuild:
        alpha = read.number("alpha")
        return lambda a, b: function(a, b, alpha=alpha), (read.edge(0), read.edge(1))

    return rule


def _gelu(read: _Node) -> Rebuild:
    approximate = read.number("approximate")
    return lambda t: F.gelu(t, approximate=approximate), (read.input("self", 0),)


def _leaky_relu(read: _Node) -> Rebuild:
    slope = read.number("negative_slope")
    return lambda t: F.leaky_relu(t, slope), (read.input("self", 0),)


def _elu(read: _Node) -> Rebuild:
    given = [read.number(name) for name in ("alpha", "scale", "input_scale")]
    return lambda t: torch.ops.aten.elu(t, *given), (read.input("self", 0),)


def _hardtanh(read: _Node) -> Rebuild:
    low, high = read.number("min_val"), read.number("max_val")
    return lambda t: F.hardtanh(t, low, high), (read.input("self", 0),)


def _scaled(read: _Node) -> Rebuild:
    factor = read.number("other")
    return lambda t: torch.mul(t, factor), (read.edge(0),)


def _padded(read: _Node) -> Rebuild:
    if any(read.integers("pad")):
        raise _Unknown  # with which value
    return torch.clone, (read.edge(0),)


def _pow(read: _Node) -> Rebuild:
    exponent = read.number("exponent")
    return lambda t: t.pow(exponent), (read.input("self", 0),)


def _glu(read: _Node) -> Rebuild:
    dim = read.integer("dim")
    return lambda t: F.glu(t, dim), (read.input("self", 0),)


def _addcmul(read: _Node) -> Rebuild:
    value = read.number("value")
    arguments = (read.edge(0), read.input("tensor1", 1), read.input("tensor2", 2))
    return lambda a, b, c: torch.addcmul(a, b, c, value=value), arguments


def _joined(function: Callable[..., Tensor]) -> Callable[[_Node], Rebuild]:
    def rule(read: _Node) -> Rebuild:
        dim = read.integer("dim")
        arguments = tuple(read.edge(i) for i in range(len(read.node.next_functions)))
        return lambda *tensors: function(tensors, dim), arguments

    return rule


def _roll(read: _Node) -> Rebuild:
    shifts, dims = read.integers("shifts"), read.integers("dims")
    return lambda t: t.roll(shifts, dims), (read.edge(0),)


def _repeat(read: _Node) -> Rebuild:
    repeats = read.integers("repeats")
    return lambda t: t.repeat(repeats), (read.edge(0),)


def _clone(read: _Node) -> Rebuild:
    if read.like is None:
        raise _Unknown  # in which memory format
    size, stride = read.like.size(), read.like.stride()

    def copy(t: Tensor) -> Tensor:
        return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)

    return copy, (read.edge(0),)


def _to_copy(read: _Node) -> Rebuild:
    made, source = read.metadata(), read.node.next_functions[0][0]
    if source is None or source.name() == _LEAF or source._input_metadata[0].device != made.device:
        raise _Unknown
    dtype = made.dtype
    return lambda t: t.to(dtype), (read.edge(0),)


def _reshaped(read: _Node) -> Rebuild:
    """A reshape that copies is a clone and then this; so is a product of more than two dimensions."""
    source = read.node.next_functions[0][0]
    if source is None:
        raise _Unknown
    shape = tuple(read.metadata().shape)
    if source.name() == "CloneBackward0":
        inner = _Node(source, read.products, None, read.level).edge(0)
        return lambda t: t.contiguous().view(shape), (inner,)
    if read.products and source.name() in _PRODUCTS:
        return lambda t: t.view(shape), (read.edge(0),)
    raise _Unknown


def _addmm(read: _Node) -> Rebuild:
    alpha, beta = read.number("alpha"), read.number("beta")
    x, weight = read.input("mat1", 1), read.input("mat2", 2)
    _widens(read, "mat2")
    return lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), (read.edge(0), x, weight)


def _mm(read: _Node) -> Rebuild:
    x, weight = read.input("self", 0), read.input("mat2", 1)
    _widens(read, "mat2")
    return torch.mm, (x, weight)


def _widens(read: _Node, weight: str) -> None:
    """A product is worth its arithmetic where it makes no less than it reads."""
    packed = getattr(read.node, f"_raw_saved_{weight}").data
    if type(packed) is not Kept or packed.tensor.shape[0] > packed.tensor.shape[1]:
        raise _Unknown


def _layer_norm(read: _Node) -> Rebuild:
    shape, eps = read.number("normalized_shape"), read.node.metadata.get(EPS)
    if eps is None:
        raise _Unknown
    return _with_affine(
        read,
        lambda x, weight, bias: torch.native_layer_norm(x, shape, weight, bias, eps)[0],
        ("weight", "bias"),
    )


def _rms_norm(read: _Node) -> Rebuild:
    if EPS not in read.node.metadata:
        raise _Unknown
    shape, eps = read.number("normalized_shape"), read.node.metadata[EPS]
    return _with_affine(
        read, lambda x, weight: torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0], ("weight",)
    )


def _with_affine(read: _Node, function: Callable[..., Tensor], names: tuple[str, ...]) -> Rebuild:
    x = read.saved("input")
    if x is None:
        raise _Unknown
    given = [read.saved(name) for name in names]

    def norm(x: Tensor, *parameters: Tensor) -> Tensor:
        left = iter(parameters)
        return function(x, *(None if argument is None else next(left) for argument in given))

    return norm, (x, *(argument for argument in given if argument is not None))


_RULES: dict[str, Callable[[_Node], Rebuild]] = {
    "NativeLayerNormBackward0": _layer_norm,
    "FusedRmsNormBackward0": _rms_norm,
    "GeluBackward0": _gelu,
    "SiluBackward0": _unary(F.silu),
    "MishBackward0": _unary(F.mish),
    "HardswishBackward0": _unary(F.hardswish),
    "HardsigmoidBackward0": _unary(F.hardsigmoid),
    "HardtanhBackward0": _hardtanh,
    "LeakyReluBackward0": _leaky_relu,
    "EluBackward0": _elu,
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
}

_PRODUCTS: dict[str, Callable[[_Node], Rebuild]] = {"AddmmBackward0": _addmm, "MmBackward0": _mm}
