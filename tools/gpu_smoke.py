"""Every op once, in every layout of tests/cases.py, against the float64 reference; takes seconds.

    python tools/gpu_smoke.py [--device cuda] [--dtype float32 bfloat16 ...] [--seconds 25]

Needs torch and nothing else. Prints a line for each comparison that fails and `N passed, M failed` last;
exits with 1 if any failed or none ran. Kernels are launched one by one (CUDA_LAUNCH_BLOCKING), so that a
fault is reported by its own op. After such a fault the process cannot use the GPU, and ends.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from cases import LAYOUTS, Case, channels_last, fresh  # noqa: E402
from loopback import Loopback  # noqa: E402
from tolerances import check  # noqa: E402

from fastvit import ops, reference  # noqa: E402
from fastvit.sync.protocol import Tag  # noqa: E402

DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
LARGE = {  # several blocks to a channel, one of which merges what the others found
    "large planes": (lambda r: r(32, 4, 56, 56), 1),
    "large short planes": (lambda r: r(64, 64, 14, 14), 1),
    "large rows": (lambda r: channels_last(r(16, 64, 56, 56)), 1),
    "large tokens": (lambda r: r(32, 197, 96), 2),
}
# `activation`, what follows it, and the reference take the same options.
Check = tuple[str, Callable[[], None]]


def not_in_place(case: Case, activation: str, residual: bool) -> Iterator[Check]:
    d, z = case.channel_dim, case.z if residual else None
    act, affine = {"activation": activation, "channel_dim": d}, (case.weight, case.bias)
    moments = reference.bn_stats(case.x, d)
    saved = reference.bn_forward(case.x, moments, *affine, z, **case.buffers(), **act)[1]
    sums = reference.bn_reduce(case.x, case.dy, z, saved, *affine, **act)

    def forward(local: bool) -> None:
        ours, theirs = case.buffers(), case.buffers()
        if local:
            y, kept = ops.bn_forward(case.x, None, *affine, z, **ours, **act)
        else:
            y, kept = ops.bn_forward(case.x, moments, *affine, z, **ours, **act)
        want_y, want_kept = reference.bn_forward(case.x, moments, *affine, z, **theirs, **act)
        check("bn_forward", y, want_y)
        check("bn_stats", kept, want_kept)
        for name, buffer in ours.items():
            check("running", buffer.to(kept.dtype), theirs[name].to(kept.dtype))

    def backward(local: bool) -> None:
        if local:
            dx, dz, own = ops.bn_backward(case.x, case.dy, z, saved, None, *affine, **act)
            check("bn_reduce", own, sums[0], case.x.dtype)
        else:
            dx, dz, _ = ops.bn_backward(case.x, case.dy, z, saved, sums[0], *affine, **act)
        want = reference.bn_backward(case.x, case.dy, z, saved, sums[0], *affine, **act)
        check("bn_backward", dx, want[0])
        check("bn_backward", dz, want[1])

    yield "bn_stats", lambda: check("bn_stats", ops.bn_stats(case.x, d), moments, case.x.dtype)
    yield "bn_forward", lambda: forward(local=False)
    yield "bn_local_forward", lambda: forward(local=True)
    yield (
        "bn_apply",
        lambda: check(
            "bn_apply",
            ops.bn_apply(case.x, saved, *affine, z, **act),
            reference.bn_apply(case.x, saved, *affine, z, **act),
        ),
    )
    yield (
        "bn_reduce",
        lambda: check(
            "bn_reduce", ops.bn_reduce(case.x, case.dy, z, saved, *affine, **act), sums, case.x.dtype
        ),
    )
    yield "bn_backward", lambda: backward(local=False)
    yield "bn_local_backward", lambda: backward(local=True)


def in_place(case: Case, activation: str) -> Iterator[Check]:
    d = case.channel_dim
    act, affine = {"activation": activation, "channel_dim": d}, (case.weight, case.bias)
    moments = reference.bn_stats(case.x, d)
    want_y = fresh(case.x)
    saved = reference.abn_forward_(want_y, moments, *affine, **case.buffers(), **act)
    sums = reference.abn_reduce(want_y, case.dy, saved, *affine, **act)

    def forward(op: str) -> None:
        y = fresh(case.x)
        if op == "abn_forward":
            y, kept = ops.abn_forward(y, moments, *affine, **case.buffers(), **act)
        elif op == "abn_forward_":
            kept = ops.abn_forward_(y, moments, *affine, **case.buffers(), **act)
        else:
            kept = ops.abn_forward_(y, None, *affine, **case.buffers(), **act)
        check("abn_forward_", y, want_y)
        check("bn_stats", kept, saved)

    def backward(local: bool) -> None:
        if local:
            dx, own = ops.abn_backward(want_y, case.dy, saved, None, *affine, **act)
            check("abn_reduce", own, sums[0], case.x.dtype)
        else:
            dx, _ = ops.abn_backward(want_y, case.dy, saved, sums[0], *affine, **act)
        want = reference.abn_backward(want_y, case.dy, saved, sums[0], *affine, **act)
        check("abn_backward", dx, want[0])

    for op in ("abn_forward_", "abn_forward", "abn_local_forward_"):
        yield op, lambda op=op: forward(op)
    yield (
        "abn_reduce",
        lambda: check(
            "abn_reduce", ops.abn_reduce(want_y, case.dy, saved, *affine, **act), sums, case.x.dtype
        ),
    )
    yield "abn_backward", lambda: backward(local=False)
    yield "abn_local_backward", lambda: backward(local=True)


def vit_ops(case: Case, activation: str) -> Iterator[Check]:
    """LayerNorm over the last dimension, and from float32 to bfloat16; an activation, and a gate."""
    x, dy, z = case.x, case.dy, case.z
    weight = torch.linspace(0.5, 1.5, x.shape[-1], device=x.device)

    def layer_norm(output_dtype: torch.dtype) -> None:
        y, saved = ops.layer_norm_forward(x, weight, weight, output_dtype=output_dtype)
        want, want_saved = reference.layer_norm_forward(x, weight, weight, output_dtype=output_dtype)
        check("layer_norm_forward", y, want)
        check("layer_norm_saved", saved, want_saved, x.dtype)
        given = (x, dy.to(output_dtype), want_saved, weight)
        results = zip(ops.layer_norm_backward(*given), reference.layer_norm_backward(*given), strict=True)
        rows = (x.numel() / x.shape[-1]) ** 0.5
        for (got, want), row in zip(results, ("layer_norm_backward", "layer_norm_sums"), strict=True):
            check(row, got, want, x.dtype, least_scale=rows if row == "layer_norm_sums" else 1e-3)

    def gates() -> None:
        for op, given in (
            ("act_forward", (x,)),
            ("act_backward", (x, dy)),
            ("glu_forward", (x, z)),
            ("glu_backward", (x, z, dy)),
        ):
            results = [getattr(of, op)(*given, activation, 1.0) for of in (ops, reference)]
            results = [r if isinstance(r, tuple) else (r,) for r in results]
            for got, want in zip(*results, strict=True):
                check(op, got, want)

    yield "layer_norm", lambda: layer_norm(x.dtype)
    if x.dtype == torch.float32:
        yield "layer_norm to bfloat16", lambda: layer_norm(torch.bfloat16)
    yield "act, glu", gates


def exchange(device: str, dtype: torch.dtype) -> Iterator[Check]:
    """One of two ranks, whose peer's packets are there before it is launched: moments and sums of both."""
    x, other = Case("nchw", dtype, device), Case("nchw", dtype, device, seed=1)
    moments = torch.stack([reference.bn_stats(case.x).to(x.weight.dtype) for case in (x, other)])
    merged = reference.merge_moments(moments)
    saved = reference.bn_forward(x.x, merged)[1]
    sums = [reference.bn_reduce(case.x, case.dy, None, saved) for case in (x, other)]

    def of_moments() -> None:
        loop, tag = Loopback(2, device=device), Tag(0, 1)
        loop.send(0, list(moments), tag)
        got = loop.ranks[0].moments(x.x, 1, tag)
        loop.ranks[0].check(wait=True)
        check("bn_stats", got, merged, dtype)

    def of_sums() -> None:
        loop, tag = Loopback(2, device=device), Tag(0, 1)
        loop.send(0, sums, tag)
        got = loop.ranks[0].sums(lambda e: ops.bn_reduce(x.x, x.dy, None, saved, exchange=e), tag)
        loop.ranks[0].check(wait=True)
        check("bn_reduce", got[1], sums[0][0] + sums[1][0], dtype)

    yield "bn_stats, exchange", of_moments
    yield "bn_reduce, exchange", of_sums


