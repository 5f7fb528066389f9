"""Runs tests and benchmarks on a machine with a CUDA GPU, in two calls of nine minutes each: `make gpu`.

    python3 tools/gpu.py proof        smoke test, a copy, a minute beside torch, tests, sanitizers
    python3 tools/gpu.py measure      benchmarks/bench_gpu.py, the most informative part first

    [--out runs/gpu] [--archive runs/gpu.tar.gz] [--limit 530] [--device cpu] [--steps ...]

Needs torch and no network; make, nvcc, setuptools, pytest-timeout may be missing. Libraries that load here
are used as they are (`make gpu-libraries` makes small ones); others are built for this GPU's architecture
only. CUDA may need two minutes to start. Without a GPU or without libraries the call ends. Any other step
that fails does not stop the following ones, and a step that cannot run reports the reason. Exits with 1 if a
step failed.

Writes to --out: summary_CALL.txt, which begins with the result of the smoke test, a log per step, and the
benchmarks' tables, beside their predictions. After every step all of it is packed into --archive, the one
file to take home. `--device cpu` rehearses both calls without a GPU, on tiny shapes.
"""

import argparse
import importlib.util
import json
import os
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_process
from gpu_bench import ENDED, Benchmark, full_disk, pack
from gpu_process import LATE, ROOT, counted, cuda_tool, missing_for_a_build, pytest, verdict
from gpu_tests import Workers

# Seconds: the most for a step, and the time that is reserved for it.
CALLS = {
    "proof": {
        "environment": (150, 0),  # the GPU, torch, CUDA, commit, modules that are missing
        "build": (300, 0),  # only if fastvit does not load here with its CUDA kernels
        "smoke": (45, 30),  # tools/gpu_smoke.py, a process per dtype
        "copy": (25, 10),
        "versus": (75, 45),  # layers beside torch's, eager and compiled
        "tests": (250, 50),  # as many as fit, the most telling first
        "sanitizer": (230, 50),  # memcheck, racecheck, synccheck, initcheck over a few op tests
    },
    "measure": {
        "environment": (150, 0),
        "build": (300, 0),
        "copy": (25, 0),
        "versus": (120, 100),
        "row_ops": (60, 30),  # LayerNorm, activations, gates beside torch's
        "four_ops": (110, 60),  # the four ops in three layouts, bf16 and fp32
        "models": (100, 60),  # fastvit.convert on a ViT and a ResNet
        "exchange": (40, 20),  # Loopback: 2, 4, 8 ranks, 64 to 2048 channels
        "host": (30, 10),  # host us per op
        "on_chip": (50, 20),  # one kernel a direction against two
        "ncu": (50, 0),  # six kernels
        "slices": (30, 0),  # bn_stats against the number of slices
        "stream": (30, 0),  # what a second stream gets done while an exchange waits
        "graph": (35, 0),
        "ipc": (60, 0),  # two processes over CudaIpc
        "activations": (40, 0),  # elu, gelu, silu
        "sanitizer": (90, 0),  # memcheck, racecheck over local ops
        "layers": (150, 0),  # benchmarks/bench_ops.py: layers against torch's and other libraries'
    },
}
TESTS = (
    "test_ops.py test_local_ops.py test_cuda.py test_layers.py test_peer_faults.py test_batch_norm_act.py "
    "test_layer_norm.py test_act.py test_messages.py test_arguments.py test_convert_syncbn.py "
    "test_fuse.py test_recompute.py test_compile.py"
).split()
CARRIED = ROOT / "build/gpu/libraries.tar.xz"  # of `make gpu-libraries`
SLOW = 60  # seconds that a test may take
PATIENCE = 40  # seconds in which a row of a benchmark has to come
SMOKE = ("float32", "bfloat16", "float16", "float64")
ON_CHIP = {"0": "two", "1": "one"}  # FASTVIT_ON_CHIP, and the name of its table

