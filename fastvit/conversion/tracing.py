"""Traces a model's forward symbolically into graphs that show which op reads which tensor.

A module whose forward cannot be traced (its control flow depends on values, for example) becomes one opaque
call in the graph of its parent. It is then traced by itself; where that fails too, its children are.
"""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from unittest import mock

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint

from . import activations
from .calls import Arguments, Signature
from .caught import noting_errors, refuse_swallowed
from .untouched import untouched
from .watch import runs_as

_METADATA_METHODS = frozenset(
    {"size", "dim", "numel", "ndimension", "stride", "is_contiguous", "element_size", "get_device"}
)
_METADATA_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad"})
# On a contiguous tensor these are views; after a permutation they may copy.
_RESHAPES = frozenset(
    {
        "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze",
        torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze,
    }
)  # fmt: skip
_PERMUTATIONS = frozenset({"transpose", "permute", "movedim", torch.transpose, torch.permute, torch.movedim})
_PARTS = frozenset(
    {
        operator.getitem, torch.chunk, torch.split, torch.narrow, torch.select, torch.unbind,
        "chunk", "split", "narrow", "select", "unbind", "slice", "diagonal", "unfold",
        "expand", "expand_as", "detach", "contiguous", "to", "alias",
    }
)  # fmt: skip
_IN_PLACE_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
_OVERWRITES = frozenset(getattr(operator, name) for name in (*_IN_PLACE_OPERATORS, "setitem"))


@dataclass
class Trace:
    """The graph of one forward of `root`. Modules are compared by identity, since they may be shared."""

    root: nn.Module
    training: bool
    graph: fx.Graph
    # For each node, the modules that return its value or receive it: their hooks would see it.
    seen_by: dict[fx.Node, list[nn.Module]]
    constants: Mapping[str, object]  # arguments that are constants in the graph
    example: Arguments | None = None  # the call whose shapes it holds for; None for any shapes
    calls: dict[nn.Module, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self):
        for node in self.graph.nodes:
            if (module := self.module(node)) is not None:
                self.calls[module].append(node)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that `node` calls; None for functions, methods, inputs and outputs."""
        return self.root.get_submodule(node.target) if node.op == "call_module" else None

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that read the values of `node`, rather than its shape or type."""
        return [user for user in node.users if not reads_metadata(user)]


def reads_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METADATA_METHODS
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _METADATA_ATTRIBUTES
    return False


def is_reshape(node: fx.Node, module: nn.Module | None) -> bool:
    return runs_as(module) in (nn.Flatten, nn.Unflatten) or _calls(node, _RESHAPES)


def is_permutation(node: fx.Node) -> bool:
    return _calls(node, _PERMUTATIONS)


def is_part(node: fx.Node) -> bool:
    """Whether `node` may return a view that is neither a reshape nor a permutation."""
    return _calls(node, _PARTS)


def _calls(node: fx.Node, targets: frozenset) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def overwrites(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether `node` writes over its first argument."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return (
        node.target in _OVERWRITES
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
        or (name.endswith("_") and not name.endswith("__"))
    )


class _Proxy(fx.Proxy):
    """Records `y += z` as an op in place; fx's proxies record `y + z`."""


def _in_place_method(operation):
    def method(self, other):
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return method


