"""Recognises BatchNorm layers, with the activation that each applies by itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from ..batch_norm_act import BatchNormAct
from ..inplace_abn import InPlaceABN
from ..sync_batchnorm import SyncBatchNorm
from . import activations, tracing
from .activations import IDENTITY, Activation
from .watch import runs_as

_PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
_TIMM = {"BatchNormAct2d": _NormBase, "SyncBatchNormAct": nn.SyncBatchNorm}


@dataclass(frozen=True)
class BatchNormSite:
    """A BatchNorm layer. `activation` is the one it applies; None for a layer that cannot be converted."""

    module: nn.Module
    activation: Activation | None
    reason: str = ""

    @property
    def fused(self) -> bool:
        """Whether the unconverted layer adds a residual and activates in one pass."""
        return isinstance(self.module, SyncBatchNorm)


def find(module: nn.Module) -> BatchNormSite | None:
    """`module` as a BatchNorm layer; None for any other module.

    Functions are not layers: F.batch_norm may normalise a weight (weight standardisation).
    """
    kind = type(module)
    if isinstance(module, (BatchNormAct, InPlaceABN)):
        return BatchNormSite(module, None, f"is already a {kind.__name__}")
    if (isinstance(module, _BatchNorm) or tracing.is_abn(module)) and runs_as(module) is nn.Module:
        return BatchNormSite(module, None, "its forward, or how it is called, has been replaced")
    if tracing.is_abn(module):
        return _with_own_activation(module, _abn_activation(module))
    if not isinstance(module, _BatchNorm):
        return None
    if isinstance(module, LazyModuleMixin):
        return BatchNormSite(module, None, "is lazy, and has no parameters before its first input")
    if kind.__module__ == "timm.layers.norm_act" and kind.__name__ in _TIMM:
        drop, act = getattr(module, "drop", None), getattr(module, "act", None)
        if drop is not None and type(drop) is not nn.Identity:
            return BatchNormSite(module, None, f"drops with {type(drop).__name__} before its activation")
        return _with_own_activation(module, IDENTITY if act is None else activations.of_module(act))
    if kind.forward not in _PLAIN:
        return BatchNormSite(module, None, f"{kind.__qualname__} overrides forward")
    return BatchNormSite(module, Activation("relu") if getattr(module, "fuse_relu", False) else IDENTITY)


def _with_own_activation(module: nn.Module, activation: Activation | None) -> BatchNormSite:
    if activation is None:
        inner = type(getattr(module, "act", None)).__name__ if hasattr(module, "act") else module.activation
        return BatchNormSite(module, None, f"its activation, {inner}, is not one of BatchNormAct's")
    return BatchNormSite(module, activation)


def _abn_activation(module: nn.Module) -> Activation | None:
    if module.activation in ("leaky_relu", "elu"):
        # Slope 0 is relu. A negative slope stays leaky_relu, and cannot be inverted.
        zero = module.activation == "leaky_relu" and module.activation_param == 0
        return Activation("relu") if zero else Activation(module.activation, float(module.activation_param))
    return Activation(module.activation) if module.activation in ("relu", "identity") else None
