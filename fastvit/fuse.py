"""Converters of models: torch's layers to fastvit's, and BatchNorm to synchronised BatchNorm.

A layer changes its class and stays the same object. It notes its earlier class and attributes, by which it is
reverted. A layer may be both fused and synchronised, and each is reverted without the other.
"""

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from . import _checks, _library, _norm, functional, layer_norm
from .batch_norm_act import BatchNormAct, BatchNormActSync
from .inplace_abn import InPlaceABN, InPlaceABNSync
from .sync_batchnorm import BatchNorm, SyncBatchNorm

__all__ = ["convert_syncbn_model", "fuse", "revert_syncbn_model", "unfuse"]

_FUSED, _SYNCHRONISED = "_fused_from", "_synchronised_from"  # attributes of a layer that has changed


def _become(layer: nn.Module, kind: type, note: str, **attributes: object) -> None:
    """Changes the class of `layer`, sets `attributes` on it, and notes what was there before."""
    if issubclass(kind, _norm.SharesGroup):
        missing = {kind.group_attribute, "layer_number"} - layer.__dict__.keys()
        attributes |= dict.fromkeys(missing)
    before = {name: layer.__dict__[name] for name in attributes if name in layer.__dict__}
    layer.__dict__.update(attributes)
    layer.__dict__[note] = type(layer), before, tuple(attributes)
    layer.__class__ = kind


def _restore(layer: nn.Module, note: str) -> None:
    """Undoes `_become`."""
    kind, before, names = layer.__dict__.pop(note)
    for name in names:
        layer.__dict__.pop(name, None)
    layer.__dict__.update(before)
    layer.__class__ = kind


# Layers of torch by structure

_SILENT = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__"}
_SILENT |= {"__static_attributes__", "__firstlineno__"}  # since Python 3.13
_TIMM = ("timm.layers.", "timm.models.layers.")  # by name, so that timm need not be installed


def _is_of_timm(kind: type) -> bool:
    return kind.__module__.startswith(_TIMM)


def _same_as(kind: type, known: dict) -> Any:
    """`known` of `kind`, or of its base where the classes down to `kind` add nothing but a constructor.

    Classes of timm stand in `known` by name.
    """
    for base in kind.__mro__:
        key = base.__name__ if _is_of_timm(base) else base
        if key in known:
            return known[key]
        if not vars(base).keys() <= _SILENT:
            return None
    return None


def _is_touched(module: nn.Module) -> bool:
    """Whether something else than the class says what `module` does, or sees what goes through it."""
    attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    return any(module.__dict__.get(name) for name in attributes) or is_parametrized(module)


def _lacks_kernels(model: nn.Module) -> bool:
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    return any(
        _library.gpu_problem(device) if device.type == "cuda" else device.type not in ("cpu", "meta")
        for device in devices
    )


_ACTIVATIONS = {
    nn.Identity: lambda m: ("identity", None),
    nn.ReLU: lambda m: ("relu", None),
    nn.ReLU6: lambda m: ("relu6", None),
    # Slope 0 is relu, whose gradient needs no product.
    nn.LeakyReLU: lambda m: ("leaky_relu", m.negative_slope) if m.negative_slope else ("relu", None),
    nn.ELU: lambda m: ("elu", m.alpha),
    nn.GELU: lambda m: ({"none": "gelu", "tanh": "gelu_tanh"}[m.approximate], None),
    nn.SiLU: lambda m: ("silu", None),
    nn.Hardswish: lambda m: ("hardswish", None),
    "Swish": lambda m: ("silu", None),
    "HardSwish": lambda m: ("hardswish", None),
    "GELU": lambda m: ("gelu", None),
    "GELUTanh": lambda m: ("gelu_tanh", None),
}


def _activation(module: nn.Module) -> tuple[str, float] | None:
    """The activation that `module` is, with its parameter."""
    found = None if _is_touched(module) else _same_as(type(module), _ACTIVATIONS)
    if found is None:
        return None
    try:
        name, param = found(module)
        return name, _checks.check_activation(name, param)
    except (AttributeError, KeyError, ValueError):  # options that torch's layer takes and ours does not
        return None


