"""Chooses the mode of each BatchNorm layer: in place, recompute, keep (fused without rebuilding), or left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx, nn

from .._arguments import IN_PLACE_ACTIVATIONS
from . import layers, prove
from .activations import IDENTITY, Activation
from .chain import Chain, is_saved, origin
from .layers import BatchNormSite
from .tracing import Trace

MEMORY = ("auto", "gemm", "recompute", "inplace", "keep")


@dataclass
class LayerPlan:
    """The mode of one layer, with the reason. `mode` is a memory mode of BatchNormAct, or "left"."""

    name: str
    layer: BatchNormSite
    mode: str
    activation: Activation
    reason: str
    # The traced modules in whose forwards the plan is proven, each with the values of `training` it holds
    # for.
    roots: dict[nn.Module, set[bool]] = field(default_factory=dict)
    absorbs: list[nn.Module] = field(default_factory=list)  # activation modules that the layer replaces
    adds: bool = False  # the layer adds a residual before its activation
    watched: list[nn.Module] = field(default_factory=list)  # a hook on one of these invalidates the plan
    through_views: bool = False  # there is a view between the layer and its activation
    reshaped: bool = False  # there is a reshape, which copies a tensor that is not contiguous
    # Tensors of the output's size that the layer and its activation keep for backward, before and after.
    kept_before: int = 1
    kept_after: int = 1


@dataclass
class _Site:
    """One call of a layer in one trace."""

    trace: Trace
    call: fx.Node
    chain: Chain

    @property
    def given(self) -> fx.Node | None:
        """The residual argument of the call."""
        return self.call.args[1] if len(self.call.args) > 1 else self.call.kwargs.get("z")

    @property
    def output(self) -> fx.Node:
        return self.chain.reader if self.chain.activation else self.call


class LayerPlanner:
    """Plans for the layers of a model, from traces of its forward."""

    def __init__(self, model: nn.Module, memory: str):
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.memory = "auto" if memory == "gemm" else memory  # they differ only in other layers
        self._rebuilt: set[fx.Node] = set()  # values that backward rebuilds

    def plans(
        self, traces: list[Trace], settled: Mapping[str, LayerPlan] = MappingProxyType({})
    ) -> list[LayerPlan]:
        """A plan for each layer, in the order of the model's modules. Plans in `settled` are taken over."""
        found = [(name, layer) for module, name in self.names.items() if (layer := layers.find(module))]
        order = {node: i for i, node in enumerate(node for trace in traces for node in trace.graph.nodes)}
        sites = {name: _sites(layer, traces) for name, layer in found}

        def turn(item: tuple[str, BatchNormSite]) -> int:
            # Layers with a residual are planned in the order of the forward, because what they free depends
            # on whether their residual is rebuilt.
            calls = sites[item[0]]
            return order[calls[0].call] if any(site.chain.residual for site in calls) else -1

        plans = {}
        for name, layer in sorted(found, key=turn):
            plans[name] = plan = settled.get(name) or self._plan(name, layer, sites[name])
            if plan.mode == "recompute":
                self._rebuilt.update(site.output if plan.absorbs else site.call for site in sites[name])
        return [plans[name] for name, _ in found]

    def is_open(self, plan: LayerPlan, traces: list[Trace]) -> bool:
        """Whether the layer was left, and a trace of the whole model might change that."""
        if plan.mode != "left" or plan.layer.activation is None:
            return False
        return not any(trace.root is self.model and plan.layer.module in trace.calls for trace in traces)

    def _plan(self, name: str, layer: BatchNormSite, sites: list[_Site]) -> LayerPlan:
        if layer.activation is None:
            return LayerPlan(name, layer, "left", IDENTITY, layer.reason)
        if layer.fused and (layer.activation != IDENTITY or any(site.given for site in sites)):
            return self._fused(name, layer, sites)
        if layer.activation != IDENTITY:
            return self._own_activation(name, layer, sites)
        if not sites:
            return LayerPlan(
                name, layer, "left", IDENTITY, "no trace reaches it, so the readers of its output are unknown"
            )
        return self._absorbing(name, layer, sites) or self._alone(name, layer, sites)

    def _own_activation(self, name: str, layer: BatchNormSite, sites: list[_Site]) -> LayerPlan:
        """A layer that applies an activation (timm's, mapillary's). Only overwriting needs a proof."""
        for site in sites:
            site.chain.activation = None  # an activation that follows is a second one
        plan = LayerPlan(name, layer, "recompute", layer.activation, "has its activation inside")
        plan.kept_before += _saved_outputs(layer.activation, getattr(layer.module, "act", None), sites)
        return self._choose(plan, sites)

    def _fused(self, name: str, layer: BatchNormSite, sites: list[_Site]) -> LayerPlan:
        """A fastvit.SyncBatchNorm with relu or a residual: one pass, whose output can be rebuilt."""
        plan = LayerPlan(
            name, layer, "recompute", layer.activation, "has its activation inside", kept_before=2
        )
        rebuilt = any(
            isinstance(site.given, fx.Node) and origin(site.trace, site.given) in self._rebuilt
            for site in sites
        )
        if self.memory in ("inplace", "keep"):
            return _left(plan, f"is already one pass, and memory={self.memory!r} rebuilds nothing")
        if layer.activation == IDENTITY:
            return _left(plan, "adds a residual and does not save it, so its output cannot be rebuilt")
        if not any(prove.saved_by(site.trace, site.call) for site in sites):
            return _left(plan, "is already one pass, and no op saves its output for backward")
        return _left(plan, "its residual is rebuilt too") if rebuilt else plan

    def _absorbing(self, name: str, layer: BatchNormSite, sites: list[_Site]) -> LayerPlan | None:
        """The plan of a layer whose outputs are all read by the same activation alone; None for any other."""
        chains = [site.chain for site in sites]
        activation = chains[0].activation
        if activation in (None, IDENTITY) or any(chain.activation != activation for chain in chains):
            return None
        if any(chain.module is None for chain in chains):
            return None  # a function is called in the user's forward, which is not rewritten
        adds = chains[0].residual is not None
        if any((chain.residual is not None) != adds for chain in chains):
            return None
        absorbed = list(dict.fromkeys(chain.module for chain in chains))
        plan = LayerPlan(
            name, layer, "recompute", activation,
            f"its output{' and a residual go' if adds else ' goes'} "
            f"to {', '.join(self.names[module] for module in absorbed)} alone",
            roots=_roots(sites),
            absorbs=absorbed,
            adds=adds,
            watched=list(dict.fromkeys(module for chain in chains for module in chain.watchers())),
            through_views=any(len(chain.values) > 1 for chain in chains),
            reshaped=any(chain.reshaped for chain in chains),
        )  # fmt: skip
        if reason := prove.against_hooks(plan.watched, self.names.__getitem__):
            return LayerPlan(name, layer, "left", IDENTITY, reason)
        plan.kept_before += _saved_outputs(activation, absorbed[0], sites)
        return self._adding(plan, sites) if adds else self._choose(plan, sites)

    def _adding(self, plan: LayerPlan, sites: list[_Site]) -> LayerPlan:
        """Plans a layer with a residual, which it saves too: this pays where another op saves it as well."""
        if self.memory == "inplace":
            return _left(plan, "a residual is added before its activation, which cannot be done in place")
        plan.mode = "keep" if self.memory == "keep" else "recompute"
        # No output is rebuilt from a rebuilt residual: such a recipe would grow with every block.
        rebuilt = any(origin(site.trace, site.chain.residual) in self._rebuilt for site in sites)
        saved = rebuilt or all(is_saved(site.trace, site.chain.residual) for site in sites)
        plan.kept_after += not saved
        if plan.mode == "keep" or rebuilt:
            plan.kept_after += any(prove.saved_by(site.trace, site.output) for site in sites)
        if plan.kept_after > plan.kept_before - (plan.mode == "recompute"):
            why = "is rebuilt too" if rebuilt else "no other op saves"
            return _left(plan, f"rebuilding its output needs the residual, which {why}: no memory is freed")
        return plan

    def _alone(self, name: str, layer: BatchNormSite, sites: list[_Site]) -> LayerPlan:
        """A layer that no activation module follows. Its output is rebuilt where an op saves it."""
        saved = next(filter(None, (prove.saved_by(site.trace, site.call) for site in sites)), None)
        against = sites[0].chain.against or "an activation function follows, and a forward is not rewritten"
        if saved is None:
            return LayerPlan(name, layer, "left", IDENTITY, f"{against}; no op saves it for backward")
        for site in sites:
            site.chain.activation = None
        plan = LayerPlan(name, layer, "recompute", IDENTITY, f"its output is saved by {saved}", kept_before=2)
        return self._choose(plan, sites)

    def _choose(self, plan: LayerPlan, sites: list[_Site]) -> LayerPlan:
        """Chooses the memory mode: in place where `memory` allows it and it is proven safe."""
        if self.memory in ("recompute", "keep"):
            plan.mode = self.memory
            if self.memory == "keep":
                plan.kept_after += any(prove.saved_by(site.trace, site.output) for site in sites)
            return plan
        against = self._against_in_place(plan, sites)
        if against is None:
            plan.mode, plan.roots = "inplace", _roots(sites)
            plan.watched += [m for site in sites for m in site.trace.seen_by.get(site.call.args[0], ())]
            plan.watched = list(dict.fromkeys(plan.watched))
            plan.reason += ", and no other op reads its input"
        elif self.memory == "inplace":
            return _left(plan, against)
        elif plan.activation.name in IN_PLACE_ACTIVATIONS:
            plan.reason += f"; not in place: {against}"
        return plan

    def _against_in_place(self, plan: LayerPlan, sites: list[_Site]) -> str | None:
        module = plan.layer.module
        # A later forward may run under autocast, whose coarsest dtype is bfloat16. It does not cast float64.
        wide = module.weight is not None and module.weight.dtype == torch.float64
        dtype = torch.float64 if wide else torch.bfloat16
        if reason := prove.against_inverting(plan.activation, module.weight, module.bias, dtype):
            return reason
        if not sites:
            return "no trace reaches it"
        if plan.through_views:
            return "its activation reads a view of its output"
        if any(len(site.trace.calls[module]) > 1 for site in sites) or len(_roots(sites)) > 1:
            return "it is called more than once"
        for site in sites:
            if reason := prove.against_overwriting(site.trace, site.call, site.output):
                return reason
            listeners = site.trace.seen_by.get(site.call.args[0], ())
            if reason := prove.against_hooks(listeners, self.names.__getitem__):
                return reason
        return None


def _sites(layer: BatchNormSite, traces: list[Trace]) -> list[_Site]:
    return [
        _Site(trace, call, Chain(trace, call))
        for trace in traces
        for call in trace.calls.get(layer.module, ())
    ]


def _left(plan: LayerPlan, reason: str) -> LayerPlan:
    return LayerPlan(plan.name, plan.layer, "left", IDENTITY, reason)


def _roots(sites: list[_Site]) -> dict[nn.Module, set[bool]]:
    roots: dict[nn.Module, set[bool]] = {}
    for site in sites:
        roots.setdefault(site.trace.root, set()).add(site.trace.training)
    return roots


def _saved_outputs(activation: Activation, module: nn.Module | None, sites: list[_Site]) -> int:
    """How many tensors a BatchNorm, this activation and its readers save besides the input."""
    in_place = getattr(module, "inplace", False) and activation.name in ("relu6", "leaky_relu", "elu")
    if activation.name == "relu" or in_place:
        return 1  # the activation saves its result, as the next layer does
    return 1 + any(prove.saved_by(site.trace, site.output) for site in sites)
