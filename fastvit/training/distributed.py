"""Starts the process group, and exchanges messages between ranks."""

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
from .launcher import LaunchInfo

T = TypeVar("T")
_SIOCGIFADDR = 0x8915  # The request for an interface's address, from linux/sockios.h.
_ADDRESS_IN_REPLY = slice(20, 24)  # In ifreq, after 16 bytes of name, 2 of family, 2 of port.


def get_world_size() -> int:
    """Returns the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Returns the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Returns whether this is rank 0, which prints and writes files."""
    return get_rank() == 0


def print_on_main(text: str) -> None:
    """Prints a line on rank 0."""
    if is_main_process():
        print(text, flush=True)


def init_distributed(
    launch_info: LaunchInfo | None, device: str = "auto", timeout: float = 300.0
) -> torch.device:
    """Joins the launcher's process group. Without a launcher this process trains alone, and says so.

    The ranks choose their devices together: GPUs with NCCL if each rank has a GPU of its own, or else CPUs
    with gloo. A rank may see all GPUs of its host, or one.

    A rank waits `timeout` seconds for the other ranks, here and in every later collective.

    Returns:
        The device of this rank.
    """
    if launch_info is None:
        print("not using distributed mode", flush=True)
        return _choose_device(device, torch.cuda.is_available(), 0)

    rank, world_size = launch_info.rank, launch_info.world_size
    address, port = launch_info.master_addr, launch_info.master_port
    # A batch script without srun has SLURM_PROCID=0 too.
    hint = "; was srun forgotten?" if "SLURM_PROCID" in os.environ and rank == 0 else ""
    try:
        store = open_rendezvous_store(rank, world_size, address, port, timeout, launch_info.run_id)
        consensus = StoreConsensus(dist.PrefixStore("trainer", store), rank, world_size, timeout)
        rank_device = _choose_device_with_ranks(launch_info, consensus, device)
        if is_cuda := rank_device.type == "cuda":
            torch.cuda.set_device(rank_device)
        else:
            _set_gloo_interface(launch_info, consensus)
            # No rank is missing now.
            hint = "; set GLOO_SOCKET_IFNAME to the network interface that reaches the other hosts, as eth0"
        init_group = functools.partial(
            dist.init_process_group,
            "nccl" if is_cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=rank_device if is_cuda else None,
        )
        if is_cuda:
            init_group()
        else:  # gloo waits for five times its timeout when a rank does not answer.
            run_with_timeout(init_group, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise ConfigError(
            f"the {world_size} ranks did not meet at {address}:{port} within {timeout:g} s: "
            f"{first_line(error)}{hint}"
        ) from None
    return rank_device


def _choose_device_with_ranks(
    launch_info: LaunchInfo, consensus: StoreConsensus, option: str
) -> torch.device:
    """Returns this rank's own GPU if every rank has one, or the CPU. `option` is `--device`."""
    # A dict: answer to its ranks.
    ranks_by_option = consensus.gather_answers("options", f"--device {option}")
    if len(ranks_by_option) > 1:
        raise ConfigError(f"the ranks must have the same --device, got {format_answers(ranks_by_option)}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and option != "cpu" else 0
    index = launch_info.local_rank % max(1, gpus)
    gpu_uuid = str(torch.cuda.get_device_properties(index).uuid) if gpus else ""
    ranks_by_gpu = consensus.gather_answers("GPUs", gpu_uuid)
    # Ranks that share a GPU give one answer.
    all_have_gpu = "" not in ranks_by_gpu and len(ranks_by_gpu) == launch_info.world_size
    return _choose_device(option, all_have_gpu, index)


def _choose_device(option: str, all_have_gpu: bool, index: int) -> torch.device:
    if option == "cuda" and not all_have_gpu:
        raise ConfigError(
            f"--device cuda needs one GPU for each rank, got {torch.cuda.device_count()} on this host"
        )
    return torch.device("cuda", index) if option != "cpu" and all_have_gpu else torch.device("cpu")


def _set_gloo_interface(launch_info: LaunchInfo, consensus: StoreConsensus) -> None:
    """Lets gloo use the network interface that reaches rank 0, if gloo would use the loopback.

    gloo listens at the address of the host's name, which is 127.0.1.1 on Debian and in many containers. Ranks
    would then connect to their own host. If the host of rank 0 resolves its name to the loopback too,
    rank 0 uses the address that another host has resolved.
    """
    answers = consensus.gather_answers("address of rank 0", _routable_address(launch_info.master_addr))
    addresses = [*filter(None, answers)]
    if "GLOO_SOCKET_IFNAME" in os.environ or not addresses:
        return
    if _routable_address(socket.gethostname()):  # gloo listens there.
        return
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((addresses[0], launch_info.master_port))  # Sends nothing, but chooses the interface.
        if name := find_interface(probe.getsockname()[0]):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def find_interface(address: str) -> str:
    """Returns the name of the network interface of this host that has an address, or ""."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(packed)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # An interface may have no address.
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if reply[_ADDRESS_IN_REPLY] == socket.inet_aton(address):
                    return name
    return ""


def _routable_address(host: str) -> str:
    """Returns the IPv4 or IPv6 address at which other hosts reach `host`, or "" if that is the loopback.

    The resolver's first address counts, since gloo takes that one too.
    """
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return ""


def cores_per_rank() -> int:
    """Returns the number of cores for this rank: its allowed cores, divided among the ranks that share them.

    torchrun lets every rank run on all cores of the host; srun may give each task cores of its own.
    """
    machine, cores = os.uname().nodename, sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        machine = boot_id()  # Containers on one host have one boot id, but differ in names.
    return max(1, len(cores) // all_gather_objects((machine, cores)).count((machine, cores)))


def average_over_ranks(value: Tensor) -> Tensor:
    """Returns the mean of `value` over the ranks."""
    total = value.detach().clone()
    if get_world_size() > 1:
        dist.all_reduce(total)
    return total / get_world_size()


def all_gather_numbers(numbers: Tensor) -> list[list[float]]:
    """Returns n lists for `(n,)` numbers: list i has number i of every rank. Uses one collective."""
    row = numbers.detach().view(1, -1)
    if get_world_size() < 2:
        return row.T.tolist()
    rows = row.new_empty(get_world_size(), row.shape[1])
    work = getattr(dist, ALL_GATHER_NAME)(rows, row, async_op=True)
    if row.is_cuda:
        work.wait()  # Blocks the CUDA stream, not Python.
    else:
        wait_interruptibly(work)
    return rows.T.tolist()


def all_gather_objects(value: T) -> list[T]:
    """Returns on every rank the `value` of all ranks, in rank order."""
    if get_world_size() < 2:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal_on_ranks(values: dict[str, Any]) -> None:
    """Raises TrainingError on every rank, with names, values and ranks, unless all pass the same values."""
    all_values = all_gather_objects(values)
    differences = []
    for name in dict.fromkeys(name for rank_values in all_values for name in rank_values):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_values in enumerate(all_values):
            ranks_by_value.setdefault(str(rank_values.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            differences.append(f"{name} differs: {format_answers(ranks_by_value)}")
    if differences:
        raise TrainingError(f"every rank must have the same, but {' | '.join(differences)}")


def run_on_main(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function on rank 0. Returns its result, or raises TrainingError, on every rank."""
    outcome: list[Any] = [_call_catching_errors(function, *arguments) if is_main_process() else None]
    if get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, message = outcome[0]
    if message is not None:
        raise TrainingError(message)
    return result


def run_on_all_ranks(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function on every rank, and returns this rank's result. All ranks raise any rank's error."""
    result, message = _call_catching_errors(function, *arguments)
    raise_on_all_ranks(message)
    return result


def _call_catching_errors(function: Callable[..., T], *arguments: Any) -> tuple[Any, str | None]:
    """Returns a result, or an error's message for all ranks; this rank alone raises other errors."""
    try:
        return function(*arguments), None
    except (OSError, ValueError, TrainingError) as error:
        return None, str(error) or type(error).__name__


def raise_on_all_ranks(message: str | None) -> None:
    """Raises TrainingError on every rank if any rank passes a message. Every rank calls this function."""
    messages = all_gather_objects(message)
    if any(messages):
        first_message = next(filter(None, messages))
        is_same = set(messages) == {first_message}
        prefix = "" if is_same else f"rank {messages.index(first_message)}: "
        raise TrainingError(prefix + first_message)


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Copies the parameters and buffers of rank 0 to every rank."""
    if get_world_size() > 1:
        for value in model.state_dict(keep_vars=True).values():
            # A broadcast needs dense memory: channels_last needs no `contiguous()`.
            dist.broadcast(value.detach(), src=0)


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replaces running means and variances by their mean over the ranks.

    Layers that are not synchronised have other statistics on each rank, but all ranks must evaluate the model
    that rank 0 saves.
    """
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(average_over_ranks(buffer))