_BATCH_NORMS_OF_TIMM = {"BatchNormAct2d": BatchNormAct, "SyncBatchNormAct": BatchNormActSync}
_BATCH_NORMS: dict = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm), BatchNormAct),
    **dict.fromkeys((nn.SyncBatchNorm, SyncBatchNorm), BatchNormActSync),
    **_BATCH_NORMS_OF_TIMM,
}


def _activation_behind(layer: nn.Module) -> tuple[str, float] | None:
    """The activation that the BatchNorm `layer` of timm applies; None where no fused layer has it."""
    drop, act = getattr(layer, "drop", None), getattr(layer, "act", None)
    dropped = drop is None or _activation(drop) == ("identity", 0.0)
    return _activation(act) if dropped and act is not None else None


def _batch_norm(layer: nn.Module) -> tuple[str, float] | None:
    """The activation behind the BatchNorm that `layer` is; None for any other layer."""
    kind, *_ = layer.__dict__.get(_SYNCHRONISED, (type(layer),))  # the class before it was synchronised
    if _is_touched(layer) or _same_as(kind, _BATCH_NORMS) is None:
        return None
    if _same_as(kind, _BATCH_NORMS_OF_TIMM):
        return _activation_behind(layer)
    if getattr(layer, "fuse_relu", False):
        return None if _SYNCHRONISED in layer.__dict__ else ("relu", 0.0)
    return "identity", 0.0


class Absorbed(nn.Identity):
    """In the place of an activation in nn.Sequential that the BatchNorm before it applies."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.training = activation.training
        self.__dict__["activation"] = activation  # not a child, which model.modules() would find

    def extra_repr(self) -> str:
        return repr(self.__dict__["activation"])


class LayerNorm(layer_norm.LayerNorm):
    """LayerNorm whose result has the dtype that torch's has, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and input.itemsize == 2 and torch.is_autocast_enabled("cuda"):
            input = input.float()
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, output_dtype=input.dtype
        )


