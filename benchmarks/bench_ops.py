"""Forward and backward of each layer, and each raw op, compared with torch's layers and the copy bandwidth.

    python benchmarks/bench_ops.py [--device cuda] [--out benchmarks/results] [--budget 150]
    python benchmarks/bench_ops.py --device cpu --threads 1
    python benchmarks/bench_ops.py --device cpu --quick --out /tmp/smoke     # tests the program

Device time of the named work only (see harness.Timer): cold caches, a new input each time, contenders in
turn. Forward and backward are timed separately; `both` is their sum. GB/s is computed with the passes over
the activation of fastvit's ops, for all contenders: forward 3 (2R + 1W), backward 5 (4R + 1W). `host` is the
host's time for launching; where it is longer than the device's time, it limits a training loop. `peak` is the
peak memory of the pass, in activations: forward with its input, backward with the saved tensors but without
dy. On a CPU the copy is of an activation of the same size with cold caches, and torch's functions for the
work of single ops take part. Tasks run in order of importance until the budget is spent; the others are
named. Writes ops_DEVICE.csv after every task, then a picture and a Markdown table.
"""

import argparse
import gc
import itertools
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median

import contenders
import roofline
import torch
from harness import RESULTS, Timer, kernel_count, percentiles, provenance, reuse_memory, write_csv
from shapes import LAYOUTS, Case, cases, cpu_cases, quick_cases
from torch import nn

MOST_REPEATS, LEAST_REPEATS = 40, 5
WARM_UP = 3


class Layer:
    """Steps of one layer on one case."""

    passes = {"forward": 3, "backward": 5, "both": 8}

    def __init__(self, layer: nn.Module, leaf: torch.Tensor, dy: torch.Tensor):
        wide = torch.promote_types(leaf.dtype, torch.float32)
        self.layer, self.leaf, self.dy = layer.to(leaf.device, wide), leaf, dy
        self.inputs = [leaf, *self.layer.parameters()]
        self.held = [None]  # popped when used, so that nothing but autograd keeps a tensor

    def fresh(self) -> None:
        self.held = [self.leaf.clone()]  # like a convolution's output: no leaf, and not shared

    def forward(self) -> None:
        self.held.append(self.layer(self.held.pop()))

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.held.pop(), self.inputs, self.dy)

    def step(self, timer: Timer) -> dict[str, tuple[float, float]]:
        """(device, host) milliseconds by pass."""
        self.fresh()
        timer.cold()
        forward = timer(self.forward), timer.host_ms
        timer.cold()
        backward = timer(self.backward), timer.host_ms
        return {
            "forward": forward,
            "backward": backward,
            "both": (forward[0] + backward[0], forward[1] + backward[1]),
        }

    def facts(self) -> dict[str, dict]:
        """Kernels and peak memory of each pass, on a GPU."""
        before = torch.cuda.memory_allocated()
        result = {"forward": {}, "backward": {}}
        self.fresh()
        result["forward"]["peak_activations"] = peak(self.forward, before) / self.leaf.nbytes
        result["backward"]["peak_activations"] = peak(self.backward, before) / self.leaf.nbytes
        self.fresh()
        result["forward"]["kernels"] = forward = kernel_count(self.forward)
        result["backward"]["kernels"] = backward = kernel_count(self.backward)
        result["both"] = {
            "peak_activations": max(r["peak_activations"] for r in result.values()),
            "kernels": forward + backward,
        }
        return result


class RawOp:
    """Calls of one op on one case."""

    def __init__(self, name: str, op: contenders.Op, nbytes: int):
        self.name, self.op, self.nbytes = name, op, nbytes
        self.passes = {name: op.passes}

    def step(self, timer: Timer) -> dict[str, tuple[float, float]]:
        self.op.prepare()
        timer.cold()
        return {self.name: (timer(self.op.call), timer.host_ms)}

    def facts(self) -> dict[str, dict]:
        before = torch.cuda.memory_allocated()
        self.op.prepare()
        activations = peak(self.op.call, before) / self.nbytes
        self.op.prepare()
        return {self.name: {"peak_activations": activations, "kernels": kernel_count(self.op.call)}}


