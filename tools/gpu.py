"""Runs tests and benchmarks on a machine with a CUDA GPU, in two calls of nine minutes each: `make gpu`.

    python3 tools/gpu.py proof        smoke test, two minutes beside torch, tests, memcheck
    python3 tools/gpu.py measure      benchmarks/bench_gpu.py, the most informative part first; racecheck

    [--out runs/gpu] [--limit 530] [--device cpu] [--steps ...]

Needs torch, pytest with xdist and timeout, the built libraries (`make gpu CALL=libraries` packs small ones)
and no network. Without a GPU or without libraries the call ends. Any other step that fails does not stop the
following ones, and a step that cannot run reports the reason. In a benchmark an exception costs its own rows,
and behind a hang, or a fault that spoils the GPU, another process goes on. Exits with 1 if a step failed.

Writes one file, --out/CALL.tar.gz, anew after every step: summary.txt, which begins with the tests that
failed, a log per step, and the benchmarks' tables. `--device cpu` rehearses both
calls without a GPU, on tiny shapes.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATE = 124  # status of a command that exceeded its limit
SPOILED = 70  # of a process that a fault has left without a GPU

# Seconds: the most for a step, and the time that is reserved for it.
CALLS = {
    "proof": {
        "environment": (200, 0),  # the libraries, the GPU, torch, CUDA, commit
        "smoke": (60, 40),  # the ops in all layouts and dtypes
        "versus": (120, 75),  # a copy; layers beside torch's, eager and compiled
        "tests": (200, 60),  # as many as fit, the most telling first
        "sanitizer": (200, 90),  # memcheck over a few op tests
    },
    "measure": {  # the parts of benchmarks/bench_gpu.py
        "environment": (200, 0), "versus": (160, 120), "row_ops": (60, 30),
        "four_ops": (110, 60), "models": (140, 90), "exchange": (40, 20), "host_ops": (30, 10),
        "on_chip": (30, 10), "two_kernels": (30, 10),
        "convert": (90, 30),  # benchmarks/bench_convert.py
        "sanitizer": (120, 0),  # racecheck over local ops
    },
}  # fmt: skip
OPS_TESTS = "test_ops.py test_local_ops.py test_layer_norm.py test_act.py test_messages.py".split()
TESTS = [
    *"test_cuda.py test_layers.py test_peer_faults.py test_batch_norm_act.py".split(), *OPS_TESTS,
    *"test_arguments.py test_convert_syncbn.py test_fuse.py test_recompute.py test_compile.py".split(),
]  # fmt: skip
CARRIED = ROOT / "build/gpu/libraries.tar.xz"  # of `make gpu CALL=libraries`
SLOW = {"smoke": 20, "tests": 60}  # seconds that a test may take
LAST_ROW = 5  # seconds of a benchmark for the row that it has begun
# 16 threads of each of 6 workers would wait for each other.
THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
CONVERT = "--models vit_small_patch16_224,resnet50 --precision bf16 --batch 64"

# float32 and bfloat16 over planes, rows, short planes and memory with gaps; few enough for a sanitizer
LAYOUTS = "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc) and (dtype0 or dtype2)"
SANITIZED = {  # by call: tool, file, pytest's -k
    "proof": ("memcheck", "tests/test_ops.py",
              f"{LAYOUTS} and (test_bn_stats or leaky and test_abn_ops or -relu-)"),
    "measure": ("racecheck", "tests/test_local_ops.py",
                f"{LAYOUTS} and (leaky and test_abn_local_ops or test_bn_local_ops)"),
}  # fmt: skip

PROBE = """
import json, sys, torch
from fastvit import info, ops
if sys.argv[1] == "cuda":
    ops.bn_stats(torch.ones(2, 3, device="cuda")).sum().item()  # a GPU, and machine code for it
