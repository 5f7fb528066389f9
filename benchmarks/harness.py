"""Comparable timing: only the work inside the timer, cold caches, contenders in turn beside a copy.

Results have one form. A row has the case (`what`, `shape`, `dtype`, `threads`), the `contender` and the
`direction`, the time in us, its spread and its ratios, and the conditions: device, torch, CUDA, commit, date.
report.py writes such a file as a table.
"""

import argparse
import csv
import datetime
import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from fastvit.training.nvidia_apex import import_apex

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
FLUSH_BYTES = 256 << 20  # several times any cache
WARM_UP = 2  # turns
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


# glibc returns the memory of large tensors to the system, so each new tensor would cost page faults, which
# depend on its size and not on the layer. A training loop on a GPU reuses memory; so do the benchmarks.
REUSE_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def reuse_memory() -> None:
    """Restarts this program with an allocator that retains freed memory; glibc reads the option at start."""
    if any(os.environ.get(name) != value for name, value in REUSE_MEMORY.items()):
        os.environ.update(REUSE_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Taken(NamedTuple):
    """What one timing gave; the sum of two is `Taken(*map(sum, zip(one, other)))`."""

    ms: float  # of one call
    host_ms: float = 0.0  # on a GPU, what the host spends on queueing one call
    late: int = 0  # 1 if the host queued the last call after the GPU had begun: gaps may be measured


Calls = Sequence[Callable[[], object]]


class Timer:
    """Times a call on a CPU, with cold caches.

    With one thread by the processor's time, which other programs hardly lengthen, and with more by the clock.
    """

    turns = 15  # by default

    def __init__(self, device: str = "cpu", buffer_bytes: int = FLUSH_BYTES):
        self.device = torch.device(device)
        self._source = torch.rand(buffer_bytes // 4, device=device)
        self._copy = torch.empty_like(self._source)

    def rotation(self, nbytes: int, moved: int) -> tuple[int, int]:
        """How many sets of inputs of `nbytes`, and how many calls that move `moved`, one timing takes."""
        return 1, 1

    def __call__(self, calls: Calls, work: object, warm: Callable[[], object] = lambda: None) -> Taken:
        """Times calls of `work`, which have inputs of their own; `warm` precedes the timing.

        Flushing reads other data, since written lines would have to be written back first. It also evicts the
        code of the interpreter, of torch and of the op, which is warm in a training loop: `warm` is the same
        work on a few values.
        """
        (call,) = calls
        self._source.sum()
        warm()
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        call()
        return Taken((clock() - begin) * 1e3)

    def copy(self, nbytes: int) -> Taken:
        """A copy of `nbytes`."""
        pairs = list(zip(self._source.split(nbytes // 4), self._copy.split(nbytes // 4), strict=True))
        pairs = [pair for pair in pairs if pair[0].nbytes == pairs[0][0].nbytes]
        _, reps = self.rotation(nbytes, 2 * nbytes)
        calls = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in islice(cycle(pairs), reps)]
        return self(calls, ("copy", nbytes))


class CudaTimer(Timer):
    """Times many calls on a GPU between two events.

    One call would be timed with a pair of events, which costs as much as a small kernel. A delay kernel
    precedes the first event, so that the host has queued all calls before the first one begins. The inputs
    rotate over so many sets that no call finds its own in the L2 cache, and every result has its own memory.
    """

    turns = 7
    MIN_CALLS, MAX_CALLS, BYTES = 8, 60, 2 << 30  # of one timing, which moves about BYTES
    MAX_SETS = 64
    MAX_DELAY_MS = 20.0

    def __init__(self, device: str = "cuda", buffer_bytes: int = 1 << 30):
        super().__init__(device, buffer_bytes)
        self._l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._host_ms: dict[object, float] = {}  # of the last timing, by work
        for _ in range(100):  # clocks rise
            self._copy.copy_(self._source)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 10_000_000
        first.record()
        torch.cuda._sleep(cycles)
        last.record()
        torch.cuda.synchronize()
        self._cycles_per_ms = cycles / first.elapsed_time(last)

    def rotation(self, nbytes: int, moved: int) -> tuple[int, int]:
        """The sets exceed the L2 cache six times, unless they would be more than MAX_SETS."""
        sets = max(2, min(self.MAX_SETS, -(-6 * self._l2_bytes // nbytes)))
        calls = max(self.MIN_CALLS, min(self.MAX_CALLS, self.BYTES // moved))
        return sets, -(-calls // sets) * sets

    def __call__(self, calls: Calls, work: object, warm: Callable[[], object] = lambda: None) -> Taken:
        """Times `calls` behind a delay of twice what the host spent on this `work` before."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        delay = min(self.MAX_DELAY_MS, 0.5 + 2 * self._host_ms.get(work, 1.0))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(delay * self._cycles_per_ms))
        first.record()
        begin = time.perf_counter()
        results = [call() for call in calls]
        self._host_ms[work] = host = (time.perf_counter() - begin) * 1e3
        late = first.query()
        last.record()
        torch.cuda.synchronize()
        del results
        return Taken(first.elapsed_time(last) / len(calls), host / len(calls), int(late))


def timer_for(device: str, quick: bool = False) -> Timer:
    """The timer of a device; `quick` needs little memory."""
    size = {"buffer_bytes": 1 << 20} if quick else {}
    return (CudaTimer if device == "cuda" else Timer)(device, **size)


def percentiles(values: list[float], percents: tuple[int, ...] = (20, 50, 80)) -> dict[str, float]:
    """Percentiles in microseconds, by the name of a column."""
    ordered = sorted(values)
    return {f"p{p}_us": ordered[round(p / 100 * (len(ordered) - 1))] for p in percents}


def measure(
    contenders: Mapping[str, Callable[[], dict[str, Taken]]],
    timer: Timer,
    turns: int,
    nbytes: int,
    moved: Mapping[str, int],
) -> list[dict]:
    """Times contenders in turn and returns their rows; a contender returns what it took by direction.

    `times` is torch's time over the contender's, and `share_of_copy` the bandwidth at which it moves the
    bytes `moved`, by direction, as a share of a copy of `nbytes`: medians over turns, since the speed of a
    shared machine drifts. `spread` is the largest time less the least, over the median, and `late` the turns
    in which the host was late. A contender of MAY_FAIL that raises is not measured.
    """
    taken: dict[tuple[str, str], list[Taken]] = {}
    copies, left = [], dict(contenders)
    gc.collect()
    gc.freeze()  # collections, which precede each turn, then look at new objects alone
    gc.disable()
    try:
        for turn in range(WARM_UP + turns):
            gc.collect()
            copy = timer.copy(nbytes).ms
            copies += [copy] if turn >= WARM_UP else []
            for name in list(left):
                try:
                    step = left[name]()
                except Exception as error:
                    if turn or name not in MAY_FAIL or "CUDA error" in str(error):
                        raise
                    print(f"not measured: {name}: {type(error).__name__}: {str(error)[:200]}")
                    del left[name]
                    continue
                for direction, one in step.items() if turn >= WARM_UP else ():
                    taken.setdefault((name, direction), []).append(one)
    finally:
        gc.enable()
    rows = []
    for (name, direction), turns_taken in taken.items():
        own, host_ms, late = zip(*turns_taken, strict=True)
        row = {"contender": name, "direction": direction, **percentiles([1e3 * ms for ms in own])}
        if torchs := taken.get(("torch", direction)):
            row["times"] = median(t.ms / o for t, o in zip(torchs, own, strict=True))
        shares = [moved[direction] * copy / (2 * nbytes * ms) for ms, copy in zip(own, copies, strict=True)]
        row |= {"share_of_copy": median(shares), "copy_us": 1e3 * median(copies)}
        row |= {"copy_GB_s": 2 * nbytes / 1e6 / median(copies)}
        row |= {"spread": (max(own) - min(own)) / median(own), "late": sum(map(bool, late))}
        rows.append(row | {"host_us": 1e3 * median(host_ms) if any(host_ms) else ""})
    return rows


THIRD_PARTY: dict[str, Callable[[int], torch.nn.Module]] = {
    "apex SyncBatchNorm": lambda channels: import_apex("parallel").SyncBatchNorm(channels),
    "inplace_abn": lambda channels: import_module("inplace_abn").InPlaceABN(channels),
}
"""Layers of other libraries, over (N, C, *): how to make one; raises ImportError where it is not there."""
COMPILED = "torch.compile"
MAY_FAIL = (COMPILED, *THIRD_PARTY)


def third_party_layers(channels: int, names: Iterable[str] = THIRD_PARTY) -> dict[str, torch.nn.Module]:
    """The layers of THIRD_PARTY that can be imported; prints the reason for each other one."""
    found = {}
    for name in names:
        try:
            found[name] = THIRD_PARTY[name](channels)
        except ImportError as error:
            print(f"not measured: {name}: {error}")
    return found


def timed_us(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Microseconds of the host's clock until `work` is done, on a GPU too."""
    begin = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) * 1e6


def output_of(*command: str) -> str:
    """The output of a command; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this tree: FASTVIT_COMMIT, which a copy with another history or none needs, or git's."""
    if given := os.environ.get("FASTVIT_COMMIT"):
        return given
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    head = output_of(*git, "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    changed = output_of(*git, "status", "--porcelain", "--", "csrc", "fastvit", "setup.py")
    return head + ("+changes" if changed else "")


def provenance(device: str) -> dict[str, str]:
    """Device, software and date of a measurement."""
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": device_name(device),
        "driver": (driver or ["unknown"])[0] if on_gpu else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def conditions(row: dict[str, str], *more: str) -> str:
    """Where and when a row was measured."""
    return ", ".join([row["device"], *more, f"torch {row['torch']}", f"commit {row['commit']}", row["date"]])


def command_line(description: str, device: str | None = "cpu") -> argparse.ArgumentParser:
    """A parser with a program's docstring and --out, and --device with that default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if device:
        parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def read_csv(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of a table; none where there is no such file."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(header)} |", "|---" * len(header) + "|"] + [
        f"| {' | '.join(map(str, row))} |" for row in rows
    ]


def write_csv(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / f"{name}.csv", folder / f".{name}.csv"
    fields = list(dict.fromkeys(key for row in rows for key in row))
    try:
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
        new.replace(path)  # a full disk or a kill leaves the previous file as it was
    finally:
        new.unlink(missing_ok=True)
    return path