for _name in _IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_name}__", _in_place_method(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Traces into every module that is not one op. A module that cannot be traced becomes one call."""

    def __init__(self):
        super().__init__(autowrap_modules=(math,))
        self.errors: list[str] = []  # exceptions that reached code of the model
        self.opaque: list[nn.Module] = []
        self.seen_by: dict[fx.Node, list[nn.Module]] = defaultdict(list)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        of_torch = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        of_torch = of_torch and runs_as(m) is not nn.Module
        return of_torch or isinstance(m, _NormBase) or activations.of_module(m) is not None or is_abn(m)

    def call_module(self, m, forward, args, kwargs):
        result = self._call(m, args, kwargs)
        fx.node.map_aggregate((args, kwargs, result), lambda value: self._note(value, m))
        return result

    def _note(self, value: object, m: nn.Module) -> None:
        if isinstance(value, fx.Proxy) and not isinstance(value, fx.proxy.Attribute):
            self.seen_by[value.node].append(m)

    def _call(self, m: nn.Module, args: tuple, kwargs: dict):
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)))
        stack, errors = dict(self.module_stack), len(self.errors)
        try:
            # forward and not __call__, since the user's hooks must not see proxies.
            result = super().call_module(m, m.forward, args, kwargs)
            refuse_swallowed(self.errors[errors:])
            return result
        except Exception:  # a proxy cannot do all that a tensor can
            del self.errors[errors:]
            self._undo(last)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.opaque.append(m)
            return self.create_proxy("call_module", name, args, kwargs)

    def note_held(self) -> None:
        """Adds a reader to each value that the forward stored in a module's attribute."""
        output = next(iter(reversed(self.graph.nodes)))

        def note(value: object) -> None:
            if (
                isinstance(value, fx.Proxy)
                and value.tracer is self
                and not isinstance(value, fx.proxy.Attribute)
            ):
                with self.graph.inserting_before(output):
                    self.graph.call_function(an_attribute, (value.node,))

        for module in self.root.modules():
            for value in module.__dict__.values():
                fx.node.map_aggregate(list(value) if isinstance(value, set) else value, note)

    def _undo(self, last: fx.Node) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.seen_by.pop(node, None)
            self.graph.erase_node(node)


def an_attribute(value: object) -> None:
    """The reader, in a graph, of a value that a forward stores in a module's attribute."""


@contextlib.contextmanager
def _refused_checkpoints() -> Iterator[None]:
    """Refuses checkpointed forwards: they run again alone, so no proof may cross their border."""

    def refuse(*_, **__):
        raise NotImplementedError("a checkpointed forward is not traced together with its caller")

    with (
        mock.patch.object(checkpoint.CheckpointFunction, "apply", refuse),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", refuse),
    ):
        yield


def is_abn(module: nn.Module) -> bool:
    """Whether `module` is ABN, mapillary's or compat's; by name, since mapillary's need not be installed."""
    kind = type(module)
    return kind.__name__ == "ABN" and "inplace_abn" in kind.__module__.split(".")


def trace(
    model: nn.Module, constants: Mapping[nn.Module, Mapping[str, object]] = MappingProxyType({})
) -> tuple[list[Trace], list[nn.Module]]:
    """Traces `model` in training and in evaluation, and restores it.

    Args:
        constants: for a module, the arguments that are constants in its graph; for a module that is not
            named, the defaults of its forward.

    Returns:
        The graphs, and the modules whose own forward could not be traced.
    """
    traces: list[Trace] = []
    untraced: dict[nn.Module, None] = {}
    with untouched(model):
        for training in (True, False):
            for module in model.modules():
                module.__dict__["training"] = training
            with _refused_checkpoints():
                _trace_in_pieces(model, training, constants, traces, untraced)
    return traces, list(untraced)


def _trace_in_pieces(
    model: nn.Module,
    training: bool,
    constants: Mapping[nn.Module, Mapping[str, object]],
    traces: list[Trace],
    untraced: dict[nn.Module, None],
) -> None:
    roots, done = [model], set()
    while roots:
        root = roots.pop(0)
        if root in done:
            continue
        done.add(root)
        tracer = _Tracer()
        try:
            if "forward" in root.__dict__ or isinstance(root, (_NormBase, fx.GraphModule)):
                raise NotImplementedError("its forward is not that of its class, or is one op")
            given = constants[root] if root in constants else Signature(type(root).forward).defaults
            with warnings.catch_warnings():  # about arguments that are objects; each call compares them
                warnings.filterwarnings("ignore", "Was not able to add assertion")
                with noting_errors(tracer.errors):
                    graph = tracer.trace(root, dict(given))
            refuse_swallowed(tracer.errors)
            tracer.note_held()
        except Exception:
            untraced[root] = None
            roots += root.children()
            continue
        traces.append(Trace(root, training, graph, tracer.seen_by, given))
        roots += tracer.opaque
