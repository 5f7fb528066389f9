"""Times synchronised statistics with every backend: the exchange alone, and a whole step of a layer.

    python benchmarks/bench_sync.py [--world 2 4 8]         ranks of this machine, one number after another
    python benchmarks/bench_sync.py --hosts 2 --world 4 --delay 1 --what exchange
                            ranks on hosts, which are namespaces of this machine (simulated_hosts.py)

The ranks use NCCL if there are as many GPUs as ranks, else gloo.

Exchange: moments forward, sums backward, without a layer; `bare` is torch.distributed's collective of as many
numbers. Step: forward and backward of one layer on all ranks at the same time; `local` has the statistics of
one rank. Contenders take turns. `times` is the median over turns of a baseline's time divided by the
contender's; the baseline of an exchange is `bare`, that of a step `local`. torch.nn.SyncBatchNorm runs on
CUDA. apex's runs if apex can be imported (FASTVIT_APEX=folder of its sources), and without compiled parts it
is Python over collectives, on the CPU too.

Each timing begins after an exchange of all ranks, and is that of the slowest rank. On a CPU each rank stays
on a core of its own if there are enough cores: two ranks that meet on one core take turns, and an exchange
then takes two to ten times as long. The allocator retains freed memory. torch's profiler counts the calls.
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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import (
    make_parser,
    percentiles,
    provenance,
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
STEP_SHAPES = {  # the inputs of a step, by device type
    "cpu": ((32, 64, 28, 28), (32, 256, 14, 14), (32, 64, 56, 56)),
    "cuda": tuple((32, channels, 28, 28) for channels in CHANNELS),
}
DIRECTIONS = ("forward", "backward", "both")
ROWS_FILE = "rows.json"
FOLDER_VARIABLE = "FASTVIT_BENCH_FOLDER"  # the environment variable of a rank on a simulated host
Call = Callable[[], object]
Contender = tuple[tuple[Call, Call], tuple[Call, Call]]
"""Forward and backward: a call that prepares the timing, and the call that is timed."""


def make_group(statistics: str) -> "dist.ProcessGroup":
    """Returns a new process group of all ranks, whose backend `statistics` has chosen."""
    os.environ["FASTVIT_STATISTICS"] = statistics
    group = dist.new_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    make_exchange_calls(group, 2, device)[0]()
    return group


def make_exchange_calls(group, channels: int, device: torch.device) -> tuple[Call, Call]:
    """Returns calls that exchange moments and sums; without a group torch's bare collectives."""
    moments, sums = (torch.rand(n, device=device) for n in (2 * channels + 2, 2 * channels))
    if group is None:
        rows = moments.new_empty(dist.get_world_size() * moments.numel())
        return partial(getattr(dist, ALL_GATHER_NAME), rows, moments), partial(dist.all_reduce, sums)
    layer = sync.LayerKey("bench_sync", moments.numel(), 0.1)
    shared = get_statistics_group(group, moments.device)
    tag = shared.merge_moments(layer, moments)[1]
    return partial(shared.merge_moments, layer, moments), partial(shared.merge_sums, sums[None], tag)