# float32 and bfloat16 over planes, rows, short planes and memory with gaps; few enough for a sanitizer
LAYOUTS = "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc)"
OPS = f"{LAYOUTS} and (dtype0 or dtype2) and (test_bn_stats or leaky and test_abn_ops or -relu-)"
LOCAL = f"{LAYOUTS} and (dtype0 or dtype2) and (leaky and test_abn_local_ops or test_bn_local_ops)"
SANITIZED = {  # by call and tool: options, file, pytest's -k
    "proof": {
        # torch makes calls that it expects to fail
        "memcheck": (["--report-api-errors", "no"], "tests/test_ops.py", OPS),
        "racecheck": ([], "tests/test_ops.py", OPS),
        "synccheck": ([], "tests/test_ops.py", OPS),
        "initcheck": ([], "tests/test_ops.py", f"{LAYOUTS} and dtype0 and leaky and test_abn_ops"),
    },
    "measure": {
        "memcheck": (["--report-api-errors", "no"], "tests/test_local_ops.py", LOCAL),
        "racecheck": ([], "tests/test_local_ops.py", LOCAL),
    },
}

MACHINE = """
import importlib.util, json, os, platform, torch
modules = "pytest pytest_timeout matplotlib numpy triton ninja setuptools tqdm".split()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
if gpus:
    torch.zeros(1, device="cuda").item()
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "CUDA of torch": torch.version.cuda or "none",
    "cuDNN": str(torch.backends.cudnn.version()),
    "GPUs": ", ".join(
        f"{g.name} (sm_{g.major}{g.minor}, {g.multi_processor_count} SMs, {g.total_memory / 2**30:.0f} GiB)"
        for g in gpus
    ) or "none",
    "architecture": ";".join(sorted({f"{g.major}.{g.minor}" for g in gpus})),
    "cores": os.cpu_count(),
    "modules missing": ", ".join(m for m in modules if not importlib.util.find_spec(m)) or "none",
}))
"""
LIBRARY = """
import sys, torch, fastvit
from fastvit import _library, ops
print("CUDA kernels", _library.CUDA_STATUS)
if sys.argv[1] == "cuda":
    if not _library.HAS_CUDA:
        raise SystemExit(3)
    ops.bn_stats(torch.ones(2, 3, device="cuda")).sum().item()  # there is machine code for this GPU
"""
SMI = ("name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.mem", "temperature.gpu")
NCU_KERNELS = "regex:stats_kernel|forward_kernel|reduce_kernel|backward_kernel"


def run(*arguments, **options) -> list[tuple[int, str]]:
    return gpu_process.run(*arguments, **options)


class Blocked(Exception):
    """No further step can run."""


@dataclass
class Result:
    step: str
    state: str  # "passed", "FAILED" or "not run"
    details: str
    seconds: float = 0.0


