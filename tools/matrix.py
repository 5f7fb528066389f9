"""Tests one wheel with several releases of torch: `make wheel`.

    python tools/matrix.py dist/*.whl [--torch torch==2.13.0] [--compile torch==2.11.0 torch]

Each requirement gets a bare virtual environment in runs/matrix with that torch and the wheel, which trains
one step there (examples/first_step.py). With those of --compile every source, C++ and CUDA, is compiled
against that torch's headers; code for the device only as far as its syntax, because no kernel includes
torch. With them the wheel also takes the tests of what a release of torch can break: the names of autograd's
nodes, by which recipes are read, what torch.compile traces, the calls of ops, and layers. Exits with 1 if
anything failed.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
TESTS = (
    "test_recompute*",
    "test_report",
    "test_budget",
    "test_compile",
    "test_arguments",
    "test_layers",
    "test_batch_norm_act",
    "test_layer_norm",
    "test_fuse",
)


def run(*command: str | Path, cwd: Path = ROOT, seconds: int = 900) -> str:
    """The command's output; SystemExit with it when the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": environment, "text": True, "timeout": seconds}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([str(word) for word in command], **options)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nstatus {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def environment(requirement: str) -> Path:
    """The interpreter of a new virtual environment with that torch."""
    folder = ROOT / "runs/matrix" / requirement
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin/python"
    run(*pip(python), requirement)
    return python


def pip(python: Path) -> tuple[str | Path, ...]:
    # Of 10,000 modules that torch brings, an environment here imports a few hundred.
    return python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"


def commands(include: Path, folder: Path) -> list[list[str | Path]]:
    """A compiler's command for each source."""
    common = ["-std=c++20", f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}", "-isystem", include]
    cpp = ["-fsyntax-only", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", *SETUP["QUIET"].split()]
    cpp += ["-DFASTVIT_ISA=baseline", '-DFASTVIT_CUDA_BUILD=""']
    cpp += ["-DFASTVIT_HAS_BASELINE"]
    found = [
        [os.environ.get("CXX", "c++").split()[-1], *cpp, *common, source] for source in SETUP["cpp_sources"]()
    ]
    toolkit, why = SETUP["find_cuda"]()
    if not toolkit:
        print(f"CUDA sources are not compiled: {why}", flush=True)
        return found
    host = "-gencode=arch=compute_80,code=compute_80 -fdevice-syntax-only -DUSE_CUDA -Xcompiler -Wno-psabi"
    nvcc = [toolkit / "bin/nvcc", *host.split(), *common]
    for source in SETUP["cuda_sources"]():
        found.append([*nvcc, "-c", source, "-o", folder / f"{source.stem}.o"])
    return found


def check(requirement: str, options: argparse.Namespace) -> None:
    python = environment(requirement)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    if requirement in options.compile:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = commands(Path(packages) / "torch/include", Path(folder))
            list(pool.map(lambda job: run(*job), jobs))
        print(f"{requirement}: {len(jobs)} sources compile against its headers", flush=True)
    run(*pip(python), options.wheel)
    with tempfile.TemporaryDirectory() as empty:  # nothing of the source tree is there to be imported
        print(run(python, ROOT / "examples/first_step.py", cwd=Path(empty)).splitlines()[-1], flush=True)
        print(run(python, "-m", "fastvit.info", cwd=Path(empty)), flush=True)
    if requirement in options.compile:
        run(*pip(python), "pytest", "pytest-timeout", "numpy", "matplotlib")
        tests = [test for name in TESTS for test in ROOT.glob(f"tests/{name}.py")]
        # The script, since `python -m pytest` would import the source tree.
        chosen = ("-m", "not slow and not models and not thorough")
        summary = re.search(r"\d+ passed.*", run(python.parent / "pytest", "-q", *chosen, *tests))
        print(f"{requirement}: tests, {summary and summary[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    for option in ("--torch", "--compile"):
        parser.add_argument(option, nargs="+", default=[], metavar="REQUIREMENT")
    options = parser.parse_args()
    options.wheel = options.wheel.resolve()

    def failure(requirement: str) -> str | None:
        try:
            check(requirement, options)
        except (SystemExit, subprocess.SubprocessError) as error:
            print(f"{requirement}: FAILED\n{error}", flush=True)
            return requirement
        return None

    with ThreadPoolExecutor(2) as pool:  # one is downloaded and unpacked while another compiles
        failed = list(filter(None, pool.map(failure, options.compile + options.torch)))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
