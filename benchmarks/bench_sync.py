"""Synchronised statistics: the exchange alone, and a whole step of a layer, by every backend.

    python benchmarks/bench_sync.py [--world 2 4 8]         ranks of this machine, one number after another
    python benchmarks/bench_sync.py --hosts 2 --world 4 --delay 1 --what exchange
                                         ranks on hosts, which are namespaces of this machine (hosts.py)
    python benchmarks/bench_sync.py --simulate 8 64 1024    what more ranks would send, without processes

Over NCCL where there are as many GPUs as ranks, else over gloo.

Exchange: moments forward, sums backward, without a layer; `bare` is torch.distributed's collective of as many
numbers, and ratios are bare / time. Step: forward and backward of one layer on all ranks at the same time,
the contenders in turn; `local` does not share, and ratios are medians of time / local of the same turn.
torch.nn.SyncBatchNorm runs on CUDA. apex's runs where there is an apex (FASTVIT_APEX=folder of its sources):
Python over collectives where nothing is compiled, on the CPU too; `apex_ratio` is the median of apex's time /
time of the same turn.

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
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import many_ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import peer_layers
from harness import command_line, percentiles, provenance, reuse_memory, write_csv
from hosts import Hosts
from torch import nn

import fastvit
from fastvit import sync
from fastvit.sync.collective import ALL_GATHER
from fastvit.sync.group import group_of

CHANNELS = (64, 256, 512, 1024, 2048)
SHAPES = {  # of a step's input, by device type
    "cpu": ((32, 64, 28, 28), (32, 256, 14, 14), (32, 64, 56, 56)),
    "cuda": tuple((32, channels, 28, 28) for channels in CHANNELS),
}
APEX = "apex SyncBatchNorm"
DIRECTIONS = ("forward", "backward", "both")
ROWS = "rows.json"
FOLDER = "FASTVIT_BENCH_FOLDER"  # of a rank on a host


def group_with(statistics: str) -> "dist.ProcessGroup":
    """A new group of all ranks that has chosen its backend by `statistics`."""
    os.environ["FASTVIT_STATISTICS"] = statistics
    group = dist.new_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    exchange(group, torch.zeros(6, device=device), torch.zeros(4, device=device))[0]()
    return group


def exchange(group, moments, sums) -> tuple[Callable, Callable]:
    """The exchanges of moments and of sums."""
    layer, shared = sync.LayerKey("bench_sync", moments.numel(), 0.1), group_of(group, moments.device)
    tag = shared.share_moments(layer, moments)[1]
    return lambda: shared.share_moments(layer, moments), lambda: shared.share_sums(sums[None], tag)


def bare_exchange(moments, sums) -> tuple[Callable, Callable]:
    rows = moments.new_empty(dist.get_world_size() * moments.numel())
    return lambda: getattr(dist, ALL_GATHER)(rows, moments), lambda: dist.all_reduce(sums)


def timed(work: Callable, device: torch.device) -> float:
    """Microseconds."""
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def slowest(times: dict[tuple[str, str], list[float]]) -> dict[tuple[str, str], list[float]]:
    """The time of the slowest rank in each turn."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, times)
    return {key: [max(turn) for turn in zip(*(t[key] for t in everybody), strict=True)] for key in times}


