"""The parts of apex.contrib that torch has under other names: clip_grad, layer_norm, optimizers, xentropy."""
