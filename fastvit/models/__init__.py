"""Models built from the layers of fastvit."""

from .norm_act import NORMS, NormAct
from .vit import MLP_NORMS, VARIANTS, ViT, create_vit, vit_digits

__all__ = [
    "MLP_NORMS",
    "NORMS",
    "VARIANTS",
    "NormAct",
    "ViT",
    "create_vit",
    "vit_digits",
]
