"""apex's public names over torch."""

from . import amp, contrib, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel
from .fp16_utils import FP16_Optimizer

__all__ = [
    "FP16_Optimizer",
    "amp",
    "contrib",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]
