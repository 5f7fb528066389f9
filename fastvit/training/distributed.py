"""Ranks: the process group from start to end, and messages between ranks."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..sync.collective import ALL_GATHER_NAME, wait_interruptibly
from ..sync.launcher_rendezvous import open_rendezvous_store
from ..sync.process_watch import boot_id
from ..sync.store_consensus import StoreConsensus, format_answers
from ..sync.waiting import run_with_timeout
from .config import ConfigError, TrainingError, first_line
from .launch import Launch

T = TypeVar("T")
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of a network interface


def get_world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """The rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is rank 0, the one that prints and writes files."""
    return get_rank() == 0


def say(text: str) -> None:
    """Print a line on rank 0."""
    if is_main_process():
        print(text, flush=True)


def init(launch: Launch | None, device: str = "auto", timeout: float = 300.0) -> torch.device:
    """Join the process group of the launcher; without a launcher print a message and use this process alone.

    The ranks agree on their device before the backend is chosen: NCCL when each of them has a GPU of its own,
    else gloo and the CPU. The launcher may make all GPUs of the host visible to each rank, or its own alone.

    A rank waits `timeout` seconds for the others, here and in every later collective.

    Returns:
        The device of this rank.
    """
    if launch is None:
        print("not using distributed mode", flush=True)
        return _choose_device(device, torch.cuda.is_available(), 0)

    rank, world = launch.rank, launch.world
    hint = "; was srun forgotten?" if "SLURM_PROCID" in os.environ and rank == 0 else ""
    try:
        store = open_rendezvous_store(rank, world, launch.address, launch.port, timeout, launch.run)
        consensus = StoreConsensus(dist.PrefixStore("trainer", store), rank, world, timeout)
        told = consensus.gather_answers("options", f"--device {device}")
        if len(told) > 1:
            raise ConfigError(f"the ranks differ in their options: {format_answers(told)}")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
        index = launch.local_rank % max(1, gpus)
        own = str(torch.cuda.get_device_properties(index).uuid) if gpus else ""
        different = consensus.gather_answers("GPUs", own)
        chosen = _choose_device(device, "" not in different and len(different) == world, index)
        if cuda := chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        else:
            _choose_interface(launch, consensus)
            hint = "; GLOO_SOCKET_IFNAME names the network interface that reaches the other hosts, as eth0"
        group = functools.partial(
            dist.init_process_group,
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            device_id=chosen if cuda else None,
        )
        # gloo waits for five times its timeout when a rank does not answer.
        group() if cuda else run_with_timeout(group, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise ConfigError(
            f"the {world} ranks did not meet at {launch.address}:{launch.port} within {timeout:g} s: "
            f"{first_line(error)}{hint}"
        ) from None
    return chosen


def _choose_device(option: str, all_have_gpu: bool, index: int) -> torch.device:
    if option == "cuda" and not all_have_gpu:
        raise ConfigError(
            f"--device cuda needs one GPU for each rank, got {torch.cuda.device_count()} on this host"
        )
    return torch.device("cuda", index) if option != "cpu" and all_have_gpu else torch.device("cpu")


def _choose_interface(launch: Launch, consensus: StoreConsensus) -> None:
    """Have gloo use the network interface that reaches rank 0, where it would use the loopback.

    gloo listens at the address of the host's name, which Debian and many containers have as 127.0.1.1. Then
    ranks connect to their own host in place of another. The host of rank 0 knows its own name so, and takes
    the address by which the others know it.
    """
    known = [*filter(None, consensus.gather_answers("address of rank 0", _outer_address(launch.address)))]
    if "GLOO_SOCKET_IFNAME" in os.environ or not known or _outer_address(socket.gethostname()):
        return
    family = socket.AF_INET6 if ":" in known[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((known[0], launch.port))  # sends nothing, and chooses the own address
        if name := interface_of(probe.getsockname()[0]):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str:
    """The name of the network interface that has an address of this host; "" where none has it."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(packed)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
                if found == socket.inet_aton(address):
                    return name
    return ""


def _outer_address(host: str) -> str:
    """The address at which other hosts reach a host, of IPv4 or IPv6; "" where it has none.

    It is the first that the resolver gives, which gloo takes too.
    """
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return ""


def own_cores() -> int:
    """This rank's share of the cores that it may run on.

    torchrun lets every rank run on all cores of the host; srun may give each task its own.
    """
    machine, cores = os.uname().nodename, sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        machine = boot_id()  # of ranks in several containers too
    return max(1, len(cores) // gather_objects((machine, cores)).count((machine, cores)))


def mean_of_ranks(value: Tensor) -> Tensor:
    """The mean of `value` over the ranks."""
    total = value.detach().clone()
    if get_world_size() > 1:
        dist.all_reduce(total)
    return total / get_world_size()


def gather_numbers(numbers: Tensor) -> list[list[float]]:
    """Each of the `(n,)` numbers of all ranks, in rank order: one collective."""
    mine = numbers.detach().view(1, -1)
    if get_world_size() < 2:
        return mine.T.tolist()
    everybody = mine.new_empty(get_world_size(), mine.shape[1])
    work = getattr(dist, ALL_GATHER_NAME)(everybody, mine, async_op=True)
    work.wait() if mine.is_cuda else wait_interruptibly(work)
    return everybody.T.tolist()


def gather_objects(value: T) -> list[T]:
    """`value` of every rank in rank order, on every rank."""
    if get_world_size() < 2:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(values: dict[str, Any]) -> None:
    """Raise TrainingError on every rank, with names, values and ranks, unless all pass the same values."""
    everybody = gather_objects(values)
    different = []
    for name in dict.fromkeys(name for one in everybody for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            ranks.setdefault(str(one.get(name)), []).append(rank)
        if len(ranks) > 1:
            different.append(f"{name} differs: {format_answers(ranks)}")
    if different:
        raise TrainingError(f"every rank must have the same, but {' | '.join(different)}")


def on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on rank 0, and return its result, or raise its error, on every rank."""
    outcome: list[Any] = [_attempt(function, *arguments) if is_main_process() else None]
    if get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, failed = outcome[0]
    if failed is not None:
        raise TrainingError(failed)
    return result


def on_every(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on every rank and return its result there; an error of one is raised on all."""
    result, failed = _attempt(function, *arguments)
    raise_together(failed)
    return result


def _attempt(function: Callable[..., T], *arguments: Any) -> tuple[Any, str | None]:
    """The result of a function, or the message of an error that all ranks should raise."""
    try:
        return function(*arguments), None
    except (OSError, ValueError, TrainingError) as error:
        return None, str(error) or type(error).__name__


def raise_together(failed: str | None) -> None:
    """Raise TrainingError on every rank when one of them passes a message; every rank calls it."""
    messages = gather_objects(failed)
    if any(messages):
        first = next(filter(None, messages))
        rank = messages.index(first)
        raise TrainingError(first if set(messages) == {first} else f"rank {rank}: {first}")


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to every rank."""
    if get_world_size() > 1:
        for value in model.state_dict(keep_vars=True).values():
            # A broadcast needs dense memory, which a parameter in channels_last has too.
            dist.broadcast(value.detach(), src=0)


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replace running means and variances by their mean over the ranks.

    They differ in layers that are not synchronised, and all ranks are to evaluate what rank 0 saves.
    """
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(mean_of_ranks(buffer))
