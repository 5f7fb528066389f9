"""apex as its scripts know it: amp, parallel, optimizers, fp16_utils and normalization over torch's parts."""

from . import amp, parallel

__all__ = ["amp", "parallel"]