def checks(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Iterator[Check]]]]:
    """(layout, its checks), with activations in turn: each is used in some layout."""
    LAYOUTS.update(LARGE)
    outputs = ("relu", "gelu", "identity", "silu", "leaky_relu", "hardswish", "relu6", "gelu_tanh", "elu")
    order = ("nchw", "nhwc_c96", "tokens", *LARGE)
    order += tuple(layout for layout in LAYOUTS if layout not in order)
    for i, layout in enumerate(order):

        def both(i: int = i, layout: str = layout) -> Iterator[Check]:
            case = Case(layout, dtype, device)
            yield from not_in_place(case, outputs[i % len(outputs)], residual=i % 2 == 1)
            yield from in_place(case, ("leaky_relu", "elu", "identity")[i % 3])
            yield from vit_ops(case, outputs[i % len(outputs)])

        yield layout, both
    yield "nchw", lambda: exchange(device, dtype)


def usable(device: str) -> bool:
    """Whether the GPU still works for this process after a fault."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=25, help="after which no layout is begun")
    options = parser.parse_args()
    begin, passed, failed, left = time.monotonic(), 0, 0, 0

    def fail(what: str, error: Exception) -> None:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        print(f"FAILED {what}: {said}", flush=True)
        if not usable(options.device):
            print(
                f"after {what} the GPU takes no more work of this process; {passed} passed, {failed} failed"
            )
            sys.exit(1)

    for dtype in options.dtype:
        for layout, of_layout in checks(options.device, DTYPES[dtype]):
            if time.monotonic() - begin > options.seconds:
                left += 1
                continue
            name = "making the inputs"
            try:
                for name, one in of_layout():
                    try:
                        one()
                        passed += 1
                    except Exception as error:
                        failed += 1
                        fail(f"{name} {layout} {dtype}", error)
            except Exception as error:  # of the reference
                failed += 1
                fail(f"after {name} {layout} {dtype}", error)
    late = f", {left} layouts not reached within {options.seconds:.0f} s" if left else ""
    print(f"{passed} passed, {failed} failed{late}")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
