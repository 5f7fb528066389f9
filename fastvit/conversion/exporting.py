"""Traces a model by torch.export, for layers whose module cannot be traced symbolically.

An export follows one forward with real shapes, so control flow may depend on them. Its graph of aten ops is
rewritten as a graph of tracing.py: calls of modules where an op is a module, torch's functions and methods
elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from . import activations, layers
from .calls import Arguments, Signature
from .caught import noting_errors, refuse_swallowed
from .tracing import Trace
from .untouched import untouched
from .watch import runs_as

# The op that a module consists of. BatchNorm has a second one, which counts its batches.
_OPS = {
    "batch_norm", "linear", "relu", "relu6", "hardtanh", "leaky_relu", "elu", "gelu", "silu", "hardswish",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "avg_pool2d", "max_pool2d", "flatten", "unflatten", "layer_norm", "group_norm", "dropout", "mish",
    "prelu",
}  # fmt: skip
_OF_TORCH = {
    "relu", "leaky_relu", "elu", "gelu", "silu", "hardswish", "linear", "conv1d", "conv2d", "conv3d",
    "conv_transpose2d", "avg_pool2d", "max_pool2d", "hardsigmoid", "mish", "scaled_dot_product_attention",
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def trace(model: nn.Module, arguments: Arguments) -> list[Trace]:
    """The graphs of `model` in training and in evaluation; none where it cannot be exported."""
    traces: list[Trace] = []
    if "forward" in model.__dict__:  # then the forward of the class, which checks the proof, does not run
        return traces
    args, kwargs = arguments
    constants = Signature(type(model).forward).constants(args, kwargs)
    with untouched(model), _quiet():
        for training in (True, False):
            for module in model.modules():
                module.__dict__["training"] = training
                # The user's hooks must not see fake tensors.
                module.__dict__.update({kind: OrderedDict() for kind in _HOOKS})
            stored = _note_stored_tensors(model)
            errors: list[str] = []
            try:
                with noting_errors(errors):
                    program = torch.export.export(model, args, kwargs, strict=False)
                refuse_swallowed(errors)
            except Exception:  # data-dependent control flow, ops without a fake, and others
                continue
            if stored:
                continue
            traces.append(_Rewriter(model, training, program.graph, constants).trace())
            traces[-1].example = arguments
    return traces


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences logs, warnings and prints of torch's exporter, but not those of the model's code."""
    here = threading.get_ident()

    def of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"(torch|fastvit|contextlib)(\.|$)")
        # The exporter prints the graph at an error, even at one that is caught.
        undo.enter_context(mock.patch("torch.export._trace.print", lambda *_, **__: None, create=True))
        for name in list(logging.root.manager.loggerDict):
            if name.split(".")[0] == "torch":
                logging.getLogger(name).addFilter(of_another_thread)
                undo.callback(logging.getLogger(name).removeFilter, of_another_thread)
        yield


def _note_stored_tensors(model: nn.Module) -> list[object]:
    """Collects tensors that the forward stores in attributes, where they may be read outside of the graph.

    A hook collects them, since torch.export restores attributes before it returns.
    """
    stored: list[object] = []

    def note(*_: object) -> None:
        held = [
            value
            for module in model.modules()
            for name, value in module.__dict__.items()
            if name not in ("_parameters", "_buffers")  # fake while the forward runs
        ]
        stored.extend(
            leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, (FakeTensor, FunctionalTensor))
        )

    model.register_forward_hook(note)  # `untouched` removes it
    return stored


class _Rewriter:
    def __init__(self, model: nn.Module, training: bool, exported: fx.Graph, constants: Mapping[str, object]):
        self.constants = constants
        self.model = model
        self.training = training
        self.exported = exported
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.stacks: dict[fx.Node, list[nn.Module]] = {}

    def trace(self) -> Trace:
        for node in self.exported.nodes:
            self._rewrite(node)
        return Trace(self.model, self.training, self.graph, self._seen_by(), self.constants)

    def _rewrite(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.nodes[node] = self.graph.placeholder(node.name)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.nodes.__getitem__)
        if node.op == "output":
            made = self.graph.output(args[0])
        elif node.op == "call_function":
            made = self._call(node, args, kwargs)
        else:  # the graph of a region (under autocast, for example), which is opaque
            made = self.graph.create_node(node.op, node.target, args, kwargs)
        self.nodes[node] = made
        self.stacks.setdefault(made, self._stack(node))

    def _call(self, node: fx.Node, args: tuple, kwargs: dict) -> fx.Node:
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # operator.getitem, a higher-order op
            return self.graph.call_function(node.target, args, kwargs)
        name = schema.name.split("::")[-1]
        plain = name.removesuffix("_")
        stack = self._stack(node)
        inside = next((m for m in stack[:-1] if layers.find(m) is not None), None)
        if inside is not None:
            return args[0]  # the layer's call includes its activation
        path = self._path(node)
        if stack and plain in _OPS and self._is_one_op(stack[-1]):
            return self.graph.call_module(path, args[:1])
        if name != plain and plain in _OF_TORCH:
            return self.graph.call_function(getattr(F, plain), args, kwargs | {"inplace": True})
        if name in _OF_TORCH:
            return self.graph.call_function(getattr(F, name), args, kwargs)
        return self.graph.call_method(name, args or (None,), kwargs)

    @staticmethod
    def _is_one_op(module: nn.Module) -> bool:
        if runs_as(module) is nn.Module:
            return layers.find(module) is not None
        of_torch = type(module).__module__.startswith("torch.nn.modules") and not any(module.children())
        return of_torch or activations.of_module(module) is not None or layers.find(module) is not None

    @staticmethod
    def _path(node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        return list(stack.values())[-1][0].split("@")[0]

    def _stack(self, node: fx.Node) -> list[nn.Module]:
        """The modules whose forwards `node` is in, without the model, outermost first."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path.split("@")[0] for path, _ in stack.values()]
        return [self.model.get_submodule(path) for path in paths if path]

    def _seen_by(self) -> dict[fx.Node, list[nn.Module]]:
        # An Identity has no op in the graph, so each of them may have received any tensor.
        identities = [module for module in self.model.modules() if runs_as(module) is nn.Identity]
        seen: dict[fx.Node, list[nn.Module]] = defaultdict(list)
        for node in self.graph.nodes:
            made_in = self.stacks.get(node, [])
            for reader in node.users:
                read_in = self.stacks.get(reader, [])
                seen[node] += [m for m in made_in if m not in read_in] + [
                    m for m in read_in if m not in made_in
                ]
            seen[node] += [made_in[-1]] if made_in else []
            seen[node] += identities
        return seen
