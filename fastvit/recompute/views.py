"""Views, by the names of autograd's nodes: a tensor is followed by them to its base."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def as_signed(value):
    """Returns an attribute of a node, which gives integers as unsigned, with its sign."""
    if type(value) is tuple:
        return tuple([as_signed(one) for one in value])
    return value - 2**64 if type(value) is int and value >= 2**63 else value


ViewOp = tuple  # a function of a tensor, and its other arguments


def _of_shape(node, _: int) -> ViewOp:
    return Tensor.view, tuple(node._input_metadata[0].shape)


def _expand(node, _: int) -> ViewOp:
    shape = tuple(node._input_metadata[0].shape)
    return (identity,) if node._saved_self_sym_sizes == shape else (Tensor.expand, *shape)


def _method(name: str, *integers: str, is_part: bool = False) -> Callable:
    """Returns the rule of a view by a method of Tensor; `is_part` if it returns several views."""
    saved, method = [sys.intern(f"_saved_{integer}") for integer in integers], getattr(Tensor, name)

    def rule(node, number: int) -> ViewOp:
        values = [as_signed(getattr(node, one)) for one in saved]
        return (_part, method, number, *values) if is_part else (method, *values)

    return rule


def _part(tensor: Tensor, method: Callable, number: int, *values) -> Tensor:
    return method(tensor, *values)[number]


def identity(tensor: Tensor) -> Tensor:
    return tensor


def as_strided_in(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    """A view of the memory behind the first element of `tensor`, which may be a view itself."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _slice(node, _: int) -> ViewOp:
    integers = (node._saved_dim, node._saved_start, node._saved_end, node._saved_step)
    return torch.ops.aten.slice.Tensor, *as_signed(integers)


def as_strided_of_write(node) -> ViewOp | None:
    """Returns the view to which an op in place has written. Such a base begins where its storage does."""
    if node.name() != "AsStridedBackward0" or node.next_functions[0][0].name() != WRITE_TO_VIEW:
        return None
    size, stride = as_signed(node._saved_size), as_signed(node._saved_stride)
    return as_strided_in, size, stride, node._saved_storage_offset or 0


WRITE_TO_VIEW = "torch::autograd::CopySlices"
VIEWS: dict[str, Callable[..., ViewOp]] = {
    "ViewBackward0": _of_shape,
    "ReshapeAliasBackward0": _of_shape,
    "AliasBackward0": lambda *_: (identity,),
    "ExpandBackward0": _expand,
    "PermuteBackward0": _method("permute", "dims"),
    "TransposeBackward0": _method("transpose", "dim0", "dim1"),
    "TBackward0": _method("t"),
    "UnbindBackward0": _method("unbind", "dim", is_part=True),
    "SplitBackward0": _method("split", "split_size", "dim", is_part=True),
    "SplitWithSizesBackward0": _method("split_with_sizes", "split_sizes", "dim", is_part=True),
    "SelectBackward0": _method("select", "dim", "index"),
    "SliceBackward0": _slice,
    "UnsqueezeBackward0": _method("unsqueeze", "dim"),
    "SqueezeBackward0": _method("squeeze"),
    "SqueezeBackward1": _method("squeeze", "dim"),
    "UnfoldBackward0": _method("unfold", "dimension", "size", "step"),
}


def follow_views(node):
    """Follows view nodes back from `node`; returns the node of their base, or None for a leaf."""
    while node is not None and node.name() in VIEWS:
        node, _ = node.next_functions[0]
    return node


def skip_unsafe_view(node):
    """Returns `node`, or the node behind an unsafe view, as of a reshaping copy or of a matmul.

    A matmul with a bias has an unsafe view in torch 2.15, and a view in 2.13.
    """
    return node.next_functions[0][0] if node.name() == "UnsafeViewBackward0" else node


def reaches_through_views(node, number: int, producer) -> bool:
    """Returns whether only views lie between the node of a tensor and `producer`, the node of its base.

    A Function may write into its input and return it, without a version.

    Args:
        node, number: the node that made the tensor, and which of its outputs that is.
    """
    while node is not producer:
        if node is None:
            return False
        if (name := node.name()) in _ALL_VIEWS:
            number = 0
        elif name not in PASS_THROUGH_NODES:
            return False
        node, number = node.next_functions[number]
    return True


_ALL_VIEWS = {*VIEWS, "AsStridedBackward0", "DiagonalBackward0", "SqueezeBackward2"}
# Nodes that return their inputs: FSDP2's round the forward of each unit, and those of full backward hooks.
PASS_THROUGH_NODES = {"RegisterPostBackwardFunctionBackward", "BackwardHookFunctionBackward"}
