"""Augmentation of a batch. What is drawn comes from the generator that is given, and from nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["random_flip", "random_shift"]


def random_shift(images: Tensor, pixels: int, generator: torch.Generator, background: float = 0.0) -> Tensor:
    """Move each image by up to `pixels` along each axis; what moves in is background.

    The same as padding by `pixels` and cropping at random.

    Args:
        images: `(N, C, H, W)`.

    Returns:
        a new tensor of the same shape.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, [pixels] * 4, value=background)
    offsets = torch.randint(0, 2 * pixels + 1, (2, n, 1), generator=generator)
    rows = (torch.arange(height) + offsets[0]).view(n, height, 1)
    columns = (torch.arange(width) + offsets[1]).view(n, 1, width)
    # Index tensors on both sides of the channel axis put it last.
    moved = padded[torch.arange(n).view(n, 1, 1), :, rows, columns]
    return moved.permute(0, 3, 1, 2).contiguous()


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half; `(N, C, H, W)`, a new tensor."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flipped, images.flip(3), images)
