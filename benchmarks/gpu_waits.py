"""Parts of bench_gpu.py in which kernels wait for each other, or a CUDA graph launches them."""

import datetime
import functools
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_kernels import Tasks
from harness import Timer, percentiles
from loopback import Loopback
from shapes import RESNET, Case, images
from torch import nn

import fastvit
from fastvit import ops, sync
from fastvit.sync.protocol import Tag

BOTH = ("nchw", "channels_last")
WORLDS, CHANNELS = (2, 4, 8), (64, 256, 512, 1024, 2048)


def exchange(part) -> Tasks:
    """The device's time with the exchange, without it, and the difference; `share` is the message alone."""

    def work(world: int, c: int, what: str) -> None:
        x, dy = torch.randn(4, c, device=part.device), torch.randn(4, c, device=part.device)
        loop, tag = Loopback(world, device=part.device), Tag(0, 0)
        way = loop.ranks[0]
        moments = ops.bn_stats(x)
        _, saved = ops.bn_forward(x, moments)
        sums = ops.bn_reduce(x, dy, None, saved)

        def reduce(e):
            return ops.bn_reduce(x, dy, None, saved, exchange=e)

        numbers, alone, shared = {
            "moments": (moments, lambda: ops.bn_stats(x), lambda: way.moments(x, 1, tag)),
            "sums": (sums, lambda: reduce(None), lambda: way.sums(reduce, tag)),
            "share": (sums, None, lambda: way.share(sums, tag)),
        }[what]
        without = part.time(alone)["p50_us"] if alone else 0.0
        times = part.time(shared, send=lambda: loop.send(0, [numbers] * world, tag))
        way.check(wait=True)
        part.row(
            what=what, world=world, channels=c, **times, without_us=without,
            exchange_us=times["p50_us"] - without,
        )  # fmt: skip

    for world in WORLDS:
        for c in (8,) if part.quick else CHANNELS:
            for what in ("moments", "sums", "share"):
                yield f"{what}, W = {world}, C = {c}", functools.partial(work, world, c, what)


def stream(part) -> Tasks:
    """A stream of small ops, alone and beside a kernel that waits for a peer's packets."""
    for repeat in range(3):
        yield f"repeat {repeat}", functools.partial(_stream, part)


def _stream(part) -> None:
    x = torch.randn(8, 64, 8, 8, device=part.device)
    work = torch.randn((8, 64, 8, 8) if part.quick else (64, 256, 28, 28), device=part.device)
    beside, waiting = part.stream(), part.stream()

    def busy() -> float:
        begin = time.perf_counter()
        with part.on(beside):
            for _ in range(50):
                ops.bn_stats(work)
        if beside:
            beside.synchronize()
        return (time.perf_counter() - begin) * 1e6

    part.synchronize()
    loop, tag, moments = Loopback(2, timeout=20.0, device=part.device), Tag(0, 0), ops.bn_stats(x)
    loop.send(0, [moments, moments], tag)  # once before: kernels are loaded at their first launch, which may
    loop.ranks[0].moments(x, 1, tag)  # wait for running kernels
    alone = min(busy() for _ in range(3))
    if waiting is None:  # on a CPU a wait is the caller's
        loop.send(0, [moments, moments], tag)
    part.synchronize()
    with part.on(waiting):
        got = loop.ranks[0].moments(x, 1, tag)
    during = min(busy() for _ in range(3))
    still = waiting is None or not waiting.query()
    if waiting:
        with part.on(beside):
            loop.send(0, [moments, moments], tag)
    part.synchronize()
    loop.ranks[0].check(wait=True)
    part.row(
        what="50 x bn_stats", alone_us=alone, during_us=during, ratio=during / alone,
        exchange_waited=still, arrived=bool(got.isfinite().all()),
    )  # fmt: skip


def graph(part) -> Tasks:
    cases = [Case((4, 8, 6, 6), "nchw", "fp32")] if part.quick else images(32, RESNET[1:4], BOTH, ("bf16",))
    for case in cases:
        yield case, functools.partial(_graph, part, case)


def _graph(part, case: Case) -> None:
    model = nn.Sequential(*(fastvit.BatchNormAct(case.channels) for _ in range(4))).to(part.device)
    leaf, dy = case.randn(part.device).requires_grad_(), case.randn(part.device)
    inputs = [leaf, *model.parameters()]

    def step():
        return torch.autograd.grad(model(leaf), inputs, dy)

    eager = part.time(step)
    replay = step
    if part.device == "cuda":
        side = part.stream()
        side.wait_stream(torch.cuda.current_stream())
        with part.on(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        replay = captured.replay
    for what, times in (("eager", eager), ("replayed", part.time(replay))):
        part.row(what=what, shape=case.size, layout=case.layout, dtype=case.dtype, **times)


def _rank(rank: int, store: str, device: str, sizes: list, quick: bool, results) -> None:
    """One of two processes on one GPU."""
    os.environ["FASTVIT_STATISTICS"] = "peer"
    if device == "cuda":
        torch.cuda.set_device(0)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    timer, rows = Timer(device, 1 << 20), []
    for shape in sizes:
        layer = fastvit.InPlaceABNSync(shape[1]).to(device)
        leaf = torch.randn(shape, device=device, requires_grad=True)
        dy, times = torch.randn(shape, device=device), []

        def step(layer=layer, leaf=leaf, dy=dy):
            return torch.autograd.grad(layer(leaf.clone()), leaf, dy)

        for _ in range(3 if quick else 20):
            dist.barrier()
            times.append(timer(step) * 1e3)
        rows.append({"shape": "x".join(map(str, shape)), **percentiles(times[1:], "us")})
    results.put((rank, " ".join(sync.describe_groups()), rows))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def ipc(part) -> Tasks:
    """The two take turns on the GPU, so times are those of switching; it shows that numbers arrive."""
    yield "two processes", functools.partial(_ipc, part)


def _ipc(part) -> None:
    sizes = [(4, 8, 6, 6)] if part.quick else [(8, 64, 28, 28), (32, 256, 28, 28), (32, 2048, 7, 7)]
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", part.device, sizes, part.quick, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
        try:
            for process in processes:
                process.start()
            left = max(5.0, part.deadline - time.perf_counter())
            got = sorted(results.get(timeout=left) for _ in processes)
            for process in processes:
                process.join(10)
        finally:
            for process in filter(mp.Process.is_alive, processes):
                process.kill()
    for rank, way, rows in got:
        for row in rows:
            part.row(what="step of InPlaceABNSync", rank=rank, way=way, **row)
