"""Each op of a batch norm, beside torch's function for the same work and a copy of the same size.

    python benchmarks/bench_ops.py [--device cpu|cuda] [--threads 1] [--turns N] [--out benchmarks/results]
    python benchmarks/bench_ops.py --quick --out /tmp/smoke     # tests the program

Two names in one row are one op for the work of both; `inplace` and `from_output` rows are those of a layer
in place, whose backward recovers its input from its output. Bandwidths are computed with the passes over the
activation of fastvit's ops, for torch's too, so that two ops and one op for both can be compared. torch's
functions are, on a CPU, those of its BatchNorm with leaky_relu; on a GPU, those of its SyncBatchNorm, which
apply no activation. Writes ops_DEVICE.csv after every case, and its table; with ATEN_CPU_CAPABILITY=avx2,
which lowers the instruction set, ops_cpu_avx2.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from harness import (
    DTYPES,
    Taken,
    Timer,
    command_line,
    measure,
    provenance,
    reuse_memory,
    timer_for,
    write_csv,
)
from report import write_table
from torch.nn import functional as F

from fastvit import ops

FORWARD, BACKWARD = "bn_stats, bn_forward", "bn_reduce, bn_backward"
REDUCE_OUTPUT, BACKWARD_OUTPUT = "bn_reduce from_output", "bn_backward from_output"
BOTH_OUTPUT = f"{BACKWARD} from_output"
# The passes of an op over the activation.
PASSES = {"bn_stats": 1, "bn_forward": 2, FORWARD: 3, "bn_reduce": 2, "bn_backward": 3, BACKWARD: 5}
PASSES |= {"bn_forward_inplace": 2, REDUCE_OUTPUT: 2, BACKWARD_OUTPUT: 3, BOTH_OUTPUT: 5, "act": 2}
Works = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """One activation: (N, C, H, W) in one of torch's memory formats, or tokens (N, L, C)."""

    shape: tuple[int, ...]
    layout: str  # nchw, channels_last or tokens
    dtype: str

    @property
    def channel_dim(self) -> int:
        return 2 if self.layout == "tokens" else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.layout}"

    def randn(self, device: str) -> torch.Tensor:
        x = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        return x.contiguous(memory_format=torch.channels_last) if self.layout == "channels_last" else x


def images(n: int, channels: int, side: int, dtype: str, layouts=("channels_last", "nchw")) -> list[Case]:
    return [Case((n, channels, side, side), layout, dtype) for layout in layouts]


def tokens(n: int, channels: int, dtype: str) -> Case:
    return Case((n, 197, channels), "tokens", dtype)


def cuda_cases() -> list[Case]:
    """Batches of 128 and 256 images, of which the L2 cache holds a part at most, and few images."""
    found = [*images(128, 256, 56, "bf16"), *images(128, 1024, 14, "bf16")]
    found += [tokens(n, 768, "bf16") for n in (128, 256, 32)]
    return [*found, *images(16, 256, 28, "bf16", ["channels_last"]), images(128, 256, 56, "fp32")[0]]


def cpu_cases() -> list[Case]:
    """Tokens, channels_last and planes, of 4 to 13 MB, and results of 39 to 103 MB, past the caches."""
    found = []
    for dtype in ("fp32", "bf16"):
        found += [tokens(32, 384, dtype), *images(64, 320, 10, dtype), *images(32, 2048, 7, dtype)]
        found += [*images(24, 192, 20, dtype, ["nchw"]), *images(16, 96, 40, dtype)]
        found += [tokens(128, 768, dtype), *images(64, 128, 56, dtype, ["nchw"])]
    for dtype in ("fp16", "fp64"):
        found += [tokens(32, 384, dtype), *images(16, 96, 40, dtype, ["nchw"])]
    return found


QUICK = [*images(4, 8, 6, "fp32"), Case((4, 9, 16), "tokens", "bf16")]


def raw_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> Works:
    """Each op alone, with inputs as from the ops before it."""
    c, d = case.channels, case.channel_dim
    weight = 1 - torch.rand(c, device=x.device) / 2  # values that are normalised again and again stay bounded
    bias = torch.rand(c, device=x.device) / 2
    running = torch.zeros(c, device=x.device), torch.ones(c, device=x.device)
    tail, moments = (weight, bias, None, "leaky_relu", 0.01, d), ops.bn_stats(x, d)
    _, saved = ops.bn_forward(x, *tail, moments)
    (sums,) = ops.bn_reduce(x, dy, saved, *tail)
    y, overwritten = x.clone(), x.clone()
    ops.bn_forward_inplace(y, *tail, moments)
    return {
        "bn_stats": lambda: ops.bn_stats(x, d),
        "bn_forward": lambda: ops.bn_forward(x, *tail, moments, *running),
        FORWARD: lambda: ops.bn_forward(x, *tail, None, *running),
        "bn_reduce": lambda: ops.bn_reduce(x, dy, saved, *tail),
        "bn_backward": lambda: ops.bn_backward(x, dy, saved, *tail, False, sums),
        BACKWARD: lambda: ops.bn_backward(x, dy, saved, *tail),
        "bn_forward_inplace": lambda: ops.bn_forward_inplace(overwritten, *tail, moments, *running),
        REDUCE_OUTPUT: lambda: ops.bn_reduce(y, dy, saved, *tail, True),
        BACKWARD_OUTPUT: lambda: ops.bn_backward(y, dy, saved, *tail, True, sums),
        BOTH_OUTPUT: lambda: ops.bn_backward(y, dy, saved, *tail, True),
        "act": lambda: ops.act_forward(x, None, "leaky_relu", 0.01),
    }


