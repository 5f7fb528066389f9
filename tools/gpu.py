"""All that a machine with a CUDA GPU is asked for, in one command and under nine minutes: `make gpu`.

    python tools/gpu.py [--out runs/gpu] [--limit 530] [--device cpu] [--steps tests benchmarks]

Needs torch and nothing from a network. Steps follow each other, each within its time; a step that fails does
not keep the next from running; one that cannot run says why. Writes into --out: summary.txt, a log per step,
and the benchmarks' csv, md and png. Exits with 1 if anything failed.

Seconds: the most a step gets, and what is kept back for it whatever the steps before it do.

    environment   30        what is here: GPU, driver, torch, CUDA, commit, modules that are missing
    build        220        only if fastvit does not load here with its CUDA kernels
    tests        180 (100)  five pytest processes side by side: ops, layers, what only a GPU shows, compiling
    benchmarks   190 (100)  benchmarks/bench_ops.py; 35 of them to start and to draw, the rest is its budget
    sanitizer    230  (60)  what is left: memcheck, racecheck, synccheck, initcheck over a few op tests

`--device cpu` rehearses all of it without a GPU, on tiny benchmarks.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = {
    "environment": (30, 0),
    "build": (220, 0),
    "tests": (180, 100),
    "benchmarks": (190, 100),
    "sanitizer": (230, 60),
}
BENCHMARK_ENDS = 35

TESTS = {  # processes of their own: after a fault in a kernel, a process can do nothing more
    "ops": ["tests/test_ops.py", "tests/test_local_ops.py", "tests/test_arguments.py"],
    "layers": ["tests/test_layers.py", "tests/test_peer_faults.py", "tests/test_convert_syncbn.py"],
    "BatchNormAct": ["tests/test_batch_norm_act.py", "tests/test_recompute.py"],
    "GPU": ["tests/test_cuda.py", "tests/test_messages.py"],
    "compile": ["tests/test_compile.py"],
}
# float32 and bfloat16 over planes, rows, short planes and memory with gaps; few enough for a sanitizer
LAYOUTS = "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc)"
OPS = f"{LAYOUTS} and (dtype0 or dtype2) and (test_bn_stats or leaky and test_abn_ops or -relu-)"
TOOLS = {  # options, and pytest's -k
    "memcheck": (["--report-api-errors", "no"], OPS),  # torch makes calls that it expects to fail
    "racecheck": ([], OPS),
    "synccheck": ([], OPS),
    "initcheck": ([], f"{LAYOUTS} and dtype0 and leaky and test_abn_ops"),
}
UNSUPPORTED = "Device not supported"
ERROR_STATUS = 99

MACHINE = """
import importlib.util, json, platform, torch
modules = "pytest pytest_timeout matplotlib numpy triton ninja setuptools tqdm".split()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "CUDA of torch": torch.version.cuda or "none",
    "cuDNN": str(torch.backends.cudnn.version()),
    "GPUs": ", ".join(
        f"{g.name} (sm_{g.major}{g.minor}, {g.multi_processor_count} SMs, {g.total_memory / 2**30:.0f} GiB)"
        for g in gpus
    ) or "none",
    "modules missing": ", ".join(m for m in modules if not importlib.util.find_spec(m)) or "none",
}))
"""
LIBRARY = """
import fastvit
from fastvit import _library
print("CUDA kernels", _library.CUDA_STATUS)
raise SystemExit(0 if _library.HAS_CUDA else 3)
"""
SMI = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.mem", "temperature.gpu")


@dataclass
class Result:
    step: str
    state: str  # "passed", "FAILED" or "not run"
    details: str
    seconds: float = 0.0


def run(commands: list[list[str]], seconds: float, environment: dict | None = None) -> list[tuple[int, str]]:
    """(status, output) of commands run side by side; 124 for one that is ended for not being done in time."""
    deadline = time.monotonic() + seconds
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
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = 124
            with contextlib.suppress(ProcessLookupError):  # also what it left behind, beside the next step
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
                process.wait(5)
        output.seek(0)
        results.append((status, output.read()))
        output.close()
    return results


def pytest(*arguments: str, limit: int = 120) -> list[str]:
    """A pytest command; without pytest-timeout the project's options would be refused."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=-ra",
    ]
    if importlib.util.find_spec("pytest_timeout"):
        # by a thread: a wait for a GPU that hangs is not in Python, where a signal would be handled
        command += ["--timeout", str(limit), "--timeout-method", "thread"]
    return [*command, *arguments]


