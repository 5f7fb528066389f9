"""apex.contrib.optimizers: where apex moved its first FP16_Optimizer and the optimizers for it."""

from ...optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedSGD

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
