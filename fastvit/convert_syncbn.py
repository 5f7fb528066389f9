"""Converts the BatchNorms of a model to synchronised BatchNorms, and back."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import _checks, _library
from ._layer_classes import (
    TIMM_BATCH_NORMS,
    change_class,
    change_to_batch_norm_act,
    lookup_class,
    match_timm_activation,
    restore_class,
)
from ._norm_base import FUSED_FROM, SYNCHRONIZED_FROM
from .batch_norm_act import BatchNormAct, BatchNormActSync
from .inplace_abn import InPlaceABN, InPlaceABNSync
from .sync_batch_norm import BatchNorm, SyncBatchNorm

__all__ = ["convert_syncbn_model", "revert_syncbn_model"]

# The synchronised subclass of a layer adds a process group and no other state.
_SYNC_CLASSES = {InPlaceABN: InPlaceABNSync, BatchNormAct: BatchNormActSync}
_WITH_ACTIVATION: dict = {**_SYNC_CLASSES, **TIMM_BATCH_NORMS}
_KNOWN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


class SyncBatchNormAct(SyncBatchNorm):
    """timm's BatchNormAct2d over a process group, with any drop layer and activation."""

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        y = super().forward(input, z)
        for name in ("drop", "act"):
            if (module := getattr(self, name, None)) is not None:
                y = module(y)
        return y


@contextlib.contextmanager
def temporarily_unsynchronized(layer: Any) -> Iterator[None]:
    """Reverts `convert_syncbn_model` for `layer` inside the `with` statement, and converts it again after."""
    if SYNCHRONIZED_FROM not in layer.__dict__:
        yield
        return
    process_group, channel_last = layer.process_group, layer.channel_last
    restore_class(layer, SYNCHRONIZED_FROM)
    yield
    _synchronize(layer, process_group, channel_last)


def _reason_to_skip(layer: nn.Module) -> str:
    """Returns why `convert_syncbn_model` cannot synchronise a BatchNorm, or ""."""
    cls: Any = type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "has no channels before a first forward"
    is_synchronized = issubclass(cls, (SyncBatchNormAct, *_SYNC_CLASSES.values()))
    has_known_forward = cls.forward in _KNOWN_FORWARDS or lookup_class(cls, _WITH_ACTIVATION) is not None
    return "" if is_synchronized or has_known_forward else "overrides forward"


def _synchronize(layer: Any, process_group: "dist.ProcessGroup | None", channel_last: bool) -> None:
    """Synchronises a BatchNorm. A layer that is synchronised already gets the group and the layout."""
    cls = type(layer)
    if (sync_class := lookup_class(cls, _SYNC_CLASSES)) is not None:
        channel_last = layer.channel_last or (channel_last and FUSED_FROM in layer.__dict__)
        change_class(layer, sync_class, SYNCHRONIZED_FROM, channel_last=channel_last)
        layer.set_process_group(process_group)
    elif cls is BatchNormActSync and {FUSED_FROM, SYNCHRONIZED_FROM} & layer.__dict__.keys():
        if SYNCHRONIZED_FROM not in layer.__dict__:  # It was fused from torch's SyncBatchNorm.
            change_class(layer, cls, SYNCHRONIZED_FROM, channel_last=layer.channel_last)
        layer.set_process_group(process_group or layer.process_group)
        layer.channel_last = channel_last or layer.channel_last
    elif not issubclass(cls, tuple(_SYNC_CLASSES.values())):
        channel_last = channel_last or getattr(layer, "channel_last", False)
        if lookup_class(cls, TIMM_BATCH_NORMS):
            _synchronize_timm(layer, channel_last)
        elif not issubclass(cls, SyncBatchNorm):
            change_class(layer, SyncBatchNorm, SYNCHRONIZED_FROM, channel_last=channel_last, fuse_relu=False)
        layer.set_process_group(process_group or layer.process_group)
        layer.channel_last = channel_last


def _synchronize_timm(layer: nn.Module, channel_last: bool) -> None:
    activation = match_timm_activation(layer)
    if activation is None:
        change_class(layer, SyncBatchNormAct, SYNCHRONIZED_FROM, channel_last=channel_last, fuse_relu=False)
    else:
        change_to_batch_norm_act(layer, BatchNormActSync, SYNCHRONIZED_FROM, activation, channel_last)


