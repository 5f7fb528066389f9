"""Benchmarks on a GPU in parts; `tools/gpu.py` runs them, in its order.

    python benchmarks/bench_gpu.py PART [--device cuda] [--out benchmarks/results]

    versus       layers beside torch's, eager and compiled, and other libraries': forward and backward
    row_ops      LayerNorm, activations and gates beside torch's
    models       fastvit.convert on a ViT and a ResNet: a step's time, memory, host, the largest batch
    four_ops     stats, forward, reduce, backward, plain and in place: three layouts, bf16 and fp32
    on_chip      local ops on tensors that fit on chip
    two_kernels  the same with FASTVIT_ON_CHIP=0, which takes two kernels a direction
    exchange     moments and sums by Loopback, with the peers' packets sent before: 2, 4, 8 ranks, C to 2048
    host_ops     host microseconds per op

Times by harness.Timer: of the device, with cold caches, medians. Writes PART_DEVICE.csv after every row.
A part is a sequence of tasks. One that raises costs its own rows. One that hangs, or spoils the GPU for this
process, ends the program; with --skip another one goes on behind it. `--device cpu` runs all code, on tiny
shapes with --quick; its times are meaningless.
"""

import faulthandler
import functools
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import gpu_kernels
import gpu_models
import gpu_versus
import gpu_waits
import torch
from gpu_kernels import nothing
from harness import Timer, command_line, percentiles, provenance, read_csv, write_csv

REPEATS = 15
HANGS = 90  # seconds of one task, compiling included, after which it hangs
Task = tuple[object, Callable[[], None]]  # a name, and what adds rows


class Part:
    """Rows of one part. No task begins after `until`, in seconds since 1970. `skip` tasks have been begun by
    an earlier process, whose rows are in the table.
    """

    def __init__(self, name: str, device: str, out: Path, until: float, quick: bool, skip: int = 0):
        self.name, self.device, self.out, self.quick = name, device, out, quick
        self.until, self.skip = until, skip
        self.rows: list[dict] = [*read_csv(self.table, out)] if skip else []
        self.where = provenance(device)
        self.left: list[str] = []
        self.failed: list[str] = []

    @property
    def table(self) -> str:
        return f"{self.name}_{self.device}"

    @functools.cached_property
    def timer(self) -> Timer:
        return Timer(self.device, 1 << 20 if self.quick else None)

    def run(self, tasks: Iterable[Task]) -> None:
        for what, work in itertools.islice(tasks, self.skip, None):
            name = str(what)
            if time.time() > self.until:
                self.left.append(name)
                continue
            print(f"begin {name}", flush=True)
            faulthandler.dump_traceback_later(HANGS, exit=True)  # out of CUDA's waits too
            try:
                work()
                self.synchronize()
            except Exception as error:
                self.failed.append(name)
                traceback.print_exc()
                print(f"failed {name}: {type(error).__name__}: {error}".splitlines()[0][:300], flush=True)
                if not self.usable():
                    sys.exit(1)
            finally:
                faulthandler.cancel_dump_traceback_later()
        if self.left:
            print(f"not reached: {', '.join(self.left)}")
        print("ended", flush=True)  # a part that was not cut, for tools/gpu.py

    def usable(self) -> bool:
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def time(
        self,
        work: Callable[[], object],
        prepare: Callable[[], object] = nothing,
        send: Callable[[], object] = nothing,
        repeats: int = REPEATS,
    ) -> dict:
        """Percentiles of microseconds, device and host. Caches are cold for what `prepare` left, and not for
        what `send` writes.
        """
        device, host = [], []
        for repeat in range((2 if self.quick else repeats) + 2):
            prepare()
            self.timer.cold()
            send()
            self.synchronize()
            taken = self.timer(work)
            if repeat >= 2:  # the first launches load kernels
                device.append(taken * 1e3)
                host.append(self.timer.host_ms * 1e3)
        return percentiles(device, "us") | {"host_us": percentiles(host, "us")["p50_us"]}

    def row(self, **row: object) -> None:
        self.rows.append({"part": self.name, **row} | self.where)
        cells = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(cells), flush=True)
        try:
            write_csv(self.table, self.rows, self.out)
        except OSError as error:  # a full disk: what is printed is still seen
            print(f"not written: {error}", flush=True)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


PARTS = {
    part.__name__: part
    for part in (
        gpu_versus.versus, gpu_versus.row_ops, gpu_models.models, gpu_kernels.four_ops,
        gpu_kernels.on_chip, gpu_waits.exchange, gpu_kernels.host_ops,
    )
} | {"two_kernels": gpu_kernels.on_chip}  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, "cuda")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--until", type=float, default=math.inf, help="begin no task after it, since 1970")
    parser.add_argument("--skip", type=int, default=0, help="tasks that an earlier call has begun")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: is the program in order?")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "bench_gpu: there is no CUDA GPU (--device cpu --quick needs none)\n")
    part = Part(options.part, options.device, options.out, options.until, options.quick, options.skip)
    part.run(PARTS[options.part](part))
    sys.exit(1 if part.failed or not part.rows else 0)


if __name__ == "__main__":
    main()
