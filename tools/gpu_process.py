"""Programs with a time limit, and the archive that is renewed after every step; for tools/gpu.py."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATE = 124  # status of a command that exceeded the limit
SILENT = 125  # of one that said nothing for too long
LEAST = 2  # seconds for which a process is worth starting
RESERVE = 5  # seconds of a benchmark for its last row
ENDED = (0, 1)  # statuses of a benchmark that came to its end


def run(
    command: list[str],
    seconds: float,
    environment: dict | None = None,
    each_line: Callable[[str], None] = lambda line: None,
    patience: float | None = None,
) -> tuple[int, str]:
    """Status and output of a command, which is killed at the end with all its children.

    LATE for one that exceeds the limit, SILENT for one that says nothing for `patience` seconds after its
    first line. The output is read from a pipe: a file would need room on the disk.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        return 127, f"{command[0]}: {error}\n"
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [arrived.put(line) for line in process.stdout], daemon=True)
    reader.start()
    begin = heard = time.monotonic()
    lines: list[str] = []
    status = None

    def take(line: str) -> None:
        lines.append(line)
        each_line(line)

    while status is None:
        now = time.monotonic()
        if now - begin > seconds:
            status = LATE
        elif patience and lines and now - heard > patience:
            status = SILENT
        else:
            try:
                take(arrived.get(timeout=0.1))
                heard = time.monotonic()
            except queue.Empty:
                status = process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
        process.wait(5)
    reader.join(2)
    while not arrived.empty():
        take(arrived.get())
    return status, "".join(lines)


def counted(output: str) -> str:
    """pytest's last line of counts, or the last line of output."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    return (counts or lines or ["no output"])[-1][:160]


def pack(folder: Path) -> None:
    """All files of a folder in one archive beside it, which is replaced at once."""
    new = folder.with_name(f".{folder.name}.tar.gz")
    try:
        with tarfile.open(new, "w:gz") as tar:
            tar.add(folder, folder.name)
        new.replace(folder.with_name(f"{folder.name}.tar.gz"))
    finally:
        new.unlink(missing_ok=True)


class Benchmark:
    """A program that says `begin NAME` before each task, and `failed NAME: why` after one that raised.

    A process that dies in a task, or says nothing for `patience` seconds, costs that task: another process
    continues behind it.
    """

    def __init__(self, command: list[str], environment: dict, seconds: float, patience: float | None):
        self.output, self.status = "", LATE
        self.begun: list[str] = []
        self.faults: list[str] = []
        deadline, before = time.monotonic() + seconds, -1
        while len(self.begun) > before and (left := deadline - time.monotonic()) > LEAST:
            before = len(self.begun)
            limited = [*command, "--budget", f"{max(2.0, left - RESERVE):.0f}"]
            variables = {**environment, "FASTVIT_BEGUN": json.dumps(self.begun)}
            self.status, output = run(limited, left, variables, self._hear, patience)
            self.output += output
            if self.status in (*ENDED, LATE):
                break
            silent = self.status == SILENT
            why = f"no answer in {patience:.0f} s" if silent else f"ended its process ({self.status})"
            self.faults += [f"{name}: {why}" for name in self.begun[before:][-1:]]

    def _hear(self, line: str) -> None:
        kind, _, rest = line.strip().partition(" ")
        if kind == "begin":
            self.begun.append(rest)
        elif kind == "failed":
            self.faults.append(rest)
        print(f"    {line.rstrip()}", flush=True)
