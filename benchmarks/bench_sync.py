"""Times synchronised statistics with every backend: the exchange alone, and a whole step of a layer.

    python benchmarks/bench_sync.py [--world 2 4 8]         on this machine, first with 2 ranks, then 4, 8
    python benchmarks/bench_sync.py --hosts 2 --world 4 --delay 1 --what exchange
                            ranks on simulated hosts: this machine's, in separate Linux namespaces

The ranks use NCCL if there are as many GPUs as ranks, else gloo. The program measures two things:

    exchange   ranks send moments in the forward and sums in the backward, without a layer
    step       all ranks run forward and backward of one layer at the same time

In both, the contender `bare` is a collective of torch.distributed alone, which sends as many numbers as an
exchange. The contender `local` of a step is a layer with the statistics of its own rank.

Contenders take turns. The column `times` is a ratio, not a duration: the baseline's time divided by the
contender's, as the median over turns. The baseline of an exchange is `bare`, that of a step is `local`.
torch.nn.SyncBatchNorm runs on CUDA only. apex's SyncBatchNorm runs if apex can be imported
(FASTVIT_APEX=folder of its sources). Without its compiled parts apex's layer is Python over collectives, and
runs on the CPU too.

Each timing begins after an exchange, which aligns the ranks. The time of the slowest rank counts. On a CPU
each rank has its own core if there are enough: two ranks on one core take turns, and an exchange then takes
two to ten times as long. The program restarts itself with an allocator that retains freed memory. torch's
profiler counts the calls.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conditions import provenance
from harness import (
    APEX,
    make_parser,
    percentiles,
    restart_with_reused_memory,
    third_party_layers,
    time_us,
    write_csv,
)
from result_tables import write_table
from simulated_hosts import SimulatedHosts
from torch import nn

import fastvit
from fastvit import sync
from fastvit.sync.collective import ALL_GATHER_NAME
from fastvit.sync.statistics_group import get_statistics_group

CHANNELS = (64, 256, 512, 1024, 2048)
STEP_SHAPES = {  # device type -> shapes (N, C, H, W) of the input of a step
    "cpu": ((32, 64, 28, 28), (32, 256, 14, 14), (32, 64, 56, 56)),
    "cuda": tuple((32, channels, 28, 28) for channels in CHANNELS),
}
DIRECTIONS = ("forward", "backward", "both")
ROWS_FILE = "rows.json"  # Rank 0 writes its rows into this file for the parent process.
MOMENTUM = 0.1  # torch's default; ranks check that theirs agree. No running statistics are updated.
FOLDER_VARIABLE = "FASTVIT_BENCH_FOLDER"  # the environment variable of a rank on a simulated host
Call = Callable[[], object]


class TimedCall(NamedTuple):
    prepare: Call  # This runs before each timing.
    call: Call


class Contender(NamedTuple):
    forward: TimedCall
    backward: TimedCall


class ExchangeCalls(NamedTuple):
    merge_moments: Call
    merge_sums: Call


def make_group(setting: str) -> "dist.ProcessGroup":
    """Returns a new process group of all ranks, with the backend for FASTVIT_STATISTICS=`setting`."""
    os.environ["FASTVIT_STATISTICS"] = setting  # A group reads the variable at its first exchange, below.
    group = dist.new_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    make_exchange_calls(group, channels=2, device=device).merge_moments()
    return group


def make_exchange_calls(group, channels: int, device: torch.device) -> ExchangeCalls:
    """Returns calls that exchange moments and sums over `group`; for None, torch's bare collectives."""
    # Moments are mean[C], M2[C] and the count, in two numbers to be exact. Sums are two per channel.
    moments, sums = (torch.rand(n, device=device) for n in (2 * channels + 2, 2 * channels))
    if group is None:
        gathered = moments.new_empty(dist.get_world_size() * moments.numel())
        gather = partial(getattr(dist, ALL_GATHER_NAME), gathered, moments)
        return ExchangeCalls(gather, partial(dist.all_reduce, sums))
    layer = sync.LayerKey("bench_sync", layer_id=moments.numel(), momentum=MOMENTUM)  # an id for each size
    statistics_group = get_statistics_group(group, moments.device)
    # Ranks compare the tag of an exchange. A backward has that of its forward.
    _, tag = statistics_group.merge_moments(layer, moments)
    return ExchangeCalls(
        partial(statistics_group.merge_moments, layer, moments),
        partial(statistics_group.merge_sums, sums[None], tag),  # `(1, 2C)`
    )


