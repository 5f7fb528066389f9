"""Tests and measures fastvit on a machine with a CUDA GPU, within some minutes: `make gpu`.

    python3 tools/gpu.py [--minutes 15] [--tests "tests/test_ops.py::test_x ..."] [--steps bench_ops ncu]
    python3 tools/gpu.py --device cpu  # rehearses, without a GPU, all that can be

A step is a command with a time limit, so a hang costs one step. OUT has two files, replaced after each step:
summary.txt, and gpu.tar.gz with logs and tables. Calls with the same OUT can divide the steps. The program
exits with 1 if a step failed. It needs pytest with xdist and timeout, and no network.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from gpu_steps import CARRIED, NO_GPU, ROOT, checksum, fits, plan

FAILURE = r"^(?:(?:FAILED|ERROR) |E  |=+ (?:Invalid|Error|Program hit)).*"
LEAST_SECONDS = 10  # for a step to be worth its start
KILL_SECONDS = 8  # between SIGINT, on which pytest prints its failures, and SIGKILL
TOGETHER = {"tests", "memcheck", "racecheck"}
FOLDERS = "usr/local/cuda*/bin usr/local/cuda*/compute-sanitizer opt/nvidia/*/compute-sanitizer"
FOLDERS += " opt/nvidia/nsight-compute/*"


class Step:
    """A command in a process group of its own."""

    def __init__(self, name: str, command: list[str], log: Path, seconds: float):
        self.name, self.log, self.begin, self.end = name, log, time.monotonic(), time.monotonic() + seconds
        self.stops = [(0, signal.SIGINT), (KILL_SECONDS, signal.SIGKILL)]
        with log.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self) -> str:
        """Returns how the step ended, or an empty string. Stops a late step."""
        status, late = self.process.poll(), time.monotonic() - self.end
        if status is None and late < KILL_SECONDS + 2:  # A driver may not let a killed process go.
            if self.stops and late > self.stops[0][0]:
                self.kill(self.stops.pop(0)[1])
            return ""
        self.kill(signal.SIGKILL)  # children that the command left
        return "LATE" if len(self.stops) < 2 else f"FAILED {status}" if status else "passed"

    def said(self) -> str:
        """Returns seconds, and the counts of pytest and a sanitizer or the last line."""
        text = self.log.read_text(errors="replace").strip()
        counts = re.findall(r"^=* ?(\d+ (?:passed|failed|error|skipped).*|\w+ SUMMARY.*)", text, re.M)
        said = "; ".join(counts[-2:] or text.splitlines()[-1:])
        return f"{time.monotonic() - self.begin:4.0f} s  {said[:150]}"


class Run:
    """The steps of one call. `work` has what goes into the archive."""

    def __init__(self, device: str, out: Path, work: Path, minutes: float, named: str):
        self.out, self.work, self.summary, self.logs = out, work, work / "summary.txt", list[Path]()
        self.end, self.states = time.monotonic() + 60 * minutes - KILL_SECONDS - 4, dict[str, str]()
        self.plan, self.times = plan(device, work, named), 3 if device == "cpu" else 1

    def report(self, step: str, state: str, details: str) -> None:
        """Adds a line to the summary, and replaces the files of OUT."""
        self.states[step] = state
        print(line := f"{step:13} {state:9} {details}", flush=True)
        with self.summary.open("a") as file:
            print(line, file=file)
        with tarfile.open(new := self.out / ".new", "w:gz") as tar:
            tar.add(self.work, ".")
        new.replace(self.out / "gpu.tar.gz")
        Path(shutil.copy(self.summary, new)).replace(self.out / "summary.txt")

    def run(self, *names: str) -> bool:
        """Runs steps at the same time; returns whether all passed."""
        running: list[Step] = []
        try:
            for name in names:
                seconds, needs, command = self.plan[name]
                seconds = min(seconds * self.times, self.end - time.monotonic())
                missing = [one for one in needs.split() if not (shutil.which(one) or find_spec(one))]
                if missing or seconds < LEAST_SECONDS:
                    self.report(name, "not run", f"no {missing[0]}" if missing else "no time is left")
                else:
                    self.logs.append(self.work / f"{name}.log")
                    running.append(Step(name, command, self.logs[-1], seconds))
            while running:
                time.sleep(0.1)
                for step in [*running]:
                    if state := step.poll():
                        running.remove(step)
                        self.report(step.name, state, step.said())
        finally:
            for step in running:
                step.kill(signal.SIGKILL)
        return all(self.states[name] == "passed" for name in names)

    def ready(self) -> bool:
        """Returns whether the libraries run; builds them where they do not."""
        known = self.summary.read_text() if self.summary.exists() else ""
        if re.search(f"^facts +passed.* sources {checksum()}$", known, re.M) or self.run("facts"):
            return True
        return self.states["facts"] != f"FAILED {NO_GPU}" and self.run("build") and self.run("facts")

    def failures(self) -> list[str]:
        """Returns failed tests and errors, counted without their parameters and numbers."""
        groups: dict[str, list[str]] = {}
        for log in self.logs:
            for line in re.findall(FAILURE, log.read_text(errors="replace"), re.M):
                groups.setdefault(re.sub(r"\[.*|(?<= )[\d.e+-]+", "", line), []).append(line)
        most = sorted(groups.values(), key=len, reverse=True)
        return [f"{len(lines):5} x {lines[0][:200]}" for lines in most[:40]]


def main() -> None:
    names = list(plan("cpu", ROOT, ""))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--tests", default="", help="tests that run first, by their names in pytest")
    parser.add_argument("--steps", nargs="+", choices=names, default=names[3:])
    options = parser.parse_args()
    (out := options.out.resolve()).mkdir(parents=True, exist_ok=True)
    folders = [str(one) for name in FOLDERS.split() for one in Path("/").glob(name)]
    if fits(CARRIED / "fastvit", options.device):  # The history that lies beside a copy may be another's.
        os.environ.setdefault("FASTVIT_COMMIT", (CARRIED / "commit").read_text().strip())
    os.environ |= {"FASTVIT_TEST_DEVICE": options.device, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *folders])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's `&` ignores it, for the steps too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The steps are ended, too.
    with tempfile.TemporaryDirectory() as work:
        if (out / "gpu.tar.gz").exists():
            shutil.unpack_archive(out / "gpu.tar.gz", work)
        run = Run(options.device, out, Path(work), options.minutes, options.tests)
        if run.ready():
            wanted = ["named"] * bool(options.tests) + [name for name in names[3:] if name in options.steps]
            for name in wanted:
                if name not in run.states:
                    run.run(*(one for one in wanted if one == name or {one, name} <= TOGETHER))
        print("\nwhat failed:", *run.failures(), "\nsummary:", run.summary.read_text(), sep="\n")
    sys.exit(any(state[0] in "FL" for state in run.states.values()))


if __name__ == "__main__":
    main()
