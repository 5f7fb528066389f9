"""What a trace proves of a residual that is added between a BatchNorm and its activation.

The layer then computes when its activation is called, and keeps the residual for backward. So no op between
the two may read or write what the layer reads, and no later op may write to the residual. Reasons against it
are given as in prove.py.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from . import activations, layers, prove
from .tracing import Trace, overwrites, reads_metadata
from .watch import runs_as

_ADDITIONS = frozenset({operator.add, torch.add, "add"})
_ADDITIONS_IN_PLACE = frozenset({operator.iadd, "add_"})
_ARITHMETIC = _ADDITIONS | {operator.mul, torch.mul, "mul"}


def added_to(node: fx.Node, value: fx.Node) -> fx.Node | None:
    """The other tensor that `node` adds to `value`, overwriting no other than `value`."""
    in_place = node.target in _ADDITIONS_IN_PLACE
    if node.op not in ("call_function", "call_method") or not (in_place or node.target in _ADDITIONS):
        return None
    if len(node.args) != 2 or node.kwargs or node.args[0] is node.args[1]:
        return None
    first, second = node.args
    other = second if first is value else None if in_place else first
    return other if isinstance(other, fx.Node) else None


def against_adding(
    trace: Trace, values: list[fx.Node], addition: fx.Node, residual: fx.Node, activation: fx.Node
) -> str | None:
    """Why the layer whose output is `values[0]` cannot do `addition` and `activation` in one pass."""
    for value in values[1:]:
        if value is not addition and runs_as(trace.module(value)) is not nn.Identity:
            return "there is a view in between"
    node = values[0].next
    while node is not activation:
        if not (node in values or reads_metadata(node) or prove.passes_on(trace.module(node))):
            return f"{prove.describe(trace, node)} runs in between"
        node = node.next
    return _against_keeping(trace, residual)


def is_kept(trace: Trace, residual: fx.Node) -> bool:
    """Whether somebody keeps the residual for backward anyhow."""
    return any(prove.kept_by(trace, value) for value in _same_memory(trace, residual))


def origin(trace: Trace, value: fx.Node) -> fx.Node:
    """Where the very tensor `value` was made, before modules that pass it on."""
    while prove.passes_on(trace.module(value)):
        value = value.args[0]
    return value


def _against_keeping(trace: Trace, residual: fx.Node) -> str | None:
    """Why the layer cannot keep `residual` for backward: it might be overwritten."""
    same = _same_memory(trace, residual)
    first = same[-1]
    if first.op == "placeholder":
        return "the residual belongs to the caller"
    if not _makes_new(trace, first):
        return f"the residual comes from {prove.describe(trace, first)}, which may return a view"
    seen, todo = set(same), list(same)
    while todo:
        value = todo.pop()
        for reader in trace.readers(value):
            module = trace.module(reader)
            if reader in seen:
                continue
            if overwrites(reader, module) and reader.args[:1] == (value,):
                return f"{prove.describe(trace, reader)} overwrites the residual"
            if module is not None and not _is_known(module):
                return f"{prove.describe(trace, reader)} reads the residual and might overwrite it"
            if prove.shares_memory(reader, module):
                seen.add(reader)
                todo.append(reader)
    return None


def _same_memory(trace: Trace, value: fx.Node) -> list[fx.Node]:
    """`value` and what it was before modules passed it on and ops overwrote it."""
    same = [value]
    while True:
        node = same[-1]
        module = trace.module(node)
        first = node.args[0] if node.args and "out" not in node.kwargs else None
        if not (prove.passes_on(module) or overwrites(node, module)) or not isinstance(first, fx.Node):
            return same
        same.append(first)


def _makes_new(trace: Trace, node: fx.Node) -> bool:
    module = trace.module(node)
    if module is not None:
        layer = layers.find(module)
        is_layer = layer is not None and layer.activation is not None
        return prove.is_fresh(module) or is_layer or activations.of_module(module) is not None
    if node.op not in ("call_function", "call_method") or node.kwargs.get("out") is not None:
        return False
    fresh = prove.calls_fresh(node) or node.target in _ARITHMETIC
    return fresh or activations.of_function(node.target, node.args, node.kwargs) is not None


def _is_known(module: nn.Module) -> bool:
    """Whether a trace shows all that `module` does: it is one op, which overwrites only where it says so."""
    of_torch = runs_as(module) is not nn.Module and type(module).__module__.startswith("torch.nn")
    return of_torch or layers.find(module) is not None or activations.of_module(module) is not None
