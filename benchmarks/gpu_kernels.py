"""Parts of bench_gpu.py that time kernels one after the other, and the host that launches them."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from statistics import median

import contenders
import torch
from shapes import RESNET, RESNET_LAYERS, Case, images, quick_cases, tokens

import fastvit
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
ACTIVATED = [*images(128, [RESNET[1]], BOTH, ("bf16", "fp32"))]
SLICED_BYTES = 16 << 20, 64 << 20
Call = tuple[int, Callable[[], object], Callable[[], object]]  # passes over an activation, the op, before it
Tasks = Iterator[tuple[object, Callable[[], None]]]  # see bench_gpu.Part


def nothing() -> None:
    pass


def timed(part, case: Case, op: str, nbytes: float, call, prepare=nothing, send=nothing, **row) -> None:
    """One row: times, and the share of a copy of as many bytes."""
    times = part.time(call, prepare, send)
    copy = median(part.timer.copy_bandwidth() for _ in range(3))
    bandwidth = nbytes / times["p50_us"] / 1e3
    part.row(
        op=op, **row, shape=case.size, layout=case.layout, dtype=case.dtype, MB=case.nbytes / 1e6, **times,
        GB_s=bandwidth, copy_GB_s=copy, share_of_copy=bandwidth / copy,
    )  # fmt: skip


def calls_of(part, case: Case, names: tuple[str, ...], make: Callable[[], dict[str, Call]], **row) -> Tasks:
    """A task per op. The tensors are made once, by the first task that needs them."""
    made = functools.cache(make)

    def work(op: str) -> None:
        passes, call, prepare = made()[op]
        timed(part, case, op, passes * case.nbytes, call, prepare, **row)

    for op in names:
        yield " ".join(map(str, (op, case, *row.values()))), functools.partial(work, op)


def copy(part) -> Tasks:
    def work(size: int) -> None:
        source = torch.rand(size // 4, device=part.device)
        target = torch.empty_like(source)
        times = part.time(lambda: target.copy_(source))
        part.row(what="copy", MB=size / 1e6, **times, GB_s=2 * size / times["p50_us"] / 1e3)

    for size in (1, 4, 16, 64, 256, 1024, 2048):
        yield f"{size} MiB", functools.partial(work, size << (8 if part.quick else 20))


def four_ops(part) -> Tasks:
    """Each op alone, then forward and backward of one rank of eight with their exchanges."""

    def work(raw: Callable[[], dict], case: Case, op: str) -> None:
        one = raw()[op]
        timed(
            part, case, op, one.passes * case.nbytes, one.call, one.prepare, one.send,
            contender=f"fastvit.ops.{op}",
        )  # fmt: skip

    chosen = quick_cases() if part.quick else FOUR_OPS
    for make, names in (
        (contenders.raw_ops, contenders.RAW_OPS),
        (contenders.exchanges, contenders.EXCHANGES if part.device == "cuda" else ()),
    ):
        for case in chosen:
            raw = functools.cache(lambda make=make, case=case: make(case, *_operands(case, part.device)))
            for op in names:
                yield f"{op} {case}", functools.partial(work, raw, case, op)


def _operands(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return case.randn(device), case.randn(device)


LOCAL_OPS = (
    "bn_forward without moments",
    "bn_backward without sums",
    "abn_forward_ without moments",
    "abn_backward without sums",
)


def local_calls(case: Case, device: str) -> dict[str, Call]:
    x, dy, d = case.randn(device), case.randn(device), case.channel_dim
    y, overwritten = x.clone(), x.clone()
    _, saved = ops.bn_forward(x, channel_dim=d)
    saved_of_y = ops.abn_forward_(y, channel_dim=d)
    return {
        "bn_forward without moments": (3, lambda: ops.bn_forward(x, channel_dim=d), nothing),
        "bn_backward without sums": (
            5,
            lambda: ops.bn_backward(x, dy, None, saved, channel_dim=d),
            nothing,
        ),
        "abn_forward_ without moments": (
            3,
            lambda: ops.abn_forward_(overwritten, channel_dim=d),
            lambda: overwritten.copy_(x),
        ),
        "abn_backward without sums": (5, lambda: ops.abn_backward(y, dy, saved_of_y, channel_dim=d), nothing),
    }


def on_chip(part) -> Tasks:
    wanted = os.environ.get("FASTVIT_ON_CHIP", "1")
    for case in quick_cases() if part.quick else FIT_ON_CHIP:
        make = functools.partial(local_calls, case, part.device)
        yield from calls_of(part, case, LOCAL_OPS, make, on_chip=wanted)


def slices(part) -> Tasks:
    def stats(case: Case) -> dict[str, Call]:
        x = case.randn(part.device)
        return {"bn_stats": (1, lambda: ops.bn_stats(x), nothing)}

    for total in (1 << 14,) if part.quick else SLICED_BYTES:
        for layout in BOTH:
            for c in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
                n = total // (2 * c * (4 if part.quick else 56 * 56))
                side = 2 if part.quick else 56
                if n > 0:
                    case = Case((n, c, side, side), layout, "bf16")
                    make = functools.partial(stats, case)
                    yield from calls_of(part, case, ("bn_stats",), make, channels=c)


def activation_calls(case: Case, device: str, activation: str) -> dict[str, Call]:
    x, dy, d = case.randn(device), case.randn(device), case.channel_dim
    act = {"activation": activation, "channel_dim": d}
    moments = ops.bn_stats(x, d)
    _, saved = ops.bn_forward(x, moments, **act)
    (sums,) = ops.bn_reduce(x, dy, None, saved, **act)
    calls: dict[str, Call] = {
        "bn_forward": (2, lambda: ops.bn_forward(x, moments, **act), nothing),
        "bn_reduce": (2, lambda: ops.bn_reduce(x, dy, None, saved, **act), nothing),
        "bn_backward": (3, lambda: ops.bn_backward(x, dy, None, saved, sums, **act), nothing),
    }
    if activation in ("elu", "leaky_relu"):
        y, overwritten = x.clone(), x.clone()
        ops.abn_forward_(y, moments, **act)
        calls |= {
            "abn_forward_": (
                2,
                lambda: ops.abn_forward_(overwritten, moments, **act),
                lambda: overwritten.copy_(x),
            ),
            "abn_reduce": (2, lambda: ops.abn_reduce(y, dy, saved, **act), nothing),
            "abn_backward": (3, lambda: ops.abn_backward(y, dy, saved, sums, **act), nothing),
        }
    return calls


def activations(part) -> Tasks:
    for case in quick_cases() if part.quick else ACTIVATED:
        for activation in ("relu", "elu", "gelu", "silu", "gelu_tanh", "hardswish", "leaky_relu"):
            names = ("bn_forward", "bn_reduce", "bn_backward")
            if activation in ("elu", "leaky_relu"):
                names += ("abn_forward_", "abn_reduce", "abn_backward")
            make = functools.partial(activation_calls, case, part.device, activation)
            yield from calls_of(part, case, names, make, activation=activation)


def host_ops(part) -> Tasks:
    """On tensors so small that the device's time is short; the minimum over rounds of calls, so few that a
    launch never waits for room in the stream. `plan_us` is the planning in `cpp_us`, for large tensors too.
    """
    calls, rounds = 200, 2 if part.quick else 30
    raw = torch.ops.fastvit

    def each(work: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(rounds):
            part.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            best = min(best, (time.perf_counter() - begin) / calls * 1e6)
        return best

    def of_op(layout: str, python: Callable, cpp: Callable, op: str) -> None:
        below, whole = each(cpp), each(python)
        part.row(op=op, layout=layout, cpp_us=below, python_us=whole - below, both_us=whole)

    def of_layer(layout: str, x: torch.Tensor, name: str) -> None:
        layer = getattr(fastvit, name)(8).to(part.device)
        leaf = x.detach().requires_grad_()
        forward = each(lambda: layer(leaf * 1.0))
        extra = each(lambda: leaf * 1.0)  # a tensor that may be overwritten
        part.row(op=f"{name}, forward", layout=layout, both_us=forward - extra)

    for layout in BOTH:
        x = Case((2, 8, 4, 4), layout, "fp32").randn(part.device)
        w, b = torch.ones(8, device=part.device), torch.zeros(8, device=part.device)
        moments = torch.rand(18, device=part.device)
        for op, python, cpp in host_calls(x, w, b, moments, moments.clone(), moments[:16], raw, (None,) * 3):
            yield f"{op} {layout}", functools.partial(of_op, layout, python, cpp, op)
        for name in ("InPlaceABN", "BatchNormAct"):
            yield f"{name} {layout}", functools.partial(of_layer, layout, x, name)
    yield "plans", functools.partial(plan_times, part)


def plan_times(part) -> None:
    import planner  # compiles the planner: a machine without a C++ compiler goes without

    resident = {(rows, packets): 2 for rows in (False, True) for packets in (False, True)}
    repeats = 400 if part.quick else 20_000

    def row(op: str, layers: str, took: list[float]) -> None:
        part.row(op=f"{op}, plan", layers=layers, plan_us=median(took) / 1e3, most_us=max(took) / 1e3)

    for layout in BOTH:
        for op, *kernel in (
            ("bn_stats", 1, 1),
            ("bn_forward", 2, 0),
            ("bn_reduce", 2, 2),
            ("bn_backward", 3, 0),
        ):
            row(op, f"53 of ResNet-50, {layout}", [
                planner.nanoseconds(case, *kernel, resident, 132, 82 << 10, repeats=repeats)
                for case in images(32, RESNET_LAYERS, (layout,), ("bf16",))
            ])  # fmt: skip
    for backward in (False, True):
        norms = [planner.nanoseconds(32 * 197, 384, 8, backward, repeats=repeats) for _ in range(24)]
        row(f"layer_norm_{'backward' if backward else 'forward'}", "24 of a ViT", norms)


def host_calls(x, w, b, moments, saved, sums, raw, none) -> Iterator[tuple[str, Callable, Callable]]:
    """(op, by fastvit.ops, by the dispatcher alone)."""
    act = ("leaky_relu", 0.01, 1)
    yield "bn_stats", lambda: ops.bn_stats(x), lambda: raw.bn_stats(x, 1, None)
    yield (
        "bn_forward",
        lambda: ops.bn_forward(x, moments, w, b, activation="leaky_relu"),
        lambda: raw.bn_forward(x, moments, w, b, None, *none, 0.1, 1e-5, *act),
    )
    yield (
        "bn_reduce",
        lambda: ops.bn_reduce(x, x, None, saved, w, b, "leaky_relu"),
        lambda: raw.bn_reduce(x, x, None, saved, w, b, *act, None),
    )
    yield (
        "bn_backward",
        lambda: ops.bn_backward(x, x, None, saved, sums, w, b, "leaky_relu"),
        lambda: raw.bn_backward(x, x, None, saved, sums, w, b, *act),
    )
    yield (
        "bn_forward without moments",
        lambda: ops.bn_forward(x, None, w, b, activation="leaky_relu"),
        lambda: raw.bn_forward(x, None, w, b, None, *none, 0.1, 1e-5, *act),
    )
    yield (
        "bn_backward without sums",
        lambda: ops.bn_backward(x, x, None, saved, None, w, b, "leaky_relu"),
        lambda: raw.bn_backward(x, x, None, saved, None, w, b, *act),
    )


def six_kernels(part) -> Tasks:
    """The four ops over rows, and over planes the two that read most."""

    def work(layout: str) -> None:
        case = Case((4, 8, 6, 6), layout, "fp32") if part.quick else Case((128, 256, 56, 56), layout, "bf16")
        x, dy = case.randn(part.device), case.randn(part.device)
        moments = ops.bn_stats(x)
        _, saved = ops.bn_forward(x, moments, activation="relu")
        if layout == "channels_last":
            (sums,) = ops.bn_reduce(x, dy, None, saved, activation="relu")
            ops.bn_backward(x, dy, None, saved, sums, activation="relu")
        part.row(what="launched")

    for layout in ("channels_last", "nchw"):
        yield layout, functools.partial(work, layout)
