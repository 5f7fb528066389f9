"""apex's public names over torch."""

from .._finder import finish
from . import amp, fp16_utils, normalization, optimizers, parallel
from .fp16_utils import FP16_Optimizer

__all__ = ["FP16_Optimizer", "amp", "fp16_utils", "normalization", "optimizers", "parallel"]

finish(__name__)
