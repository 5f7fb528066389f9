"""Comparable timing: only the work inside the timer, cold caches, contenders in turn.

Results have one form. A row has the case (`what`, `shape`, `dtype`, `threads`), the `contender` and the
`direction`, the time in us and its ratios, and the conditions: device, torch, CUDA, commit, date. report.py
writes such a file as a table.
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
from pathlib import Path
from statistics import median

import torch

from fastvit.training.nvidia_apex import import_apex

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
FLUSH_BYTES = 256 << 20  # several times any cache
COPY_BYTES = 2 << 30  # a GPU's buffers: larger than any activation of the benchmarks
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


class Timer:
    """Times callables on one device, with cold caches.

    On a GPU by CUDA events. Before the first event a delay kernel is queued, which is long enough for the
    host to queue all of the work, so that gaps between launches are not measured; gaps are measured in work
    that waits for the GPU itself. On a CPU with one thread by the processor's time, which other programs
    hardly lengthen, and with more by the clock.
    """

    HEAD_START = 0.5, 5.0  # milliseconds, least and most

    def __init__(self, device: str, buffer_bytes: int | None = None):
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        most = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8) if cuda else FLUSH_BYTES
        self._source = torch.rand((buffer_bytes or most) // 4, device=device)
        self._flush = self._source[: FLUSH_BYTES // 4]
        self._copy = torch.empty_like(self._source)
        self._head_start = self.HEAD_START[0]
        self._cycles = 0.0  # cycles of the delay kernel in a millisecond
        self._covered = True  # the last call was queued before the wait ended
        self.host_ms = 0.0  # what the host spent on the last call
        if cuda:
            for _ in range(200):  # clocks rise
                self._copy.copy_(self._source)
            cycles = 10_000_000
            waits = [self._events(lambda: torch.cuda._sleep(cycles)) for _ in range(5)]
            self._cycles = cycles / min(waits)

    def cold(self) -> None:
        """Flushes the caches by reading other data: written lines would have to be written back first."""
        self._flush.sum()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, work: Callable[[], object]) -> float:
        """Milliseconds that one call of `work` takes."""
        if self.device.type == "cuda":
            torch.cuda._sleep(int(self._head_start * self._cycles))
            taken = self._events(work)
            least, most = self.HEAD_START
            wanted = 2 * self.host_ms if self._covered else 2 * self._head_start
            self._head_start = min(most, max(least, wanted, 0.9 * self._head_start))
            return taken
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        work()
        return (clock() - begin) * 1e3

    def _events(self, work: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter()
        work()
        self.host_ms = (time.perf_counter() - begin) * 1e3
        self._covered = not start.query()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def copy_bandwidth(self, nbytes: int) -> float:
        """GB/s of a copy of `nbytes` with cold caches, bytes read plus bytes written."""
        source, copy = self._source[: nbytes // 4], self._copy[: nbytes // 4]
        self.cold()
        return 2 * source.nbytes / self(lambda: copy.copy_(source)) / 1e6


def percentiles(values: list[float], percents: tuple[int, ...] = (20, 50, 80)) -> dict[str, float]:
    """Percentiles in microseconds, by the name of a column."""
    ordered = sorted(values)
    return {f"p{p}_us": ordered[round(p / 100 * (len(ordered) - 1))] for p in percents}


def measure(
    contenders: Mapping[str, Callable[[], dict[str, float]]],
    timer: Timer,
    turns: int,
    nbytes: int,
    moved: Mapping[str, int],
) -> list[dict]:
    """Times contenders in turn and returns their rows; a contender returns milliseconds by direction.

    `times` is torch's time over the contender's, and `share_of_copy` the bandwidth at which it moves the
    bytes `moved`, by direction, as a share of a copy of `nbytes`: medians over turns, since the speed of a
    shared machine drifts.
    """
    taken: dict[tuple[str, str], list[float]] = {}
    copies = []
    gc.collect()
    gc.disable()
    try:
        for turn in range(WARM_UP + turns):
            copy = timer.copy_bandwidth(nbytes)
            steps = {name: step() for name, step in contenders.items()}
            if turn >= WARM_UP:
                copies.append(copy)
                for name, step in steps.items():
                    for direction, ms in step.items():
                        taken.setdefault((name, direction), []).append(ms)
    finally:
        gc.enable()
    rows = []
    for (name, direction), own in taken.items():
        row = {"contender": name, "direction": direction, **percentiles([1e3 * ms for ms in own])}
        if torchs := taken.get(("torch", direction)):
            row["times"] = median(t / o for t, o in zip(torchs, own, strict=True))
        shares = [moved[direction] / 1e6 / ms / copy for ms, copy in zip(own, copies, strict=True)]
        rows.append(row | {"share_of_copy": median(shares), "copy_GB_s": median(copies)})
    return rows


THIRD_PARTY: dict[str, Callable[[int], torch.nn.Module]] = {
    "apex SyncBatchNorm": lambda channels: import_apex("parallel").SyncBatchNorm(channels),
    "inplace_abn": lambda channels: import_module("inplace_abn").InPlaceABN(channels),
}
"""Layers of other libraries, over (N, C, *): how to make one; raises ImportError where it is not there."""


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
    """The commit of this tree, from git or, in a copy without history, from FASTVIT_COMMIT."""
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    head = output_of(*git, "rev-parse", "--short", "HEAD")
    if not head:
        return os.environ.get("FASTVIT_COMMIT") or "unknown"
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
