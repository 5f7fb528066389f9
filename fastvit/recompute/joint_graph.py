"""Decides in the joint graph of forward and backward what torch's partitioner recomputes.

The ops with a cheap rule (recompute_rules.py), and pointwise ops, are recomputed where the tensors that they
take are saved for the backward anyway. Residual sums of others are saved. Products, convolutions, attention
and random ops get no tag: the partitioner saves their results. In contrast to a scope the whole graph is
known, so concatenations are recomputed too where several take the same tensors.
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

_MAX_CHAINED_SUMS = 4  # recomputed sums in a row
_aten = torch.ops.aten
_CAST_PACKETS = {_aten._to_copy, torch.ops.prims.convert_element_type}
_CONCATS = {_aten.cat, _aten.stack}
_SUM_PACKETS = {_aten.add, _aten.sub}
_MATMUL_PACKETS = {_aten.mm, _aten.addmm}
_JOINT_GRAPH_FORMS = {  # the forms of ops with rules that this graph has
    *(_aten._native_batch_norm_legit_functional, _aten._native_batch_norm_legit_no_training),
    *(_aten._batch_norm_with_update_functional, torch.ops.prims.convert_element_type),
}
_SIDE_EFFECTS = {_aten.native_dropout, _aten.native_batch_norm, _aten.cudnn_batch_norm}
# A compiler fuses a pooling with the ops before it, and repeats them for each window: 1.4x a step's time.
_POOL_PACKETS = {_aten.max_pool2d_with_indices, _aten.avg_pool2d}
_CHEAP_PACKETS = (cheap_op_packets() | _JOINT_GRAPH_FORMS) - _SIDE_EFFECTS - _POOL_PACKETS


class ScopeOptions(NamedTuple):
    """What compiled code reads of a policy."""

    matmuls: bool
    weight_casts: bool
    kept_fraction: float


def scope_options(node: Node) -> ScopeOptions | None:
    """Returns the options of the scope in which an op was; None outside of scopes."""
    options = node.meta.get("custom", {}).get(SCOPE_META_KEY)
    return None if options is None else ScopeOptions(*options)


def tag_recompute(graph: Graph) -> None:
    """Tags the ops of a joint graph that the partitioner is to recompute, or not to."""
    forward = _find_forward_nodes(graph)
    is_read: set[Node] = set()  # by the backward, itself or a view of it
    for node in reversed(graph.nodes):
        for user in node.users:
            if user.op != "output" and (user not in forward or (_is_view(user) and user in is_read)):
                is_read.add(node)
    sums: dict[Node, int] = {}  # of each op that may be recomputed: the recomputed sums on the way to it
    for node in graph.nodes:
        if node in forward and "recompute" not in node.meta and scope_options(node) is not None:
            count = _count(node, sums, is_read)
            if count is not None:
                sums[node] = count
            elif (
                _overload_packet(node) in _SUM_PACKETS
            ):  # or its terms would be saved, and all earlier sums repeated
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in sums and (node in is_read or not needed.isdisjoint(node.users)):
            needed.add(node)
            if not _is_view(node):
                node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)


def _find_forward_nodes(graph: Graph) -> set[Node]:
    """The nodes that the results of the forward, and what it writes, are made of."""
    behind: set[Node] = set()  # the gradients of the results
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in node.name
        if is_gradient or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    results = set(graph.output_node().all_input_nodes)
    forward = {node for node in graph.nodes if node not in behind and (node in results or _is_mutable(node))}
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    return forward


def _count(node: Node, sums: dict[Node, int], is_read: set[Node]) -> int | None:
    """The recomputed sums on the way to this op, and it; None where it is not recomputed."""
    from torch._functorch.partitioners import _size_of

    if _is_view(node) or node.target is operator.getitem:
        return sums.get(node.all_input_nodes[0])
    op, target, options = _overload_packet(node), cast(Any, node.target), scope_options(node)
    if options is None:
        return None
    bases = [_view_base(one) for one in node.all_input_nodes]
    if op in _MATMUL_PACKETS:
        rows, columns = cast(Node, node.args[-1]).meta["val"].shape
        is_known = isinstance(rows, int) and isinstance(columns, int)
        if not options.matmuls or not is_known or rows > columns:  # as in a scope
            return None
    elif op not in _CHEAP_PACKETS and (
        op is None or torch.Tag.pointwise not in target.tags
    ):  # a loop that fuses
        return None
    if op in _CAST_PACKETS and bases[0].op == "placeholder" and not options.weight_casts:
        return None
    count = 0
    for base in bases:
        if base in sums and not (op in _SUM_PACKETS and _overload_packet(base) in _MATMUL_PACKETS):
            count = max(count, sums[base])
        elif base not in is_read and base.op not in ("placeholder", "get_attr"):
            # It would be saved for this op, which frees nothing, except where a list shares it with others.
            if 2 * _size_of(base) >= _size_of(node) and not (op in _CONCATS and len(base.users) > 1):
                return None
    count += op in _SUM_PACKETS
    return count if count <= _MAX_CHAINED_SUMS else None


def _overload_packet(node: Node) -> object:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else None


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])  # of a split
    target = node.target
    return isinstance(target, OpOverload) and (target.is_view or target is _aten._unsafe_view.default)


def _view_base(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node
