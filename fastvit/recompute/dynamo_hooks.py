"""Recompute scopes under torch.compile, in which autograd has no graph of the ops.

Dynamo records ops in a graph. `begin_traced_scope` and `end_traced_scope` run while Dynamo traces
(torch._dynamo.comptime), and mark the ops between the two calls. AOTAutograd carries the marks to the joint
graph of forward and backward, and calls `_joint_graph_pass` before it divides the joint graph. The pass tags
ops like a policy of selective checkpointing (joint_graph.py), and torch's partitioner recomputes or saves
them. No op is added or replaced.

If there is a budget, no op is tagged: torch's partitioner alone meets the budget (activation_memory_budget).

The pass is set in torch's configuration only while the backend compiles a graph with marks. torch's
`cache_key_tag` separates the compiled code from that of the same graph without marks. Backends without
AOTAutograd ("eager") ignore the marks. The module needs torch 2.11.
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

_OPTIONS_ATTRIBUTE = "_fastvit_compiled"  # options for compiled code; pickled modules have the name
_MAX_OWN_REFERENCES = 3  # from the module, a local variable, and the argument of getrefcount
# The partitioner gets this part of a budget: it counts no padding or views, and exceeds budgets by percents.
_BUDGET_MARGIN = 0.95
# For each graph with an open scope: the names of the nodes before it, and how many scopes are open.
_open_scopes: weakref.WeakKeyDictionary[Graph, tuple[set[str], int]] = weakref.WeakKeyDictionary()
# Modules whose forward, or the rest of the forward after a graph break, is compiled.
_compiled_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def enable_traced_scopes(module: nn.Module, policy: Policy) -> None:
    """Prepares a module whose hooks call `begin_traced_scope` and `end_traced_scope`.

    Dynamo does not guard on hooks, so this module could run code that was compiled for such a module without
    hooks. Dynamo does guard on the type of `_modules`, the dictionary of submodules: an OrderedDict replaces
    it. If other code refers to the dictionary, it is not replaced. Then code without hooks may run, and keep
    more for backward.

    Dynamo does not trace the hooks of the module on which torch.compile is called. A hook of its first
    submodule with parameters, `announce_compiled_module`, wraps Dynamo's backend instead.
    """
    set_options(module, policy)
    _change_modules_type(module, OrderedDict)
    submodule = _find_parametrized_submodule(module)
    if submodule is not None and announce_compiled_module not in submodule._forward_pre_hooks.values():
        submodule.register_forward_pre_hook(announce_compiled_module)


def set_options(module: nn.Module, policy: Policy) -> None:
    """Stores on a module the options of its policy that compiled code reads."""
    options = ScopeOptions(policy.level >= RecomputeLevel.MATMULS, policy.weight_casts, policy.kept_fraction)
    # Set through `__dict__`: `module` may be a result of torch.compile, which forwards `setattr` to the
    # module in it. A plain tuple is a constant to Dynamo, and pickles without a class of fastvit.
    module.__dict__[_OPTIONS_ATTRIBUTE] = tuple(options)


def disable_traced_scopes(module: nn.Module) -> None:
    """Undoes `enable_traced_scopes`, but leaves the announcing pre-hook in place."""
    if module.__dict__.pop(_OPTIONS_ATTRIBUTE, None) is not None:
        _change_modules_type(module, dict)
    _compiled_modules.discard(module)


def _change_modules_type(module: nn.Module, dict_type: type[dict]) -> None:
    modules = module.__dict__["_modules"]
    if type(modules) is not dict_type and sys.getrefcount(modules) <= _MAX_OWN_REFERENCES:
        module.__dict__["_modules"] = dict_type(modules)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has compiled the forward of `module` since `enable_traced_scopes`."""
    return module in _compiled_modules


def _find_parametrized_submodule(module: nn.Module) -> nn.Module | None:
    """Returns the first submodule that has parameters, because the module probably calls it."""
    containers = (nn.ModuleList, nn.ModuleDict)  # They have no forward.
    submodules = [m for m in module.modules() if m is not module and not isinstance(m, containers)]
    return next((m for m in submodules if next(m.parameters(), None) is not None), None)


def announce_compiled_module(module: nn.Module, arguments: tuple) -> None:
    """Wraps Dynamo's backend while Dynamo traces; registered as a forward pre-hook of a submodule."""
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

    options = getattr(module, _OPTIONS_ATTRIBUTE)  # noqa: F841  # `_on_scope_end` gets it by name
    comptime(_on_scope_end)


