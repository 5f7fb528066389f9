"""The parts of apex.contrib that torch has under other names: clip_grad, layer_norm, optimizers, xentropy."""

from . import clip_grad, layer_norm, optimizers, xentropy

__all__ = ["clip_grad", "layer_norm", "optimizers", "xentropy"]
