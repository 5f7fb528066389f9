"""`fuse`: changes torch's layers of a model to fastvit's, and `unfuse` changes them back.

A layer may be both fused and synchronised. Each is undone without the other.
"""

import itertools
from collections import Counter

import torch
from torch import Tensor, nn

from . import _checks, _library, functional, layer_norm
from ._layer_classes import (
    TIMM_BATCH_NORMS,
    change_class,
    change_to_batch_norm_act,
    is_customized,
    lookup_class,
    match_activation,
    match_timm_activation,
    restore_class,
)
from ._norm_base import FUSED_FROM, SYNCHRONIZED_FROM
from .batch_norm_act import BatchNormAct, BatchNormActSync
from .convert_syncbn import temporarily_unsynchronized
from .sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["fuse", "unfuse"]

_BATCH_NORMS: dict = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm), BatchNormAct),
    **dict.fromkeys((nn.SyncBatchNorm, SyncBatchNorm), BatchNormActSync),
    **TIMM_BATCH_NORMS,
}


def _is_on_unsupported_device(model: nn.Module) -> bool:
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    return any(
        _library.gpu_problem(device) if device.type == "cuda" else device.type not in ("cpu", "meta")
        for device in devices
    )


def _match_batch_norm(layer: nn.Module) -> tuple[str, float] | None:
    """Returns the activation behind the BatchNorm that `layer` is, or None for any other layer."""
    cls, *_ = layer.__dict__.get(SYNCHRONIZED_FROM, (type(layer),))  # The class before it was synchronised.
    if is_customized(layer) or lookup_class(cls, _BATCH_NORMS) is None:
        return None
    if lookup_class(cls, TIMM_BATCH_NORMS):
        return match_timm_activation(layer)
    if getattr(layer, "fuse_relu", False):
        return None if SYNCHRONIZED_FROM in layer.__dict__ else ("relu", 0.0)
    return "identity", 0.0


class FusedActivationPlaceholder(nn.Identity):
    """Replaces an activation in an nn.Sequential, because the BatchNorm before it applies that activation."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.training = activation.training
        self.__dict__["activation"] = activation  # Not a child: model.modules() must not find it.

    def extra_repr(self) -> str:
        return repr(self.__dict__["activation"])


class TorchDtypeLayerNorm(layer_norm.LayerNorm):
    """LayerNorm whose result has the dtype that torch's has, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and input.itemsize == 2 and torch.is_autocast_enabled("cuda"):
            input = input.float()
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, output_dtype=input.dtype
        )


class TanhGELU(nn.GELU):
    """GELU by tanh, in fastvit's kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.act(input, "gelu_tanh")


def fuse(model: _checks.Model) -> _checks.Model:
    """Changes, in place, torch's layers of `model` to fastvit's, and returns `model`. `unfuse` undoes it.

    Types, options and visible structure alone decide; nothing is run.

    | layers | become |
    |---|---|
    | BatchNorm1d, BatchNorm2d, BatchNorm3d | `BatchNormAct` with `memory="recompute"` |
    | torch's and fastvit's SyncBatchNorm | `BatchNormActSync` with the same group |
    | timm's BatchNormAct2d and SyncBatchNormAct, without a drop layer | the same, with their activation |
    | BatchNorm and the activation after it in an nn.Sequential | the same, an Identity behind it |
    | LayerNorm | `LayerNorm` of fastvit, with torch's dtypes under autocast |
    | GELU by tanh | a module of `functional.act` |

    Activations are Identity, ReLU, ReLU6, LeakyReLU, ELU, GELU, SiLU and Hardswish, in place or not. Layers
    stay the same objects, as parameters and buffers do. state_dict keys, requires_grad, training flags and
    sharing do not change. Optimizers built before stay valid.

    These stay as they are: layers with hooks (those of `parallelize_module` among them), parametrizations or
    a forward of their own; subclasses that define more than a constructor; lazy and scripted layers; a model
    of which a part is on a device without kernels (`python -m fastvit.info` says so). An activation stays
    where its BatchNorm has several places in the model, and in an nn.Sequential with hooks.

    Results and gradients differ from torch's by roundings; those of `fastvit.convert` do not. Outputs are
    recomputed in backward only inside `fastvit.recompute_scope()`, so use `fastvit.convert` after `fuse`.
    Fused layers have the limits of fastvit's: they are once differentiable, do not work under torch.func and
    TorchScript, and run on a CPU, or on a GPU for which there are kernels. A fused BatchNorm takes 2 to 5
    dimensions, and in an nn.Sequential its own output is that of the activation. `convert_syncbn_model` may
    come before or after; torch's and timm's converters to SyncBatchNorm refuse a layer with an activation.
    """
    _checks.check_module("fuse", model)
    _library.require_kernels("fastvit.fuse")
    if _is_on_unsupported_device(model):
        return model
    num_uses = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    for parent in list(model.modules()):
        if not is_customized(parent) and lookup_class(type(parent), {nn.Sequential: True}):
            _fuse_sequential(parent, num_uses)
    for layer in model.modules():
        if (activation := _match_batch_norm(layer)) is not None:
            _fuse_batch_norm(layer, activation)
        elif is_customized(layer):
            continue
        elif lookup_class(type(layer), {nn.LayerNorm: True}):
            change_class(layer, TorchDtypeLayerNorm, FUSED_FROM, output_dtype=None)
        elif match_activation(layer) == ("gelu_tanh", 0.0):
            change_class(layer, TanhGELU, FUSED_FROM, approximate="tanh")
    return model


def _fuse_sequential(sequential: nn.Module, num_uses: Counter) -> None:
    """Fuses BatchNorms of `sequential` with the activations that follow.

    Args:
        num_uses: the number of places in the model of each module, by id.
    """
    children = list(sequential._modules.items())
    for i, (_, layer) in enumerate(children):
        if layer is None or num_uses[id(layer)] != 1 or _match_batch_norm(layer) != ("identity", 0.0):
            continue
        for name, next_child in children[i + 1 :]:
            activation = None if next_child is None else match_activation(next_child)
            if next_child is None or activation == ("identity", 0.0):
                continue
            if activation is not None:
                _fuse_batch_norm(layer, activation)
                sequential._modules[name] = FusedActivationPlaceholder(next_child)
            break


def _fuse_batch_norm(layer: nn.Module, activation: tuple[str, float]) -> None:
    with temporarily_unsynchronized(layer):
        channel_last = getattr(layer, "channel_last", False)
        cls = lookup_class(type(layer), _BATCH_NORMS)
        change_to_batch_norm_act(layer, cls, FUSED_FROM, activation, channel_last)


def unfuse(model: _checks.Model) -> _checks.Model:
    """Undoes, in place, `fuse` in `model`, and returns `model`. Layers stay synchronised."""
    for layer in list(model.modules()):
        if FUSED_FROM in layer.__dict__:
            with temporarily_unsynchronized(layer):
                restore_class(layer, FUSED_FROM)
        for name, child in layer._modules.items():
            if isinstance(child, FusedActivationPlaceholder):
                layer._modules[name] = child.__dict__["activation"].train(child.training)
    return model


def is_fused(model: nn.Module) -> bool:
    """Returns whether `model` has layers that `fuse` changed."""
    return any(FUSED_FROM in layer.__dict__ for layer in model.modules())
