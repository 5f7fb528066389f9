"""Each op of a batch norm, beside torch's function for the same work and a copy of the same size.

    python benchmarks/bench_ops.py [--device cpu|cuda] [--threads 1] [--out benchmarks/results]
    python benchmarks/bench_ops.py --quick --out /tmp/smoke     # tests the program

Bandwidths are computed with the passes over the activation of fastvit's ops, for torch's too. Writes
ops_DEVICE.csv after every case, and its table; with ATEN_CPU_CAPABILITY=avx2, which lowers the instruction
set, ops_cpu_avx2.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import DTYPES, Timer, command_line, measure, provenance, reuse_memory, write_csv
from report import write_table
from torch.nn import functional as F

from fastvit import ops

BACKWARD = "bn_reduce, bn_backward"  # one function of torch
# The passes of an op over the activation.
PASSES = {"bn_stats": 1, "bn_forward": 2, "abn_forward_": 2, "bn_reduce": 2, "abn_reduce": 2}
PASSES |= {"bn_backward": 3, "abn_backward": 3, BACKWARD: 5}


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
    """The stages of ResNet-50, where a whole batch and where few images are on a GPU, and tokens."""
    stages = (256, 56), (512, 28), (1024, 14), (2048, 7)
    found = []
    for dtype in ("bf16", "fp32"):
        found += [tokens(128, channels, dtype) for channels in (384, 768)]
        found += [case for n in (128, 8) for stage in stages for case in images(n, *stage, dtype)]
    return found


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


def raw_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Each op alone, with inputs as from the ops before it."""
    c, d = case.channels, case.channel_dim
    weight = 1 - torch.rand(c, device=x.device) / 2  # values that are normalised again and again stay bounded
    bias = torch.rand(c, device=x.device) / 2
    running = torch.zeros(c, device=x.device), torch.ones(c, device=x.device)
    parameters, act = (weight, bias), {"activation": "leaky_relu", "channel_dim": d}
    moments = ops.bn_stats(x, d)
    _, saved = ops.bn_forward(x, moments, *parameters, **act)
    (sums,) = ops.bn_reduce(x, dy, None, saved, *parameters, **act)
    y, overwritten = x.clone(), x.clone()
    ops.abn_forward_(y, moments, *parameters, **act)
    return {
        "bn_stats": lambda: ops.bn_stats(x, d),
        "bn_forward": lambda: ops.bn_forward(x, moments, *parameters, None, *running, **act),
        "abn_forward_": lambda: ops.abn_forward_(overwritten, moments, *parameters, *running, **act),
        "bn_reduce": lambda: ops.bn_reduce(x, dy, None, saved, *parameters, **act),
        "abn_reduce": lambda: ops.abn_reduce(y, dy, saved, *parameters, **act),
        "bn_backward": lambda: ops.bn_backward(x, dy, None, saved, sums, *parameters, **act),
        "abn_backward": lambda: ops.abn_backward(y, dy, saved, sums, *parameters, **act),
    }


def torch_ops(case: Case, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Callable[[], object]]:
    """torch's functions for the same work, with names as those of `raw_ops`; its backward is one function."""
    if case.layout == "tokens":
        x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, var = torch.ones(2, case.channels, dtype=wide, device=x.device)
    bias, mean = torch.zeros(2, case.channels, dtype=wide, device=x.device)

    def forward():
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias), 0.01, inplace=True)

    def backward():
        dz = torch.ops.aten.leaky_relu_backward(dy, y, 0.01, True)
        return torch.ops.aten.native_batch_norm_backward(
            dz, x, weight, mean, var, mean, var, True, 1e-5, [True, True, True]
        )

    y = forward()
    return {
        "bn_stats": lambda: torch.batch_norm_update_stats(x, mean.clone(), var.clone(), 0.1),
        "bn_forward": forward,
        BACKWARD: backward,
    }


def few_of(x: torch.Tensor) -> torch.Tensor:
    """A few values, which lie in memory as those of x do.

    Flushing the caches also evicts the code of the interpreter, of torch and of the op, which is warm in a
    training loop. So the same work on a few values precedes each timing on a CPU.
    """
    return (x[:2, :, :4, :4] if x.dim() == 4 else x[:2]).detach().clone()


def bench(case: Case, timer: Timer, turns: int) -> list[dict]:
    """Rows of each op on one case."""
    x, dy = (case.randn(timer.device.type) for _ in range(2))
    made = {"fastvit": raw_ops, "torch": torch_ops}
    calls = {name: make(case, x, dy) for name, make in made.items()}
    few = {name: make(case, few_of(x), few_of(dy)) for name, make in made.items()}

    def step(name: str, op: str) -> dict[str, float]:
        timer.cold()
        if timer.device.type == "cpu":
            few[name][op]()
        return {"": timer(calls[name][op])}

    rows = []
    for op, passes in PASSES.items():
        contenders = {name: lambda name=name, op=op: step(name, op) for name in calls if op in calls[name]}
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
    parser.add_argument("--turns", type=int, default=15, help="times of each op")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if not on_gpu:
        reuse_memory()
    timer = Timer(options.device, 1 << 20 if options.quick else None)
    lowered = "" if on_gpu else os.environ.get("ATEN_CPU_CAPABILITY")
    name = f"ops_{options.device}" + (f"_{lowered}" if lowered else "")
    rows: list[dict] = []
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        where = {"threads": threads, "instructions": instructions(timer.device), **provenance(options.device)}
        for case in QUICK if options.quick else cuda_cases() if on_gpu else cpu_cases():
            rows += [row | where for row in bench(case, timer, options.turns)]
            write_table(write_csv(name, rows, options.out))
            print(f"{case} {case.dtype}, {threads} thread(s)", flush=True)


if __name__ == "__main__":
    main()
