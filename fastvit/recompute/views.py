"""Views, by the names of autograd's nodes: a tensor is followed by them to its base."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def signed(value):
    """An attribute of a node, which returns integers as unsigned."""
    if type(value) is tuple:
        return tuple([signed(one) for one in value])
    return value - 2**64 if type(value) is int and value >= 2**63 else value


ViewOp = tuple  # a function of a tensor, and its other arguments


def _of_shape(node, _: int) -> ViewOp:
    return Tensor.view, tuple(node._input_metadata[0].shape)


def _expand(node, _: int) -> ViewOp:
    shape = tuple(node._input_metadata[0].shape)
    return (itself,) if node._saved_self_sym_sizes == shape else (Tensor.expand, *shape)


def _method(name: str, *integers: str, part: bool = False) -> Callable:
    """A view by a method of Tensor with these integers; `part` for a method that returns several views."""
    saved, method = [sys.intern(f"_saved_{integer}") for integer in integers], getattr(Tensor, name)

    def rule(node, number: int) -> ViewOp:
        values = [signed(getattr(node, one)) for one in saved]
        return (_part, method, number, *values) if part else (method, *values)

    return rule


def _part(tensor: Tensor, method: Callable, number: int, *values) -> Tensor:
    return method(tensor, *values)[number]


def itself(tensor: Tensor) -> Tensor:
    return tensor


def part(tensor: Tensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A view of the memory behind the first element of `tensor`, which may be a view itself."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _slice(node, _: int) -> ViewOp:
    integers = (node._saved_dim, node._saved_start, node._saved_end, node._saved_step)
    return torch.ops.aten.slice.Tensor, *signed(integers)


VIEWS: dict[str, Callable[..., ViewOp]] = {
    "ViewBackward0": _of_shape,
    "ReshapeAliasBackward0": _of_shape,
    "AliasBackward0": lambda *_: (itself,),
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


def of_views(node):
    """The node that made the base of which `node` made a view; None where no node did."""
    while node is not None and node.name() in VIEWS:
        node, _ = node.next_functions[0]
    return node


def of_unsafe_view(node):
    """`node`, or the one behind an unsafe view, as of a reshaping copy or a product of many dimensions.

    A product with a bias has an unsafe view in torch 2.15, and a view in 2.13.
    """
    return node.next_functions[0][0] if node.name() == "UnsafeViewBackward0" else node


def leads_to(node, number: int, producer) -> bool:
    """Whether the graph leads from a tensor by views alone to its base, which the node `producer` made.

    A Function may write into its input and return it, without a version.

    Args:
        node, number: the node that made the tensor, and which of its results that is.
    """
    while node is not producer:
        if node is None:
            return False
        if (name := node.name()) in _ALL:
            number = 0
        elif name not in _RETURN_THEIR_INPUTS:
            return False
        node, number = node.next_functions[number]
    return True


_ALL = {*VIEWS, "AsStridedBackward0", "DiagonalBackward0", "SqueezeBackward2"}
_RETURN_THEIR_INPUTS = {"RegisterPostBackwardFunctionBackward"}  # FSDP2, round the forward of each unit
