"""Tests one wheel with several releases of torch: `make wheel`.

    python tools/wheel_matrix.py dist/*.whl [--torch torch==2.13.0] [--compile torch==2.11.0 torch]

The program makes a bare virtual environment in runs/matrix for each requirement, installs that torch and the
wheel, and trains a small model there (examples/first_step.py). For each requirement of --compile the program
also compiles every source, C++ and CUDA, against that torch's headers, and runs the tests of parts that a
release of torch can break: the names of autograd's nodes, which select recipes, the traces of torch.compile,
the calls of ops, and layers. Device code is checked for its syntax alone, because no kernel includes torch.
The program exits with 1 if a requirement failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_resources import find_program

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("recompute", "report", "layers", "ops/test_arguments.py")


def run_command(*command: str | Path, cwd: Path = ROOT, seconds: int = 900) -> str:
    """Returns the output of a command. Raises SystemExit with the output if the command fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": variables, "text": True, "timeout": seconds}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run([str(word) for word in command], **options)
    if result.returncode:
        raise SystemExit(f"{result.stdout}\nstatus {result.returncode}: {' '.join(map(str, command))}")
    return result.stdout


def create_environment(requirement: str) -> Path:
    """Makes a virtual environment with the torch of `requirement`; returns its interpreter."""
    folder = ROOT / "runs/matrix" / requirement
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin/python"
    run_command(*pip_install(python), requirement)
    return python


def pip_install(python: Path) -> tuple[str | Path, ...]:
    """Returns the beginning of a command that installs packages for an interpreter."""
    # Without --no-compile pip compiles 10,000 modules of torch, of which the tests import a few hundred.
    return python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"


def compile_commands(include: Path, folder: Path) -> list[list[str | Path]]:
    """Returns the compiler's command for each source."""
    common = ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", include]
    cpp = [*"-fsyntax-only -fvisibility=hidden -Wall -Wextra -Werror -Wno-psabi".split(), *common]
    cpp += ["-DFASTVIT_HAS_BASELINE", "-DFASTVIT_ISA=baseline", '-DFASTVIT_BUILD_INFO=""']
    compiler = os.environ.get("CXX", "c++").split()[-1]  # CXX may begin with ccache.
    commands = [[compiler, *cpp, source] for source in sorted(ROOT.glob("csrc/**/*.cpp"))]
    if not (nvcc := find_program("nvcc")):
        print("CUDA sources are not compiled: there is no nvcc", flush=True)
        return commands
    # -cuda ends with C++ code, whose types nvcc has checked by then.
    cuda = "-cuda -gencode=arch=compute_80,code=compute_80 -fdevice-syntax-only -DUSE_CUDA"
    for source in sorted(ROOT.glob("csrc/cuda/*.cu")):
        commands.append([nvcc, *cuda.split(), *common, source, "-o", folder / f"{source.stem}.cpp"])
    return commands


def check_release(requirement: str, options: argparse.Namespace) -> None:
    """Tries the wheel with the torch of `requirement`. Raises SystemExit if a command fails."""
    python = create_environment(requirement)
    packages = run_command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    if requirement in options.compile:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = compile_commands(Path(packages) / "torch/include", Path(folder))
            list(pool.map(lambda command: run_command(*command), commands))
        print(f"{requirement}: {len(commands)} sources compile against its headers", flush=True)
    run_command(*pip_install(python), options.wheel)
    with tempfile.TemporaryDirectory() as empty:  # An empty folder has no source tree to import.
        output = run_command(python, ROOT / "examples/first_step.py", cwd=Path(empty))
        print(output.splitlines()[-1], flush=True)
        print(run_command(python, "-m", "fastvit.info", cwd=Path(empty)), flush=True)
    if requirement in options.compile:
        run_command(*pip_install(python), "pytest", "pytest-timeout", "hypothesis", "numpy", "matplotlib")
        # The script `pytest` is run, since `python -m pytest` would import the source tree.
        tests = [ROOT / "tests" / name for name in TESTS]
        summary = re.search(r"\d+ passed.*", run_command(python.parent / "pytest", "-q", *tests))
        print(f"{requirement}: tests, {summary and summary[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    for option, text in ("--torch", "releases to try"), ("--compile", "releases to compile for and to test"):
        parser.add_argument(option, nargs="+", default=[], metavar="REQUIREMENT", help=text)
    options = parser.parse_args()
    options.wheel = options.wheel.resolve()

    def run_and_report(requirement: str) -> str | None:
        """Returns the requirement if its check failed."""
        try:
            check_release(requirement, options)
        except (SystemExit, subprocess.SubprocessError) as error:
            print(f"{requirement}: FAILED\n{error}", flush=True)
            return requirement
        return None

    with ThreadPoolExecutor(2) as pool:  # One environment is downloaded and unpacked while another compiles.
        failed = list(filter(None, pool.map(run_and_report, options.compile + options.torch)))
    sys.exit(f"wheel_matrix: failed with {', '.join(failed)}; the output is above" if failed else 0)


if __name__ == "__main__":
    main()