def torch_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> Works:
    """torch's functions for the same work, with names as those of `raw_ops`."""
    if case.layout == "tokens":
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, var = torch.ones(2, case.channels, dtype=wide, device=x.device)
    bias, mean = torch.zeros(2, case.channels, dtype=wide, device=x.device)
    act = {"act": lambda: F.leaky_relu(x, 0.01)}
    if x.is_cuda:
        return synced_ops(x, dy, weight, bias) | act

    def forward(training: bool = False):
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias, training), 0.01, inplace=True)

    def backward():
        dv = torch.ops.aten.leaky_relu_backward(dy, y, 0.01, True)
        return torch.ops.aten.native_batch_norm_backward(
            dv, x, weight, mean, var, mean, var, True, 1e-5, [True, True, True]
        )

    y = forward()
    return act | {
        "bn_stats": lambda: torch.batch_norm_update_stats(x, mean.clone(), var.clone(), 0.1),
        "bn_forward": forward,
        FORWARD: lambda: forward(training=True),
        BACKWARD: backward,
    }


def synced_ops(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Works:
    """The functions of torch.nn.SyncBatchNorm, without its collectives."""
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // weight.numel()], dtype=torch.int32, device=x.device)
    sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)[:2]

    def elemt(mean, invstd):
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)

    def reduce():
        return torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)

    def backward(sum_dy, sum_dy_xmu):
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)

    return {
        "bn_stats": lambda: torch.batch_norm_stats(x, 1e-5),
        "bn_forward": lambda: elemt(mean, invstd),
        FORWARD: lambda: elemt(*torch.batch_norm_stats(x, 1e-5)),
        "bn_reduce": reduce,
        "bn_backward": lambda: backward(*sums),
        BACKWARD: lambda: backward(*reduce()[:2]),
    }


def few_of(x: torch.Tensor) -> torch.Tensor:
    """A few values, which lie in memory as those of x do; for what warms a timer."""
    return (x[:2, :, :4, :4] if x.dim() == 4 else x[:2]).detach().clone()


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    """Rows of each op on one case."""
    device = timer.device.type
    x, dy = (case.randn(device) for _ in range(2))
    sets, _ = timer.rotation(x.nbytes, x.nbytes)
    inputs = [(x, dy), *((case.randn(device), case.randn(device)) for _ in range(sets - 1))]
    made = {"fastvit": raw_ops, "torch": torch_ops}
    works = {name: [make(case, *one) for one in inputs] for name, make in made.items()}
    few = {name: make(case, few_of(x), few_of(dy)) for name, make in made.items()}

    def step(name: str, op: str) -> dict[str, Taken]:
        _, reps = timer.rotation(x.nbytes, PASSES[op] * x.nbytes)
        calls = [work[op] for work in islice(cycle(works[name]), reps)]
        return {"": timer(calls, (name, op, case), few[name][op])}

    rows = []
    for op, passes in PASSES.items():
        contenders = {name: lambda name=name, op=op: step(name, op) for name in few if op in few[name]}
        found = measure(contenders, timer, turns, x.nbytes, {"": passes * x.nbytes})
        rows += [{"what": op, "shape": str(case), "dtype": case.dtype} | row for row in found]
    return rows


def instructions(device: torch.device) -> str:
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.ops.fastvit.cpu_capability()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: is the program in order?")
    parser.add_argument("--threads", type=int, nargs="+", help="each in turn (default: torch's)")
    parser.add_argument("--turns", type=int, help="timings of each op (default: 15, on a GPU 7)")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if not on_gpu:
        reuse_memory()
    timer = timer_for(options.device, options.quick)
    lowered = "" if on_gpu else os.environ.get("ATEN_CPU_CAPABILITY")
    name = f"ops_{options.device}" + (f"_{lowered}" if lowered else "")
    rows: list[dict] = []
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        where = {"threads": threads, "instructions": instructions(timer.device), **provenance(options.device)}
        for case in QUICK if options.quick else cuda_cases() if on_gpu else cpu_cases():
            rows += [row | where for row in bench(case, timer, options.turns or timer.turns)]
            write_table(write_csv(name, rows, options.out))
            print(f"{case} {case.dtype}, {threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