def count_calls(function: Call) -> dict[str, int]:
    """Returns the numbers of collectives and of ops, by torch's profiler. Ops inside ops do not count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = profile.events()
    op_ids = {id(event) for event in events if event.name.startswith(("aten::", "fastvit::"))}
    return {
        "collectives": sum(event.name.startswith("c10d::") for event in events),
        "ops": sum(id(event) in op_ids and id(event.cpu_parent) not in op_ids for event in events),
    }


def bench(contenders: dict[str, Contender], baseline: str, repeats: int, device: torch.device) -> list[dict]:
    """Times contenders in turn and returns their rows; a time is that of the slowest rank."""
    local_us: dict[tuple[str, str], list[float]] = {(n, d): [] for n in contenders for d in DIRECTIONS}
    num_warm_up_turns = repeats // 10  # The first turns allocate memory and fill caches.
    for turn in range(repeats):
        for name, contender in contenders.items():
            durations_us = []
            for timed in contender:
                timed.prepare()
                durations_us.append(time_us(timed.call, device))
            if turn >= num_warm_up_turns:
                for direction, us in zip(DIRECTIONS, (*durations_us, sum(durations_us)), strict=True):
                    local_us[name, direction].append(us)
    us_by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(us_by_rank, local_us)
    slowest_us = {
        key: [max(turn_us) for turn_us in zip(*(rank_us[key] for rank_us in us_by_rank), strict=True)]
        for key in local_us
    }
    rows = []
    for name, contender in contenders.items():
        forward, backward = (count_calls(timed.call) for timed in contender)  # `prepare` does not count.
        sum_of_both = {kind: forward[kind] + backward[kind] for kind in forward}
        for direction, counts in zip(DIRECTIONS, (forward, backward, sum_of_both), strict=True):
            contender_us, baseline_us = slowest_us[name, direction], slowest_us[baseline, direction]
            row = {"contender": name, "direction": direction, **percentiles(contender_us, (50, 95))}
            row["times"] = median(base / us for base, us in zip(baseline_us, contender_us, strict=True))
            rows.append(row | counts)
    return rows


def bench_exchange(channels: int, groups: dict, repeats: int, device: torch.device) -> list[dict]:
    """Returns the rows of an exchange by each group of `groups`, and by torch's bare collectives."""

    def run_three_times(call: Call) -> None:
        """Runs exchanges, so that the previous contender's threads leave the cores, and ranks align."""
        for _ in range(3):
            call()

    contenders = {
        name: Contender(
            *(
                TimedCall(partial(run_three_times, call), call)
                for call in make_exchange_calls(group, channels, device)
            )
        )
        for name, group in ({"bare": None} | groups).items()
    }
    return bench(contenders, baseline="bare", repeats=repeats, device=device)


def make_layers(channels: int, groups: dict, device: torch.device) -> dict[str, nn.Module]:
    """Returns the layers that are compared in a step, by contender."""
    # All ranks have to call new_group for every group, also for a group of another rank.
    local_group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    layers = {"local": fastvit.SyncBatchNorm(channels, process_group=local_group)}
    layers |= {name: fastvit.SyncBatchNorm(channels, process_group=g) for name, g in groups.items()}
    if device.type == "cuda":
        layers["torch SyncBatchNorm"] = nn.SyncBatchNorm(channels)
    layers |= third_party_layers(channels, [APEX])
    return {name: layer.to(device) for name, layer in layers.items()}


