"""apex's public names over torch."""

from .._import_hook import set_up_package
from . import amp, fp16_utils, normalization, optimizers, parallel
from .fp16_utils import FP16_Optimizer

__all__ = ["FP16_Optimizer", "amp", "fp16_utils", "normalization", "optimizers", "parallel"]

set_up_package(__name__)