def peak(work: Callable[[], object], before: int) -> int:
    """Most bytes allocated during `work`, over `before`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Bench:
    """Runs tasks; collects rows, and the contenders that could not be measured."""

    def __init__(self, device: str, seconds: float, timer: Timer):
        self.device, self.seconds, self.timer = device, seconds, timer
        self.where = provenance(device)
        self.rows: list[dict] = []
        self.absent: dict[str, str] = {}  # first reason by contender

    def task(self, task: str, case: Case) -> None:
        if self.device == "cuda" and 12 * case.nbytes > torch.cuda.mem_get_info()[0]:
            self._leave_out(f"{task} {case}", "needs more memory than is free")
            return
        x, dy = case.randn(self.device), case.randn(self.device)
        measured = {}
        if task == "ops":
            for name, op in contenders.raw_ops(case, x, dy).items():
                measured[f"fastvit.ops.{name}"] = RawOp(name, op, x.nbytes)
            for name, op in contenders.torch_ops(case, x, dy).items() if self.device == "cpu" else ():
                measured[f"torch {name}"] = RawOp(name, op, x.nbytes)
        else:
            x.requires_grad_()
            for name, make in contenders.layers(task, case, self.device).items():
                try:
                    candidate = Layer(make(), x, dy)
                    for _ in range(WARM_UP):
                        candidate.step(self.timer)
                    measured[name] = candidate
                except Exception as error:  # the others are measured all the same
                    if task == "layers":
                        raise
                    self._leave_out(name, f"{type(error).__name__}: {error}".splitlines()[0][:160])
        facts = {name: m.facts() if self.device == "cuda" else {} for name, m in measured.items()}
        times, copy = self._repeat(measured, x.nbytes)
        for name, work in measured.items():
            for op, passes in work.passes.items():
                self._row(case, name, op, passes, times[name], copy, facts[name].get(op, {}))

    def _repeat(self, measured: dict, nbytes: int) -> tuple[dict[str, list[dict]], float]:
        """Times by contender, in turn, within the time of a task; and the copy bandwidth."""
        times: dict[str, list[dict]] = {name: [] for name in measured}
        copies = []
        begin = time.perf_counter()
        gc.collect()
        gc.disable()
        try:
            for repeat in itertools.count():
                late = time.perf_counter() - begin > self.seconds
                if repeat == MOST_REPEATS or (repeat >= LEAST_REPEATS and late):
                    break
                copies.append(self.timer.copy_bandwidth(nbytes if self.device == "cpu" else None))
                for name, work in measured.items():
                    times[name].append(work.step(self.timer))
        finally:
            gc.enable()
        return times, median(copies)

    def _row(self, case: Case, name: str, op: str, passes: int, steps: list[dict], copy: float, facts: dict):
        device = percentiles([step[op][0] * 1e3 for step in steps], "us")
        bandwidth = passes * case.nbytes / device["p50_us"] / 1e3
        row = {
            "contender": name,
            "op": op,
            "shape": case.size,
            "layout": case.layout,
            "dtype": case.dtype,
            "threads": torch.get_num_threads() if self.device == "cpu" else "",
            "MB": case.nbytes / 1e6,
            **device,
            "host_us": percentiles([step[op][1] * 1e3 for step in steps], "us")["p50_us"],
            "passes": passes,
            "GB_s": bandwidth,
            "copy_GB_s": copy,
            "share_of_copy": bandwidth / copy,
            "peak_activations": facts.get("peak_activations", ""),
            "kernels": facts.get("kernels") or "",  # 0: the profiler saw none, but some there were
            "repeats": len(steps),
        }
        self.rows.append(row | self.where)
        print(
            f"{case!s:34} {name:30} {op:12} {row['p50_us']:9.1f} us (host {row['host_us']:7.1f})  "
            f"{row['GB_s']:7.0f} GB/s {row['share_of_copy']:5.2f} of copy  {row['kernels']!s:>3} kernels",
            flush=True,
        )

    def _leave_out(self, what: str, why: str) -> None:
        if what not in self.absent:
            self.absent[what] = why
            print(f"not measured: {what}: {why}", flush=True)


def name_of(task: tuple[int, str, Case]) -> str:
    return f"{task[1]} {task[2]}"


def tasks(all_cases: list[Case], compiled: int) -> list[tuple[str, Case]]:
    """(task, case) in order of importance, on a GPU."""
    first, rest = all_cases[:14], all_cases[14:]
    one_of_each = {case.layout: case for case in reversed(first)}
    few = [one_of_each[layout] for layout in LAYOUTS if layout in one_of_each]
    return [
        *(("layers", case) for case in first),
        *(("ops", case) for case in first[:8]),
        *(("peers", case) for case in few),
        *(("compiled", case) for case in few[:compiled]),
        *(("exchange", case) for case in few),
        *((task, case) for case in rest for task in ("layers", "ops")),
        *(("ops", case) for case in first[8:]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for csv, png and md")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no task is begun")
    parser.add_argument("--seconds", type=float, default=0.6, help="of repeats per task")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: is the program in order?")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU, each in turn (default: torch's)")
    parser.add_argument("--compiled", type=int, help="cases for torch.compile (default 2, with --quick 0)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "bench_ops: there is no CUDA GPU (--device cpu --quick needs none)\n")
    if options.device == "cpu":
        reuse_memory()
    begin = time.perf_counter()
    name = f"ops_{options.device}"
    bench = Bench(
        options.device,
        0.02 if options.quick else options.seconds,
        Timer(options.device, 1 << 20 if options.quick else None),
    )
    compiled = (0 if options.quick else 2) if options.compiled is None else options.compiled
    failed, todo = 0, tasks(quick_cases() if options.quick else cases(), compiled)
    if options.device == "cpu" and not options.quick:
        todo = [(task, case) for case in cpu_cases() for task in ("layers", "ops")]
    each = options.threads or [torch.get_num_threads()]
    todo = [(threads, *task) for threads in each for task in todo]
    while todo and time.perf_counter() - begin < options.budget:
        threads, task, case = todo.pop(0)
        torch.set_num_threads(threads)
        try:
            bench.task(task, case)
        except Exception:  # of one task; what the others measured is still worth having
            failed += 1
            traceback.print_exc()
            bench.absent[f"{task} {case}"] = "failed: " + traceback.format_exc().splitlines()[-1][:160]
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
        write_csv(name, bench.rows, options.out)
        text = roofline.table(bench.rows, bench.absent, list(map(name_of, todo)))
        (options.out / f"{name}.md").write_text(text)
    print(f"not reached within {options.budget:.0f} s: {', '.join(map(name_of, todo)) or 'nothing'}")
    contenders.end_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
