"""Tests and measures fastvit on a machine with a CUDA GPU: `make gpu`.

    python3 tools/gpu.py [--out runs/gpu] [--steps test_cuda bench_ops ...] [--device cpu]

Every step is a command with a time limit, at whose end it is killed with its children, so that a hang costs
one step. OUT/STEP.log has all that it printed, tables of benchmarks lie beside it. After every step
OUT/summary.txt and OUT/gpu.tar.gz, which has everything in OUT, are written anew. Calls with the same OUT can
divide the steps. Exits with 1 if a step failed. All steps take about half an hour, and need pytest with xdist
and timeout, the built libraries and no network. `--device cpu` rehearses them without a GPU.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = "-m pytest -v --tb=short -o addopts= --timeout 60 --timeout-method thread"
TESTS = {
    "test_ops": "test_ops test_layer_norm test_act test_messages test_arguments",
    "test_cuda": "test_cuda test_peer_faults",
    "test_layers": "test_layers test_batch_norm_act test_convert_syncbn test_fuse",
    "test_convert": "test_recompute test_compile",
}
# float32 and bfloat16 over planes, rows, short planes and memory with gaps; few enough for a sanitizer
LAYOUTS = "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc) and (dtype0 or dtype2)"
OPS = "(leaky and test_abn_ops or test_bn_ops and -relu-)"
SANITIZED = ("memcheck", "racecheck")
BENCHMARKS = {  # the arguments, those of a rehearsal, and a package without which it is not run
    "bench_layers": ("", "--quick --turns 1", "torch"),
    "bench_ops": ("", "--quick --turns 1", "torch"),
    "bench_host": ("", "--rounds 1", "timm"),
    "bench_convert": (
        "--models vit_small_patch16_224,resnet50 --precision bf16 --batch 64",
        "--models resnet18 --batch 1 --repeats 1 --contenders convert",
        "timm",
    ),
}
SECONDS = {"facts": 180} | dict.fromkeys([*TESTS, *SANITIZED], 240) | dict.fromkeys(BENCHMARKS, 300)
FACTS = """
import os, subprocess, sys, time, torch
from fastvit import info, ops
begin = time.monotonic()
while sys.argv[1] == "cuda":  # a driver may take two minutes to start
    work = "import torch; torch.ones(1, device='cuda')"
    failed = subprocess.run([sys.executable, "-c", work]).returncode
    if not failed or time.monotonic() - begin > 120 or not os.path.exists("/dev/nvidiactl"):
        ops.bn_stats(torch.ones(2, 3, device="cuda")).sum().item()  # machine code for this GPU
        break
    time.sleep(3)
os.system("nvidia-smi; git -c safe.directory=* log -1 --oneline")
info.main()
"""


def run(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> int | str:
    """The status of a command, whose output goes to `log`; "late" past the limit."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    status: int | str = "late"
    with log.open("w") as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` has it ignored
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
        for end in (signal.SIGINT, signal.SIGKILL):  # on the first pytest tells what has failed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may not let it go
                process.wait(10)
    return status


def said(log: Path) -> str:
    """pytest's last line of counts, or the last line."""
    text = re.sub(r"^=+ | =+$", "", log.read_text(errors="replace"), flags=re.M)
    counts = re.findall(r"^\d+ (?:passed|failed|error|skipped).*", text, re.M)
    return (counts or text.strip().split("\n"))[-1][:160]


def pytest(names: str, *options: str) -> list[str]:
    files = [f"tests/{name}.py" for name in names.split()]
    return [sys.executable, *PYTEST.split(), "-m", "not slow and not models", *options, *files]


def task(step: str, device: str, out: Path) -> tuple[list[str], dict[str, str]] | str:
    """The command and environment of a step, or why it is not run."""
    environment = {"FASTVIT_TEST_DEVICE": device, "OMP_NUM_THREADS": "2"}
    if step == "facts":
        return [sys.executable, "-c", FACTS, device], environment
    if step in TESTS:
        return pytest(TESTS[step], "-n", str(min(6, (os.cpu_count() or 2) // 2))), environment
    if step in SANITIZED:
        folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
        program = shutil.which("compute-sanitizer", path=folders)
        if device == "cpu" or not program:
            return "a rehearsal without a GPU" if device == "cpu" else "there is no compute-sanitizer"
        command = [program, "--tool", step, "--error-exitcode", "99"]
        command += ["--report-api-errors", "no"] if step == "memcheck" else []  # torch expects some to fail
        # one allocation per tensor, so that its end is known; torch's cache would hide an overrun
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        return [*command, *pytest("test_ops", "-k", f"{LAYOUTS} and {OPS}")], environment
    if not importlib.util.find_spec(BENCHMARKS[step][2]):
        return f"there is no {BENCHMARKS[step][2]}"
    command = [sys.executable, f"benchmarks/{step}.py", "--device", device, "--out", str(out)]
    return [*command, *BENCHMARKS[step][device == "cpu"].split()], environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", nargs="+", choices=list(SECONDS), default=list(SECONDS))
    options = parser.parse_args()
    (out := options.out.resolve()).mkdir(parents=True, exist_ok=True)
    failed = False
    for step in dict.fromkeys(["facts", *options.steps]):
        begin, log, todo = time.monotonic(), out / f"{step}.log", task(step, options.device, out)
        state, details = "not run", str(todo)
        if not isinstance(todo, str):
            status = run(todo[0], log, SECONDS[step], todo[1])
            state, details = "FAILED" if status else "passed", f"status {status}: {said(log)}"
        failed = failed or state == "FAILED"
        line = f"{step:14} {state:8} {time.monotonic() - begin:5.0f} s  {details}"
        print(line, flush=True)
        with (out / "summary.txt").open("a") as file:
            file.write(line + "\n")
        with tarfile.open(new := out / ".new.tar.gz", "w:gz") as tar:
            tar.add(out, "", filter=lambda member: None if member.name.endswith(".gz") else member)
        new.replace(out / "gpu.tar.gz")
        if failed and step == "facts":
            break
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
