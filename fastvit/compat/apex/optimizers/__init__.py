"""apex.optimizers over torch's fused optimizers and multi-tensor operations, on the CPU and on CUDA.

`set_grad_none=True` makes `zero_grad()` set gradients to None. `amsgrad=True` raises RuntimeError.
"""

from ..fp16_utils.fp16_optimizer import FP16_Optimizer  # for scripts from before 2020
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
