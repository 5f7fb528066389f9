"""The part of bench_gpu.py in which kernels wait for other ranks."""

import functools

import torch
from gpu_kernels import Tasks
from loopback import Loopback

from fastvit import ops
from fastvit.sync.protocol import Tag

REPEATS = 60  # a difference of medians, in steps of an event's half microsecond
WORLDS, CHANNELS = (2, 4, 8), (64, 256, 512, 1024, 2048)


def exchange(part) -> Tasks:
    """The device's time with the exchange, without it, and the difference; `share` is the message alone."""

    def work(world: int, c: int, what: str) -> None:
        x, dy = torch.randn(4, c, device=part.device), torch.randn(4, c, device=part.device)
        loop, tag = Loopback(world, device=part.device), Tag(0, 0)
        backend = loop.ranks[0]
        moments = ops.bn_stats(x)
        _, saved = ops.bn_forward(x, moments)
        sums = ops.bn_reduce(x, dy, None, saved)

        def reduce(e):
            return ops.bn_reduce(x, dy, None, saved, exchange=e)

        numbers, alone, shared = {
            "moments": (moments, lambda: ops.bn_stats(x), lambda: backend.moments(x, 1, tag)),
            "sums": (sums, lambda: reduce(None), lambda: backend.sums(reduce, tag)),
            "share": (sums, None, lambda: backend.share(sums, tag)),
        }[what]
        without = part.time(alone, repeats=REPEATS)["p50_us"] if alone else 0.0
        times = part.time(shared, send=lambda: loop.send(0, [numbers] * world, tag), repeats=REPEATS)
        backend.check(wait=True)
        part.row(
            what=what, world=world, channels=c, **times, without_us=without,
            exchange_us=times["p50_us"] - without,
        )  # fmt: skip

    for world in WORLDS:
        for c in (8,) if part.quick else CHANNELS:
            for what in ("moments", "sums", "share"):
                yield f"{what}, W = {world}, C = {c}", functools.partial(work, world, c, what)
