"""Synchronised statistics: the exchange alone, and a whole step of a layer, by every backend.

    python benchmarks/bench_sync.py [--world 2 4 8]         ranks of this machine, one number after another
    python benchmarks/bench_sync.py --hosts 2 --world 4 --delay 1 --what exchange
                                         ranks on hosts, which are namespaces of this machine (hosts.py)

Over NCCL where there are as many GPUs as ranks, else over gloo.

Exchange: moments forward, sums backward, without a layer; `bare` is torch.distributed's collective of as many
numbers. Step: forward and backward of one layer on all ranks at the same time; `local` does not share.
Contenders take turns; `times` is the median over turns of bare's time divided by the contender's, for a step
local's. torch.nn.SyncBatchNorm runs on CUDA. apex's runs where there is an apex (FASTVIT_APEX=folder of its
sources): Python over collectives where nothing is compiled, on the CPU too.

Each time begins after an exchange of all ranks, and is that of the slowest rank. On a CPU each rank stays on
a core of its own, where there are enough: two ranks that meet on one core take turns, and an exchange then
takes two to ten times as long. The allocator retains freed memory. torch's profiler counts the calls.
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
    command_line,
    percentiles,
    provenance,
    reuse_memory,
    third_party_layers,
    timed_us,
    write_csv,
)
from hosts import Hosts
from report import write_table
from torch import nn

import fastvit
from fastvit import sync
from fastvit.sync.collective import ALL_GATHER_NAME
from fastvit.sync.statistics_group import get_statistics_group

CHANNELS = (64, 256, 512, 1024, 2048)
SHAPES = {  # the input of a step, by device type
    "cpu": ((32, 64, 28, 28), (32, 256, 14, 14), (32, 64, 56, 56)),
    "cuda": tuple((32, channels, 28, 28) for channels in CHANNELS),
}
DIRECTIONS = ("forward", "backward", "both")
ROWS = "rows.json"
FOLDER = "FASTVIT_BENCH_FOLDER"  # set for a rank on a host
Work = Callable[[], object]
Contender = tuple[tuple[Work, Work], tuple[Work, Work]]
"""Forward and backward: what precedes its timing, and what is timed."""


def group_with(statistics: str) -> "dist.ProcessGroup":
    """A new group of all ranks that has chosen its backend by `statistics`."""
    os.environ["FASTVIT_STATISTICS"] = statistics
    group = dist.new_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    exchange(group, 2, device)[0]()
    return group


def exchange(group, channels: int, device: torch.device) -> tuple[Work, Work]:
    """The exchanges of moments and of sums; torch's bare collectives without a group."""
    moments, sums = (torch.rand(n, device=device) for n in (2 * channels + 2, 2 * channels))
    if group is None:
        rows = moments.new_empty(dist.get_world_size() * moments.numel())
        return partial(getattr(dist, ALL_GATHER_NAME), rows, moments), partial(dist.all_reduce, sums)
    layer = sync.LayerKey("bench_sync", moments.numel(), 0.1)
    shared = get_statistics_group(group, moments.device)
    tag = shared.merge_moments(layer, moments)[1]
    return partial(shared.merge_moments, layer, moments), partial(shared.merge_sums, sums[None], tag)


