"""Runs programs for tools/gpu.py with a time limit, and kills their children too."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATE = 124  # status of a command that exceeded the limit
SAY_EVERY = 15  # seconds
UNSUPPORTED = "Device not supported"
ERROR_STATUS = 99


def run(
    commands: list[list[str]], seconds: float, environment: dict | None = None, waiting: str = ""
) -> list[tuple[int, str]]:
    """(status, output) of commands that run in parallel; LATE for one that exceeds the time limit.

    `waiting` is called from time to time with the names of running commands.
    """
    begin = time.monotonic()
    started = []
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
    for command in commands:
        output = tempfile.TemporaryFile("w+", errors="replace")
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            output.write(f"{command[0]}: {error}\n")
            process = None
        started.append((process, output))
    results = []
    for process, output in started:
        status = 127
        if process:
            status = _wait(process, begin, seconds, waiting)
            with contextlib.suppress(ProcessLookupError):  # its remaining children too
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
                process.wait(5)
        output.seek(0)
        results.append((status, output.read()))
        output.close()
    return results


def _wait(process: subprocess.Popen, begin: float, seconds: float, waiting: str) -> int:
    while True:
        gone = time.monotonic() - begin
        try:
            return process.wait(max(0.0, min(seconds - gone, SAY_EVERY if waiting else seconds)))
        except subprocess.TimeoutExpired:
            gone = time.monotonic() - begin
            if gone >= seconds:
                return LATE
            print(f"  waiting for {waiting}: {gone:.0f} of {seconds:.0f} s", flush=True)


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
