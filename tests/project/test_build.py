"""setup.py: what it refuses, in one sentence each; the metadata; the libraries are of these sources."""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import torch

import fastvit  # noqa: F401  loads the libraries

ROOT = Path(__file__).resolve().parents[2]
ISAS = ("baseline", "avx2", "avx512") if platform.machine() == "x86_64" else ("baseline",)
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


@pytest.mark.nightly
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
    ids=[
        "CXX",
        "setuptools",
        "torch",
        "FASTVIT_CPU",
        "FASTVIT_CUDA",
        "FASTVIT_KERNELS",
        "TORCH_CUDA_ARCH_LIST",
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("archs", "targets"),
    [
        pytest.param(
            "",
            "compute_75, sm_75, sm_80, sm_90",  # The default, as far as nvcc knows it.
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the default is this GPU's"),
        ),
        ("8.0 9.0a;", "sm_80, sm_90a"),
        ("8.0;Turing", "compute_75, sm_75, sm_80"),
    ],
    ids=["default", "numbers", "name"],
)
def test_kernels_that_do_not_compile_are_an_error(archs, targets, tmp_path):
    create_nvcc(tmp_path, "echo this is no GPU compiler; exit 1")
    cxx = f"ccache {shutil.which('c++') or 'g++'} -DFROM_CXX"
    run = build(
        tmp_path,
        FASTVIT_CUDA="1",
        CUDA_HOME=str(tmp_path),
        TORCH_CUDA_ARCH_LIST=archs,
        CXX=cxx,
        FASTVIT_CPU="",
    )
    assert f"CUDA kernels built for {targets} with CUDA 13.0" in run.stdout
    assert f"fastvit: CPU kernels for {', '.join(ISAS)};" in run.stdout  # The default of a wheel.
    (rules,) = (tmp_path / "temp").glob("cuda*/build.ninja")
    (options,) = (line for line in rules.read_text().splitlines() if line.startswith("cuda_post_cflags"))
    assert ",-DFROM_CXX " in options and options.count("-gencode=") == len(targets.split())
    assert "this is no GPU compiler" in run.stdout
    assert run.stderr.strip().splitlines()[-1] == (
        "fastvit: compiling failed; the compiler's messages are above. "
        "FASTVIT_CUDA=0 builds without CUDA kernels, CXX=g++-12 with another compiler."
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("0", "FASTVIT_CUDA=0"),
        pytest.param(
            "auto",
            "this torch cannot load CUDA kernels; FASTVIT_CUDA=1 builds them",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can load them"),
        ),
    ],
    ids=["0", "auto"],
)
def test_a_build_without_cuda_says_why(choice, reason, tmp_path):
    create_nvcc(tmp_path, "exit 1")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\ncase $1 in -v | --version | -dump*) echo 12.2.0 ;; *) exit 1 ;; esac\n")
    compiler.chmod(0o755)
    variables = {"CUDA_HOME": str(tmp_path), "CXX": str(compiler), "FASTVIT_CPU": "native"}
    run = build(tmp_path, FASTVIT_CUDA=choice, **variables)
    best = torch.backends.cpu.get_cpu_capability().lower().replace("default", "baseline")
    assert f"fastvit: CPU kernels for {best}; CUDA kernels not built: {reason}\n" in run.stdout


def test_a_script_beside_the_clone_imports_the_package(tmp_path):
    """And not the clone's folder, which has the package's name."""
    (tmp_path / "fastvit").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import fastvit; print(fastvit.InPlaceABN(4))\n")
    result = python("script.py", cwd=tmp_path, PYTHONPATH="")
    assert result.returncode == 0 and result.stdout.startswith("InPlaceABN(4"), result.stderr


def test_the_description_of_the_package_has_no_relative_link(tmp_path):
    """A package index does not have the repository's files."""
    run = python("setup.py", "-q", "egg_info", "-e", tmp_path, FASTVIT_KERNELS="0")
    assert run.returncode == 0, run.stderr
    metadata = PathDistribution(tmp_path / "fastvit.egg-info").metadata
    source = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Source"]
    in_source = re.compile(rf"{re.escape(source)}/(?:blob|raw)/v{re.escape(metadata['Version'])}/([^#]+)")
    links = r"\]\(([^)\s]*)|\b(?:src|href)=[\"']?([^\"'\s>]*)|^\[[^]]+\]: *(\S+)"
    targets = ["".join(groups) for groups in re.findall(links, metadata["Description"], re.M)]
    assert targets and [target for target in targets if "://" not in target] == []
    paths = [match[1] for target in targets if (match := in_source.match(target))]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_citation_has_the_version_of_the_package():
    project, citation = (ROOT / "pyproject.toml").read_text(), (ROOT / "CITATION.cff").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', project, re.M)
    assert re.findall(r"^version: (.+)$", citation, re.M) == [version]


@pytest.mark.nightly
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
