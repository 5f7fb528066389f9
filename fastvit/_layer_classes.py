"""The classes of layers: which known layer a module is, and how a layer changes its class.

A layer that changes its class stays the same object. It stores its earlier class and attributes, and
`restore_class` puts them back.
"""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from . import _checks, _norm_base
from .batch_norm_act import BatchNormAct, BatchNormActSync


def change_class(layer: nn.Module, cls: type, undo_attribute: str, **attributes: object) -> None:
    """Changes the class of `layer` and sets `attributes` on it.

    The layer stores its earlier class and attributes under the name `undo_attribute`.
    """
    if issubclass(cls, _norm_base.ProcessGroupMixin):
        missing = {"process_group", "layer_id"} - layer.__dict__.keys()
        attributes |= dict.fromkeys(missing)
    old_attributes = {name: layer.__dict__[name] for name in attributes if name in layer.__dict__}
    layer.__dict__.update(attributes)
    layer.__dict__[undo_attribute] = type(layer), old_attributes, tuple(attributes)
    layer.__class__ = cls


def restore_class(layer: nn.Module, undo_attribute: str) -> None:
    """Undoes `change_class`."""
    cls, old_attributes, names = layer.__dict__.pop(undo_attribute)
    for name in names:
        layer.__dict__.pop(name, None)
    layer.__dict__.update(old_attributes)
    layer.__class__ = cls


def change_to_batch_norm_act(
    layer: nn.Module, cls: type, undo_attribute: str, activation: tuple[str, float], channel_last: bool
) -> None:
    """Changes the class of `layer` to BatchNormAct or BatchNormActSync."""
    name, param = activation
    options = {"activation": name, "activation_param": param, "memory": "recompute"}
    change_class(layer, cls, undo_attribute, channel_last=channel_last, **options)


_CONSTRUCTOR_ATTRIBUTES = {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__"}
_CONSTRUCTOR_ATTRIBUTES |= {"__static_attributes__", "__firstlineno__"}  # Python 3.13 adds these.
_TIMM_PREFIXES = ("timm.layers.", "timm.models.layers.")  # Names, so that timm need not be installed.


def _is_timm_class(cls: type) -> bool:
    return cls.__module__.startswith(_TIMM_PREFIXES)


def lookup_class(cls: type, by_class: dict) -> Any:
    """Returns the entry of `by_class` for `cls`, or None.

    The entry of a base counts where the classes from the base down to `cls` add nothing but a constructor.
    The keys are classes; for classes of timm they are names.
    """
    for base in cls.__mro__:
        key = base.__name__ if _is_timm_class(base) else base
        if key in by_class:
            return by_class[key]
        if not vars(base).keys() <= _CONSTRUCTOR_ATTRIBUTES:
            return None
    return None


def is_customized(module: nn.Module) -> bool:
    """Returns whether `module` has hooks, a forward of its own or a parametrization."""
    attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    return any(module.__dict__.get(name) for name in attributes) or is_parametrized(module)


_ACTIVATIONS = {
    nn.Identity: lambda m: ("identity", None),
    nn.ReLU: lambda m: ("relu", None),
    nn.ReLU6: lambda m: ("relu6", None),
    # A slope of 0 is relu, whose gradient needs no product.
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


def match_activation(module: nn.Module) -> tuple[str, float] | None:
    """Returns the activation that `module` is, with its parameter, or None for another module."""
    read_options = None if is_customized(module) else lookup_class(type(module), _ACTIVATIONS)
    if read_options is None:
        return None
    try:
        name, param = read_options(module)
        return name, _checks.resolve_activation_param("fuse", name, param)
    except (AttributeError, KeyError, ValueError):  # Options that torch's layer takes and fastvit's does not.
        return None


TIMM_BATCH_NORMS = {"BatchNormAct2d": BatchNormAct, "SyncBatchNormAct": BatchNormActSync}


def match_timm_activation(layer: nn.Module) -> tuple[str, float] | None:
    """Returns the activation that timm's BatchNorm `layer` applies, or None where no fused layer has it."""
    drop, act = getattr(layer, "drop", None), getattr(layer, "act", None)
    drops_nothing = drop is None or match_activation(drop) == ("identity", 0.0)
    return match_activation(act) if drops_nothing and act is not None else None
