"""Chooses the batches of each rank, and loads them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from .config import Config, ConfigError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Each asks a run to save a checkpoint and to end.
MAX_WORKERS_PER_RANK = 4  # The default of --workers for --data folder, if the rank has so many cores.
BatchKey = tuple[list[int], "int | None"]  # The indices of a batch, and its augmentation's seed.


def combine_seeds(*numbers: int) -> int:
    """Returns a seed of 63 bits, as int64 holds, that differs between combinations of numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def normalize_pixels(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Returns `(x / 255 - mean) / std`, by channel, of uint8 images `(..., C, H, W)`."""
    mean_, std_ = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels / 255 - mean_) / std_


class ImageDataset(Dataset):
    """Images that are read in batches, and their labels `(N,)` int64."""

    labels: Tensor

    def read_batch(self, indices: list[int], generator: torch.Generator | None) -> Tensor:
        """Returns fp32 images `(n, C, H, W)` as the model takes them. A generator augments them at random."""
        raise NotImplementedError

    def __getitem__(self, key: BatchKey) -> tuple[Tensor, Tensor]:
        indices, seed = key
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        batch = self.read_batch(indices, generator), self.labels[indices]
        if get_worker_info() is not None:
            # A full /dev/shm raises here. Otherwise the thread that sends a batch to the rank would share it,
            # and drop the error.
            for tensor in batch:
                tensor.share_memory_()
        return batch


class TrainBatchSampler(Sampler[BatchKey]):
    """Draws the shuffled batches of one rank. The last, smaller batch is dropped.

    The order depends only on (seed, epoch), and the augmentation of a batch only on (seed, epoch, rank,
    batch). So an epoch can be continued in the middle, and does not depend on the number of workers.
    """

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed
        self.rank, self.world_size = rank, world_size
        if num_images // world_size < batch_size:
            raise ConfigError(
                f"--batch-size must be at most the {num_images // world_size} training images of one rank, "
                f"got {batch_size}"
            )
        self.epoch = self.first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Lets the next iteration begin at batch `first_batch` of `epoch`."""
        self.epoch, self.first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[BatchKey]:
        # Seed 1 in epoch 0 has the order of seed 0 in epoch 1. Runs that are resumed need the same order.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_images, generator=generator)
        rank_batches = order[self.rank :: self.world_size].split(self.batch_size)
        for index in range(self.first_batch, len(self)):
            yield rank_batches[index].tolist(), combine_seeds(self.seed, self.epoch, self.rank, index)

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch, `first_batch` aside."""
        return self.num_images // self.world_size // self.batch_size


def list_test_batches(num_images: int, batch_size: int, rank: int, world_size: int) -> list[BatchKey]:
    """Lists the batches of one rank's test images, every `world_size`-th, so that each is evaluated once."""
    indices = range(rank, num_images, world_size)
    return [([*indices[n : n + batch_size]], None) for n in range(0, len(indices), batch_size)]


class _Loader(DataLoader):
    """Starts its workers with the stop signals blocked, which all threads of a worker inherit.

    A scheduler signals every process of a job, but the rank needs its workers until its step is complete.
    torch may start threads in a worker before `worker_init_fn` runs, and the kernel delivers a signal to any
    thread that does not block it.
    """

    def __iter__(self) -> Any:
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _watch_rank(worker: int) -> None:
    """Lets a worker end with its rank, and print nothing then, as its `worker_init_fn`."""
    rank_process = multiprocessing.parent_process()
    assert rank_process is not None
    sys.excepthook = partial(_print_error_of_thread, rank_process)
    threading.Thread(target=_exit_with_rank, args=(rank_process,), daemon=True).start()


def _print_error_of_thread(rank_process: BaseProcess, *error: Any) -> None:
    """Prints an error of the thread that sends batches, unless the rank ends, which closes its connection."""
    rank_process.join(1)
    if rank_process.is_alive():
        sys.__excepthook__(*error)


def _exit_with_rank(rank_process: BaseProcess) -> None:
    """Ends a worker on SIGTERM only if its rank has sent the signal, or has ended.

    In the rank, DataLoader and the interpreter's exit send SIGTERM to workers. This thread receives it though
    the main thread may hang in a read. If the rank dies first, DataLoader's own loop ends the worker.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_process.pid and rank_process.is_alive():
        pass
    os._exit(0)  # DataLoader reports any other status as a failure of the worker.


def make_loader(
    images: ImageDataset,
    batches: Sampler[BatchKey] | list[BatchKey],
    config: Config,
    device: torch.device,
    cores: int,
) -> DataLoader:
    """Returns a loader of `batches`, which are keys of `images`, for a rank that has `cores` cores."""
    num_workers = min(MAX_WORKERS_PER_RANK, cores) if config.workers is None else config.workers
    return _Loader(
        images,
        sampler=batches,
        batch_size=None,  # Each item is a batch already.
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=_watch_rank,
        pin_memory=device.type == "cuda",
        timeout=config.timeout if num_workers else 0,
    )
