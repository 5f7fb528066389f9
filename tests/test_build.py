"""setup.py: what it refuses, in one sentence each; and that the libraries are of these sources."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastvit  # noqa: F401  loads the libraries

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")


def python(*arguments, cwd=ROOT, **environment):
    command, environment = [sys.executable, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def build(folder, *program, **environment):
    """Runs `setup.py build_ext`, which must fail, and returns its process."""
    program = program or ["setup.py"]
    run = python(*program, "build_ext", "-t", folder / "temp", "-b", folder / "lib", **environment)
    assert run.returncode == 1 and not list((folder / "lib").rglob("*.so")), run.stdout
    return run


def create_nvcc(folder, commands):
    """Makes an nvcc that says its version and its architectures, and otherwise runs shell commands."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f"""#!/bin/sh
        case $1 in
        --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
        --list-gpu-arch) printf 'compute_%s\\n' 75 80 90 ;;
        *) {commands} ;;
        esac"""
    )
    nvcc.chmod(0o755)


def format_program(package, version):
    """Returns a program that runs setup.py beside another version of a package."""
    return f"""import {package}
{package}.__version__ = type({package}.__version__)("{version}")
exec(open("setup.py").read())"""


@pytest.mark.parametrize(
    "environment,program,message",
    [
        (
            {"CXX": "no-g++ -m64"},
            [],
            "there is no C++ compiler no-g++; install g++ (>= 11) or clang++, or set",
        ),
        (
            {},
            ["-c", format_program("setuptools", "65.5.0")],
            "building needs setuptools>=77 and torch>=2.11; setup",
        ),
        (
            {},
            ["-c", format_program("torch", "2.10.1+cpu")],
            "building needs setuptools>=77 and torch>=2.11; torch is",
        ),
        ({"FASTVIT_CPU": "avx9"}, [], "FASTVIT_CPU is 'avx9'; expected: native, all."),
        ({"FASTVIT_CUDA": "yes"}, [], "FASTVIT_CUDA is 'yes'; expected: auto, 0, 1."),
        ({"FASTVIT_KERNELS": "no"}, [], "FASTVIT_KERNELS is 'no'; expected: 1, 0."),
        (
            {"FASTVIT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "Volta"},
            [],
            "nvcc knows 75, 80, 90 and not 70; set TORCH_CUDA_ARCH_LIST, such as 8.6",
        ),
    ],
)
def test_what_cannot_be_built_is_one_sentence(environment, program, message, tmp_path):
    create_nvcc(tmp_path, "exit 1")
    run = build(tmp_path, *program, **{"FASTVIT_CUDA": "0", "CUDA_HOME": str(tmp_path), **environment})
    assert run.stderr.strip().splitlines()[-1].startswith(f"fastvit: {message}")


@pytest.mark.skipif(
    any(map(os.path.exists, ("/usr/local/cuda", "/usr/bin/nvcc"))),
    reason="this machine has a toolkit where all look",
)
def test_no_toolkit_is_one_sentence(tmp_path):
    run = build(tmp_path, FASTVIT_CUDA="1", CUDA_HOME="", CUDA_PATH="", PATH="/usr/bin:/bin")
    assert "FASTVIT_CUDA=1, but there is no nvcc; set CUDA_HOME, or put nvcc on PATH." in run.stderr


def test_kernels_that_do_not_compile_are_an_error(tmp_path):
    create_nvcc(tmp_path, "echo this is no GPU compiler; exit 1")
    run = build(tmp_path, FASTVIT_CUDA="1", CUDA_HOME=str(tmp_path), TORCH_CUDA_ARCH_LIST="")
    if not torch.cuda.is_available():  # The default, as far as nvcc knows it.
        assert "CUDA kernels built for compute_75, sm_75, sm_80, sm_90 with CUDA 13.0" in run.stdout
    assert "this is no GPU compiler" in run.stdout
    assert run.stderr.strip().splitlines()[-1] == (
        "fastvit: compiling failed; the compiler's messages are above. "
        "FASTVIT_CUDA=0 builds without CUDA kernels, CXX=g++-12 with another compiler."
    )


def test_a_script_beside_the_clone_imports_the_package(tmp_path):
    """And not the clone's folder, which has the package's name."""
    (tmp_path / "fastvit").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import fastvit; print(fastvit.InPlaceABN(4))\n")
    result = python("script.py", cwd=tmp_path, PYTHONPATH="")
    assert result.returncode == 0 and result.stdout.startswith("InPlaceABN(4"), result.stderr


def test_a_package_without_kernels(tmp_path):
    """Its wheel is for any system, and a layer says why it cannot be made."""
    command = ["setup.py", "-q", "egg_info", "-e", tmp_path, "build", "-b", tmp_path / "build"]
    command += ["bdist_wheel", "-b", tmp_path / "b", "-d", tmp_path / "d"]
    run = python(*command, FASTVIT_KERNELS="0")
    assert run.returncode == 0, run.stderr
    (wheel,) = (tmp_path / "d").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    code = "import fastvit.info; fastvit.info.main(); fastvit.LayerNorm(3)"
    run = python("-c", code, cwd=tmp_path / "installed", PYTHONPATH="")
    why = "this fastvit was installed with FASTVIT_KERNELS=0; `pip install .` in its sources without that "
    assert f"CPU kernels     {why}" in run.stdout and "not built: FASTVIT_KERNELS=0" in run.stdout
    assert f"ImportError: fastvit.LayerNorm needs fastvit's kernels, but {why}" in run.stderr


def test_the_libraries_are_of_these_sources():
    source_checksum = runpy.run_path(str(ROOT / "tools/gpu_steps.py"))["source_checksum"]
    assert torch.ops.fastvit.cuda_build().endswith(f"; sources {source_checksum()}")
