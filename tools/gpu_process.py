"""Runs programs for tools/gpu.py with a time limit, and kills their children too."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATE = 124  # status of a command that exceeded the limit
SILENT = 125  # of one that said nothing for too long
SAY_EVERY = 15  # seconds
UNSUPPORTED = "Device not supported"
ERROR_STATUS = 99


class _Process:
    """A running command, and a thread that reads its output: a file would need room on the disk."""

    def __init__(self, command: list[str], variables: dict, each_line: Callable[[str], None]):
        self.lines: list[str] = []
        self.heard = time.monotonic()
        self.process = self.thread = None
        try:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            self.lines.append(f"{command[0]}: {error}\n")
            return
        self.thread = threading.Thread(target=self._read, args=(each_line,), daemon=True)
        self.thread.start()

    def _read(self, each_line: Callable[[str], None]) -> None:
        for line in self.process.stdout:
            self.heard = time.monotonic()
            self.lines.append(line)
            each_line(line)

    def ended(self) -> None:
        """Kills what it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
            self.process.wait(5)
        self.thread.join(2)


def run(
    commands: list[list[str]],
    seconds: float,
    environment: dict | None = None,
    waiting: str = "",
    each_line: Callable[[str], None] = lambda line: None,
    patience: float | None = None,
) -> list[tuple[int, str]]:
    """(status, output) of commands that run in parallel; LATE for one that exceeds the time limit, SILENT for
    one that says nothing for `patience` seconds after its first line.

    What is waited for is printed from time to time, if it has a name.
    """
    begin = time.monotonic()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
    started = [_Process(command, variables, each_line) for command in commands]
    results = []
    for one in started:
        status = 127
        if one.process:
            status = _wait(one, begin, seconds, waiting, patience)
            one.ended()
        results.append((status, "".join(one.lines)))
    return results


def _wait(one: _Process, begin: float, seconds: float, waiting: str, patience: float | None) -> int:
    said = begin
    while True:
        left = seconds - (time.monotonic() - begin)
        try:
            return one.process.wait(max(0.0, min(left, 1.0)))
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if now - begin >= seconds:
            return LATE
        if patience and one.lines and now - one.heard > patience:
            return SILENT
        if waiting and now - said >= SAY_EVERY:
            said = now
            print(f"  waiting for {waiting}: {now - begin:.0f} of {seconds:.0f} s", flush=True)


def pytest(*arguments: str) -> list[str]:
    """A pytest command that takes no options from the project: some need plugins that may be missing."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["-p", "no:timeout"]  # it would end the whole process
    return [*command, "-o", "addopts=-ra", *arguments]


def counted(output: str) -> str:
    """pytest's last line of counts, or the last line of output."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    return (counts or lines or ["no output"])[-1][:160]


def cuda_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, or in the toolkit's folder."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{place}/bin" for place in places if place)]
    return shutil.which(name, path=os.pathsep.join(folders))


def missing_for_a_build() -> list[str]:
    """The requirements of setup.py that this machine lacks."""
    missing = [] if cuda_tool("nvcc") else ["nvcc"]
    compilers = (os.environ.get("CXX", "").split() or ["c++"])[0], "g++", "clang++"
    missing += [] if any(map(shutil.which, compilers)) else ["a C++ compiler"]
    near = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
    missing += [] if near else ["ninja"]
    try:
        from importlib.metadata import version

        found = version("setuptools")
    except Exception:
        found = "none"
    digits = re.match(r"\d+", found)
    return missing + ([] if digits and int(digits.group()) >= 77 else [f"setuptools>=77 (found {found})"])


def verdict(tool: str, status: int, output: str, seconds: float) -> tuple[str, str]:
    """State and details of one run of compute-sanitizer."""
    reports = [line for line in output.splitlines() if line.startswith("=========")]
    ours = [line for line in reports if "fastvit::" in line]
    if status == 0:
        return "passed", counted(output.replace("=========", ""))
    if UNSUPPORTED in output:
        return "not run", "compute-sanitizer does not support this device here"
    if status == LATE and not ours:
        return "not run", f"not done within {seconds:.0f} s"
    if status == ERROR_STATUS and tool == "initcheck" and not ours:
        return "passed", "reports about torch's kernels alone, see the log"
    first = next(
        (line.strip("= ") for line in reports if re.search(r"Invalid|Race|Barrier|Uninit|rror", line)), ""
    )
    return "FAILED", f"status {status}: {first or counted(output)}"[:200]
