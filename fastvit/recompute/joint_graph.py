"""Tags ops in the joint graph of forward and backward for torch's partitioner: recompute, or save.

The ops with a cheap rule (recompute_rules.py), and pointwise ops, are recomputed if the backward reads their
inputs anyway. Sums that are not recomputed are saved. Matmuls, convolutions, attention and random ops get no
tag, so the partitioner saves their outputs. The pass knows the whole graph, in contrast to a scope, so
concatenations are recomputed too if several concatenations take the same tensors.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from .recompute_rules import cheap_op_packets

SCOPE_META_KEY = "fastvit"

_MAX_CHAINED_SUMS = 4  # Consecutive recomputed sums, each a term of the next sum.
_aten = torch.ops.aten
_CAST_PACKETS = {_aten._to_copy, torch.ops.prims.convert_element_type}
_CONCAT_PACKETS = {_aten.cat, _aten.stack}
_SUM_PACKETS = {_aten.add, _aten.sub}
_MATMUL_PACKETS = {_aten.mm, _aten.addmm}
_JOINT_GRAPH_PACKETS = {  # A joint graph has these ops in place of ops with rules.
    *(_aten._native_batch_norm_legit_functional, _aten._native_batch_norm_legit_no_training),
    *(_aten._batch_norm_with_update_functional, torch.ops.prims.convert_element_type),
}
_SIDE_EFFECT_PACKETS = {_aten.native_dropout, _aten.native_batch_norm, _aten.cudnn_batch_norm}
# A compiler fuses a pooling with earlier ops, and computes them again for each window. A step takes 1.4 times
# as long.
_POOL_PACKETS = {_aten.max_pool2d_with_indices, _aten.avg_pool2d}
_CHEAP_PACKETS = (cheap_op_packets() | _JOINT_GRAPH_PACKETS) - _SIDE_EFFECT_PACKETS - _POOL_PACKETS


class ScopeOptions(NamedTuple):
    """The options of a policy that compiled code reads."""

    matmuls: bool
    weight_casts: bool
    kept_fraction: float


def scope_options(node: Node) -> ScopeOptions | None:
    """Returns the options of the scope in which an op ran; None if there was no scope."""
    options = node.meta.get("custom", {}).get(SCOPE_META_KEY)
    return None if options is None else ScopeOptions(*options)


def tag_recompute(graph: Graph) -> None:
    """Tags the ops of a joint graph that the partitioner has to recompute, and sums that it has to save."""
    forward_nodes = _find_forward_nodes(graph)
    read_in_backward = _find_nodes_read_in_backward(graph, forward_nodes)
    chained_sums: dict[Node, int] = {}  # For each op that may be recomputed.
    for node in graph.nodes:
        if node in forward_nodes and "recompute" not in node.meta and scope_options(node) is not None:
            count = _count_chained_sums(node, chained_sums, read_in_backward)
            if count is not None:
                chained_sums[node] = count
            elif _overload_packet(node) in _SUM_PACKETS:
                # Otherwise the partitioner would save the terms, and recompute all earlier sums.
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    needed: set[Node] = set()  # recomputed, or a view in between
    for node in reversed(graph.nodes):
        if node in chained_sums and (node in read_in_backward or not needed.isdisjoint(node.users)):
            needed.add(node)
            if not _is_view(node):
                node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)


def _find_forward_nodes(graph: Graph) -> set[Node]:
    """Returns the nodes on which the results of the forward, and what the forward writes, depend."""
    backward_nodes: set[Node] = set()
    for node in graph.nodes:
        is_gradient_of_result = node.op == "placeholder" and "tangents" in node.name
        if is_gradient_of_result or not backward_nodes.isdisjoint(node.all_input_nodes):
            backward_nodes.add(node)
    results = set(graph.output_node().all_input_nodes)
    forward_nodes = {
        node for node in graph.nodes if node not in backward_nodes and (node in results or _is_mutable(node))
    }
    for node in reversed(graph.nodes):
        if node in forward_nodes:
            forward_nodes.update(node.all_input_nodes)
    return forward_nodes


def _find_nodes_read_in_backward(graph: Graph, forward_nodes: set[Node]) -> set[Node]:
    """Returns the nodes that the backward reads, directly or through a view."""
    read_nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        for user in node.users:
            is_read = user not in forward_nodes or (_is_view(user) and user in read_nodes)
            if is_read and user.op != "output":
                read_nodes.add(node)
    return read_nodes


def _count_chained_sums(node: Node, chained_sums: dict[Node, int], read_in_backward: set[Node]) -> int | None:
    """Returns the number of recomputed sums on the longest path to the output of an op, with the op itself.

    Returns None if the op is not recomputed.
    """
    from torch._functorch.partitioners import _size_of

    if _is_view(node) or node.target is operator.getitem:
        return chained_sums.get(node.all_input_nodes[0])
    if not _has_cheap_op(node):
        return None
    op, count = _overload_packet(node), 0
    for base in map(_view_base, node.all_input_nodes):
        if base in chained_sums and not (op in _SUM_PACKETS and _overload_packet(base) in _MATMUL_PACKETS):
            count = max(count, chained_sums[base])
        elif base not in read_in_backward and base.op not in ("placeholder", "get_attr"):
            # The base would be saved for this op alone, which frees nothing unless the base is small. Several
            # concatenations may share a base.
            if 2 * _size_of(base) >= _size_of(node) and not (op in _CONCAT_PACKETS and len(base.users) > 1):
                return None
    count += op in _SUM_PACKETS
    return count if count <= _MAX_CHAINED_SUMS else None


def _has_cheap_op(node: Node) -> bool:
    """Returns whether the options of the op's scope allow that the op is recomputed."""
    op, target, options = _overload_packet(node), cast(Any, node.target), scope_options(node)
    if options is None or op is None:
        return False
    if op in _MATMUL_PACKETS:
        rows, columns = cast(Node, node.args[-1]).meta["val"].shape
        is_known = isinstance(rows, int) and isinstance(columns, int)
        return options.matmuls and is_known and rows <= columns  # the output is no narrower than the input
    if op in _CAST_PACKETS and _view_base(node.all_input_nodes[0]).op == "placeholder":
        return options.weight_casts
    return op in _CHEAP_PACKETS or torch.Tag.pointwise in target.tags  # a pointwise op fuses into a loop


def _overload_packet(node: Node) -> object:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else None


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])  # the node takes one view of a split
    target = node.target
    return isinstance(target, OpOverload) and (target.is_view or target is _aten._unsafe_view.default)


def _view_base(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node
