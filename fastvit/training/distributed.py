"""Ranks: who they are, how they start and end together, and what they say to each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from .errors import TrainingError

__all__ = [
    "Ranks",
    "all_losses",
    "average_running_statistics",
    "gather_objects",
    "get_rank",
    "get_world_size",
    "init",
    "is_main_process",
    "on_main",
    "reduce_value",
    "shutdown",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, and the device it computes on."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    backend: str | None  # None without a process group


def is_distributed() -> bool:
    """Whether a process group is set up."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Rank of this process, 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def is_main_process() -> bool:
    """Whether this is rank 0, the one that prints and writes files."""
    return get_rank() == 0


def _from_environment(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"RANK and WORLD_SIZE are set but {name} is not; start the ranks with torchrun")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be a whole number, got {text!r}") from None


def _choose_device(option: str, local_rank: int, has_gpu: bool, all_have_gpu: bool) -> torch.device:
    if option == "cuda" and not has_gpu:
        raise ValueError(
            f"--device cuda needs one GPU for each rank, got {torch.cuda.device_count()} GPUs "
            f"for local rank {local_rank}"
        )
    if option == "cpu" or not all_have_gpu:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def init(device: str = "auto", timeout: float = 300.0) -> Ranks:
    """Join the process group described by RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them.

    Without these variables the process goes on alone and says so. The ranks agree on their device before the
    backend is chosen: NCCL when every one of them has a GPU of its own, else gloo and the CPU.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout: seconds that a rank waits for the others, here and in every later collective.

    Raises:
        ValueError: the environment is incomplete, or ``cuda`` was asked for and a rank has no GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        print("not using distributed mode", flush=True)
        chosen = _choose_device(device, 0, gpus > 0, gpus > 0)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        return Ranks(0, 1, 0, 1, chosen, None)

    rank, world = _from_environment("RANK"), _from_environment("WORLD_SIZE")
    local_rank = _from_environment("LOCAL_RANK")
    local_world = _from_environment("LOCAL_WORLD_SIZE", world)
    wait = timedelta(seconds=timeout)
    store, rank, world = next(rendezvous("env://", rank, world, timeout=wait))
    store.set_timeout(wait)
    votes = dist.PrefixStore("fastvit/gpu", store)
    votes.set(str(rank), b"1" if local_rank < gpus else b"0")
    all_have_gpu = all(votes.get(str(peer)) == b"1" for peer in range(world))
    chosen = _choose_device(device, local_rank, local_rank < gpus, all_have_gpu)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    bound = {}
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        bound["device_id"] = chosen
    dist.init_process_group(
        backend, store=dist.PrefixStore("fastvit", store), rank=rank, world_size=world, timeout=wait, **bound
    )
    return Ranks(rank, world, local_rank, local_world, chosen, backend)


def shutdown() -> None:
    """Leave the process group. Every rank calls it, after it has dropped its model and optimizer.

    Destroying a gloo group while a peer still talks to it, or while DDP's hooks still hold it, aborts the
    process now and then; hence the barrier and the collection of reference cycles first.
    """
    if not is_distributed():
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def reduce_value(value: Tensor, average: bool = True) -> Tensor:
    """Sum of ``value`` over the ranks, or its mean; the input itself when there is one rank.

    Args:
        value: any shape, on the device of the run; not changed when there are several ranks.
    """
    world = get_world_size()
    if world < 2:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / world if average else total


def all_losses(loss: Tensor) -> Callable[[], list[float]]:
    """Start to share a scalar loss; the returned function waits and gives all ranks' losses in rank order."""
    loss = loss.detach()
    world = get_world_size()
    if world < 2:
        return lambda: [loss.item()]
    # A sum in which each rank fills its own place: a gather that every backend and version of torch has.
    values = loss.new_zeros(world)
    values[get_rank()] = loss
    work = dist.all_reduce(values, async_op=True)

    def wait() -> list[float]:
        work.wait()
        return values.tolist()

    return wait


def gather_objects(value: T) -> list[T]:
    """``value`` of every rank in rank order, on every rank."""
    if get_world_size() < 2:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on rank 0 alone and give its result to every rank.

    Raises:
        TrainingError: on every rank, when rank 0 met an OSError, ValueError or TrainingError; so no rank
            waits for one that has failed.
    """
    outcome: list[Any] = [None, None]
    if is_main_process():
        try:
            outcome[0] = function(*arguments)
        except (OSError, ValueError, TrainingError) as error:
            outcome[1] = str(error) or type(error).__name__
    if get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise TrainingError(outcome[1])
    return outcome[0]


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replace the running mean and variance of every BatchNorm by their mean over the ranks.

    Layers that are not synchronised see only the samples of their own rank; afterwards all ranks evaluate the
    same model, and it is the model that rank 0 writes to the checkpoint.
    """
    world = get_world_size()
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world < 2 or not buffers:
        return
    packed = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(packed)
    packed /= world
    for buffer, mean in zip(buffers, packed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
