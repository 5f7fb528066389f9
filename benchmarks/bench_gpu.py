"""Benchmarks on a GPU in parts; `tools/gpu.py measure` runs them in this order.

    python benchmarks/bench_gpu.py PART [--device cuda] [--out benchmarks/results] [--budget 60]

    copy         bandwidth of a copy by size, to which others are compared
    four_ops     stats, forward, reduce, backward, plain and in place: three layouts, bf16 and fp32
    on_chip      local ops on tensors that fit on chip; FASTVIT_ON_CHIP=0 for two kernels a direction
    slices       bn_stats of one size by number of channels, and so of slices that are merged
    exchange     moments and sums by Loopback, with the peers' packets sent before: 2, 4, 8 ranks, C to 2048
    stream       throughput of a second stream while an exchange waits for a peer
    graph        a step of four layers, eager and replayed from a CUDA graph
    ipc          a step of a layer in two processes that share one GPU's memory by CudaIpc
    activations  forward and backward by activation
    host         host microseconds per op, for C++ and Python
    six_kernels  no timing: one launch of six kernels, for a profiler

Times by harness.Timer: of the device, with cold caches, medians. Writes PART_DEVICE.csv after every row.
`--device cpu` runs all code, on tiny shapes with --quick; its times are meaningless.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_kernels
import gpu_waits
import torch
from harness import RESULTS, Timer, percentiles, provenance, write_csv

REPEATS = 15


class Part:
    """Rows of one part, and the time that is left for it."""

    def __init__(self, name: str, table: str, device: str, out: Path, budget: float, quick: bool):
        self.name, self.table, self.device, self.out, self.quick = name, table, device, out, quick
        self.deadline = time.perf_counter() + budget
        self.rows: list[dict] = []
        self.timer = Timer(device, 1 << 20 if quick else None)
        self.where = provenance(device)
        self.left: list[str] = []

    def late(self, what: object) -> bool:
        """Whether the time is over before `what`, whose name is then printed."""
        if time.perf_counter() < self.deadline:
            return False
        self.left.append(str(what))
        return True

    def time(self, work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> dict:
        """Percentiles of microseconds, device and host."""
        device, host = [], []
        for repeat in range((2 if self.quick else REPEATS) + 2):
            prepare()
            self.timer.cold()
            taken = self.timer(work)
            if repeat >= 2:  # the first launches load kernels
                device.append(taken * 1e3)
                host.append(self.timer.host_ms * 1e3)
        return percentiles(device, "us") | {"host_us": percentiles(host, "us")["p50_us"]}

    def row(self, **row: object) -> None:
        self.rows.append({"part": self.name, **row} | self.where)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        self.write()

    def write(self) -> None:
        write_csv(f"{self.table}_{self.device}", self.rows, self.out)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def on(self, stream) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(stream) if stream else contextlib.nullcontext()

    def stream(self):
        return torch.cuda.Stream() if self.device == "cuda" else None


PARTS = {
    part.__name__: part
    for part in (
        gpu_kernels.copy, gpu_kernels.four_ops, gpu_kernels.on_chip, gpu_kernels.slices, gpu_waits.exchange,
        gpu_waits.stream, gpu_waits.graph, gpu_waits.ipc, gpu_kernels.activations, gpu_kernels.host,
        gpu_kernels.six_kernels,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    parser.add_argument("--name", help="of the table (default: the part's)")
    parser.add_argument("--budget", type=float, default=60, help="seconds after which no row is begun")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: is the program in order?")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "bench_gpu: there is no CUDA GPU (--device cpu --quick needs none)\n")
    table = options.name or options.part
    part = Part(options.part, table, options.device, options.out, options.budget, options.quick)
    PARTS[options.part](part)
    if part.left:
        print(f"not reached within {options.budget:.0f} s: {', '.join(part.left)}")
    sys.exit(0 if part.rows else 1)


if __name__ == "__main__":
    main()
