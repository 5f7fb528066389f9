"""Tests and measures fastvit on a machine with a CUDA GPU, within some minutes: `make gpu`.

    python3 tools/run_gpu_checks.py [--minutes 15] [--tests "tests/x.py::test_y ..."] [--steps ncu ...]
    python3 tools/run_gpu_checks.py --device cpu  # rehearses all steps that need no GPU

A step is a command with a time limit, so a hang costs one step. The folder of `--out` gets two files, which
are replaced after each step: summary.txt, and gpu.tar.gz with logs and tables. Several calls with the same
folder can divide the steps. The program exits with 1 if a step failed. It needs pytest with xdist and
timeout, and no network.
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

from gpu_steps import CARRIED, NO_GPU_STATUS, ROOT, are_current, plan_steps, source_checksum

# Lines of pytest and of compute-sanitizer that name a failure.
FAILURE_LINE = r"^(?:(?:FAILED|ERROR) |E  |=+ (?:Invalid|Error|Program hit)).*"
MIN_STEP_SECONDS = 10  # A step with less time is not started.
KILL_SECONDS = 8  # from SIGINT, on which pytest prints its failures, to SIGKILL
CONCURRENT_STEPS = {"tests", "memcheck", "racecheck"}
TOOL_FOLDERS = "usr/local/cuda*/bin usr/local/cuda*/compute-sanitizer opt/nvidia/*/compute-sanitizer"
TOOL_FOLDERS += " opt/nvidia/nsight-compute/*"


class Step:
    """A running command, in its own process group, so that signals reach its children."""

    def __init__(self, name: str, command: list[str], log: Path, seconds: float):
        self.name, self.log, self.begin, self.end = name, log, time.monotonic(), time.monotonic() + seconds
        # Pairs of seconds after the time limit and a signal; `poll` removes those that it sends.
        self.pending_signals = [(0, signal.SIGINT), (KILL_SECONDS, signal.SIGKILL)]
        with log.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def poll(self) -> str:
        """Returns the state of an ended step, or an empty string; signals a step that exceeds its time."""
        status, seconds_late = self.process.poll(), time.monotonic() - self.end
        # A driver may keep a killed process from ending, so the wait has an end.
        if status is None and seconds_late < KILL_SECONDS + 2:
            if self.pending_signals and seconds_late > self.pending_signals[0][0]:
                self.send_signal(self.pending_signals.pop(0)[1])
            return ""
        self.send_signal(signal.SIGKILL)  # The command may have left children.
        if len(self.pending_signals) < 2:
            return "LATE"
        return f"FAILED {status}" if status else "passed"

    def summarize(self) -> str:
        """Returns the step's seconds, and the counts of pytest or a sanitizer or the log's last line."""
        text = self.log.read_text(errors="replace").strip()
        counts = re.findall(r"^=* ?(\d+ (?:passed|failed|error|skipped).*|\w+ SUMMARY.*)", text, re.M)
        result = "; ".join(counts[-2:] or text.splitlines()[-1:])
        return f"{time.monotonic() - self.begin:4.0f} s  {result[:150]}"


class CheckRun:
    """Runs the steps of one call of the program. The folder `work` becomes the archive."""

    def __init__(self, device: str, out: Path, work: Path, minutes: float, named_tests: str):
        self.out, self.work, self.summary, self.logs = out, work, work / "summary.txt", list[Path]()
        self.end, self.states = time.monotonic() + 60 * minutes - KILL_SECONDS - 4, dict[str, str]()
        self.plan, self.time_factor = plan_steps(device, work, named_tests), 3 if device == "cpu" else 1

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

    def run_steps(self, *names: str) -> bool:
        """Runs steps at the same time; returns whether all passed."""
        running: list[Step] = []
        try:
            for name in names:
                seconds, needs, command = self.plan[name]
                seconds = min(seconds * self.time_factor, self.end - time.monotonic())
                missing = [need for need in needs.split() if not (shutil.which(need) or find_spec(need))]
                if missing or seconds < MIN_STEP_SECONDS:
                    self.report(name, "not run", f"no {missing[0]}" if missing else "no time is left")
                else:
                    self.logs.append(self.work / f"{name}.log")
                    running.append(Step(name, command, self.logs[-1], seconds))
            while running:
                time.sleep(0.1)
                for step in [*running]:
                    if state := step.poll():
                        running.remove(step)
                        self.report(step.name, state, step.summarize())
        finally:
            for step in running:
                step.send_signal(signal.SIGKILL)
        return all(self.states[name] == "passed" for name in names)

    def prepare_libraries(self) -> bool:
        """Returns whether the libraries run on the device; builds them if the first try fails."""
        summary = self.summary.read_text() if self.summary.exists() else ""
        if re.search(f"^facts +passed.* sources {source_checksum()}$", summary, re.M) or self.run_steps(
            "facts"
        ):
            return True
        return (
            self.states["facts"] != f"FAILED {NO_GPU_STATUS}"
            and self.run_steps("build")
            and self.run_steps("facts")
        )

    def count_failures(self) -> list[str]:
        """Returns the most frequent failures, counted without their parameters and numbers."""
        groups: dict[str, list[str]] = {}
        for log in self.logs:
            for line in re.findall(FAILURE_LINE, log.read_text(errors="replace"), re.M):
                groups.setdefault(re.sub(r"\[.*|(?<= )[\d.e+-]+", "", line), []).append(line)
        by_frequency = sorted(groups.values(), key=len, reverse=True)
        return [f"{len(lines):5} x {lines[0][:200]}" for lines in by_frequency[:40]]


def main() -> None:
    # The first three are facts and build, for `prepare_libraries`, and named, for --tests.
    names = list(plan_steps("cpu", ROOT, ""))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu", help="folder for the two files")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--minutes", type=float, default=15, help="time limit of the whole call")
    parser.add_argument("--tests", default="", help="names of tests that run first, as pytest takes them")
    parser.add_argument("--steps", nargs="+", choices=names, default=names[3:])
    options = parser.parse_args()
    (out := options.out.resolve()).mkdir(parents=True, exist_ok=True)
    folders = [str(path) for pattern in TOOL_FOLDERS.split() for path in Path("/").glob(pattern)]
    if are_current(CARRIED / "fastvit", options.device):  # A copy of the tree may have other history.
        os.environ.setdefault("FASTVIT_COMMIT", (CARRIED / "commit").read_text().strip())
    os.environ |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *folders])
    # With `&` a shell makes this program, and so its steps, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit makes `run_steps` kill the steps.
    with tempfile.TemporaryDirectory() as work:
        if (out / "gpu.tar.gz").exists():
            shutil.unpack_archive(out / "gpu.tar.gz", work)
        run = CheckRun(options.device, out, Path(work), options.minutes, options.tests)
        if run.prepare_libraries():
            steps = ["named"] * bool(options.tests) + [name for name in names[3:] if name in options.steps]
            for name in steps:
                if name not in run.states:
                    run.run_steps(*(k for k in steps if k == name or {k, name} <= CONCURRENT_STEPS))
        print("\nwhat failed:", *run.count_failures(), "\nsummary:", run.summary.read_text(), sep="\n")
    sys.exit(any(state[0] in "FL" for state in run.states.values()))


if __name__ == "__main__":
    main()
