"""Parts of bench_gpu.py that time kernels one after the other, and the host that launches them."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import contenders
from contenders import Op
from shapes import RESNET, Case, images, quick_cases, tokens

from fastvit import ops

BOTH = ("nchw", "channels_last")
FOUR_OPS = [
    case
    for dtype in ("bf16", "fp32")
    for case in (
        *images(128, [RESNET[1], RESNET[3], RESNET[0]], BOTH, (dtype,)),
        *tokens([(128, 768)], (dtype,)),
    )
] + images(32, RESNET[4:], BOTH, ("bf16",))
FIT_ON_CHIP = [  # at most 25 MB in bf16
    *images(8, RESNET[1:], BOTH, ("bf16",)),
    *images(32, RESNET[3:], BOTH, ("bf16",)),
    *tokens([(32, 384), (64, 384)], ("bf16",)),
    *images(8, RESNET[2:], BOTH, ("fp32",)),
]
Tasks = Iterator[tuple[object, Callable[[], None]]]  # see bench_gpu.Part


def nothing() -> None:
    pass


def timed(part, case: Case, op: str, nbytes: float, call, prepare=nothing, **row) -> None:
    """One row: times, and the share of a copy of as many bytes."""
    times = part.time(call, prepare)
    copy = median(part.timer.copy_bandwidth() for _ in range(3))
    bandwidth = nbytes / times["p50_us"] / 1e3
    part.row(
        op=op, **row, shape=case.size, layout=case.layout, dtype=case.dtype, MB=case.nbytes / 1e6, **times,
        GB_s=bandwidth, copy_GB_s=copy, share_of_copy=bandwidth / copy,
    )  # fmt: skip


def each_op(part, case: Case, names: tuple[str, ...], make: Callable[[], dict[str, Op]], **row) -> Tasks:
    """A task per op. The tensors are made once, by the first task that needs them."""
    made = functools.cache(make)

    def work(name: str) -> None:
        op = made()[name]
        timed(part, case, name, op.passes * case.nbytes, op.call, op.prepare, **row)

    for name in names:
        yield " ".join(map(str, (name, case, *row.values()))), functools.partial(work, name)


def raw_ops(case: Case, device: str) -> dict[str, Op]:
    return contenders.raw_ops(case, case.randn(device), case.randn(device))


def four_ops(part) -> Tasks:
    for case in quick_cases() if part.quick else FOUR_OPS:
        yield from each_op(part, case, contenders.RAW_OPS, functools.partial(raw_ops, case, part.device))


LOCAL_OPS = (
    "bn_forward without moments",
    "bn_backward without sums",
    "abn_forward_ without moments",
    "abn_backward without sums",
)


def local_ops(case: Case, device: str) -> dict[str, Op]:
    x, dy, d = case.randn(device), case.randn(device), case.channel_dim
    y, overwritten = x.clone(), x.clone()
    _, saved = ops.bn_forward(x, channel_dim=d)
    saved_of_y = ops.abn_forward_(y, channel_dim=d)
    calls = (
        Op(3, lambda: ops.bn_forward(x, channel_dim=d)),
        Op(5, lambda: ops.bn_backward(x, dy, None, saved, channel_dim=d)),
        Op(3, lambda: ops.abn_forward_(overwritten, channel_dim=d), lambda: overwritten.copy_(x)),
        Op(5, lambda: ops.abn_backward(y, dy, saved_of_y, channel_dim=d)),
    )
    return dict(zip(LOCAL_OPS, calls, strict=True))


def on_chip(part) -> Tasks:
    wanted = os.environ.get("FASTVIT_ON_CHIP", "1")
    for case in quick_cases() if part.quick else FIT_ON_CHIP:
        make = functools.partial(local_ops, case, part.device)
        yield from each_op(part, case, LOCAL_OPS, make, on_chip=wanted)


def host_ops(part) -> Tasks:
    """On tensors so small that the device's time is short; the least over rounds of calls, so few that a
    launch never waits for room in the stream.
    """
    calls, rounds = 200, 2 if part.quick else 30

    def work(made: Callable[[], dict[str, Op]], op: str, layout: str) -> None:
        call, best = made()[op].call, float("inf")
        for _ in range(rounds):
            part.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (time.perf_counter() - begin) / calls * 1e6)
        part.row(op=op, layout=layout, host_us=best)

    for layout in BOTH:
        case = Case((2, 8, 4, 4), layout, "fp32")
        made = functools.cache(functools.partial(raw_ops, case, part.device))
        for op in contenders.RAW_OPS:
            yield f"{op} {layout}", functools.partial(work, made, op, layout)
