"""Formulas in plain PyTorch that layers and reference share: activations, and gamma in place."""

import torch
from torch import Tensor
from torch.nn import functional as F

# The floor of |gamma| in place, by which the inversion divides: a number, and a factor of |beta|.
GAMMA_FLOOR = {
    torch.float64: (1e-12, 2.0**-46),
    torch.float32: (1e-7, 2.0**-17),
    torch.bfloat16: (1e-7, 0.0),
    torch.float16: (1e-4, 0.0),
}


def effective_gamma(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gamma of a layer in place for activations of `dtype`, as float64."""
    gamma = weight.double()
    absolute, relative = GAMMA_FLOOR[dtype]
    least = torch.full_like(gamma, absolute)
    if bias is not None:
        least = torch.maximum(least, relative * bias.double().abs())
    return torch.where(gamma.abs() < least, torch.copysign(least, gamma), gamma)


def activate(v: Tensor, activation: str, param: float) -> Tensor:
    """Applies an activation by its name; `param` is leaky_relu's slope or elu's alpha."""
    match activation:
        case "identity":
            return v
        case "relu":
            return F.relu(v)
        case "relu6":
            return F.relu6(v)
        case "leaky_relu":
            return F.leaky_relu(v, param)
        case "elu":
            return F.elu(v, param)
        case "gelu":
            return F.gelu(v)
        case "gelu_tanh":
            return F.gelu(v, approximate="tanh")
        case "silu":
            return F.silu(v)
        case "hardswish":
            return F.hardswish(v)
    raise RuntimeError(f"activation is {activation!r}")
