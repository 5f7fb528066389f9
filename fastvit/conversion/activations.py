"""Recognises the modules and functions that are activations of `BatchNormAct`, with their parameter."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from .watch import runs_as


@dataclass(frozen=True)
class Activation:
    """An activation by its name in BatchNormAct. `param` is leaky_relu's slope or elu's alpha, else 0."""

    name: str
    param: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}[{self.param:g}]" if self.name in ("leaky_relu", "elu") else self.name


IDENTITY = Activation("identity")


def _gelu(approximate: str) -> Activation | None:
    return {"none": Activation("gelu"), "tanh": Activation("gelu_tanh")}.get(approximate)


def _leaky_relu(slope: float) -> Activation | None:
    # Slope 0 is relu, which cannot be inverted.
    return Activation("relu") if slope == 0 else Activation("leaky_relu", float(slope))


def _elu(alpha: float) -> Activation:
    return Activation("elu", float(alpha))


_MODULES = {
    nn.Identity: lambda m: IDENTITY,
    nn.ReLU: lambda m: Activation("relu"),
    nn.ReLU6: lambda m: Activation("relu6"),
    nn.LeakyReLU: lambda m: _leaky_relu(m.negative_slope),
    nn.ELU: lambda m: _elu(m.alpha),
    nn.GELU: lambda m: _gelu(m.approximate),
    nn.SiLU: lambda m: Activation("silu"),
    nn.Hardswish: lambda m: Activation("hardswish"),
}

# timm's modules, by name, so that timm need not be installed.
_TIMM = {
    "Swish": Activation("silu"),
    "SwishMe": Activation("silu"),
    "HardSwish": Activation("hardswish"),
    "HardSwishMe": Activation("hardswish"),
    "GELU": Activation("gelu"),
    "GELUTanh": Activation("gelu_tanh"),
}


def of_module(module: nn.Module) -> Activation | None:
    """The activation that `module` is, or None. Types are exact, since a subclass may differ."""
    kind = runs_as(module)
    if kind in _MODULES:
        return _MODULES[kind](module)
    if kind.__module__.startswith("timm.layers.activations"):
        return _TIMM.get(kind.__name__)
    return None


_RELU = (F.relu, torch.relu, "relu", F.relu_, torch.relu_, "relu_")
_FIXED = {
    **dict.fromkeys(_RELU, Activation("relu")),
    F.relu6: Activation("relu6"),
    F.silu: Activation("silu"),
    F.hardswish: Activation("hardswish"),
}
_WITH_PARAM = {
    F.leaky_relu: ("negative_slope", 0.01, _leaky_relu),
    F.leaky_relu_: ("negative_slope", 0.01, _leaky_relu),
    F.elu: ("alpha", 1.0, _elu),
    F.elu_: ("alpha", 1.0, _elu),
    F.gelu: ("approximate", "none", _gelu),
}


def of_function(target, args: tuple, kwargs: dict) -> Activation | None:
    """The activation that calling `target` applies to args[0]; None for any other function."""
    if target in _FIXED:
        return _FIXED[target]
    if target in _WITH_PARAM:
        name, default, make = _WITH_PARAM[target]
        # gelu's option is keyword-only.
        value = kwargs.get(name, args[1] if len(args) > 1 else default)
        return make(value) if isinstance(value, str) or _is_number(value) else None
    return None


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# Ops that save their input for backward. An op that is not listed (add, cat, mean, relu, a view) saves its
# output or nothing.
_SAVES_INPUT_FUNCTIONS = frozenset(
    {
        torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d, F.linear,
        F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.matmul, torch.bmm, torch.mul, operator.mul, operator.matmul, operator.truediv,
        "matmul", "bmm", "mul", "convolution",
        F.gelu, F.silu, F.hardswish, F.relu6, F.leaky_relu, F.elu, F.hardsigmoid, F.mish,
        F.max_pool2d, F.scaled_dot_product_attention,
    }
)  # fmt: skip
_SAVES_INPUT_MODULES = (
    nn.modules.conv._ConvNd, nn.Linear, nn.GELU, nn.SiLU, nn.Hardswish, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.PReLU, nn.Mish, nn.MaxPool2d, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm,
)  # fmt: skip


def saves_input(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the op at `node` saves its input for backward, by torch's derivative formulas."""
    if module is not None:
        return issubclass(runs_as(module), _SAVES_INPUT_MODULES)
    return node.target in _SAVES_INPUT_FUNCTIONS
