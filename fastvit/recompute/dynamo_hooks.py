"""What a recompute scope does under torch.compile, where there is no graph of autograd to read.

Dynamo records ops in a graph. `begin_traced_scope` and `end_traced_scope` run while it does
(torch._dynamo.comptime), and mark the ops between them. AOTAutograd carries the marks to the joint graph of
forward and backward, and calls `_joint_graph_pass` before it divides that graph. The pass tags ops like a
policy of selective checkpointing (joint_graph.py), and torch's partitioner recomputes or saves them. No op is
added or replaced.

A budget is left to torch's partitioner alone (activation_memory_budget), without tags.

The pass is set in torch's configuration only while the backend compiles a graph with marks. A tag in the key
of torch's caches keeps its result apart from that of the same graph without marks. Backends without
AOTAutograd ("eager") ignore the marks. Works from torch 2.11.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from . import joint_graph, recompute_rules
from .joint_graph import SCOPE_META_KEY, ScopeOptions, scope_options
from .policy import Policy, RecomputeLevel

_OPTIONS_ATTRIBUTE = "_fastvit_compiled"
_OWN_REFERENCES = 3  # the module, a local variable, and the argument of getrefcount
_BUDGET_MARGIN = (
    0.95  # the partitioner counts no padding and no views, and exceeds its budget by some percent
)
# For each graph with an open scope: the nodes that it had before, and how many scopes are open.
_open_scopes: weakref.WeakKeyDictionary[Graph, tuple[set[str], int]] = weakref.WeakKeyDictionary()
# Modules whose forward is compiled, or what remains of it after a graph break.
_compiled_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def enable_traced_scopes(module: nn.Module, policy: Policy) -> None:
    """Prepares a module whose hooks call `begin_traced_scope` and `end_traced_scope`.

    Code that Dynamo compiled for a module without hooks would run for this one, because Dynamo does not guard
    on hooks. It guards on the type of the dictionary of submodules, so another one takes its place, if nobody
    else holds the dictionary: it then stays, and such code may keep more for backward. And Dynamo does not
    trace the hooks of the module that is compiled itself, so one of its submodules gets a hook that announces
    it.
    """
    set_options(module, policy)
    _change_modules_type(module, OrderedDict)
    inner = _first_parametrized_submodule(module)
    if inner is not None and announce_compiled_module not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(announce_compiled_module)


def set_options(module: nn.Module, policy: Policy) -> None:
    """Sets what compiled code reads of the policy of a module."""
    options = ScopeOptions(policy.level >= RecomputeLevel.MATMULS, policy.weight_casts, policy.kept_fraction)
    # Set through `__dict__`: an OptimizedModule forwards `setattr` to the module that it wraps. A plain tuple
    # is a constant to Dynamo, and loads from any pickle.
    module.__dict__[_OPTIONS_ATTRIBUTE] = tuple(options)


def disable_traced_scopes(module: nn.Module) -> None:
    """Undoes `enable_traced_scopes`, but leaves the announcing pre-hook in place."""
    if module.__dict__.pop(_OPTIONS_ATTRIBUTE, None) is not None:
        _change_modules_type(module, dict)
    _compiled_modules.discard(module)


def _change_modules_type(module: nn.Module, kind: type[dict]) -> None:
    modules = module.__dict__["_modules"]
    if type(modules) is not kind and sys.getrefcount(modules) <= _OWN_REFERENCES:
        module.__dict__["_modules"] = kind(modules)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled the forward of `module` since `enable_traced_scopes`."""
    return module in _compiled_modules


def _first_parametrized_submodule(module: nn.Module) -> nn.Module | None:
    """Returns the first submodule that has parameters, because the module most likely calls it."""
    lists = (nn.ModuleList, nn.ModuleDict)
    inner = [m for m in module.modules() if m is not module and not isinstance(m, lists)]
    return next((m for m in inner if next(m.parameters(), None) is not None), None)


def announce_compiled_module(module: nn.Module, arguments: tuple) -> None:
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_wrap_backend)


