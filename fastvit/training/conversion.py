"""Applies `--memory` to the model, by `fastvit.convert`."""

from __future__ import annotations

import torch
from torch import nn

import fastvit

from .config import Config
from .precision import Precision

__all__ = ["save_memory"]


def save_memory(
    model: nn.Module, config: Config, shape: tuple[int, int, int], precision: Precision
) -> fastvit.Report | None:
    """Convert `model`, in place, by `--memory`.

    The model must be on its device. A model that will be compiled is not converted: torch.compile chooses
    what is kept for backward.

    Args:
        shape: C, H, W of the images.
        precision: of the run; it sets the dtype of activations, whose bytes are reported.

    Returns:
        What a training step keeps; None with `--memory off` or `--compile`.
    """
    if config.memory == "off" or config.compile:
        return None
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    device = next(model.parameters()).device
    images = torch.zeros(config.batch_size, *shape, device=device).to(memory_format=layout)
    options = config.convert_options()
    with precision.half():
        fastvit.convert(model, **options, example_inputs=images if "budget" in options else None)
        return fastvit.report(model, images)
