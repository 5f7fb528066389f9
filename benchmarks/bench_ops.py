"""Forward and backward of each layer, and each raw op, beside torch's and a copy of the same size.

    python benchmarks/bench_ops.py [--device cpu|cuda] [--threads 1] [--out benchmarks/results]
    python benchmarks/bench_ops.py --quick --out /tmp/smoke     # tests the program

Time of the named work only: a new input each time, which no cache has, and contenders in turn. Forward and
backward are timed separately; `both` is their sum. GB/s is computed with the passes over the activation of
fastvit's ops, for all contenders: forward 3 (2R + 1W), backward 5 (4R + 1W). The copy is of an activation of
the same size with cold caches. Writes ops_DEVICE.csv and ops_DEVICE.md after every case; with
ATEN_CPU_CAPABILITY=avx2, which lowers the instruction set, ops_cpu_avx2.
"""

import gc
import itertools
import os
import time
from statistics import median

import contenders
import ops_table
import torch
from harness import Timer, command_line, percentiles, provenance, reuse_memory, write_csv
from shapes import Case, cases, cpu_cases, quick_cases
from torch import nn

MOST_REPEATS, LEAST_REPEATS = 40, 5
SECONDS = 0.6  # of repeats of a case
WARM_UP = 3


def few_of(x: torch.Tensor) -> torch.Tensor:
    """A few values, which lie in memory as those of x do.

    Flushing the caches also evicts the code of the interpreter, of torch and of the op, which is warm in a
    training loop. So the same work on a few values precedes each timing.
    """
    return (x[:2, :, :4, :4] if x.dim() == 4 else x[:2]).detach().clone()


class Layer:
    """Steps of one layer on one case."""

    passes = {"forward": 3, "backward": 5, "both": 8}

    def __init__(self, layer: nn.Module, leaf: torch.Tensor, dy: torch.Tensor):
        wide = torch.promote_types(leaf.dtype, torch.float32)
        self.layer, self.leaf, self.dy = layer.to(leaf.device, wide), leaf, dy
        self.inputs = [leaf, *self.layer.parameters()]
        self.few = few_of(leaf).requires_grad_()
        self.held = [None]  # popped when used, so that nothing but autograd keeps a tensor

    def fresh(self) -> None:
        self.held = [self.leaf.clone()]  # like a convolution's output: no leaf, and not shared

    def forward(self) -> None:
        self.held.append(self.layer(self.held.pop()))

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.held.pop(), self.inputs, self.dy)

    def cold(self, timer: Timer) -> None:
        timer.cold()
        if self.leaf.is_cuda:  # the host's code runs ahead of the device
            return
        y = self.layer(self.few.clone())
        torch.autograd.grad(y, [self.few, *self.layer.parameters()], torch.ones_like(y))

    def step(self, timer: Timer) -> dict[str, float]:
        """Milliseconds by pass."""
        self.fresh()
        self.cold(timer)
        forward = timer(self.forward)
        self.cold(timer)
        backward = timer(self.backward)
        return {"forward": forward, "backward": backward, "both": forward + backward}


class RawOp:
    """Calls of one op on one case; `few` is the op on a few values."""

    def __init__(self, name: str, op: contenders.Op, few: contenders.Op):
        self.name, self.op, self.few = name, op, few
        self.passes = {name: op.passes}

    def step(self, timer: Timer) -> dict[str, float]:
        self.op.prepare()
        timer.cold()
        if timer.device.type == "cpu":
            self.few.call()
        return {self.name: timer(self.op.call)}


def layers_of(case: Case, timer: Timer) -> dict[str, Layer]:
    device = timer.device.type
    x, dy = case.randn(device).requires_grad_(), case.randn(device)
    found = {name: Layer(make(), x, dy) for name, make in contenders.layers(case).items()}
    for layer in found.values():
        for _ in range(WARM_UP):
            layer.step(timer)
    return found


def ops_of(case: Case, timer: Timer) -> dict[str, RawOp]:
    x, dy = (case.randn(timer.device.type) for _ in range(2))
    few = few_of(x), few_of(dy)
    found = {}
    for prefix, ops in ("fastvit.ops.", contenders.raw_ops), ("torch ", contenders.torch_ops):
        warm = ops(case, *few)
        found |= {prefix + name: RawOp(name, op, warm[name]) for name, op in ops(case, x, dy).items()}
    return found


def measure(case: Case, measured: dict, timer: Timer, seconds: float) -> list[dict]:
    """Rows of contenders that were timed in turn."""
    times: dict[str, list[dict]] = {name: [] for name in measured}
    copies = []
    begin = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for repeat in itertools.count():
            late = time.perf_counter() - begin > seconds
            if repeat == MOST_REPEATS or (repeat >= LEAST_REPEATS and late):
                break
            copies.append(timer.copy_bandwidth(case.nbytes))
            for name, work in measured.items():
                times[name].append(work.step(timer))
    finally:
        gc.enable()
    copy = median(copies)
    return [
        row_of(case, name, op, passes, times[name], copy, timer)
        for name, work in measured.items()
        for op, passes in work.passes.items()
    ]


def row_of(case: Case, name: str, op: str, passes: int, steps: list[dict], copy: float, timer: Timer):
    taken = percentiles([step[op] * 1e3 for step in steps], "us")
    bandwidth = passes * case.nbytes / taken["p50_us"] / 1e3
    row = {
        "contender": name,
        "op": op,
        "shape": case.size,
        "layout": case.layout,
        "dtype": case.dtype,
        "instructions": instructions(timer.device),
        "threads": torch.get_num_threads(),
        "MB": case.nbytes / 1e6,
        **taken,
        "passes": passes,
        "GB_s": bandwidth,
        "copy_GB_s": copy,
        "share_of_copy": bandwidth / copy,
        "repeats": len(steps),
    }
    print(
        f"{case!s:34} {name:30} {op:12} {row['p50_us']:9.1f} us  {bandwidth:7.0f} GB/s "
        f"{row['share_of_copy']:5.2f} of copy",
        flush=True,
    )
    return row


def instructions(device: torch.device) -> str:
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return torch.ops.fastvit.cpu_capability()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: is the program in order?")
    parser.add_argument("--threads", type=int, nargs="+", help="each in turn (default: torch's)")
    options = parser.parse_args()
    device, on_gpu = options.device, options.device == "cuda"
    if not on_gpu:
        reuse_memory()
    timer, where = Timer(device, 1 << 20 if options.quick else None), provenance(device)
    lowered = "" if on_gpu else os.environ.get("ATEN_CPU_CAPABILITY")
    name = f"ops_{device}_{lowered}" if lowered else f"ops_{device}"
    chosen = quick_cases() if options.quick else cases() if on_gpu else cpu_cases()
    rows: list[dict] = []
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for case in chosen:
            for make in (layers_of, ops_of):
                found = measure(case, make(case, timer), timer, 0.02 if options.quick else SECONDS)
                rows += [row | where for row in found]
            write_csv(name, rows, options.out)
            (options.out / f"{name}.md").write_text(ops_table.table(rows))


if __name__ == "__main__":
    main()
