"""Decides, layer by layer, what a BatchNorm becomes: in place, recomputing, plainly fused, or left."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx, nn

from .._arguments import IN_PLACE_ACTIVATIONS
from . import layers, prove
from .activations import IDENTITY, Activation
from .layers import Layer
from .prove import Chain
from .tracing import Trace

MEMORY = ("auto", "recompute", "inplace", "keep")


@dataclass
class Plan:
    """What one layer becomes, and why. `mode` is a memory mode of BatchNormAct, or "left"."""

    name: str
    layer: Layer
    mode: str
    activation: Activation
    reason: str
    roots: list[nn.Module] = field(default_factory=list)  # the traced modules whose forwards it is proven in
    absorbs: list[nn.Module] = field(default_factory=list)  # activation modules that it does the work of
    watched: list[nn.Module] = field(default_factory=list)  # a hook on one of these makes the plan void
    through_views: bool = False  # there is a view between the layer and its activation
    reshaped: bool = False  # one that copies what is not contiguous
    # Tensors of the output's size that it and its activation keep for backward, as found and as planned.
    kept_before: int = 1
    kept_after: int = 1


@dataclass
class _Site:
    """One call of a layer in one trace."""

    trace: Trace
    call: fx.Node
    chain: Chain

    @property
    def output(self) -> fx.Node:
        return self.chain.reader if self.chain.activation else self.call


class Planner:
    """Plans for the layers of a model, from traces of its forward."""

    def __init__(self, model: nn.Module, memory: str):
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.memory = memory

    def plans(self, traces: list[Trace]) -> list[Plan]:
        found = [(name, layers.find(module)) for module, name in self.names.items()]
        return [self.plan(name, layer, traces) for name, layer in found if layer is not None]

    def is_open(self, plan: Plan, traces: list[Trace]) -> bool:
        """Whether the layer was left although a trace of the whole model might tell more."""
        if plan.mode != "left" or plan.layer.activation is None:
            return False
        return not any(trace.root is self.model and plan.layer.module in trace.calls for trace in traces)

    def plan(self, name: str, layer: Layer, traces: list[Trace]) -> Plan:
        if layer.activation is None:
            return Plan(name, layer, "left", IDENTITY, layer.reason)
        sites = [
            _Site(trace, call, Chain(trace, call))
            for trace in traces
            for call in trace.calls.get(layer.module, ())
        ]
        if layer.activation != IDENTITY:
            return self._own_activation(name, layer, sites)
        if not sites:
            return Plan(name, layer, "left", IDENTITY, "no trace reaches it to tell who reads its output")
        return self._absorbing(name, layer, sites) or self._alone(name, layer, sites)

    def _own_activation(self, name: str, layer: Layer, sites: list[_Site]) -> Plan:
        """A layer with its activation inside (timm's, mapillary's): only in place needs a proof."""
        for site in sites:
            site.chain.activation = None  # what follows is not this layer's
        plan = Plan(name, layer, "recompute", layer.activation, "has its activation inside")
        plan.kept_before += _kept_outputs(layer.activation, getattr(layer.module, "act", None), sites)
        return self._choose(plan, sites)

    def _absorbing(self, name: str, layer: Layer, sites: list[_Site]) -> Plan | None:
        """A layer whose every output goes to the same activation and nowhere else; None for another."""
        chains = [site.chain for site in sites]
        activation = chains[0].activation
        if activation in (None, IDENTITY) or any(chain.activation != activation for chain in chains):
            return None
        if any(chain.module is None for chain in chains):
            return None  # a function is called by the user's forward, which stays as it is
        absorbed = list(dict.fromkeys(chain.module for chain in chains))
        plan = Plan(
            name, layer, "recompute", activation,
            f"its output goes to {', '.join(self.names[module] for module in absorbed)} alone",
            roots=_roots(sites),
            absorbs=absorbed,
            watched=list(dict.fromkeys(module for chain in chains for module in chain.watchers())),
            through_views=any(len(chain.values) > 1 for chain in chains),
            reshaped=any(chain.reshaped for chain in chains),
        )  # fmt: skip
        if reason := prove.against_hooks(plan.watched, self.names.__getitem__):
            return Plan(name, layer, "left", IDENTITY, reason)
        plan.kept_before += _kept_outputs(activation, absorbed[0], sites)
        return self._choose(plan, sites)

    def _alone(self, name: str, layer: Layer, sites: list[_Site]) -> Plan:
        """A layer that no activation module follows; its output is rebuilt where somebody keeps it."""
        kept = next(filter(None, (prove.kept_by(site.trace, site.call) for site in sites)), None)
        against = sites[0].chain.against or "an activation function follows, in a forward that is not changed"
        if kept is None:
            return Plan(name, layer, "left", IDENTITY, f"{against}; nobody keeps it for backward")
        for site in sites:
            site.chain.activation = None
        plan = Plan(name, layer, "recompute", IDENTITY, f"its output is kept by {kept}", kept_before=2)
        return self._choose(plan, sites)

    def _choose(self, plan: Plan, sites: list[_Site]) -> Plan:
        """The memory mode: in place where it was asked for or comes free, and is proven."""
        if self.memory in ("recompute", "keep"):
            plan.mode = self.memory
            if self.memory == "keep":
                plan.kept_after += any(prove.kept_by(site.trace, site.output) for site in sites)
            return plan
        against = self._against_in_place(plan, sites)
        if against is None:
            plan.mode, plan.roots = "inplace", _roots(sites)
            plan.watched += [m for site in sites for m in site.trace.seen_by.get(site.call.args[0], ())]
            plan.watched = list(dict.fromkeys(plan.watched))
            plan.reason += ", and nobody else reads its input"
        elif self.memory == "inplace":
            return Plan(plan.name, plan.layer, "left", IDENTITY, against)
        elif plan.activation.name in IN_PLACE_ACTIVATIONS:
            plan.reason += f"; not in place: {against}"
        return plan

    def _against_in_place(self, plan: Plan, sites: list[_Site]) -> str | None:
        module = plan.layer.module
        # a later forward may run under autocast, whose coarsest dtype is bfloat16; float64 it leaves alone
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


def _roots(sites: list[_Site]) -> list[nn.Module]:
    return list(dict.fromkeys(site.trace.root for site in sites))


def _kept_outputs(activation: Activation, module: nn.Module | None, sites: list[_Site]) -> int:
    """How many tensors a BatchNorm, this activation and those who read it keep besides the input."""
    in_place = getattr(module, "inplace", False) and activation.name in ("relu6", "leaky_relu", "elu")
    if activation.name == "relu" or in_place:
        return 1  # the activation keeps its result, which the next layer keeps too
    return 1 + any(prove.kept_by(site.trace, site.output) for site in sites)
