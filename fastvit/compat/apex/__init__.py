"""apex's public names over torch."""

import sys

from .._finder import without
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

for _name, _module in list(sys.modules.items()):
    if _name.startswith(__name__):
        vars(_module).setdefault("__getattr__", without(_name.removeprefix("fastvit.compat.")))
