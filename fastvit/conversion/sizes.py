"""How large the layers' outputs are, by running the model once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Arguments = tuple[tuple, dict[str, object]]


def as_arguments(inputs: Tensor | Sequence | Mapping | None) -> Arguments | None:
    """Positional and keyword arguments from what a caller names `inputs`."""
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def output_bytes(model: nn.Module, layers: list[nn.Module], arguments: Arguments) -> dict[nn.Module, int]:
    """Bytes of each layer's output, summed over its calls in one forward in evaluation without gradients.

    Running statistics and the random state stay as they are.
    """
    sizes: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _, output: Tensor) -> None:
        sizes[layer] = sizes.get(layer, 0) + output.numel() * output.element_size()

    training = {module: module.training for module in model.modules()}
    handles = [layer.register_forward_hook(note) for layer in layers]
    args, kwargs = arguments
    try:
        for module in training:
            module.__dict__["training"] = False
        devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in training.items():
            module.__dict__["training"] = flag
    return sizes