class GELU(nn.GELU):
    """GELU by tanh."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.act(input, "gelu_tanh")


def fuse(model: _checks.Model) -> _checks.Model:
    """Makes fastvit's layers of torch's in `model`, in place, and returns `model`.

    Only types, options and visible structure decide; nothing is run.

    | layers | become |
    |---|---|
    | BatchNorm1d, BatchNorm2d, BatchNorm3d | `BatchNormAct` with `memory="recompute"` |
    | torch's and fastvit's SyncBatchNorm | `BatchNormActSync` with the same group |
    | timm's BatchNormAct2d and SyncBatchNormAct, without a drop layer | the same, with their activation |
    | BatchNorm and the activation after it in an nn.Sequential | the same, and an Identity in its place |
    | LayerNorm | `LayerNorm` of fastvit, with torch's dtypes under autocast |
    | GELU by tanh | a module of `functional.act` |

    Activations are Identity, ReLU, ReLU6, LeakyReLU, ELU, GELU, SiLU and Hardswish, in place or not. Layers
    stay the same objects, as parameters and buffers do. state_dict keys, requires_grad, training flags and
    sharing do not change. Optimizers built before stay valid.

    Left as they are: layers with hooks (those of `parallelize_module` among them), parametrizations or a
    forward of their own; subclasses that define more than a constructor; lazy and scripted layers; a model of
    which a part is on a device without kernels (`python -m fastvit.info` says so). An activation is left
    where its BatchNorm has several places in the model, and in an nn.Sequential with hooks.

    Results and gradients differ from torch's by roundings; those of `fastvit.convert` do not. Outputs are
    rebuilt in backward only inside `fastvit.recompute_scope()`, so use `fastvit.convert` after `fuse`. Fused
    layers have the limits of fastvit's: they are once differentiable, do not work under torch.func and
    TorchScript, and run on a CPU, or on a GPU for which there are kernels. A fused BatchNorm takes 2 to 5
    dimensions, and in an nn.Sequential its own output is that of the activation. `convert_syncbn_model` may
    come before or after; torch's and timm's converters to SyncBatchNorm refuse a layer with an activation.
    """
    _checks.check_module("fuse", model)
    _library.check_built("fastvit.fuse")
    if _lacks_kernels(model):
        return model
    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    for parent in list(model.modules()):
        if not _is_touched(parent) and _same_as(type(parent), {nn.Sequential: True}):
            _absorb(parent, places)
    for layer in model.modules():
        if (activation := _batch_norm(layer)) is not None:
            _fuse(layer, activation)
        elif _is_touched(layer):
            continue
        elif _same_as(type(layer), {nn.LayerNorm: True}):
            _become(layer, LayerNorm, _FUSED, output_dtype=None)
        elif _activation(layer) == ("gelu_tanh", 0.0):
            _become(layer, GELU, _FUSED, approximate="tanh")
    return model


def _absorb(sequential: nn.Module, places: Counter) -> None:
    """Fuses BatchNorms of `sequential` with the activations that follow."""
    children = list(sequential._modules.items())
    for i, (_, layer) in enumerate(children):
        if layer is None or places[id(layer)] != 1 or _batch_norm(layer) != ("identity", 0.0):
            continue
        for name, later in children[i + 1 :]:
            activation = None if later is None else _activation(later)
            if later is None or activation == ("identity", 0.0):
                continue
            if activation is not None:
                _fuse(layer, activation)
                sequential._modules[name] = Absorbed(later)
            break


def _fuse(layer: nn.Module, activation: tuple[str, float]) -> None:
    with _unsynchronised(layer):
        channel_last = getattr(layer, "channel_last", False)
        _become_act(layer, _same_as(type(layer), _BATCH_NORMS), _FUSED, activation, channel_last)


def _become_act(
    layer: nn.Module, kind: type, note: str, activation: tuple[str, float], channel_last: bool
) -> None:
    """Makes a BatchNormAct, or a synchronised one, of `layer`."""
    name, param = activation
    options = {"activation": name, "activation_param": param, "memory": "recompute"}
    _become(layer, kind, note, channel_last=channel_last, **options)


def unfuse(model: _checks.Model) -> _checks.Model:
    """Undoes `fuse` in `model`, in place, and returns `model`. Layers stay synchronised."""
    for layer in list(model.modules()):
        if _FUSED in layer.__dict__:
            with _unsynchronised(layer):
                _restore(layer, _FUSED)
        for name, child in layer._modules.items():
            if isinstance(child, Absorbed):
                layer._modules[name] = child.__dict__["activation"].train(child.training)
    return model


def is_fused(model: nn.Module) -> bool:
    """Whether `model` has layers that `fuse` changed."""
    return any(_FUSED in layer.__dict__ for layer in model.modules())


# Synchronised BatchNorm

# Layers with a synchronised subclass, which adds a process group and no other state.
_TWINS = {InPlaceABN: InPlaceABNSync, BatchNormAct: BatchNormActSync}
_WITH_ACTIVATION: dict = {**_TWINS, **_BATCH_NORMS_OF_TIMM}
_TORCH_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


class SyncBatchNormAct(SyncBatchNorm):
    """timm's BatchNormAct2d over a process group, for every drop layer and activation."""

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        y = super().forward(input, z)
        for name in ("drop", "act"):
            if (module := getattr(self, name, None)) is not None:
                y = module(y)
        return y


@contextlib.contextmanager
def _unsynchronised(layer: Any) -> Iterator[None]:
    """`layer` as it was before `convert_syncbn_model`, which it goes through again at the end."""
    if _SYNCHRONISED not in layer.__dict__:
        yield
        return
    group, channel_last = getattr(layer, layer.group_attribute), layer.channel_last
    _restore(layer, _SYNCHRONISED)
    yield
    _synchronise(layer, group, channel_last)


def _why_left(layer: nn.Module) -> str:
    """Why `convert_syncbn_model` leaves a BatchNorm as it is, or ""."""
    kind: Any = type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "has no channels before a first forward"
    known = issubclass(kind, (SyncBatchNormAct, *_TWINS.values())) or _same_as(kind, _WITH_ACTIVATION)
    return "" if known or kind.forward in _TORCH_FORWARDS else "overrides forward"


