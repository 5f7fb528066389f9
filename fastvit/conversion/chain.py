"""What follows a BatchNorm in a trace, up to its activation, with the residual that is added in between.

A layer that adds a residual computes when its activation is called, and saves the residual for backward. So
no op between the layer and the activation may read or write the layer's operands, and no later op may write
to the residual. Reasons against it are given as in prove.py.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from . import activations, layers, prove
from .activations import Activation
from .tracing import Trace, is_permutation, is_reshape, overwrites, reads_metadata
from .watch import runs_as

_ADDITIONS = frozenset({operator.add, torch.add, "add"})
_ADDITIONS_IN_PLACE = frozenset({operator.iadd, "add_"})
_ARITHMETIC = _ADDITIONS | {operator.mul, torch.mul, "mul"}


class Chain:
    """The nodes from a BatchNorm's output to the one activation that reads it.

    Between them are views and Identity modules, or Identity modules and the addition of a residual.
    """

    def __init__(self, trace: Trace, start: fx.Node):
        self.trace = trace
        self.values = [start]  # the output, its views, and the sum
        self.activation: Activation | None = None
        self.reader: fx.Node | None = None  # of the last value; None where it has several readers
        self.reshaped = False
        self.addition: fx.Node | None = None
        self.residual: fx.Node | None = None
        self.against: str | None = None
        self._follow()
        if self.residual is not None:
            self._check_addition()

    def _follow(self) -> None:
        permuted = False
        while True:
            value = self.values[-1]
            readers = self.trace.readers(value)
            if len(readers) != 1:
                names = ", ".join(sorted({prove.describe(self.trace, reader) for reader in readers}))
                self.against = f"its output is read by {names}" if readers else "its output is not read"
                return
            self.reader = reader = readers[0]
            module = self.trace.module(reader)
            if self.residual is None and (residual := _added_to(reader, value)) is not None:
                self.addition, self.residual = reader, residual
                self.values.append(reader)
                continue
            if reader.args[:1] != (value,) or reader.all_input_nodes.count(value) != 1:
                self.against = f"its output is read by {prove.describe(self.trace, reader)}"
                return
            if runs_as(module) is nn.Identity:
                self.values.append(reader)
                continue
            if is_permutation(reader) or (is_reshape(reader, module) and not permuted):
                # After a permutation a reshape may copy. A copy is no view, so the mark is not found.
                permuted = permuted or is_permutation(reader)
                self.reshaped = self.reshaped or not is_permutation(reader)
                self.values.append(reader)
                continue
            self.activation = (
                activations.of_module(module)
                if module is not None
                else activations.of_function(reader.target, reader.args, reader.kwargs)
            )
            if self.activation is None:
                self.against = f"its output is read by {prove.describe(self.trace, reader)}"
            return

    def _check_addition(self) -> None:
        """Ends the chain at the addition, unless the layer can do it together with the activation."""
        against = "no activation module follows"
        if self.module is not None:
            against = against_adding(self.trace, self.values, self.addition, self.residual, self.reader)
        if against is not None:
            self.against = f"its output is read by {prove.describe(self.trace, self.addition)}; {against}"
            self.values = self.values[: self.values.index(self.addition)]
            self.activation, self.reader, self.reshaped = None, self.addition, False
            self.residual = self.addition = None

    @property
    def module(self) -> nn.Module | None:
        """The activation as a module; None where it is a function."""
        return self.trace.module(self.reader) if self.activation else None

    def watchers(self) -> list[nn.Module]:
        """Modules that return or receive a value that does not exist once the activation has moved."""
        return [module for value in self.values for module in self.trace.seen_by.get(value, ())]


def _added_to(node: fx.Node, value: fx.Node) -> fx.Node | None:
    """The other tensor that `node` adds to `value`; None where it overwrites that tensor."""
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
    return _against_saving(trace, residual)


def is_saved(trace: Trace, residual: fx.Node) -> bool:
    """Whether another op saves the residual for backward."""
    return any(prove.saved_by(trace, value) for value in _same_memory(trace, residual))


def origin(trace: Trace, value: fx.Node) -> fx.Node:
    """The node that made the tensor `value`, before modules that return their input."""
    while prove.passes_on(trace.module(value)):
        value = value.args[0]
    return value


def _against_saving(trace: Trace, residual: fx.Node) -> str | None:
    """Why the layer cannot save `residual` for backward: it might be overwritten."""
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
    """`value`, and the earlier nodes whose memory it has: inputs returned as they are, or overwritten."""
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
    """Whether a trace shows all effects of `module`: one op, with `inplace` if it overwrites its input."""
    of_torch = runs_as(module) is not nn.Module and type(module).__module__.startswith("torch.nn")
    return of_torch or layers.find(module) is not None or activations.of_module(module) is not None
