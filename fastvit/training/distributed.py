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

from ..sync.collective import ALL_GATHER, wait_on_host
from .config import ConfigError
from .errors import TrainingError
from .launch import Launch

__all__ = [
    "Ranks",
    "StepReport",
    "average_running_statistics",
    "broadcast_weights",
    "gather_objects",
    "get_rank",
    "get_world_size",
    "init",
    "is_main_process",
    "on_every",
    "on_main",
    "raise_together",
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
    """Which of the visible GPUs this rank takes, or None when there is none for it.

    srun may show each task its own GPU alone, which then has number 0 whatever the local rank; gloo lets
    ranks share a GPU, NCCL does not.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and (launch.launcher == "srun" or backend == "gloo"):
        return launch.local_rank % gpus
    return launch.local_rank if launch.local_rank < gpus else None


def init(launch: Launch | None, device: str = "auto", backend: str = "auto", timeout: float = 300.0) -> Ranks:
    """Join the process group that the launcher described; without a launcher go on alone and say so.

    The ranks agree on their device before the backend is chosen: NCCL when every one of them has a GPU, else
    gloo and the CPU.

    Args:
        launch: what `find_launch` returned.
        device: `auto`, `cpu` or `cuda`.
        backend: `auto`, `gloo` or `nccl`.
        timeout: seconds that a rank waits for the others, here and in every later collective.

    Raises:
        ConfigError: `cuda` was asked for and a rank has no GPU, or ranks are missing.
    """
    if launch is None:
        print("not using distributed mode", flush=True)
        has_gpu = torch.cuda.is_available()
        chosen = _choose_device(device, 0 if has_gpu else None, has_gpu, 0)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        return Ranks(0, 1, 0, 1, chosen, None)

    rank, world, index = launch.rank, launch.world, _gpu_index(launch, backend)
    wait = timedelta(seconds=timeout)
    os.environ.setdefault("MASTER_ADDR", launch.address)
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    try:
        store, rank, world = next(rendezvous("env://", rank, world, timeout=wait))
        store.set_timeout(wait)
        votes = dist.PrefixStore("fastvit/gpu", store)
        votes.set(str(rank), "0" if index is None else "1")
        all_have_gpu = all(votes.get(str(peer)) == b"1" for peer in range(world))
    except RuntimeError as error:
        raise ConfigError(
            f"the {world} ranks did not meet at {launch.address}:{launch.port} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from None
    chosen = _choose_device(device, index, all_have_gpu, launch.local_rank)
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    elif backend == "nccl" and chosen.type != "cuda":
        raise ConfigError("--backend must be gloo on the CPU, got 'nccl'")
    bound: dict[str, Any] = {}
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if backend == "nccl":
            bound["device_id"] = chosen
    dist.init_process_group(
        backend, store=dist.PrefixStore("fastvit", store), rank=rank, world_size=world, timeout=wait, **bound
    )
    return Ranks(rank, world, launch.local_rank, launch.local_world, chosen, backend)


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
    """What the ranks tell each other in every step: their loss, a flag, and the norm of the gradients.

    One collective under way until `read`. On CUDA a copy in pinned memory is asked for, so that `read` waits
    for that copy and not for what was launched since.

    Args:
        loss: of this rank, one number; fp32 is sent.
        norm: one number, on all ranks or on none.
    """

    def __init__(self, loss: Tensor, flag: int = 0, norm: Tensor | None = None) -> None:
        self.has_norm = norm is not None
        self.values = loss.new_full((1, 3), flag, dtype=torch.float32)
        self.values[0, 0] = loss.detach()
        if norm is not None:
            self.values[0, 2] = norm
        self.work: dist.Work | None = None
        if get_world_size() > 1:
            mine, self.values = self.values, self.values.new_empty(get_world_size(), 3)
            self.work = getattr(dist, ALL_GATHER)(self.values, mine, async_op=True)
        self.copied: torch.cuda.Event | None = None
        if self.values.is_cuda:
            if self.work is not None:
                self.work.wait()  # by the stream
            host = torch.empty(self.values.shape, pin_memory=True)
            self.values = host.copy_(self.values, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> tuple[list[float], list[int], float | None]:
        """The losses and the flags of all ranks, in rank order; the norm, as rank 0 has it."""
        if self.copied is not None:
            self.copied.synchronize()
        elif self.work is not None:
            wait_on_host(self.work)
        losses, flags, norms = self.values.T.tolist()
        return losses, [int(flag) for flag in flags], norms[0] if self.has_norm else None


def gather_objects(value: T) -> list[T]:
    """`value` of every rank in rank order, on every rank."""
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


def on_every(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on every rank and return its result there.

    Raises:
        TrainingError: on every rank, when a rank met an OSError, ValueError or TrainingError.
    """
    failed = None
    try:
        result = function(*arguments)
    except (OSError, ValueError, TrainingError) as error:
        failed = str(error) or type(error).__name__
    raise_together(failed)
    return result


def raise_together(failed: str | None) -> None:
    """Raise TrainingError on every rank when one of them comes with a message; every rank calls it."""
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
    """Give every rank the parameters and buffers of rank 0."""
    if get_world_size() > 1:
        for value in model.state_dict(keep_vars=True).values():
            # A broadcast wants dense memory, which a parameter in channels_last has too.
            dist.broadcast(value.detach(), src=0)


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replace the running mean and variance of every BatchNorm by their mean over the ranks.

    Layers that are not synchronised see only the samples of their own rank; afterwards all ranks evaluate the
    same model, and it is the model that rank 0 writes to the checkpoint.
    """
    world = get_world_size()
    names = ("running_mean", "running_var")
    buffers = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in names]
    if world < 2 or not buffers:
        return
    packed = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(packed)
    packed /= world
    for buffer, mean in zip(buffers, packed.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
