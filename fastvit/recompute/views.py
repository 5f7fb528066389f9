"""Rules of views, by the names of their nodes: (node, output number) -> the call that makes the view."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def as_signed(value):
    """Returns an attribute of a node with its sign. Nodes return integers as unsigned 64-bit integers."""
    if type(value) is tuple:
        return tuple([as_signed(one) for one in value])
    return value - 2**64 if type(value) is int and value >= 2**63 else value


ViewCall = tuple  # `(function, *arguments)`: a function of a tensor, and its other arguments


def _view_rule(node, _: int) -> ViewCall:
    return Tensor.view, tuple(node._input_metadata[0].shape)


def _expand_rule(node, _: int) -> ViewCall:
    shape = tuple(node._input_metadata[0].shape)
    return (identity,) if node._saved_self_sym_sizes == shape else (Tensor.expand, *shape)


def _make_view_rule(name: str, *integers: str, returns_several: bool = False) -> Callable:
    """Returns the rule of a method of Tensor that returns a view, or several if `returns_several`."""
    saved, method = [sys.intern(f"_saved_{integer}") for integer in integers], getattr(Tensor, name)

    def rule(node, number: int) -> ViewCall:
        values = [as_signed(getattr(node, one)) for one in saved]
        return (_take_view, method, number, *values) if returns_several else (method, *values)

    return rule


def _take_view(tensor: Tensor, method: Callable, number: int, *values) -> Tensor:
    return method(tensor, *values)[number]


def identity(tensor: Tensor) -> Tensor:
    return tensor


def as_strided_in(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    """Returns an as_strided view whose offset counts from the first element of `tensor`."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _slice_rule(node, _: int) -> ViewCall:
    integers = (node._saved_dim, node._saved_start, node._saved_end, node._saved_step)
    return torch.ops.aten.slice.Tensor, *as_signed(integers)


def as_strided_of_write(node) -> ViewCall | None:
    """Returns the call for a view that an op in place wrote; None for other nodes. The base has offset 0."""
    if node.name() != "AsStridedBackward0" or node.next_functions[0][0].name() != WRITE_TO_VIEW:
        return None
    size, stride = as_signed(node._saved_size), as_signed(node._saved_stride)
    return as_strided_in, size, stride, node._saved_storage_offset or 0


WRITE_TO_VIEW = "torch::autograd::CopySlices"
VIEW_RULES: dict[str, Callable[..., ViewCall]] = {
    "ViewBackward0": _view_rule,
    "ReshapeAliasBackward0": _view_rule,
    "AliasBackward0": lambda *_: (identity,),
    "ExpandBackward0": _expand_rule,
    "PermuteBackward0": _make_view_rule("permute", "dims"),
    "TransposeBackward0": _make_view_rule("transpose", "dim0", "dim1"),
    "TBackward0": _make_view_rule("t"),
    "UnbindBackward0": _make_view_rule("unbind", "dim", returns_several=True),
    "SplitBackward0": _make_view_rule("split", "split_size", "dim", returns_several=True),
    "SplitWithSizesBackward0": _make_view_rule(
        "split_with_sizes", "split_sizes", "dim", returns_several=True
    ),
    "SelectBackward0": _make_view_rule("select", "dim", "index"),
    "SliceBackward0": _slice_rule,
    "UnsqueezeBackward0": _make_view_rule("unsqueeze", "dim"),
    "SqueezeBackward0": _make_view_rule("squeeze"),
    "SqueezeBackward1": _make_view_rule("squeeze", "dim"),
    "UnfoldBackward0": _make_view_rule("unfold", "dimension", "size", "step"),
}


def follow_views(node):
    """Follows view nodes back from `node`; returns the node of their base, or None for a leaf."""
    while node is not None and node.name() in VIEW_RULES:
        node, _ = node.next_functions[0]
    return node


def skip_unsafe_view(node):
    """Returns `node`, or the node before an unsafe view, which follows a reshaping copy or a matmul.

    A matmul with a bias has an unsafe view in torch 2.15, and a view in 2.13.
    """
    return node.next_functions[0][0] if node.name() == "UnsafeViewBackward0" else node


def reaches_through_views(node, number: int, producer) -> bool:
    """Returns whether only views lie between the node of a tensor and `producer`, the node of its base.

    Other nodes may change the tensor: a Function may write into its input and return it at the same version.

    Args:
        node, number: the node that made the tensor, and the number of the output.
    """
    while node is not producer:
        if node is None:
            return False
        if (name := node.name()) in _VIEW_NODES:
            number = 0
        elif name not in PASS_THROUGH_NODES:
            return False
        node, number = node.next_functions[number]
    return True


_VIEW_NODES = {*VIEW_RULES, "AsStridedBackward0", "DiagonalBackward0", "SqueezeBackward2"}
# These nodes return their inputs. FSDP2 adds them around the forward of each unit, and so do full backward
# hooks of modules.
PASS_THROUGH_NODES = {"RegisterPostBackwardFunctionBackward", "BackwardHookFunctionBackward"}
