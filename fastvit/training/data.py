"""Data: scikit-learn's digits, their split, and how each rank gets its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

__all__ = ["Split", "load_digits", "random_shift", "test_loader", "train_loader"]

BACKGROUND = -1.0  # value of an empty pixel
TEST_SHARE = 5  # one image of five is a test image
TEST_BATCH = 256


@dataclass(frozen=True)
class Split:
    """Images ``(N, 1, 8, 8)`` fp32 in [-1, 1] and labels ``(N,)`` int64, for training and for test."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int) -> Split:
    """The 1797 digits that come with scikit-learn, split at random into 1438 for training and 359 for test.

    The same seed gives the same split everywhere.
    """
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.from_numpy(digits.images).to(torch.float32).unsqueeze(1) / 8 - 1  # 16 grey levels
    labels = torch.from_numpy(digits.target).to(torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(images) // TEST_SHARE])
    return Split(images[train], labels[train], images[test], labels[test])


def random_shift(images: Tensor, pixels: int = 1) -> Tensor:
    """Move each image by up to ``pixels`` along each axis; what moves in is background.

    Args:
        images: ``(N, C, H, W)``, with the background at -1.
        pixels: the largest shift. The draw comes from torch's global generator.

    Returns:
        a new tensor of the same shape.
    """
    n, _, height, width = images.shape
    padded = F.pad(images, [pixels] * 4, value=BACKGROUND)
    offsets = torch.randint(0, 2 * pixels + 1, (2, n, 1))
    rows = (torch.arange(height) + offsets[0]).view(n, height, 1)
    columns = (torch.arange(width) + offsets[1]).view(n, 1, width)
    # Index tensors on both sides of the channel axis put it last.
    moved = padded[torch.arange(n).view(n, 1, 1), :, rows, columns]
    return moved.permute(0, 3, 1, 2).contiguous()


class Batches(Dataset):
    """Images in memory, read a batch at a time: one indexing operation instead of one per image."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int = 0) -> None:
        self.images, self.labels, self.shift = images, labels, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = self.images[indices]
        return (random_shift(images, self.shift) if self.shift else images), self.labels[indices]


class EveryImageOnce(Sampler[int]):
    """Every ``world``-th index, starting at ``rank``: the ranks together see each image exactly once.

    DistributedSampler repeats images until all ranks have the same number, which counts some of them twice.
    """

    def __init__(self, length: int, rank: int, world: int) -> None:
        self.indices = range(rank, length, world)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def train_loader(
    split: Split, batch_size: int, rank: int, world: int, seed: int, pin_memory: bool
) -> tuple[DataLoader, DistributedSampler]:
    """Shuffled, shifted training batches of one rank; the last, smaller batch is dropped.

    Returns:
        the loader, and its sampler for ``set_epoch``.

    Raises:
        ValueError: the rank's share is smaller than one batch.
    """
    data = Batches(split.train_images, split.train_labels, shift=1)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=seed)
    if len(sampler) < batch_size:
        raise ValueError(
            f"--batch-size must be at most the {len(sampler)} training images of one rank, got {batch_size}"
        )
    batches = BatchSampler(sampler, batch_size, drop_last=True)
    return DataLoader(data, sampler=batches, batch_size=None, pin_memory=pin_memory), sampler


def test_loader(split: Split, rank: int, world: int, pin_memory: bool) -> DataLoader:
    """This rank's share of the test images; shares differ by up to one image, the last batch is smaller."""
    data = Batches(split.test_images, split.test_labels)
    batches = BatchSampler(EveryImageOnce(len(data), rank, world), TEST_BATCH, drop_last=False)
    return DataLoader(data, sampler=batches, batch_size=None, pin_memory=pin_memory)
