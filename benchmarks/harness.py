"""Comparable timing: a timing has no work but the contender's, caches are cold, and contenders take turns.

A copy of the same size is timed in each turn, too. All results have one form. A row has the case (`what`,
`shape`, `dtype`, `threads`), the `contender` and the `direction`, the time in us, its spread and its ratios,
and the conditions: device, torch, CUDA, commit, sources, date. `sources` is a checksum of the code that a
result measures. result_tables.py writes such a file as a table.
"""

import argparse
import csv
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from conditions import checksum_sources

from fastvit.training.nvidia_apex import import_apex

RESULTS = Path(__file__).resolve().parent / "results"
FLUSH_BYTES = 256 << 20  # several times any cache
WARM_UP_TURNS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


# glibc returns the memory of large tensors to the system, so each new tensor would cost page faults, which
# depend on its size and not on the layer. A training loop on a GPU reuses memory; so do the benchmarks.
REUSE_MEMORY_VARIABLES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def restart_with_reused_memory() -> None:
    """Restarts this program with an allocator that retains freed memory. glibc reads its options then."""
    if any(os.environ.get(name) != value for name, value in REUSE_MEMORY_VARIABLES.items()):
        os.environ.update(REUSE_MEMORY_VARIABLES)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Timing(NamedTuple):
    """The result of one timing. Two results are added by `Timing(*map(sum, zip(forward, backward)))`."""

    ms: float  # the time of one call
    host_ms: float = 0.0  # on a GPU, the time in which the host queues one call
    num_late: int = 0  # 1 if the GPU began before the host had queued the last call: `ms` may include gaps


Calls = Sequence[Callable[[], object]]