def counted(output: str) -> str:
    """pytest's last line of counts, or the last thing that was said."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    return (counts or lines or ["no output"])[-1][:160]


class Run:
    """The steps, their time and their logs."""

    def __init__(self, out: Path, device: str, limit: float, steps: list[str]):
        self.out, self.device, self.steps = out, device, steps
        self.begin, self.limit = time.monotonic(), limit
        self.results: list[Result] = []
        self.facts: dict[str, str] = {}
        out.mkdir(parents=True, exist_ok=True)
        old = [f"{step}.log" for step in steps]
        old += [f"ops_{device}.{ending}" for ending in ("csv", "md", "png") if "benchmarks" in steps]
        for name in old:
            (out / name).unlink(missing_ok=True)

    def seconds(self, step: str) -> float:
        """What a step may take: its most, and no more than the others leave."""
        later = list(SECONDS)[list(SECONDS).index(step) + 1 :]
        kept = sum(SECONDS[name][1] for name in later if name in self.steps)
        left = self.limit - (time.monotonic() - self.begin) - kept
        return max(1.0, min(SECONDS[step][0], left))

    def log(self, step: str, title: str, output: str) -> None:
        with (self.out / f"{step}.log").open("a") as file:
            file.write(f"\n##### {title}\n{output}")

    def say(self, result: Result) -> None:
        self.results.append(result)
        print(f"{result.step:24} {result.state:8} {result.seconds:5.0f} s  {result.details}", flush=True)
        self.write_summary()

    def environment(self) -> None:
        """Fills `facts`; raises RuntimeError where nothing can go on."""
        begin = time.monotonic()
        seconds = SECONDS["environment"][0]
        query = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
        git = ["git", "-c", "safe.directory=*", "log", "-1", "--format=%h %cs %s"]
        machine, smi, head = run([[sys.executable, "-c", MACHINE], query, git], seconds)
        if machine[0]:
            late = f"no answer within {seconds} s; " if machine[0] == 124 else ""
            raise RuntimeError(f"torch cannot be used: {late}{counted(machine[1])}")
        self.facts = json.loads(next(line for line in machine[1].splitlines() if line.startswith("{")))
        self.facts["nvidia-smi"] = smi[1].strip() if smi[0] == 0 else "no answer"
        given = os.environ.get("FASTVIT_COMMIT") or "unknown (no git; FASTVIT_COMMIT is not set)"
        self.facts["commit"] = head[1].strip() if head[0] == 0 else given
        self.facts["compute-sanitizer"] = sanitizer() or "not found"
        for name, value in self.facts.items():
            print(f"  {name:18} {value}", flush=True)
        if self.device == "cuda" and self.facts["GPUs"] == "none":
            raise RuntimeError("there is no GPU that torch can use; `--device cpu` rehearses without one")
        self.say(Result("environment", "passed", self.facts["GPUs"], time.monotonic() - begin))

    def build(self) -> None:
        begin = time.monotonic()
        fine = (0,) if self.device == "cuda" else (0, 3)
        ((status, output),) = run([[sys.executable, "-c", LIBRARY]], 60)
        if status in fine:
            self.say(Result("build", "passed", f"not needed: {counted(output)}", time.monotonic() - begin))
            return
        self.log("build", "the libraries as they are", output)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        wish = {"FASTVIT_CUDA": "1"} if self.device == "cuda" else {}
        ((status, output),) = run([command], self.seconds("build"), wish)
        self.log("build", " ".join(command), output)
        if status == 0:
            ((status, output),) = run([[sys.executable, "-c", LIBRARY]], 60)
            self.log("build", "the libraries as built", output)
        state = "passed" if status in fine else "FAILED"
        self.say(Result("build", state, counted(output), time.monotonic() - begin))

    def tests(self) -> None:
        begin = time.monotonic()
        seconds = self.seconds("tests")
        commands = [pytest(*files) for files in TESTS.values()]
        if self.device == "cpu":
            commands = [[*command, "-m", "not slow"] for command in commands]
        outputs = run(commands, seconds, {"FASTVIT_TEST_DEVICE": self.device})
        for name, command, (status, output) in zip(TESTS, commands, outputs, strict=True):
            self.log("tests", " ".join(command), output)
            details = counted(output)
            if status == 124:
                details = f"not done within {seconds:.0f} s; {details}"
            ran = " passed" in details or self.device == "cpu"  # on a GPU, skipping everything is no success
            state = "passed" if status == 0 and ran else "FAILED"
            self.say(Result(f"tests: {name}", state, details, time.monotonic() - begin))

    def benchmarks(self) -> None:
        begin = time.monotonic()
        seconds = self.seconds("benchmarks")
        command = [sys.executable, "benchmarks/bench_ops.py", "--device", self.device, "--out", str(self.out)]
        command += ["--budget", f"{max(10, seconds - BENCHMARK_ENDS):.0f}"]
        command += ["--quick"] if self.device == "cpu" else []
        ((status, output),) = run([command], seconds)
        self.log("benchmarks", " ".join(command), output)
        table = self.out / f"ops_{self.device}.csv"
        rows = len(table.read_text().splitlines()) - 1 if table.exists() else 0
        details = f"{rows} rows in {table.name}"
        if status:
            details += f"; status {status}: {counted(output)}"
        state = "FAILED" if status or not rows else "passed"
        self.say(Result("benchmarks", state, details, time.monotonic() - begin))

    def sanitizer(self) -> None:
        program = sanitizer()
        missing = [] if program else ["compute-sanitizer not found"]
        missing += [] if importlib.util.find_spec("pytest") else ["pytest not found"]
        missing += ["a rehearsal without a GPU"] if self.device == "cpu" else []
        if missing:
            self.say(Result("sanitizer", "not run", ", ".join(missing)))
            return
        ((_, help_text),) = run([[program, "--help"]], 20)
        ours = "--kernel-name" if "--kernel-name " in help_text else "--kernel-regex"
        deadline = time.monotonic() + self.seconds("sanitizer")
        for i, (tool, (options, selection)) in enumerate(TOOLS.items()):
            begin = time.monotonic()
            seconds = (deadline - begin) / (len(TOOLS) - i)
            # initcheck has to see torch's kernels write what ours read
            kernels = [ours, "kns=fastvit"] if tool != "initcheck" else []
            command = [program, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), *options, *kernels]
            command += pytest("tests/test_ops.py", "-k", selection, limit=int(seconds))
            # one allocation per tensor, so that its end is known; torch's cache would hide an overrun
            wish = {"FASTVIT_TEST_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            ((status, output),) = run([command], seconds, wish)
            self.log("sanitizer", " ".join(command), output)
            state, details = verdict(tool, status, output, seconds)
            self.say(Result(f"sanitizer: {tool}", state, details, time.monotonic() - begin))

    def all(self) -> int:
        """Runs the steps and writes the summary; the exit status."""
        blocked = ""
        try:
            self.environment()
        except (RuntimeError, ValueError) as error:
            blocked = str(error)
            self.say(Result("environment", "FAILED", blocked))
        for step in self.steps if not blocked else []:
            try:
                getattr(self, step)()
            except Exception as error:  # of this script: the steps that follow are still worth running
                self.say(Result(step, "FAILED", f"{type(error).__name__}: {error}"))
        return self.summary()

    def write_summary(self) -> str:
        """After every step: a machine may be taken away."""
        failed = [result.step for result in self.results if result.state == "FAILED"]
        lines = [f"{name:18} {value}" for name, value in self.facts.items()] + [""]
        lines += [f"{r.step:24} {r.state:8} {r.seconds:5.0f} s  {r.details}" for r in self.results]
        lines += ["", f"{time.monotonic() - self.begin:.0f} s in all; logs and tables in {self.out}"]
        lines += [f"FAILED: {', '.join(failed)}" if failed else "nothing failed"]
        text = "\n".join(lines) + "\n"
        (self.out / "summary.txt").write_text(text)
        return text

    def summary(self) -> int:
        text = self.write_summary()
        table = self.out / f"ops_{self.device}.md"
        if table.exists():  # the most important rows first
            print("\n" + "\n".join(table.read_text().splitlines()[:36]))
        print("\n" + text)
        return 1 if any(result.state == "FAILED" for result in self.results) else 0


def sanitizer() -> str | None:
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{place}/bin" for place in places if place)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def verdict(tool: str, status: int, output: str, seconds: float) -> tuple[str, str]:
    """State and details of one sanitizer run."""
    reports = [line for line in output.splitlines() if line.startswith("=========")]
    ours = [line for line in reports if "fastvit::" in line]
    if status == 0:
        return "passed", counted(output.replace("=========", ""))
    if UNSUPPORTED in output:
        return "not run", "compute-sanitizer does not support this device here"
    if status == 124 and not ours:
        return "not run", f"not done within {seconds:.0f} s"
    if status == ERROR_STATUS and tool == "initcheck" and not ours:
        return "passed", "reports about torch's kernels alone, see the log"
    first = next(
        (line.strip("= ") for line in reports if re.search(r"Invalid|Race|Barrier|Uninit|rror", line)), ""
    )
    return "FAILED", f"status {status}: {first or counted(output)}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    later = [step for step in SECONDS if step != "environment"]
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--limit", type=float, default=530, help="seconds for all steps together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", nargs="+", default=later, choices=later)
    options = parser.parse_args()
    steps = [step for step in later if step in options.steps]
    sys.exit(Run(options.out.resolve(), options.device, options.limit, steps).all())


if __name__ == "__main__":
    main()
