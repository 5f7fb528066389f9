"""apex.contrib.layer_norm, for any width; apex's takes some widths only."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