class Timer:
    """Times a call on a CPU, with cold caches.

    One thread is timed by the processor's time, which other programs hardly lengthen; several by the clock.
    """

    default_turns = 15

    def __init__(self, device: str = "cpu", buffer_bytes: int = FLUSH_BYTES):
        self.device = torch.device(device)
        self._source = torch.rand(buffer_bytes // 4, device=device)
        self._copy = torch.empty_like(self._source)

    def plan_rotation(self, nbytes: int, bytes_moved: int) -> tuple[int, int]:
        """Returns the number of input sets, of `nbytes` each, and of calls for one timing.

        A call moves `bytes_moved`.
        """
        return 1, 1

    def __call__(self, calls: Calls, key: object, warm_up: Callable[[], object] = lambda: None) -> Timing:
        """Times `calls`, each of which has inputs of its own. `warm_up` runs before the timing.

        The caches are flushed by reading other data, since written lines would have to be written back first.
        The flush also evicts the code of the interpreter, of torch and of the op, which is warm in a training
        loop. So `warm_up` is the same work on a few values. `key` identifies the work.
        """
        (call,) = calls
        self._source.sum()
        warm_up()
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        call()
        return Timing((clock() - begin) * 1e3)

    def copy(self, nbytes: int) -> Timing:
        """Times a copy of `nbytes`."""
        pairs = list(zip(self._source.split(nbytes // 4), self._copy.split(nbytes // 4), strict=True))
        pairs = [(source, copy) for source, copy in pairs if source.nbytes == pairs[0][0].nbytes]
        _, num_calls = self.plan_rotation(nbytes, 2 * nbytes)
        calls = [lambda s=source, c=copy: c.copy_(s) for source, copy in islice(cycle(pairs), num_calls)]
        return self(calls, ("copy", nbytes))


class CudaTimer(Timer):
    """Times many calls on a GPU between two events.

    A pair of events costs as much as a small kernel, so a timing has many calls. A delay kernel before the
    first event gives the host time to queue all calls, so that gaps between launches are not measured. The
    calls rotate over so many sets of inputs that no call finds its inputs in the L2 cache. Every result has
    its own memory.
    """

    default_turns = 7
    MIN_CALLS, MAX_CALLS = 8, 60  # of one timing
    BYTES_PER_TIMING = 2 << 30  # All calls of a timing move about so many bytes.
    MAX_SETS = 64
    MAX_DELAY_MS = 20.0

    def __init__(self, device: str = "cuda", buffer_bytes: int = 1 << 30):
        super().__init__(device, buffer_bytes)
        self._l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._host_ms: dict[object, float] = {}  # the host's time in the last timing of each key
        for _ in range(100):  # The GPU raises its clock only under load.
            self._copy.copy_(self._source)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 10_000_000
        first.record()
        torch.cuda._sleep(cycles)
        last.record()
        torch.cuda.synchronize()
        self._cycles_per_ms = cycles / first.elapsed_time(last)

    def plan_rotation(self, nbytes: int, bytes_moved: int) -> tuple[int, int]:
        """Returns the number of sets that are six times the L2 cache, at most MAX_SETS, and that of calls."""
        num_sets = max(2, min(self.MAX_SETS, -(-6 * self._l2_bytes // nbytes)))
        num_calls = max(self.MIN_CALLS, min(self.MAX_CALLS, self.BYTES_PER_TIMING // bytes_moved))
        return num_sets, -(-num_calls // num_sets) * num_sets

    def __call__(self, calls: Calls, key: object, warm_up: Callable[[], object] = lambda: None) -> Timing:
        """Times `calls` behind a delay of twice what the host spent on the last calls with this `key`."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        delay_ms = min(self.MAX_DELAY_MS, 0.5 + 2 * self._host_ms.get(key, 1.0))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(delay_ms * self._cycles_per_ms))
        first.record()
        begin = time.perf_counter()
        results = [call() for call in calls]
        self._host_ms[key] = host_ms = (time.perf_counter() - begin) * 1e3
        is_late = first.query()
        last.record()
        torch.cuda.synchronize()
        del results
        return Timing(first.elapsed_time(last) / len(calls), host_ms / len(calls), int(is_late))


def make_timer(device: str, quick: bool = False) -> Timer:
    """Returns the timer of a device. With `quick` the timer needs little memory, and caches are not cold."""
    size = {"buffer_bytes": 1 << 20} if quick else {}
    return (CudaTimer if device == "cuda" else Timer)(device, **size)


def percentiles(values: list[float], percents: tuple[int, ...] = (20, 50, 80)) -> dict[str, float]:
    """Returns percentiles in microseconds, by the name of a column."""
    ordered = sorted(values)
    return {f"p{p}_us": ordered[round(p / 100 * (len(ordered) - 1))] for p in percents}


def measure_in_turns(
    contenders: Mapping[str, Callable[[], dict[str, Timing]]],
    timer: Timer,
    turns: int,
    nbytes: int,
    bytes_moved: Mapping[str, int],
) -> list[dict]:
    """Times contenders in turn and returns their rows; a contender returns its timings by direction.

    The column `times` is a ratio, torch's time over the contender's. `share_of_copy` is the bandwidth at
    which the contender moves `bytes_moved[direction]`, over that of a copy of `nbytes`. Both are medians over
    turns, since the speed of a shared machine drifts. `spread` is the largest time less the least, over the
    median. `late` is the number of turns in which the host was late. A contender of MAY_FAIL that raises is
    not measured.
    """
    timings: dict[tuple[str, str], list[Timing]] = {}
    copies_ms, remaining = [], dict(contenders)
    gc.collect()
    gc.freeze()  # Later collections then visit only objects that the turns made.
    gc.disable()
    try:
        for turn in range(WARM_UP_TURNS + turns):
            gc.collect()
            copy_ms = timer.copy(nbytes).ms
            copies_ms += [copy_ms] if turn >= WARM_UP_TURNS else []
            for name in list(remaining):
                try:
                    by_direction = remaining[name]()
                except Exception as error:
                    if turn or name not in MAY_FAIL or "CUDA error" in str(error):
                        raise
                    print(f"not measured: {name}: {type(error).__name__}: {str(error)[:200]}")
                    del remaining[name]
                    continue
                for direction, timing in by_direction.items() if turn >= WARM_UP_TURNS else ():
                    timings.setdefault((name, direction), []).append(timing)
    finally:
        gc.enable()
    rows = []
    for (name, direction), by_turn in timings.items():
        times_ms, host_ms, num_late = zip(*by_turn, strict=True)
        row = {"contender": name, "direction": direction, **percentiles([1e3 * ms for ms in times_ms])}
        if torch_timings := timings.get(("torch", direction)):
            row["times"] = median(t.ms / ms for t, ms in zip(torch_timings, times_ms, strict=True))
        copies_of_work = bytes_moved[direction] / (2 * nbytes)
        shares = [copies_of_work * copy_ms / ms for ms, copy_ms in zip(times_ms, copies_ms, strict=True)]
        row |= {"share_of_copy": median(shares), "copy_us": 1e3 * median(copies_ms)}
        row |= {"copy_GB_s": 2 * nbytes / 1e6 / median(copies_ms)}
        row |= {
            "spread": (max(times_ms) - min(times_ms)) / median(times_ms),
            "late": sum(map(bool, num_late)),
        }
        rows.append(row | {"host_us": 1e3 * median(host_ms) if any(host_ms) else ""})
    return rows


APEX = "apex SyncBatchNorm"
THIRD_PARTY: dict[str, Callable[[int], torch.nn.Module]] = {
    APEX: lambda channels: import_apex("parallel").SyncBatchNorm(channels),
    "inplace_abn": lambda channels: import_module("inplace_abn").InPlaceABN(channels),
}
"""Functions that make layers of other libraries, over (N, C, *), or raise ImportError without the library."""
COMPILED = "torch.compile"
MAY_FAIL = (COMPILED, *THIRD_PARTY)


def third_party_layers(channels: int, names: Iterable[str] = THIRD_PARTY) -> dict[str, torch.nn.Module]:
    """Returns the layers of THIRD_PARTY that can be imported; prints why the others cannot."""
    layers = {}
    for name in names:
        try:
            layers[name] = THIRD_PARTY[name](channels)
        except ImportError as error:
            print(f"not measured: {name}: {error}")
    return layers


def time_us(
    function: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns microseconds of `clock` until the work of `function` is done, on a GPU too."""
    begin = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) * 1e6


def make_parser(description: str, device: str | None = "cpu") -> argparse.ArgumentParser:
    """Returns a parser with the options --out and, unless `device` is None, --device with this default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if device:
        parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def read_csv(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Returns the rows of a table, or none if the file is missing."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [{"sources": ""} | row for row in csv.DictReader(file)]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return [f"| {' | '.join(header)} |", "|---" * len(header) + "|"] + [
        f"| {' | '.join(map(str, row))} |" for row in rows
    ]


def write_csv(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    """Writes rows to NAME.csv in a folder, and returns the path. Floats get four digits.

    Rows without the checksum of their sources get that of today.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row | {"sources": row.get("sources", checksum_sources(name))} for row in rows]
    path, new_path = folder / f"{name}.csv", folder / f".{name}.csv"
    fields = list(dict.fromkeys(key for row in rows for key in row))
    try:
        with new_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
        new_path.replace(path)  # A full disk or a kill leaves the previous file unchanged.
    finally:
        new_path.unlink(missing_ok=True)
    return path
