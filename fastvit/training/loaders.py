"""Loads each rank's share of the images, a batch at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from .config import Config, ConfigError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # each asks a run to save a checkpoint and end
MOST_WORKERS = 4  # of a rank, unless --workers has another number
Key = tuple[list[int], "int | None"]  # indices of a batch, and the seed of its augmentation


def seed_of(*numbers: int) -> int:
    """A seed for each combination of numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def normalise(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """`(x / 255 - mean) / std` by channel of images `(..., C, H, W)`, uint8."""
    mean_, std_ = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels / 255 - mean_) / std_


class ImageDataset(Dataset):
    """Images that are read a batch at a time, and their labels `(N,)` int64."""

    labels: Tensor

    def read(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        """Images `(n, C, H, W)` fp32, ready for the model; augmented by random numbers of the generator."""
        raise NotImplementedError

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        indices, seed = key
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        batch = self.read(indices, generator), self.labels[indices]
        if get_worker_info() is not None:
            # A full /dev/shm is an error here; the thread that sends a batch to the rank would drop it.
            for part in batch:
                part.share_memory_()
        return batch


class TrainBatches(Sampler[Key]):
    """Shuffled batches of one rank; the last, smaller batch is dropped.

    The order depends only on (seed, epoch), and the augmentation of a batch only on (seed, epoch, rank,
    batch). So an epoch can be continued in the middle, and does not depend on the number of workers.
    """

    def __init__(self, images: int, batch_size: int, rank: int, world: int, seed: int) -> None:
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.rank, self.world = rank, world
        if images // self.world < batch_size:
            raise ConfigError(
                f"--batch-size must be at most the {images // self.world} training images of one rank, "
                f"got {batch_size}"
            )
        self.epoch = self.first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Begin the next iteration at batch `first` of `epoch`."""
        self.epoch, self.first = epoch, first

    def __iter__(self) -> Iterator[Key]:
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        mine = torch.randperm(self.images, generator=random)[self.rank :: self.world].split(self.batch_size)
        for batch in range(self.first, len(self)):
            yield mine[batch].tolist(), seed_of(self.seed, self.epoch, self.rank, batch)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.images // self.world // self.batch_size


def test_batches(images: int, batch_size: int, rank: int, world: int) -> list[Key]:
    """A share of the test images that is every `world`-th: the ranks together see each exactly once."""
    share = range(rank, images, world)
    return [([*share[n : n + batch_size]], None) for n in range(0, len(share), batch_size)]


class _Loader(DataLoader):
    """Starts its workers with the stop signals blocked, which all threads of a worker inherit.

    A scheduler signals every process of a job, and the rank needs its workers until its step is complete.
    torch may start threads in a worker before `worker_init_fn` runs, and a signal takes any thread that does
    not block it.
    """

    def __iter__(self) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch_rank(worker: int) -> None:
    threading.Thread(target=_wait_for_rank, daemon=True).start()


def _wait_for_rank() -> None:
    """End a worker by SIGTERM only when its rank sends it, or when the rank has ended.

    DataLoader and the interpreter's exit end workers by SIGTERM, even those that hang in a read.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid and rank.is_alive():
        pass
    os._exit(0)  # DataLoader reports any other status as a failure of the worker


def make_loader(
    images: ImageDataset, batches: Sampler[Key] | list[Key], config: Config, device: torch.device, cores: int
) -> DataLoader:
    """Loads the batches of this rank, which has so many cores; each batch is a key of `images`."""
    workers = min(MOST_WORKERS, cores) if config.workers is None else config.workers
    return _Loader(
        images,
        sampler=batches,
        batch_size=None,  # an item is a batch
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_watch_rank,
        pin_memory=device.type == "cuda",
        timeout=config.timeout if workers else 0,
    )
