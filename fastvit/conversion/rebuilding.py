"""Opens recompute scopes around the model's blocks, in which outputs of norms and activations are rebuilt.

Autograd's graph tells the op and the inputs of each tensor, so rebuilding needs no proof and replaces no
module. The graph lacks the eps of a normalisation and the probability of a dropout; modules add both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from ..recompute import Policy, active_scope, policy_scope, remember_eps
from .adopted import adopt
from .runtime import ForwardWrapper
from .untouched import untouched

_PLAIN = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_DROPOUT = F.dropout
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class RebuiltNorm(ForwardWrapper):
    """A normalisation that records its eps, which the graph lacks."""

    def _run(self, original, args, kwargs):
        y = original(self, *args, **kwargs)
        # A forward that was patched later may use eps in another way.
        if type(y) is Tensor and y.requires_grad and original is self._known:
            eps = {getattr(self, name) for name in self._eps}
            if len(eps) == 1:
                remember_eps(y, eps.pop())
        return y


class RebuiltDropout(ForwardWrapper):
    """A dropout that records its probability, so that its mask takes a byte for each element."""

    def _run(self, original, args, kwargs):
        scope = active_scope()
        if scope is None or not self.training or original is not self._known or F.dropout is not _DROPOUT:
            return original(self, *args, **kwargs)
        with scope.dropout(self.p):
            return original(self, *args, **kwargs)


class RebuiltBlock(ForwardWrapper):
    """A block that opens a scope, so that its outputs are rebuilt outside of the model's forward too."""

    def _run(self, original, args, kwargs):
        scope = active_scope()
        if scope is None:
            with policy_scope(self._policy, self._name):
                return original(self, *args, **kwargs)
        outer, scope.block = scope.block, self._name
        try:
            result = original(self, *args, **kwargs)
        finally:
            scope.block = outer
        scope.finish()
        return result


def adopt_blocks(model: nn.Module, policy: Policy) -> None:
    """Adopts the normalisations, dropouts and blocks of `model`."""
    names = {module: name for name, module in model.named_modules()}
    norms = {module: eps for module in names if (eps := _eps_names(module))}
    blocks = [module for module in names if module is not model and _is_block(module, norms)]
    for module, eps in norms.items():
        adopt(module, RebuiltNorm, _eps=eps, _known=type(module).forward)
    for module in names:
        if type(module) is nn.Dropout and 0 < module.p < 1:
            adopt(module, RebuiltDropout, _known=nn.Dropout.forward)
    for module in blocks:
        adopt(module, RebuiltBlock, _policy=policy, _name=names[module])


def _is_block(module: nn.Module, norms: dict[nn.Module, tuple[str, ...]]) -> bool:
    """Whether a normalisation is a direct child of `module`."""
    if isinstance(module, (*_CONTAINERS, fx.GraphModule, torch.jit.ScriptModule)) or module in norms:
        return False
    return any(child in norms or _is_norm(child) for child in module.children())


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not isinstance(module, _NormBase)


def _eps_names(module: nn.Module) -> tuple[str, ...]:
    """The attributes that may hold the eps of `module`, a normalisation; none where that is not known."""
    kind = type(module)
    if isinstance(module, (torch.jit.ScriptModule, _NormBase)) or parametrize.is_parametrized(module):
        return ()
    if kind.forward in _PLAIN or kind.__module__ in ("timm.layers.norm", "timm.layers.norm_act"):
        return ("eps",) if hasattr(module, "eps") else ()
    if kind.__module__.startswith("torch.nn") or any(module.children()) or not module._parameters:
        return ()
    with untouched(module):
        try:
            graph = fx.Tracer().trace(module)
        except Exception:  # a proxy cannot do all that a tensor can
            return ()
    calls = [node for node in graph.nodes if node.target in (F.layer_norm, F.rms_norm, torch.layer_norm)]
    if len(calls) != 1:
        return ()
    eps = calls[0].kwargs.get("eps", calls[0].args[4] if len(calls[0].args) > 4 else None)
    return tuple(name for name, value in vars(module).items() if isinstance(value, float) and value == eps)