def counted(*works: Callable) -> dict[str, int]:
    """Calls in `works`, by torch's profiler: collectives, and torch's ops, without those inside of others."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for work in works:
            work()
    events = profile.events()
    is_op = {id(e): e.name.startswith(("aten::", "fastvit::")) for e in events}
    return {
        "collectives": sum(e.name.startswith("c10d::") for e in events),
        "ops": sum(is_op[id(e)] and not is_op.get(id(e.cpu_parent), False) for e in events),
    }


def bench_exchange(groups: dict, repeats: int, device: torch.device) -> list[dict]:
    rows = []
    for channels in CHANNELS:
        moments = torch.rand(2 * channels + 2, device=device)
        sums = torch.rand(2 * channels, device=device)
        contenders = {"bare": bare_exchange(moments, sums)}
        contenders |= {name: exchange(group, moments, sums) for name, group in groups.items()}
        times = {(name, d): [] for name in contenders for d in DIRECTIONS}
        for repeat in range(repeats):
            for name, both in contenders.items():
                taken = []
                for work in both:
                    for _ in range(3):  # until gloo's threads, of the contender before, are off the cores;
                        work()  # and the ranks leave the last one together
                    taken.append(timed(work, device))
                if repeat >= repeats // 10:
                    for direction, one in zip(DIRECTIONS, (*taken, sum(taken)), strict=True):
                        times[name, direction].append(one)
        times = slowest(times)
        for (name, direction), taken in times.items():
            row = {"what": "exchange", "channels": channels, "contender": name, "direction": direction}
            of = slice(*{"forward": (0, 1), "backward": (1, 2), "both": (0, 2)}[direction])
            row |= percentiles(taken, "us", (50, 95)) | counted(*contenders[name][of])
            rows.append(row | {"ratio": median(times["bare", direction]) / row["p50_us"]})
    return rows


def layers(channels: int, groups: dict, device: torch.device) -> dict[str, nn.Module]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    chosen = {"local": fastvit.SyncBatchNorm(channels, process_group=alone)}
    chosen |= {name: fastvit.SyncBatchNorm(channels, process_group=g) for name, g in groups.items()}
    if device.type == "cuda":
        chosen["torch SyncBatchNorm"] = nn.SyncBatchNorm(channels)
    chosen |= peer_layers(channels, [APEX])
    return {name: layer.to(device) for name, layer in chosen.items()}


def bench_step(shape: tuple[int, ...], groups: dict, repeats: int, device: torch.device) -> list[dict]:
    channels = shape[1]
    x = torch.randn(shape, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    together = exchange(
        next(reversed(groups.values())), torch.zeros(10, device=device), torch.zeros(8, device=device)
    )[0]
    gather, reduce = bare_exchange(
        torch.zeros(2 * channels + 2, device=device), torch.zeros(2 * channels, device=device)
    )
    contenders = layers(channels, groups, device)
    local = contenders["local"]
    steps = {
        name: (lambda layer=layer: layer(x), lambda y: y.backward(dy)) for name, layer in contenders.items()
    }
    steps["bare"] = gather, lambda _: reduce()
    times = {(name, d): [] for name in steps for d in DIRECTIONS}

    def begin_cold() -> None:
        """Not timed: what was in the caches goes, and the ranks begin together."""
        local(x).backward(dy)
        x.grad = None
        together()

    for repeat in range(repeats):
        for name, (forward, backward) in steps.items():
            kept: list = []
            begin_cold()
            first = timed(lambda forward=forward, kept=kept: kept.append(forward()), device)
            if name == "bare":  # each comes after work, as a layer's do
                begin_cold()
            second = timed(lambda backward=backward, kept=kept: backward(kept.pop()), device)
            if repeat >= repeats // 10:
                for direction, taken in zip(DIRECTIONS, (first, second, first + second), strict=True):
                    times[name, direction].append(taken)
    times = slowest(times)
    counts = {}
    for name, (forward, backward) in steps.items():
        x.grad, kept = None, []
        once = counted(lambda forward=forward, kept=kept: kept.append(forward()))
        again = counted(lambda backward=backward, kept=kept: backward(kept.pop()))
        both = {what: once[what] + again[what] for what in once}
        counts |= {(name, d): c for d, c in zip(DIRECTIONS, (once, again, both), strict=True)}
    rows = []
    for (name, direction), taken in times.items():
        row = {"what": "step", "shape": "x".join(map(str, shape)), "channels": channels}
        row |= {"contender": name, "direction": direction}
        row |= percentiles(taken, "us", (50, 95)) | counts[name, direction]
        row["ratio"] = median(t / alone for t, alone in zip(taken, times["local", direction], strict=True))
        if (APEX, direction) in times and name not in (APEX, "bare"):
            row["apex_ratio"] = median(a / t for a, t in zip(times[APEX, direction], taken, strict=True))
        rows.append(row)
    return rows


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
    except RuntimeError as error:  # on all ranks
        print(error)
    cores = sorted(os.sched_getaffinity(0))
    if not cuda and options.threads == 1 and world <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})  # this thread; gloo's, which exist by now, stay free
    repeats = max(20, options.repeats * 2 // world)
    rows = bench_exchange(groups, repeats, device) if "exchange" in options.what else []
    for shape in SHAPES[device.type] if "step" in options.what else ():
        rows += bench_step(shape, groups, repeats, device)
    if rank == 0:
        where = provenance(device.type)
        here = {"device_type": device.type, "cores": os.cpu_count(), "world": world}
        here |= {"threads": options.threads}
        if options.hosts:
            here |= {"hosts": options.hosts, "delay_ms": options.delay}
        rows = [here | row | where for row in rows]
        for row in rows:
            print(
                f"{world} ranks  {row['what']:9} C={row['channels']:<5} {row['contender']:20} "
                f"{row['direction']:9} {row['p50_us']:9.1f} us  p95 {row['p95_us']:9.1f}  "
                f"collectives {row['collectives']}  ops {row['ops']:2}  ratio {row['ratio']:.3f}  "
                f"apex / time {row.get('apex_ratio', '-')}"
            )
        (Path(folder) / ROWS).write_text(json.dumps(rows))
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
    parser.add_argument("--simulate", type=int, nargs="+", help="ranks")
    options = parser.parse_args()
    if options.simulate:
        return print(*many_ranks.table(options.simulate), sep="\n")
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
    name = f"sync_{'hosts_' if options.hosts else ''}{rows[0]['device_type']}"
    print(write_csv(options.name or name, rows, options.out))


if __name__ == "__main__":
    main()