def count_calls(function: Call) -> dict[str, int]:
    """Returns the number of collectives, and of ops outside of other ops, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = profile.events()
    is_op = {id(e): e.name.startswith(("aten::", "fastvit::")) for e in events}
    return {
        "collectives": sum(e.name.startswith("c10d::") for e in events),
        "ops": sum(is_op[id(e)] and not is_op.get(id(e.cpu_parent), False) for e in events),
    }


def bench(contenders: dict[str, Contender], baseline: str, repeats: int, device: torch.device) -> list[dict]:
    """Returns rows of contenders that take turns; a time is that of the slowest rank."""
    times_by_key: dict[tuple[str, str], list[float]] = {(n, d): [] for n in contenders for d in DIRECTIONS}
    for repeat in range(repeats):
        for name, directions in contenders.items():
            durations_us = []
            for prepare, call in directions:
                prepare()
                durations_us.append(time_us(call, device))
            if repeat >= repeats // 10:
                for direction, us in zip(DIRECTIONS, (*durations_us, sum(durations_us)), strict=True):
                    times_by_key[name, direction].append(us)
    times_of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(times_of_ranks, times_by_key)
    slowest = {
        key: [max(turn) for turn in zip(*(times[key] for times in times_of_ranks), strict=True)]
        for key in times_by_key
    }
    rows = []
    for name, directions in contenders.items():
        forward, backward = (count_calls(call) for _, call in directions)
        both = {kind: forward[kind] + backward[kind] for kind in forward}
        for direction, counts in zip(DIRECTIONS, (forward, backward, both), strict=True):
            times, baseline_times = slowest[name, direction], slowest[baseline, direction]
            row = {"contender": name, "direction": direction, **percentiles(times, (50, 95))}
            row["times"] = median(base / us for base, us in zip(baseline_times, times, strict=True))
            rows.append(row | counts)
    return rows


def bench_exchange(channels: int, groups: dict, repeats: int, device: torch.device) -> list[dict]:
    def run_three_times(call: Call) -> None:
        """Lets the threads of the previous contender leave the cores, and aligns the ranks."""
        for _ in range(3):
            call()

    contenders = {
        name: tuple(
            (partial(run_three_times, call), call) for call in make_exchange_calls(group, channels, device)
        )
        for name, group in ({"bare": None} | groups).items()
    }
    return bench(contenders, "bare", repeats, device)


def make_layers(channels: int, groups: dict, device: torch.device) -> dict[str, nn.Module]:
    own_group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    layers = {"local": fastvit.SyncBatchNorm(channels, process_group=own_group)}
    layers |= {name: fastvit.SyncBatchNorm(channels, process_group=g) for name, g in groups.items()}
    if device.type == "cuda":
        layers["torch SyncBatchNorm"] = nn.SyncBatchNorm(channels)
    layers |= third_party_layers(channels, ["apex SyncBatchNorm"])
    return {name: layer.to(device) for name, layer in layers.items()}


def bench_step(shape: tuple[int, ...], groups: dict, repeats: int, device: torch.device) -> list[dict]:
    x = torch.randn(shape, device=device, requires_grad=True)
    dy, outputs = torch.randn_like(x), []
    align_ranks = make_exchange_calls(next(reversed(groups.values())), 4, device)[0]
    layers = make_layers(shape[1], groups, device)
    local = layers["local"]

    def evict_and_align() -> None:
        """Evicts the caches by a step of a layer, and aligns the ranks by an exchange."""
        local(x).backward(dy)
        x.grad = None
        align_ranks()

    def make_step(layer: nn.Module) -> Contender:
        return (
            (evict_and_align, lambda: outputs.append(layer(x))),
            (lambda: None, lambda: outputs.pop().backward(dy)),
        )

    contenders = {name: make_step(layer) for name, layer in layers.items()}
    gather, reduce = make_exchange_calls(None, shape[1], device)
    # Each collective follows other work, as the exchange in a layer does.
    contenders["bare"] = (evict_and_align, gather), (evict_and_align, reduce)
    return bench(contenders, "local", repeats, device)


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Measures on one rank; rank 0 writes the rows into `folder`."""
    uses_cuda = torch.cuda.device_count() >= world
    torch.set_num_threads(options.threads)
    if uses_cuda:
        torch.cuda.set_device(rank)
    init, timeout = f"file://{folder}/store", datetime.timedelta(seconds=60)
    backend = "nccl" if uses_cuda else "gloo"
    dist.init_process_group(backend, init, rank=rank, world_size=world, timeout=timeout)
    device = torch.device("cuda", rank) if uses_cuda else torch.device("cpu")
    groups = {"Collective": make_group("collective")}
    try:
        if not options.hosts:
            groups["CudaIpc" if uses_cuda else "SharedMemory"] = make_group("peer")
    except RuntimeError as error:  # Without peer memory all ranks raise.
        print(error)
    cores = sorted(os.sched_getaffinity(0))
    if not uses_cuda and options.threads == 1 and world <= len(cores):
        os.sched_setaffinity(
            0, {cores[rank]}
        )  # Only this thread moves: gloo's threads exist by now, and stay free.
    repeats = max(20, options.repeats * 2 // world)
    rows: list[dict] = []
    for channels in CHANNELS if "exchange" in options.what else ():
        measured = bench_exchange(channels, groups, repeats, device)
        rows += [{"what": "exchange", "shape": f"C={channels}"} | row for row in measured]
    for shape in STEP_SHAPES[device.type] if "step" in options.what else ():
        measured = bench_step(shape, groups, repeats, device)
        rows += [{"what": "step", "shape": "x".join(map(str, shape))} | row for row in measured]
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
        ranks = []
        for rank in range(world):
            environment = os.environ | variables | {"RANK": str(rank)}
            host = rank * options.hosts // world
            ranks.append(hosts.start(host, [sys.executable, *sys.argv], env=environment))
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("bench_sync: a rank failed; its traceback is above")


def main() -> None:
    parser = make_parser(__doc__, None)
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
        "--hosts", type=int, default=0, help="number of simulated hosts, each with as many ranks"
    )
    parser.add_argument(
        "--delay", type=float, default=1.0, help="milliseconds that a packet takes between hosts"
    )
    parser.add_argument("--name", help="results/NAME.csv (default: sync_DEVICE, or sync_hosts_DEVICE)")
    options = parser.parse_args()
    restart_with_reused_memory()
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
    device = "cuda" if rows[0]["driver"] else "cpu"
    name = options.name or f"sync_{'hosts_' if options.hosts else ''}{device}"
    print(write_table(write_csv(name, rows, options.out)).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
