"""Models built from the layers of fastvit."""

from .norm_act import NORMS, SYNCHRONISED, NormAct
from .vit import MLP_NORMS, ViT, vit_digits

__all__ = ["MLP_NORMS", "NORMS", "SYNCHRONISED", "NormAct", "ViT", "vit_digits"]
