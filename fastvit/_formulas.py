"""Formulas in plain PyTorch that layers and reference share: activations, and gamma in place."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# The inversion in place divides by |gamma|. Its floor is the larger of a number and a factor of |beta|.
GAMMA_FLOOR = {
    torch.float64: (1e-12, 2.0**-46),
    torch.float32: (1e-7, 2.0**-17),
    torch.bfloat16: (1e-7, 0.0),
    torch.float16: (1e-4, 0.0),
}


def effective_gamma(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the gamma of a layer in place for activations of `dtype`, in float64."""
    gamma = weight.double()
    absolute, relative = GAMMA_FLOOR[dtype]
    floor = torch.full_like(gamma, absolute)
    if bias is not None:
        floor = torch.maximum(floor, relative * bias.double().abs())
    return torch.where(gamma.abs() < floor, torch.copysign(floor, gamma), gamma)


# Every activation of a value and a parameter, and the parameter's default: slope of leaky_relu, alpha of elu.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], float | None]] = {
    "identity": (lambda v, _: v, None),
    "relu": (lambda v, _: F.relu(v), None),
    "relu6": (lambda v, _: F.relu6(v), None),
    "leaky_relu": (F.leaky_relu, 0.01),
    "elu": (F.elu, 1.0),
    "gelu": (lambda v, _: F.gelu(v), None),
    "gelu_tanh": (lambda v, _: F.gelu(v, approximate="tanh"), None),
    "silu": (lambda v, _: F.silu(v), None),
    "hardswish": (lambda v, _: F.hardswish(v), None),
}


def apply_activation(v: Tensor, activation: str, param: float) -> Tensor:
    """Applies an activation by its name; `param` is leaky_relu's slope or elu's alpha."""
    return ACTIVATIONS[activation][0](v, param)
