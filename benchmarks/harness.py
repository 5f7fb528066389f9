"""Timing that can be compared: only the work inside the timer, cold caches, contenders in turn.

Every row of a results file says where it was measured: device, threads, torch, CUDA, commit, date.
"""

import csv
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
FLUSH_BYTES = 256 << 20


# glibc returns large tensors to the system when they are freed, so each new one pays for page faults that
# depend on its size and not on the layer. A training loop on a GPU reuses memory; so do the benchmarks.
REUSE_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def reuse_memory() -> None:
    """Starts this program again with an allocator that keeps freed memory; glibc reads that only at start."""
    if any(os.environ.get(name) != value for name, value in REUSE_MEMORY.items()):
        os.environ.update(REUSE_MEMORY)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Timer:
    """Times callables on one device: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self, device: str):
        self.device = torch.device(device)
        self._flush = torch.ones(FLUSH_BYTES // 4, device=self.device)
        self._copy = torch.empty_like(self._flush)

    def cold(self) -> None:
        """Puts something else into the caches, by reading: written lines would have to go back first."""
        self._flush.sum()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, work: Callable[[], object]) -> float:
        """Milliseconds that one call of `work` takes."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    def copy_bandwidth(self) -> float:
        """GB/s of one large copy, bytes read plus bytes written."""
        return 2 * self._flush.nbytes / self(lambda: self._copy.copy_(self._flush)) / 1e6


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}_ms": ordered[round(p / 100 * (len(ordered) - 1))] for p in (20, 50, 80)}


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def provenance(device: str) -> dict[str, str]:
    """Where and with what a row was measured."""

    def git(*command: str) -> str:
        result = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return result.stdout.strip()

    changed = git("status", "--porcelain", "--", "csrc", "fastvit", "setup.py")
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changed else ""),
        "date": datetime.date.today().isoformat(),
    }


def write_csv(name: str, rows: list[dict], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
    return path