def _synchronise(layer: Any, process_group: "dist.ProcessGroup | None", channel_last: bool) -> None:
    """Synchronises a BatchNorm, or gives one that is synchronised the group and the layout."""
    kind = type(layer)
    if (twin := _same_as(kind, _TWINS)) is not None:
        channel_last = layer.channel_last or (channel_last and _FUSED in layer.__dict__)
        _become(layer, twin, _SYNCHRONISED, channel_last=channel_last)
        layer.set_group(process_group)
    elif kind is BatchNormActSync and {_FUSED, _SYNCHRONISED} & layer.__dict__.keys():
        if _SYNCHRONISED not in layer.__dict__:  # fused from torch's SyncBatchNorm
            _become(layer, kind, _SYNCHRONISED, channel_last=layer.channel_last)
        layer.set_group(process_group or layer.process_group)
        layer.channel_last = channel_last or layer.channel_last
    elif not issubclass(kind, tuple(_TWINS.values())):
        channel_last = channel_last or getattr(layer, "channel_last", False)
        if _same_as(kind, _BATCH_NORMS_OF_TIMM):
            _synchronise_timm(layer, channel_last)
        elif not issubclass(kind, SyncBatchNorm):
            _become(layer, SyncBatchNorm, _SYNCHRONISED, channel_last=channel_last, fuse_relu=False)
        layer.set_group(process_group or layer.process_group)
        layer.channel_last = channel_last


def _synchronise_timm(layer: nn.Module, channel_last: bool) -> None:
    activation = _activation_behind(layer)
    if activation is None:
        _become(layer, SyncBatchNormAct, _SYNCHRONISED, channel_last=channel_last, fuse_relu=False)
    else:
        _become_act(layer, BatchNormActSync, _SYNCHRONISED, activation, channel_last)


def convert_syncbn_model(
    module: _checks.Model,
    process_group: "dist.ProcessGroup | None" = None,
    channel_last: bool = False,
    *,
    strict: bool = False,
) -> _checks.Model:
    """Turns every BatchNorm in `module` into a SyncBatchNorm, in place, and returns `module`.

    Layers change class and stay the same objects: parameters, buffers, hooks, requires_grad, training flags
    and sharing do not change, so optimizers built before stay valid. `revert_syncbn_model` undoes it.

    | layers | become |
    |---|---|
    | BatchNorm1d/2d/3d, torch's SyncBatchNorm, subclasses with the same forward | `SyncBatchNorm` |
    | timm's BatchNormAct2d and SyncBatchNormAct | `BatchNormActSync` with their activation |
    | the same with a drop layer or another activation than those of `fuse` | a `SyncBatchNorm` before both |
    | `BatchNormAct`, and layers that `fuse` has made | `BatchNormActSync` |
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
    _library.check_built("fastvit.convert_syncbn_model")
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    reasons = [_why_left(layer) for layer in layers]
    kinds = [(type(layer).__qualname__, why) for layer, why in zip(layers, reasons, strict=True) if why]
    if kinds:
        counts = sorted(Counter(kinds).items())
        named = "; ".join(f"{kind} ({count}), which {why}" for (kind, why), count in counts)
        if strict or len(kinds) == len(layers):
            raise ValueError(f"convert_syncbn_model: cannot synchronise {named}")
        if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            warnings.warn(f"convert_syncbn_model: not synchronised: {named}", stacklevel=2)
    for layer, why in zip(layers, reasons, strict=True):
        if not why:
            _synchronise(layer, process_group, channel_last)
    return module


def revert_syncbn_model(module: _checks.Model) -> _checks.Model:
    """Undoes `convert_syncbn_model` in `module`, in place, and returns `module`.

    A SyncBatchNorm built as such becomes a BatchNorm for 2 to 5 dimensions. One with fuse_relu, or with
    channel_last and built as such, has no counterpart: it is left, and a warning names it. An InPlaceABNSync
    or BatchNormActSync built as such is left.
    """
    _checks.check_module("revert_syncbn_model", module)
    left = []
    layer: Any  # changes its class
    for name, layer in module.named_modules():
        changed = _SYNCHRONISED in layer.__dict__
        if issubclass(type(layer), SyncBatchNorm):
            if layer.fuse_relu or (layer.channel_last and not changed):
                left.append(name or type(layer).__name__)
                continue
            if not changed:
                for attribute in ("process_group", "channel_last", "fuse_relu", "layer_number"):
                    del layer.__dict__[attribute]
                layer.__class__ = BatchNorm
        if changed:
            _restore(layer, _SYNCHRONISED)
    if left:
        warnings.warn(
            f"revert_syncbn_model: left as they are, for lack of a BatchNorm: {', '.join(left)}", stacklevel=2
        )
    return module