def bench_step(shape: tuple[int, ...], groups: dict, repeats: int, device: torch.device) -> list[dict]:
    """Returns the rows of a step of each layer of `make_layers`, and of torch's bare collectives."""
    x = torch.randn(shape, device=device, requires_grad=True)
    dy, outputs = torch.randn_like(x), []
    # The last group is the fastest: it uses peer memory, if possible. A few channels suffice for a wait.
    align_ranks = make_exchange_calls(list(groups.values())[-1], channels=4, device=device).merge_moments
    layers = make_layers(shape[1], groups, device)
    local = layers["local"]

    def evict_and_align() -> None:
        """Evicts the caches by a step of a layer, and aligns the ranks by an exchange."""
        local(x).backward(dy)
        x.grad = None
        align_ranks()

    def make_step(layer: nn.Module) -> Contender:
        return Contender(
            TimedCall(evict_and_align, lambda: outputs.append(layer(x))),
            TimedCall(lambda: None, lambda: outputs.pop().backward(dy)),
        )

    contenders = {name: make_step(layer) for name, layer in layers.items()}
    gather, reduce = make_exchange_calls(None, channels=shape[1], device=device)
    # Each collective follows other work, as the exchange in a layer does.
    contenders["bare"] = Contender(TimedCall(evict_and_align, gather), TimedCall(evict_and_align, reduce))
    return bench(contenders, baseline="local", repeats=repeats, device=device)


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Measures on one rank. Rank 0 writes the rows into `folder`, which all ranks share."""
    uses_cuda = torch.cuda.device_count() >= world
    torch.set_num_threads(options.threads)
    if uses_cuda:
        torch.cuda.set_device(rank)
    store_url, timeout = f"file://{folder}/store", datetime.timedelta(seconds=60)
    backend = "nccl" if uses_cuda else "gloo"
    dist.init_process_group(backend, store_url, rank=rank, world_size=world, timeout=timeout)
    device = torch.device("cuda", rank) if uses_cuda else torch.device("cpu")
    groups = {"Collective": make_group("collective")}
    try:
        if not options.hosts:  # Hosts share no memory. `peer` chooses the backend of this name.
            groups["CudaIpc" if uses_cuda else "SharedMemory"] = make_group("peer")
    except RuntimeError as error:  # Without peer memory all ranks raise.
        print(error)
    cores = sorted(os.sched_getaffinity(0))
    if not uses_cuda and options.threads == 1 and world <= len(cores):
        # This pins the main thread. gloo's threads exist already and may run on every core.
        os.sched_setaffinity(0, {cores[rank]})
    repeats = max(20, options.repeats * 2 // world)  # The time of an exchange grows with the number of ranks.
    rows: list[dict] = []
    for channels in CHANNELS if "exchange" in options.what else ():
        exchange_rows = bench_exchange(channels, groups, repeats, device)
        rows += [{"what": "exchange", "shape": f"C={channels}"} | row for row in exchange_rows]
    for shape in STEP_SHAPES[device.type] if "step" in options.what else ():
        step_rows = bench_step(shape, groups, repeats, device)
        rows += [{"what": "step", "shape": "x".join(map(str, shape))} | row for row in step_rows]
    if rank == 0:
        setup = {"world": world, "threads": options.threads, "cores": os.cpu_count()}
        if options.hosts:
            setup |= {"hosts": options.hosts, "delay_ms": options.delay}
        conditions = provenance(device.type)
        (Path(folder) / ROWS_FILE).write_text(json.dumps([setup | row | conditions for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def spawn_on_hosts(world: int, folder: str, options: argparse.Namespace) -> None:
    """Runs the ranks on simulated hosts; each rank is a process of this program."""
    variables = {"WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "eth0", FOLDER_VARIABLE: folder}
    with SimulatedHosts(options.hosts, options.delay / 1e3) as hosts:
        processes = []
        for rank in range(world):
            environment = os.environ | variables | {"RANK": str(rank)}
            host = rank * options.hosts // world
            processes.append(hosts.start(host, [sys.executable, *sys.argv], env=environment))
        if any([process.wait() for process in processes]):  # A list: all processes have to end.
            raise SystemExit("bench_sync: a rank failed; its traceback is above")


def main() -> None:
    parser = make_parser(__doc__, device=None)  # no option --device
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="numbers of ranks, each in turn")
    parser.add_argument("--what", nargs="+", default=["exchange", "step"], choices=["exchange", "step"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    parser.add_argument(
        "--repeats",
        type=int,
        default=300,
        help="timings of each contender with 2 ranks; more ranks make fewer",
    )
    parser.add_argument(
        "--hosts", type=int, default=0, help="number of simulated hosts, which share the ranks equally"
    )
    parser.add_argument(
        "--delay", type=float, default=1.0, help="milliseconds that a packet takes between hosts"
    )
    options = parser.parse_args()
    restart_with_reused_memory()  # This returns only in the restarted process.
    if folder := os.environ.get(FOLDER_VARIABLE):
        return rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder, options)
    rows: list[dict] = []
    for world in options.world:
        with tempfile.TemporaryDirectory() as folder:
            if options.hosts:
                spawn_on_hosts(world, folder, options)
            else:
                mp.spawn(rank_main, (world, folder, options), nprocs=world)
            rows += json.loads((Path(folder) / ROWS_FILE).read_text())
    device = "cuda" if rows[0]["driver"] else "cpu"  # Only rows of a GPU have a driver.
    name = f"sync_{'hosts_' if options.hosts else ''}{device}"
    print(write_table(write_csv(name, rows, options.out)).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
