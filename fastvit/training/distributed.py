"""Ranks: the process group from start to end, and messages between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ..sync.collective import ALL_GATHER, wait_on_host
from .config import ConfigError, TrainingError
from .launch import Launch

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, their number, and the device."""

    rank: int
    world: int
    device: torch.device


def get_rank() -> int:
    """Rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Whether this is rank 0, the one that prints and writes files."""
    return get_rank() == 0


def _choose_device(option: str, index: int | None, all_have_gpu: bool, local_rank: int) -> torch.device:
    if option == "cuda" and index is None:
        raise ConfigError(
            f"--device cuda needs one GPU for each rank, got {torch.cuda.device_count()} GPUs "
            f"for local rank {local_rank}"
        )
    if option == "cpu" or not all_have_gpu:
        return torch.device("cpu")
    assert index is not None  # every rank has a GPU
    return torch.device("cuda", index)


def _gpu_index(launch: Launch, backend: str) -> int | None:
    """The index of this rank's GPU among the visible ones, or None without one.

    srun, Kubernetes or CUDA_VISIBLE_DEVICES may make only its own GPU visible to each rank, as number 0;
    `init` finds ranks that have the same one by its UUID. With gloo ranks may share a GPU, with NCCL not.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and (gpus == 1 or launch.launcher == "srun" or backend == "gloo"):
        return launch.local_rank % gpus
    return launch.local_rank if launch.local_rank < gpus else None


def init(launch: Launch | None, device: str = "auto", backend: str = "auto", timeout: float = 300.0) -> Ranks:
    """Join the process group of the launcher; without a launcher print a message and use this process alone.

    The ranks agree on their device before the backend is chosen: NCCL when each of them has a GPU, else gloo
    and the CPU.

    Args:
        launch: the result of `find_launch`.
        device: `auto`, `cpu` or `cuda`.
        backend: `auto`, `gloo` or `nccl`.
        timeout: seconds that a rank waits for the others, here and in every later collective.

    Raises:
        ConfigError: `cuda` was asked for and a rank has no GPU, or ranks are missing.
    """
    if launch is None:
        print("not using distributed mode", flush=True)
        has_gpu = torch.cuda.is_available()
        return Ranks(0, 1, _choose_device(device, 0 if has_gpu else None, has_gpu, 0))

    rank, world, index = launch.rank, launch.world, _gpu_index(launch, backend)
    wait = timedelta(seconds=timeout)
    os.environ.setdefault("MASTER_ADDR", launch.address)
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=wait))
        store.set_timeout(wait)
        votes = dist.PrefixStore("fastvit/gpu", store)
        own = "" if index is None or device == "cpu" else str(torch.cuda.get_device_properties(index).uuid)
        votes.set(str(rank), own)
        gpus = {votes.get(str(peer)).decode() for peer in range(world)}
        all_have_gpu = "" not in gpus and (backend == "gloo" or len(gpus) == world)
    except RuntimeError as error:
        raise ConfigError(
            f"the {world} ranks did not meet at {launch.address}:{launch.port} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None
    chosen = _choose_device(device, index if all_have_gpu else None, all_have_gpu, launch.local_rank)
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    elif backend == "nccl" and chosen.type != "cuda":
        raise ConfigError("--backend must be gloo on the CPU, got 'nccl'")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        backend, store=dist.PrefixStore("fastvit", store), rank=rank, world_size=world, timeout=wait,
        device_id=chosen if backend == "nccl" else None,
    )  # fmt: skip
    return Ranks(rank, world, chosen)


def own_cores() -> int:
    """This rank's share of the cores that it may run on: ranks that may run on the same ones divide them.

    torchrun lets every rank run on all cores of the host; srun may give each task its own.
    """
    cores = sorted(os.sched_getaffinity(0))
    place = os.uname().nodename, cores
    return max(1, len(cores) // gather_objects(place).count(place))


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Sum of `value` over the ranks, or its mean; the input itself when there is one rank.

    Args:
        value: any shape, on the device of the run; not changed when there are several ranks.
    """
    world = get_world_size()
    if world < 2:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / world if average else total


class StepReport:
    """The message of the ranks in every step: their loss, the norm of the gradients, and a flag.

    The collective runs until `read`. On CUDA its result is copied to pinned memory, so that `read` waits for
    the copy and not for later kernels. Numbers are sent in fp32.
    """

    def __init__(self, loss: Tensor, gradient_norm: Tensor, flag: int = 0) -> None:
        self.values = loss.new_full((1, 3), flag, dtype=torch.float32)
        self.values[0, 0] = loss.detach()
        self.values[0, 1] = gradient_norm
        self.work: dist.Work | None = None
        if get_world_size() > 1:
            mine, self.values = self.values, self.values.new_empty(get_world_size(), 3)
            self.work = getattr(dist, ALL_GATHER)(self.values, mine, async_op=True)
        self.copied: torch.cuda.Event | None = None
        if self.values.is_cuda:
            if self.work is not None:
                self.work.wait()  # on the stream, not on the host
            host = torch.empty(self.values.shape, pin_memory=True)
            self.values = host.copy_(self.values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> tuple[list[float], float, list[int]]:
        """The losses of all ranks, in rank order, rank 0's norm of the gradients, and the flags."""
        if self.copied is not None:
            self.copied.synchronize()
        elif self.work is not None:
            wait_on_host(self.work)
        losses, norms, flags = self.values.T.tolist()
        return losses, norms[0], flags


def gather_objects(value: T) -> list[T]:
    """`value` of every rank in rank order, on every rank."""
    if get_world_size() < 2:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def _attempt(function: Callable[..., T], *arguments: Any) -> tuple[Any, str | None]:
    """The result of a function, or the message of an error that all ranks should raise."""
    try:
        return function(*arguments), None
    except (OSError, ValueError, TrainingError) as error:
        return None, str(error) or type(error).__name__


def on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on rank 0, and return its result on every rank.

    Raises:
        TrainingError: on every rank, when rank 0 raised an OSError, ValueError or TrainingError.
    """
    outcome: list[Any] = [*_attempt(function, *arguments)] if is_main_process() else [None, None]
    if get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, failed = outcome
    if failed is not None:
        raise TrainingError(failed)
    return result


def on_every(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on every rank and return its result there.

    Raises:
        TrainingError: on every rank, when a rank raised an OSError, ValueError or TrainingError.
    """
    result, failed = _attempt(function, *arguments)
    raise_together(failed)
    return result


def raise_together(failed: str | None) -> None:
    """Raise TrainingError on every rank when one of them passes a message; every rank calls it."""
    messages = gather_objects(failed)
    ranks = [rank for rank, message in enumerate(messages) if message is not None]
    if not ranks:
        return
    first = messages[ranks[0]]
    if all(message == first for message in messages):
        raise TrainingError(first)
    raise TrainingError(f"rank {ranks[0]}: {first}")


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to every rank."""
    if get_world_size() > 1:
        for value in model.state_dict(keep_vars=True).values():
            # A broadcast needs dense memory, which a parameter in channels_last has too.
            dist.broadcast(value.detach(), src=0)


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replace the running mean and variance of every BatchNorm by their mean over the ranks.

    Layers that are not synchronised use only the samples of their own rank. Afterwards all ranks evaluate the
    model that rank 0 writes to the checkpoint.
    """
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(reduce_value(buffer))