def begin_traced_scope() -> None:
    """Begins a scope, while Dynamo traces."""
    from torch._dynamo.comptime import comptime

    comptime(_on_scope_begin)


def end_traced_scope(module: nn.Module) -> None:
    """Ends the scope of a module, while Dynamo traces: marks the ops since `begin_traced_scope`."""
    from torch._dynamo.comptime import comptime

    options = getattr(module, _OPTIONS_ATTRIBUTE)  # noqa: F841  # `_on_scope_end` reads the local variable
    comptime(_on_scope_end)


def _on_scope_begin(context) -> None:
    graph = context.graph()
    before, count = _open_scopes.get(graph) or ({node.name for node in graph.nodes}, 0)
    _open_scopes[graph] = before, count + 1


def _on_scope_end(context) -> None:
    graph = context.graph()
    before, count = _open_scopes.pop(graph, (set(), 0))
    if count > 1:  # the outer scope marks the ops
        _open_scopes[graph] = before, count - 1
    if count != 1:  # 0 where the graph began inside the scope
        return
    options = context.get_local("options").as_python_constant()
    _mark_nodes([node for node in graph.nodes if node.name not in before], options)
    _wrap_backend(context)


def _wrap_backend(context) -> None:
    """Lets the pass see the graph that is being traced."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    if not isinstance(output.compiler_fn, _ScopeBackend):
        output.compiler_fn = _ScopeBackend(output.compiler_fn)
    output.compiler_fn.options = _options_of_compiled_module(output.root_tx.f_locals)


def _options_of_compiled_module(variables: dict[str, object]) -> ScopeOptions | None:
    """The options of the module whose forward is compiled, also in the rest of it after a graph break."""
    for name, value in variables.items():
        module = value[0] if type(value) is tuple and value else value  # *args of a decorated forward
        code = getattr(module.forward, "__code__", None) if isinstance(module, nn.Module) else None
        if code is not None and name == code.co_varnames[0] and hasattr(module, _OPTIONS_ATTRIBUTE):
            assert isinstance(module, nn.Module)
            _compiled_modules.add(module)
            return getattr(module, _OPTIONS_ATTRIBUTE)
    return None


def _mark_nodes(nodes: list[Node], options: ScopeOptions) -> None:
    for node in nodes:
        node.meta["custom"] = {SCOPE_META_KEY: options, **node.meta.get("custom", {})}


class _ScopeBackend:
    """The backend of one graph, with the pass."""

    def __init__(self, backend: Callable):
        self.backend = backend
        self.options: ScopeOptions | None = None  # of ops without a mark
        functools.update_wrapper(self, backend, updated=())

    def __call__(self, top: GraphModule, inputs: list) -> Callable:
        from torch._functorch import config

        if self.options is not None:
            _mark_nodes(list(top.graph.nodes), self.options)
        graphs = [module.graph for module in top.modules() if isinstance(module, GraphModule)]
        options = {node: scope_options(node) for graph in graphs for node in graph.nodes}
        share = min((found.kept_fraction for found in options.values() if found), default=1.0)
        marks = [f"{node.name} {found}" for node, found in options.items()]
        marks += [
            torch.compiler.config.cache_key_tag,
            *map(inspect.getsource, (joint_graph, recompute_rules)),
        ]
        key = hashlib.sha256("\n".join(marks).encode()).hexdigest()
        passes = functools.partial(_joint_graph_pass, config.joint_custom_pass)
        if share == 0:
            raise ValueError("convert: in compiled code a budget in bytes needs example_inputs")
        changed = (
            {"activation_memory_budget": share * _BUDGET_MARGIN}
            if share < 1
            else {"joint_custom_pass": passes}
        )
        with config.patch(changed), torch.compiler.config.patch(cache_key_tag=key):  # type: ignore[attr-defined]
            return self.backend(top, inputs)


def _joint_graph_pass(configured: Callable | None, joint_module: GraphModule, inputs: object) -> GraphModule:
    if configured is not None:
        joint_module = configured(joint_module, inputs)
    joint_graph.tag_recompute(joint_module.graph)
    return joint_module
