"""apex's public names over torch: amp, parallel, optimizers, fp16_utils and normalization."""

from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from .fp16_utils import FP16_Optimizer

__all__ = [
    "FP16_Optimizer",
    "amp",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]