def convert_syncbn_model(
    module: _checks.Model,
    process_group: "dist.ProcessGroup | None" = None,
    channel_last: bool = False,
    *,
    strict: bool = False,
) -> _checks.Model:
    """Changes, in place, every BatchNorm in `module` to a SyncBatchNorm, and returns `module`.

    Layers change class and stay the same objects: parameters, buffers, hooks, requires_grad, training flags
    and sharing do not change, so optimizers built before stay valid. `revert_syncbn_model` undoes it.

    | layers | become |
    |---|---|
    | BatchNorm1d/2d/3d, torch's SyncBatchNorm, subclasses with the same forward | `SyncBatchNorm` |
    | timm's BatchNormAct2d and SyncBatchNormAct | `BatchNormActSync` with their activation |
    | the same with a drop layer or another activation than those of `fuse` | a `SyncBatchNorm` before both |
    | `BatchNormAct`, and layers that `fuse` has changed | `BatchNormActSync` |
    | `InPlaceABN` | `InPlaceABNSync` |

    A BatchNorm of another class that overrides forward, and a lazy one, stays as it is; a warning on rank 0
    names the classes with their counts. InstanceNorm is not converted. A layer that is synchronised already
    retains its process group where `process_group` is None, and its channel_last.

    The check of dimensions of BatchNorm1d/2d/3d is lost: a SyncBatchNorm takes 2 to 5 dimensions.

    Args:
        process_group: the ranks that share statistics; None is the default group.
        channel_last: C is the last dimension of the inputs, as in apex.
        strict: raise instead of the warning.

    Raises:
        ValueError: a BatchNorm would stay as it is, and `strict` is True or all of them would. Nothing has
            changed then.
    """
    _checks.check_module("convert_syncbn_model", module)
    _library.require_kernels("fastvit.convert_syncbn_model")
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    reasons = [_reason_to_skip(layer) for layer in layers]
    skipped = [
        (type(layer).__qualname__, reason) for layer, reason in zip(layers, reasons, strict=True) if reason
    ]
    if skipped:
        counts = sorted(Counter(skipped).items())
        classes = "; ".join(f"{cls} ({count}), which {reason}" for (cls, reason), count in counts)
        if strict or len(skipped) == len(layers):
            raise ValueError(f"convert_syncbn_model: cannot synchronise {classes}")
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            warnings.warn(f"convert_syncbn_model: not synchronised: {classes}", stacklevel=2)
    for layer, reason in zip(layers, reasons, strict=True):
        if not reason:
            _synchronize(layer, process_group, channel_last)
    return module


def revert_syncbn_model(module: _checks.Model) -> _checks.Model:
    """Undoes, in place, `convert_syncbn_model` in `module`, and returns `module`.

    A SyncBatchNorm built as such becomes a BatchNorm for 2 to 5 dimensions. One with fuse_relu, or with
    channel_last and built as such, has no counterpart: it stays as it is, and a warning names it. An
    InPlaceABNSync or BatchNormActSync built as such stays too.
    """
    _checks.check_module("revert_syncbn_model", module)
    kept = []
    layer: Any  # Its class changes.
    for name, layer in module.named_modules():
        was_converted = SYNCHRONIZED_FROM in layer.__dict__
        if issubclass(type(layer), SyncBatchNorm):
            if layer.fuse_relu or (layer.channel_last and not was_converted):
                kept.append(name or type(layer).__name__)
                continue
            if not was_converted:
                for attribute in ("process_group", "channel_last", "fuse_relu", "layer_id"):
                    del layer.__dict__[attribute]
                layer.__class__ = BatchNorm
        if was_converted:
            restore_class(layer, SYNCHRONIZED_FROM)
    if kept:
        warnings.warn(
            "revert_syncbn_model: these layers stay synchronised, because no BatchNorm of torch has their "
            f"fuse_relu or channel_last: {', '.join(kept)}",
            stacklevel=2,
        )
    return module