def _on_scope_begin(context) -> None:
    graph = context.graph()
    names_before, num_open = _open_scopes.get(graph) or ({node.name for node in graph.nodes}, 0)
    _open_scopes[graph] = names_before, num_open + 1


def _on_scope_end(context) -> None:
    graph = context.graph()
    names_before, num_open = _open_scopes.pop(graph, (set(), 0))
    if num_open > 1:  # The scope around this one marks the ops.
        _open_scopes[graph] = names_before, num_open - 1
    if num_open != 1:  # 0 after a graph break in the scope: `_ScopeBackend` marks the ops of the new graph.
        return
    options = context.get_local("options").as_python_constant()
    _mark_nodes([node for node in graph.nodes if node.name not in names_before], options)
    _wrap_backend(context)


def _wrap_backend(context) -> None:
    """Wraps Dynamo's backend so that the joint-graph pass runs for the graph that is being traced."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    if not isinstance(output.compiler_fn, _ScopeBackend):
        output.compiler_fn = _ScopeBackend(output.compiler_fn)
    output.compiler_fn.module_options = _register_compiled_module(output.root_tx.f_locals)


def _register_compiled_module(variables: dict[str, object]) -> tuple | None:
    """Registers the module whose forward, or its rest after a graph break, is compiled; returns its options.

    Args:
        variables: the local variables of the outermost frame that Dynamo traces.
    """
    for name, value in variables.items():
        module = value[0] if type(value) is tuple and value else value  # *args of a decorated forward
        if not isinstance(module, nn.Module):
            continue
        code = getattr(module.forward, "__code__", None)
        is_self = code is not None and name == code.co_varnames[0]  # `self` may have another name.
        if is_self and hasattr(module, _OPTIONS_ATTRIBUTE):
            _compiled_modules.add(module)
            return getattr(module, _OPTIONS_ATTRIBUTE)
    return None


def _mark_nodes(nodes: list[Node], options: tuple) -> None:
    """Marks nodes in `meta` with the options of their scope. Nodes of an inner scope are marked already."""
    for node in nodes:
        node.meta["custom"] = {SCOPE_META_KEY: options, **node.meta.get("custom", {})}


class _ScopeBackend:
    """The backend of one graph, which runs the pass on the joint graph of that graph."""

    def __init__(self, backend: Callable):
        self.backend = backend
        self.module_options: tuple | None = None  # of the compiled module, for ops without a mark
        functools.update_wrapper(self, backend, updated=())

    def __call__(self, graph_module: GraphModule, inputs: list) -> Callable:
        from torch._functorch import config

        if self.module_options is not None:
            _mark_nodes(list(graph_module.graph.nodes), self.module_options)
        graphs = [module.graph for module in graph_module.modules() if isinstance(module, GraphModule)]
        options = {node: scope_options(node) for graph in graphs for node in graph.nodes}
        # torch has one budget for a graph: the least one meets the budgets of all scopes.
        kept_fraction = min((scope.kept_fraction for scope in options.values() if scope), default=1.0)
        is_fraction_unknown = kept_fraction == 0  # See `Policy.kept_fraction`.
        if is_fraction_unknown:
            raise ValueError(
                "convert: compiled code cannot meet a budget in bytes without example_inputs; pass them, or "
                "a fraction as the budget"
            )
        changes: dict[str, object] = {
            "joint_custom_pass": functools.partial(_joint_graph_pass, config.joint_custom_pass)
        }
        if kept_fraction < 1:
            changes = {"activation_memory_budget": kept_fraction * _BUDGET_MARGIN}
        key = torch.compiler.config.patch(cache_key_tag=_make_cache_key(options))  # type: ignore[attr-defined]
        with config.patch(changes), key:
            return self.backend(graph_module, inputs)


def _make_cache_key(options: dict[Node, ScopeOptions | None]) -> str:
    """Returns a key for torch's caches: the marks of a graph change the code that is compiled for its ops."""
    parts = [f"{node.name} {scope}" for node, scope in options.items()]
    parts += [torch.compiler.config.cache_key_tag, *map(inspect.getsource, (joint_graph, recompute_rules))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _joint_graph_pass(
    configured_pass: Callable | None, joint_module: GraphModule, inputs: object
) -> GraphModule:
    """Runs the pass that the user has configured, and tags ops after it."""
    if configured_pass is not None:
        joint_module = configured_pass(joint_module, inputs)
    joint_graph.tag_recompute(joint_module.graph)
    return joint_module
