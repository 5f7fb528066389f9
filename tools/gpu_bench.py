"""Runs one benchmark for tools/gpu.py, in a new process after each fault; packs what was written."""

import contextlib
import json
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_process
from gpu_process import LATE, ROOT, SILENT

sys.path.append(str(ROOT / "benchmarks"))
import compare  # noqa: E402

LEAST = 10  # seconds for which a process is worth starting
RESERVE = 5  # seconds of a process for its last row
ENDED = (0, 1)  # statuses of a benchmark that came to its end: all in order, or some tasks failed


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """A file that cannot be written is said, and stops nothing: what is printed can still be read."""
    try:
        yield
    except OSError as error:
        print(f"  not written: {error}", flush=True)


def pack(folder: Path, archive: Path) -> None:
    """All files of a folder in one archive, which is replaced at once."""
    new = archive.with_name(f".{archive.name}")
    try:
        with tarfile.open(new, "w:gz") as tar:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file not in (archive, new):
                    tar.add(file, f"{folder.name}/{file.relative_to(folder)}")
        new.replace(archive)
    finally:
        new.unlink(missing_ok=True)


class Benchmark:
    """A program that says `begin NAME` before each task, and `failed NAME: why` after one that raised.

    A process that dies in a task, or says nothing for `patience` seconds, costs that task: another process
    continues behind it.
    """

    def __init__(self, command: list[str], environment: dict, patience: float | None):
        self.command, self.environment, self.patience = command, environment, patience
        self.output, self.status, self.rows = "", 0, 0
        self.begun: list[str] = []
        self.faults: list[str] = []

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            before = len(self.begun)
            budget = ["--budget", f"{max(2.0, left - RESERVE):.0f}"]
            environment = {**self.environment, "FASTVIT_BEGUN": json.dumps(self.begun)}
            ((self.status, output),) = gpu_process.run(
                [[*self.command, *budget]], left, environment, each_line=self._hear, patience=self.patience
            )
            self.output += output
            if self.status in (*ENDED, LATE) or len(self.begun) == before:
                break
            silent = self.status == SILENT
            why = f"no answer in {self.patience:.0f} s" if silent else f"ended its process ({self.status})"
            self.faults.append(f"{self.begun[-1]}: {why}")
            if deadline - time.monotonic() < LEAST:
                break

    def _hear(self, line: str) -> None:
        kind, _, rest = line.strip().partition(" ")
        if kind == "begin":
            self.begun.append(rest)
        elif kind == "failed":
            self.faults.append(rest)
        print(f"    {line.rstrip()}", flush=True)

    def compared(self, table: Path) -> list[str]:
        """The table's rows beside their predictions; counts all rows."""
        rows = compare.read(table)
        self.rows = len(rows)
        return compare.lines(compare.compared(rows, compare.predictions()))