print(json.dumps(info.facts()))
"""
STARTING = r"CUDA unknown error|initializ|No CUDA GPUs|no NVIDIA driver"  # said while a driver comes up
SMI = "nvidia-smi --format=csv,noheader --query-gpu=driver_version,memory.used,clocks.sm,clocks.mem"
GIT = "git -c safe.directory=* log -1 --format=%h,%cs,%s"


def run(
    command: list[str], seconds: float, environment: dict | None = None, echo: bool = False
) -> tuple[int, str]:
    """Status and output of a command, which is killed at the end with all its children; LATE past the limit.

    The output is read from a pipe: a file would need room on the disk.
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
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout:
            lines.append(line)
            if echo:
                print(f"    {line.rstrip()}", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = LATE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
        process.wait(5)
    reader.join(2)
    return status, "".join(lines)


def counted(output: str) -> str:
    """pytest's last line of counts, or the last line of output."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    return (counts or lines or ["no output"])[-1][:160]


def written(file: Path) -> float:
    """When; 0 where there is none."""
    return os.stat(file).st_mtime if os.path.exists(file) else 0.0


def pack(folder: Path, archive: Path) -> None:
    """All files of a folder in one archive, which is replaced at once."""
    new = archive.with_name(f".{archive.name}")
    try:
        with tarfile.open(new, "w:gz") as tar:
            tar.add(folder, "")
        new.replace(archive)
    finally:
        new.unlink(missing_ok=True)


def pytest(options: str, selection: str, *files: str) -> list[str]:
    """A pytest command without the project's own options."""
    command = [sys.executable, "-m", "pytest", *"--tb=short -p no:cacheprovider -o addopts=".split()]
    return [*command, *options.split(), "-m", "not slow and not models", "-k", selection, *files]


def verdict(status: int, output: str, seconds: float) -> tuple[str, str]:
    """State and details of one run of compute-sanitizer."""
    reports = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    if status == 0:
        return "passed", counted(output.replace("=========", ""))
    if "Device not supported" in output:
        return "not run", "compute-sanitizer does not support this device here"
    if status == LATE and "fastvit::" not in "".join(reports):
        return "not run", f"not done within {seconds:.0f} s"
    first = (line for line in reports if re.search(r"Invalid|Race|Barrier|rror", line))
    return "FAILED", f"status {status}: {next(first, None) or counted(output)}"[:200]


class Run:
    """The steps of one call, their time and their logs."""

    def __init__(self, call: str, out: Path, device: str, limit: float, steps: list[str]):
        self.call, self.archive, self.device, self.steps = call, out / f"{call}.tar.gz", device, steps
        self.folder = tempfile.TemporaryDirectory(prefix="fastvit-gpu-")
        self.out = Path(self.folder.name)
        self.begin, self.step_began, self.limit = time.monotonic(), time.monotonic(), limit
        self.results: dict[str, tuple[str, str]] = {}  # by step: "passed", "FAILED" or "not run", and details
        self.facts: dict[str, str] = {}
        self.wrong: list[str] = []  # tests that failed
        out.mkdir(parents=True, exist_ok=True)

    def seconds(self, step: str) -> float:
        """The time for a step: its most, minus what is reserved for later steps."""
        table = CALLS[self.call]
        later = list(table)[list(table).index(step) + 1 :]
        reserved = sum(table[name][1] for name in later if name in self.steps)
        left = self.limit - (time.monotonic() - self.begin) - reserved
        return max(1.0, min(table[step][0], left))

    def log(self, step: str, title: str, output: str) -> None:
        with contextlib.suppress(OSError), (self.out / f"{step}.log").open("a") as file:
            file.write(f"\n##### {title}\n{output}")

    def say(self, step: str, state: str, details: str) -> None:
        seconds, self.step_began = time.monotonic() - self.step_began, time.monotonic()
        self.results[step] = state, f"{seconds:5.0f} s  {details}"
        print(f"{step:24} {state:8} {self.results[step][1]}", flush=True)
        self.write_summary()

    def environment(self) -> None:
        """Unpacks the libraries and fills `facts`. A driver may need two minutes before a GPU is there."""
        library = ROOT / "fastvit/_cuda.so"
        if self.device == "cuda" and written(CARRIED) > written(library):
            with tarfile.open(CARRIED) as tar:
                for file in filter(tarfile.TarInfo.isfile, tar.getmembers()):
                    (ROOT / file.name).unlink(missing_ok=True)  # another process may have it mapped
                tar.extractall(ROOT, filter="data")
            library.touch()
        deadline, status = time.monotonic() + self.seconds("environment"), 1
        while status:
            left = deadline - time.monotonic()
            status, output = run([sys.executable, "-c", PROBE, self.device], left)
            self.log("environment", "fastvit on this machine", output)
            starting = Path("/dev/nvidiactl").exists() and re.search(STARTING, output)
            if status and (status == LATE or not starting or left < 10):
                late = "no answer in time; " if status == LATE else ""
                raise RuntimeError(f"fastvit does not run here: {late}{counted(output)}")
            if status:
                print(f"  not yet, but there is a driver: {counted(output)}", flush=True)
                time.sleep(3)
        self.facts = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        given = os.environ.get("FASTVIT_COMMIT", "unknown")
        for name, command, otherwise in (("nvidia-smi", SMI, "not there"), ("commit", GIT, given)):
            status, output = run(command.split(), 20)
            self.facts[name] = output.strip() if status == 0 else otherwise
        for name, value in self.facts.items():
            print(f"  {name:20} {value}", flush=True)
        self.say("environment", "passed", self.facts["GPUs"])

    def smoke(self) -> None:
        """The tests of ops, each launch waited for: a fault is reported by its own op."""
        self.pytest("smoke", OPS_TESTS, {"CUDA_LAUNCH_BLOCKING": "1"})

    def tests(self) -> None:
        self.pytest("tests", TESTS, {})

    def pytest(self, step: str, files: list[str], environment: dict) -> None:
        """As many tests as fit, by several processes."""
        seconds, workers = self.seconds(step), max(1, min(6, (os.cpu_count() or 2) // 2))
        options = f"-v -p gpu -n {workers} --maxschedchunk 1 --max-worker-restart 40 --timeout {SLOW[step]} "
        options += "--timeout-method thread --continue-on-collection-errors"
        command = pytest(options, "", *(str(Path("tests") / name) for name in files))
        status, output = run(command, seconds, THREADS | {"FASTVIT_TEST_DEVICE": self.device} | environment)
        self.log(step, " ".join(command), output)
        found: dict[str, set[str]] = collections.defaultdict(set)
        line = r"^(?:\[gw.*?%\] )?(PASSED|SKIPPED|FAILED|ERROR|begun) (\S.*?)(?: - .*)?\s*$"
        for state, name in re.findall(line, output, re.M):
            found[state].add(name)
        wrong = [f"FAILED {name}" for name in sorted(found["FAILED"] | found["ERROR"])]
        cut = sorted(found.pop("begun", set()).difference(*found.values()))
        for name in wrong[:20]:
            print(f"  {name}", flush=True)
        self.wrong += wrong
        good = status in (0, LATE) and found["PASSED"] and not wrong  # where none passed nothing was shown
        total = re.search(r"\[(\d+) items?\]", output)
        details = f"{len(wrong)} failed, {len(found['PASSED'])} passed, {len(found['SKIPPED'])} skipped of "
        details += f"{total[1] if total else '?'} within {seconds:.0f} s"
        details += "" if good else f"; first: {wrong[0] if wrong else counted(output)}"
        details += f"; begun and not ended: {', '.join(cut)}" if cut else ""
        self.say(step, "passed" if good else "FAILED", details)

    def sanitizer(self) -> None:
        folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
        program = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
        if self.device == "cpu" or not program:
            why = "a rehearsal without a GPU" if self.device == "cpu" else "compute-sanitizer not found"
            self.say("sanitizer", "not run", why)
            return
        tool, file, selection = SANITIZED[self.call]
        _, help_text = run([program, "--help"], 20)
        ours = "--kernel-name" if "--kernel-name " in help_text else "--kernel-regex"
        seconds = self.seconds("sanitizer")
        command = [program, "--tool", tool, "--error-exitcode", "99", ours, "kns=fastvit"]
        # torch makes calls that it expects to fail
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command += pytest("-q", selection, file)
        # one allocation per tensor, so that its end is known; torch's cache would hide an overrun
        wish = {"FASTVIT_TEST_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status, output = run(command, seconds, wish)
        self.log("sanitizer", " ".join(command), output)
        self.say("sanitizer", *verdict(status, output, seconds))

    def bench(self, step: str) -> None:
        """A part of benchmarks/bench_gpu.py; its table. A process that ends within a
        task is followed by another one, which begins behind that task.
        """
        end = time.time() + self.seconds(step)
        command = [sys.executable, "benchmarks/bench_gpu.py", step, "--device", self.device]
        command += ["--out", str(self.out), "--until", str(end - LAST_ROW)]
        command += ["--quick"] if self.device == "cpu" else []
        wish = {"FASTVIT_ON_CHIP": "0"} if step == "two_kernels" else None
        output, begun, faults = "", 0, []
        while True:
            status, said = run([*command, "--skip", str(begun)], max(1.0, end - time.time()), wish, echo=True)
            output += said
            tasks, ended = re.findall(r"^begin (.*)$", said, re.M), re.search(r"^ended$", said, re.M)
            begun += len(tasks)
            faults += re.findall(r"^failed (.*)$", said, re.M)
            if ended or not tasks or status == LATE:
                break
            if f"\nfailed {tasks[-1]}" not in said:
                faults.append(f"{tasks[-1]}: status {status}")
        if not tasks and not ended:
            faults.append(f"status {status}: {counted(said)}")
        cut = [f"cut in {tasks[-1]}"] if tasks and not ended else []
        table = self.out / f"{step}_{self.device}.csv"
        rows = table.read_text().count("\n") - 1 if table.exists() else 0
        self.log(step, " ".join(command), output)
        left = [line[:400] for line in re.findall(r"^not reached: .*$", said, re.M)]
        details = [f"{rows} rows", *faults, *cut, *left]
        self.say(step, "FAILED" if faults or not rows else "passed", "; ".join(details))

    def convert(self) -> None:
        """benchmarks/bench_convert.py: what convert frees in whole models, bit for bit, and its time."""
        if self.device == "cpu":
            self.say("convert", "not run", "a rehearsal without a GPU")
            return
        command = [sys.executable, "benchmarks/bench_convert.py", *CONVERT.split(), "--device", self.device]
        status, output = run([*command, "--out", str(self.out)], self.seconds("convert"), echo=True)
        self.log("convert", " ".join(command), output)
        self.say("convert", "FAILED" if status else "passed", counted(output))

    def all(self) -> int:
        """Runs the steps; the exit status."""
        for step in ("environment", *self.steps):
            try:
                method = getattr(self, step, None)
                method() if method else self.bench(step)
            except Exception as error:  # of this script too: the steps that follow are still worth running
                self.say(step, "FAILED", f"{type(error).__name__}: {error}")
                if step == "environment":
                    break
        print("\n" + self.write_summary())
        return int(any(state == "FAILED" for state, _ in self.results.values()))

    def write_summary(self) -> str:
        """After every step: a machine may be taken away. What the smoke test found comes first."""
        failed = [step for step, (state, _) in self.results.items() if state == "FAILED"]
        lines = [*self.wrong[:30], *(f"{name:20} {value}" for name, value in self.facts.items()), ""]
        lines += [f"{step:24} {state:8} {details}" for step, (state, details) in self.results.items()]
        ran = {step.split(":")[0] for step in self.results}
        lines += [f"{step:24} not begun" for step in self.steps if step not in ran]
        lines += ["", f"{time.monotonic() - self.begin:.0f} s in all; logs and tables in {self.archive}"]
        lines += [f"FAILED: {', '.join(failed)}" if failed else "nothing failed"]
        text = "\n".join(lines) + "\n"
        try:
            (self.out / "summary.txt").write_text(text)
            pack(self.out, self.archive)
        except OSError as error:  # a full disk stops nothing: what is printed can still be read
            print(f"  not written: {error}", flush=True)
        return text


# As a plugin of pytest, for tests on one GPU whose run is cut at a time limit. pytest-timeout ends a worker
# whose test hangs, and xdist starts another.
failed_in_process: list[str] = []


def pytest_collection_modifyitems(items: list) -> None:
    """First what only a GPU can show; then a fixed order that leaves something of everything before a cut."""
    items.sort(key=lambda item: ("test_cuda" not in item.nodeid, hashlib.md5(item.nodeid.encode()).digest()))


def pytest_runtest_logstart(nodeid: str) -> None:
    """The run may be cut in it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nbegun {nodeid}", flush=True)


def pytest_runtest_logreport(report) -> None:
    """The run may be cut before pytest prints its failures."""
    if report.failed:
        failed_in_process.append(report.nodeid)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            print(f"\n##### {report.nodeid}, {report.when}\n{report.longreprtext[-3000:]}", flush=True)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Ends a worker of xdist whose GPU a failed test has spoiled."""
    torch = sys.modules.get("torch")
    if failed_in_process[-1:] == [nodeid] and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(SPOILED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("call", choices=list(CALLS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--limit", type=float, default=530, help="seconds for all steps together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="default: all")
    options = parser.parse_args()
    every = list(CALLS[options.call])[1:]
    if unknown := set(options.steps or ()) - set(every):
        parser.error(f"--steps: {', '.join(sorted(unknown))} unknown; {', '.join(every)} expected")
    steps = [step for step in every if step in (options.steps or every)]
    sys.exit(Run(options.call, options.out.resolve(), options.device, options.limit, steps).all())


if __name__ == "__main__":
    main()
