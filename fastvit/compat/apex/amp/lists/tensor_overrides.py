"""Methods of torch.Tensor: those of `torch_overrides` and the operators."""

import torch

from . import torch_overrides

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch.Tensor


def _methods(names: list[str]) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)]


FP16_FUNCS = ["__matmul__", *_methods(torch_overrides.FP16_FUNCS)]

FP32_FUNCS = ["__pow__", "__rpow__", "__ipow__", "cpu", *_methods(torch_overrides.FP32_FUNCS)]

CASTS = _methods(torch_overrides.CASTS)

SEQUENCE_CASTS: list[str] = []