def counted(work: Work) -> dict[str, int]:
    """Calls in `work`, by torch's profiler: collectives, and torch's ops, without those inside of others."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    events = profile.events()
    is_op = {id(e): e.name.startswith(("aten::", "fastvit::")) for e in events}
    return {
        "collectives": sum(e.name.startswith("c10d::") for e in events),
        "ops": sum(is_op[id(e)] and not is_op.get(id(e.cpu_parent), False) for e in events),
    }


def bench(contenders: dict[str, Contender], baseline: str, repeats: int, device: torch.device) -> list[dict]:
    """Rows of contenders in turn; a time is that of the slowest rank."""
    own: dict[tuple[str, str], list[float]] = {(n, d): [] for n in contenders for d in DIRECTIONS}
    for repeat in range(repeats):
        for name, parts in contenders.items():
            taken = []
            for before, work in parts:
                before()
                taken.append(timed_us(work, device))
            if repeat >= repeats // 10:
                for direction, us in zip(DIRECTIONS, (*taken, sum(taken)), strict=True):
                    own[name, direction].append(us)
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    times = {key: [max(turn) for turn in zip(*(t[key] for t in everybody), strict=True)] for key in own}
    rows = []
    for name, parts in contenders.items():
        forward, backward = (counted(work) for _, work in parts)
        both = {what: forward[what] + backward[what] for what in forward}
        for direction, counts in zip(DIRECTIONS, (forward, backward, both), strict=True):
            taken, of = times[name, direction], times[baseline, direction]
            row = {"contender": name, "direction": direction, **percentiles(taken, (50, 95))}
            row["times"] = median(base / us for base, us in zip(of, taken, strict=True))
            rows.append(row | counts)
    return rows


def bench_exchange(channels: int, groups: dict, repeats: int, device: torch.device) -> list[dict]:
    def thrice(work: Work) -> None:
        """Not timed: threads of the previous contender leave the cores, and the ranks begin together."""
        for _ in range(3):
            work()

    contenders = {
        name: tuple((partial(thrice, work), work) for work in exchange(group, channels, device))
        for name, group in ({"bare": None} | groups).items()
    }
    return bench(contenders, "bare", repeats, device)


def layers(channels: int, groups: dict, device: torch.device) -> dict[str, nn.Module]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    chosen = {"local": fastvit.SyncBatchNorm(channels, process_group=alone)}
    chosen |= {name: fastvit.SyncBatchNorm(channels, process_group=g) for name, g in groups.items()}
    if device.type == "cuda":
        chosen["torch SyncBatchNorm"] = nn.SyncBatchNorm(channels)
    chosen |= third_party_layers(channels, ["apex SyncBatchNorm"])
    return {name: layer.to(device) for name, layer in chosen.items()}


def bench_step(shape: tuple[int, ...], groups: dict, repeats: int, device: torch.device) -> list[dict]:
    x = torch.randn(shape, device=device, requires_grad=True)
    dy, kept = torch.randn_like(x), []
    together = exchange(next(reversed(groups.values())), 4, device)[0]
    found = layers(shape[1], groups, device)
    local = found["local"]

    def begin_cold() -> None:
        """Not timed: evicts the caches, and the ranks begin together."""
        local(x).backward(dy)
        x.grad = None
        together()

    def step(layer: nn.Module) -> Contender:
        return (
            (begin_cold, lambda: kept.append(layer(x))),
            (lambda: None, lambda: kept.pop().backward(dy)),
        )

    contenders = {name: step(layer) for name, layer in found.items()}
    gather, reduce = exchange(None, shape[1], device)
    contenders["bare"] = (begin_cold, gather), (begin_cold, reduce)  # each follows work, as a layer's does
    return bench(contenders, "local", repeats, device)


def rank_main(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Measures; rank 0 writes the rows into `folder`."""
    cuda = torch.cuda.device_count() >= world
    torch.set_num_threads(options.threads)
    if cuda:
        torch.cuda.set_device(rank)
    init, timeout = f"file://{folder}/store", datetime.timedelta(seconds=60)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init, rank=rank, world_size=world, timeout=timeout)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    groups = {"Collective": group_with("collective")}
    try:
        if not options.hosts:
            groups["CudaIpc" if cuda else "SharedMemory"] = group_with("peer")
    except RuntimeError as error:  # all ranks raise it
        print(error)
    cores = sorted(os.sched_getaffinity(0))
    if not cuda and options.threads == 1 and world <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})  # this thread; gloo's, which exist by now, stay free
    repeats = max(20, options.repeats * 2 // world)
    rows: list[dict] = []
    for channels in CHANNELS if "exchange" in options.what else ():
        found = bench_exchange(channels, groups, repeats, device)
        rows += [{"what": "exchange", "shape": f"C={channels}"} | row for row in found]
    for shape in SHAPES[device.type] if "step" in options.what else ():
        found = bench_step(shape, groups, repeats, device)
        rows += [{"what": "step", "shape": "x".join(map(str, shape))} | row for row in found]
    if rank == 0:
        here = {"world": world, "threads": options.threads, "cores": os.cpu_count()}
        if options.hosts:
            here |= {"hosts": options.hosts, "delay_ms": options.delay}
        where = provenance(device.type)
        (Path(folder) / ROWS).write_text(json.dumps([here | row | where for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def spawn_on_hosts(world: int, folder: str, options: argparse.Namespace) -> None:
    """Runs the ranks on hosts, each a process of this program."""
    own = {"WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "eth0", FOLDER: folder}
    with Hosts(options.hosts, options.delay / 1e3) as hosts:
        ranks = []
        for rank in range(world):
            environment = os.environ | own | {"RANK": str(rank)}
            host = rank * options.hosts // world
            ranks.append(hosts.start(host, [sys.executable, *sys.argv], env=environment))
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a rank has failed")


def main() -> None:
    parser = command_line(__doc__, None)
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="ranks")
    parser.add_argument("--what", nargs="+", default=["exchange", "step"], choices=["exchange", "step"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    parser.add_argument("--repeats", type=int, default=300, help="of each kind with 2 ranks, else fewer")
    parser.add_argument("--hosts", type=int, default=0, help="with equal parts of the ranks")
    parser.add_argument("--delay", type=float, default=1.0, help="of a packet between hosts, in ms")
    parser.add_argument("--name", help="results/NAME.csv (default: sync_DEVICE, or sync_hosts_DEVICE)")
    options = parser.parse_args()
    reuse_memory()
    if folder := os.environ.get(FOLDER):
        return rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder, options)
    rows: list[dict] = []
    for world in options.world:
        with tempfile.TemporaryDirectory() as folder:
            if options.hosts:
                spawn_on_hosts(world, folder, options)
            else:
                mp.spawn(rank_main, (world, folder, options), nprocs=world)
            rows += json.loads((Path(folder) / ROWS).read_text())
    device = "cuda" if rows[0]["driver"] else "cpu"
    name = options.name or f"sync_{'hosts_' if options.hosts else ''}{device}"
    print(write_table(write_csv(name, rows, options.out)).with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