class Run:
    """The steps of one call, their time and their logs."""

    def __init__(
        self, call: str, out: Path, device: str, limit: float, steps: list[str], archive: Path | None = None
    ):
        self.call, self.out, self.device, self.steps = call, out, device, steps
        self.archive = archive or out.with_name(f"{out.name}.tar.gz")
        self.begin, self.limit = time.monotonic(), limit
        self.results: list[Result] = []
        self.facts: dict[str, str] = {}
        self.wrong: list[str] = []  # of the smoke test
        out.mkdir(parents=True, exist_ok=True)
        first = "first_" if call == "proof" else ""
        old = [self.log_of(step) for step in steps] + [out / f"{first}{step}_{device}.csv" for step in steps]
        for file in old:
            file.unlink(missing_ok=True)

    def log_of(self, step: str) -> Path:
        return self.out / (f"{step}.log" if self.call == "proof" else f"measure_{step}.log")

    def seconds(self, step: str) -> float:
        """The time for a step: its most, minus what is reserved for later steps."""
        table = CALLS[self.call]
        later = list(table)[list(table).index(step) + 1 :]
        kept = sum(table[name][1] for name in later if name in self.steps)
        left = self.limit - (time.monotonic() - self.begin) - kept
        return max(1.0, min(table[step][0], left))

    def log(self, step: str, title: str, output: str) -> None:
        with full_disk(), self.log_of(step).open("a") as file:
            file.write(f"\n##### {title}\n{output}")

    def say(self, step: str, state: str, details: str, begin: float | None = None) -> None:
        seconds = 0.0 if begin is None else time.monotonic() - begin
        self.results.append(Result(step, state, details, seconds))
        print(f"{step:24} {state:8} {seconds:5.0f} s  {details}", flush=True)
        self.write_summary()

    def environment(self) -> None:
        """Fills `facts`. The driver and CUDA may need two minutes before a GPU is there."""
        begin = time.monotonic()
        seconds = self.seconds("environment")
        waiting = "CUDA to come up" if self.device == "cuda" else "torch"
        while True:
            left = seconds - (time.monotonic() - begin)
            ((status, output),) = run([[sys.executable, "-c", MACHINE]], left, waiting=waiting)
            if status == 0:
                self.facts = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
                if self.device == "cpu" or self.facts["GPUs"] != "none":
                    break
                problem = "there is no GPU that torch can use; `--device cpu` rehearses without one"
            else:
                late = f"no answer within {seconds:.0f} s; " if status == LATE else ""
                problem = f"torch cannot be used: {late}{counted(output)}"
            # A driver that is still starting shows no GPU, or gives errors of CUDA.
            starting = Path("/dev/nvidiactl").exists() and (status == 0 or "CUDA" in output)
            if not starting or time.monotonic() - begin > seconds - 5:
                raise Blocked(problem)
            print(f"  not yet, but there is a driver: {problem}", flush=True)
            time.sleep(3)
        taken = time.monotonic() - begin
        query = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
        git = ["git", "-c", "safe.directory=*", "log", "-1", "--format=%h %cs %s"]
        smi, head = run([query, git], 20)
        self.facts["nvidia-smi"] = smi[1].strip() if smi[0] == 0 else "no answer"
        given = os.environ.get("FASTVIT_COMMIT") or "unknown (no git; FASTVIT_COMMIT is not set)"
        self.facts["commit"] = head[1].strip() if head[0] == 0 else given
        for tool in ("compute-sanitizer", "ncu"):
            self.facts[tool] = cuda_tool(tool) or "not found"
        self.facts["missing for a build"] = ", ".join(missing_for_a_build()) or "nothing"
        for name, value in self.facts.items():
            print(f"  {name:20} {value}", flush=True)
        slow = f"; CUDA took {taken:.0f} s to come up" if taken > 20 and self.device == "cuda" else ""
        self.say("environment", "passed", self.facts["GPUs"] + slow, begin)

    def build(self) -> None:
        begin = time.monotonic()
        probe = [sys.executable, "-c", LIBRARY, self.device]
        if CARRIED.exists() and not (ROOT / "fastvit/_cuda.so").exists():
            with tarfile.open(CARRIED) as tar:
                tar.extractall(ROOT, filter="data")
        ((status, output),) = run([probe], 90, waiting="the libraries")
        if status == 0:
            self.say("build", "passed", f"not needed: {counted(output)}", begin)
            return
        self.log("build", "the libraries as they are", output)
        if missing := missing_for_a_build():
            raise Blocked(
                f"no library that works here ({counted(output)}), and none can be built: "
                f"{', '.join(missing)} missing"
            )
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        wish = {}
        if self.device == "cuda":
            architecture = os.environ.get("TORCH_CUDA_ARCH_LIST") or self.facts["architecture"]
            wish = {"FASTVIT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architecture}
        ((status, output),) = run([command], self.seconds("build"), wish, waiting="the build")
        self.log("build", " ".join([*(f"{k}={v}" for k, v in wish.items()), *command]), output)
        if status:
            why = "not done in time" if status == LATE else counted(output)
            raise Blocked(f"the build failed: {why}; see {self.log_of('build')}")
        ((status, output),) = run([probe], 90)
        self.log("build", "the libraries as built", output)
        if status:
            raise Blocked(f"what was built does not work: {counted(output)}; see {self.log_of('build')}")
        self.say("build", "passed", counted(output), begin)

    def smoke(self) -> None:
        begin, seconds = time.monotonic(), self.seconds("smoke")
        program = [sys.executable, "tools/gpu_smoke.py", "--device", self.device]
        program += ["--seconds", f"{max(5, seconds - 20):.0f}", "--dtype"]
        outputs = run([[*program, dtype] for dtype in SMOKE], seconds)
        states = []
        for dtype, (status, output) in zip(SMOKE, outputs, strict=True):
            self.log("smoke", dtype, output)
            self.wrong += [line for line in output.splitlines() if line.startswith(("FAILED", "after "))]
            late = f"not done within {seconds:.0f} s; " if status == LATE else ""
            if status and not any(dtype in line for line in self.wrong):
                self.wrong.append(f"FAILED {dtype}: {late}{counted(output)}")
            states.append(f"{dtype} {late}{counted(output)}")
        for line in self.wrong[:30]:
            print(f"  {line}", flush=True)
        self.say("smoke", "FAILED" if self.wrong else "passed", "; ".join(states), begin)

    def tests(self) -> None:
        begin, seconds = time.monotonic(), self.seconds("tests")
        if not importlib.util.find_spec("pytest"):
            self.say("tests", "FAILED", "pytest not found")
            return
        command = pytest("-m", "not slow and not models", *(str(Path("tests") / name) for name in TESTS))
        number = max(1, min(6, (os.cpu_count() or 2) // 2))
        workers = Workers(ROOT, self.out, command, {"FASTVIT_TEST_DEVICE": self.device}, number, SLOW)
        workers.run(seconds - 2)
        found = workers.outcomes
        by = {what: sorted(n for n in found if found[n] == what) for what in ("failed", "slow", "passed")}
        skipped = sum(what == "skipped" for what in found.values())
        self.log("tests", " ".join(command), "\n".join(workers.said) + "\n")
        for name in by["failed"]:
            self.log("tests", name, workers.texts.get(name, "") + "\n")
        for line in [*workers.said, *(f"FAILED {name}" for name in by["failed"])][:20]:
            print(f"  {line}", flush=True)
        counts = [f"{len(names)} {what}" for what, names in by.items() if names or what == "passed"]
        details = f"{', '.join(counts)}, {skipped} skipped of {workers.tests} within {seconds:.0f} s"
        first = next(iter(by["failed"] + by["slow"] + workers.said), "")
        # Where all were skipped nothing was shown.
        state = "FAILED" if first or not by["passed"] else "passed"
        self.say("tests", state, details + (f"; first: {first}" if first else ""), begin)

    def sanitizer(self) -> None:
        program = cuda_tool("compute-sanitizer")
        missing = [] if program else ["compute-sanitizer not found"]
        missing += [] if importlib.util.find_spec("pytest") else ["pytest not found"]
        missing += ["a rehearsal without a GPU"] if self.device == "cpu" else []
        if missing:
            self.say("sanitizer", "not run", ", ".join(missing))
            return
        ((_, help_text),) = run([[program, "--help"]], 20)
        ours = "--kernel-name" if "--kernel-name " in help_text else "--kernel-regex"
        deadline = time.monotonic() + self.seconds("sanitizer")
        for i, (tool, (options, file, selection)) in enumerate(SANITIZED[self.call].items()):
            begin = time.monotonic()
            seconds = max(1.0, (deadline - begin) / (len(SANITIZED[self.call]) - i))
            # initcheck has to see torch's kernels write what ours read
            kernels = [ours, "kns=fastvit"] if tool != "initcheck" else []
            command = [program, "--tool", tool, "--error-exitcode", str(gpu_process.ERROR_STATUS)]
            command += [*options, *kernels, *pytest(file, "-k", selection)]
            # one allocation per tensor, so that its end is known; torch's cache would hide an overrun
            wish = {"FASTVIT_TEST_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            ((status, output),) = run([command], seconds, wish)
            self.log("sanitizer", " ".join(command), output)
            self.say(f"sanitizer: {tool}", *verdict(tool, status, output, seconds), begin)

    def bench(self, step: str, *programs: tuple[str, list[str], dict]) -> None:
        """Benchmarks, one after the other: (name of the table, command, environment)."""
        for i, (table, command, environment) in enumerate(programs):
            begin = time.monotonic()
            seconds = self.seconds(step) / (len(programs) - i)
            command = [sys.executable, *command, "--device", self.device, "--out", str(self.out)]
            command += ["--quick"] if self.device == "cpu" else []
            patience = None if step == "layers" else PATIENCE
            one = Benchmark(command, {**environment, "FASTVIT_PROFILER": "0"}, patience)
            one.run(seconds)
            self.log(step, " ".join(command), one.output)
            compared = one.compared(self.out / f"{table}_{self.device}.csv")
            self.log(step, "beside the predictions", "\n".join(compared) + "\n")
            for line in [*one.faults, *(line for line in compared if line.endswith(" off"))][:20]:
                print(f"  {line}", flush=True)
            details = f"{one.rows} rows in {table}_{self.device}.csv; {compared[-1]}"
            if one.status not in ENDED:
                late = f"not done within {seconds:.0f} s; " if one.status == LATE else ""
                details += f"; status {one.status}: {late}{counted(one.output)}"
            details += "".join(f"; {fault}" for fault in one.faults)
            bad = one.status or one.faults or not one.rows
            self.say(f"{step}: {table}", "FAILED" if bad else "passed", details, begin)

    def part(self, step: str) -> None:
        """A part of benchmarks/bench_gpu.py."""
        first = "first_" if self.call == "proof" else ""  # the second call has a table of its own
        tables = {f"on_chip_{n}": {"FASTVIT_ON_CHIP": w} for w, n in ON_CHIP.items()}
        tables = tables if step == "on_chip" else {f"{first}{step}": {}}
        command = ["benchmarks/bench_gpu.py", step]
        self.bench(step, *(([name, [*command, "--name", name], wish]) for name, wish in tables.items()))

    def layers(self) -> None:
        """benchmarks/bench_ops.py, which compiles for longer than a row may take."""
        self.bench("layers", ("ops", ["benchmarks/bench_ops.py"], {}))

    def ncu(self) -> None:
        program, begin = cuda_tool("ncu"), time.monotonic()
        missing = [] if program else ["ncu not found"]
        missing += ["a rehearsal without a GPU"] if self.device == "cpu" else []
        if missing:
            self.say("ncu", "not run", ", ".join(missing))
            return
        seconds = self.seconds("ncu")
        sections = "SpeedOfLight MemoryWorkloadAnalysis Occupancy WarpStateStats InstructionStats".split()
        command = [program, "--clock-control", "none"]  # the clocks are not ours to set
        command += ["--kernel-name-base", "function", "--kernel-name", NCU_KERNELS]
        command += [word for section in sections for word in ("--section", section)]
        command += [sys.executable, "benchmarks/bench_gpu.py", "six_kernels", "--out", str(self.out)]
        ((status, output),) = run([command], seconds)
        self.log("ncu", " ".join(command), output)
        found = output.count("Section: GPU Speed Of Light Throughput")
        if "ERR_NVGPUCTRPERM" in output:
            self.say("ncu", "not run", "counters are for administrators alone here", begin)
        else:
            state = "passed" if status == 0 and found else "FAILED"
            self.say("ncu", state, f"{found} kernels in {self.log_of('ncu').name}, status {status}", begin)

    def all(self) -> int:
        """Runs the steps and writes the summary; the exit status."""
        for step in ("environment", *self.steps):
            begin = time.monotonic()
            try:
                method = getattr(self, step, None)
                method() if method else self.part(step)
            except Blocked as error:
                self.say(step, "FAILED", str(error), begin)
                break
            except Exception as error:  # of this script: the steps that follow are still worth running
                self.say(step, "FAILED", f"{type(error).__name__}: {error}", begin)
                if step == "environment":
                    break
        return self.summary()

    def write_summary(self) -> str:
        """After every step: a machine may be taken away. What the smoke test found comes first."""
        failed = [result.step for result in self.results if result.state == "FAILED"]
        lines = self.wrong[:30] + ([""] if self.wrong else [])
        lines += [f"{name:20} {value}" for name, value in self.facts.items()] + [""]
        lines += [f"{r.step:24} {r.state:8} {r.seconds:5.0f} s  {r.details}" for r in self.results]
        ran = {result.step.split(":")[0] for result in self.results}
        lines += [f"{step:24} not begun" for step in self.steps if step not in ran]
        lines += ["", f"{time.monotonic() - self.begin:.0f} s in all; logs and tables in {self.out}"]
        lines += [f"FAILED: {', '.join(failed)}" if failed else "nothing failed"]
        text = "\n".join(lines) + "\n"
        with full_disk():
            (self.out / f"summary_{self.call}.txt").write_text(text)
            pack(self.out, self.archive)
        return text

    def summary(self) -> int:
        text = self.write_summary()
        print("\n" + text)
        return 1 if any(result.state == "FAILED" for result in self.results) else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = list(dict.fromkeys(step for table in CALLS.values() for step in table if step != "environment"))
    parser.add_argument("call", choices=list(CALLS), help="which of the two")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--archive", type=Path, help="default: the folder's name with .tar.gz")
    parser.add_argument("--limit", type=float, default=530, help="seconds for all steps together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", nargs="+", default=every, choices=every, metavar="STEP")
    options = parser.parse_args()
    steps = [step for step in CALLS[options.call] if step in options.steps and step != "environment"]
    archive = options.archive and options.archive.resolve()
    run = Run(options.call, options.out.resolve(), options.device, options.limit, steps, archive)
    sys.exit(run.all())


if __name__ == "__main__":
    main()
