"""setup.py: its choices and its error messages."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")


def setup_globals(**environment):
    """setup.py's functions under an environment, without building."""
    with mock.patch.dict(os.environ, environment):
        return runpy.run_path(str(ROOT / "setup.py"))


def python(*arguments, cwd=ROOT, **environment):
    command, environment = [sys.executable, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def build(*program, **environment):
    """`setup.py build_ext` as a process; it must fail before it compiles anything."""
    program = program or ["setup.py"]
    run = python(*program, "build_ext", "-t", "build/test", "-b", "build/test", **environment)
    assert run.returncode != 0 and "ninja: Entering" not in run.stdout
    return run.stderr.strip().splitlines()[-1]


def toolkit(folder, architectures="75 80 86 90 100 120", version="13000", nvcc=None):
    """A folder that looks like a toolkit; its nvcc knows these architectures, or runs the commands `nvcc`."""
    nvcc = nvcc or f"printf 'compute_%s\\n' {architectures}"
    for name, text in {
        "include/cuda_runtime.h": "",
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {version}\n",
        "bin/nvcc": f"#!/bin/sh\n{nvcc}\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_no_compiler_is_one_sentence(tmp_path):
    assert build(PATH=str(tmp_path), CXX="") == (
        "fastvit: there is no C++ compiler; install g++ (>= 11) or clang++, or set CXX."
    )
    assert "there is no C++ compiler" in build(CXX="no-such-compiler")


@pytest.mark.parametrize(
    "module,stand_in,message",
    [
        ("torch", "None", "building needs torch>=2.11, found none; pip install it first."),
        ("torch", "mock.Mock(__version__='2.10.1+cpu')", "building needs torch>=2.11, found 2.10.1+cpu;"),
        ("setuptools", "mock.Mock(__version__='65.5.0')", "building needs setuptools>=77.0, found 65.5.0;"),
    ],
)
def test_what_is_missing_or_old_is_one_sentence(module, stand_in, message):
    code = f"""
import runpy, sys
from unittest import mock
sys.modules["{module}"] = {stand_in}
runpy.run_path("setup.py")
"""
    assert message in build("-c", code)


def find_cuda(monkeypatch, editable=False, cuda="auto", home="", path=""):
    """The toolkit that setup.py finds, or None, and why."""
    for name, value in (("CUDA_HOME", home), ("CUDA_PATH", ""), ("PATH", f"{path}:/bin:/usr/bin")):
        monkeypatch.setenv(name, str(value))
    return setup_globals(FASTVIT_CUDA=cuda)["find_cuda"](editable)


def test_cuda_choice(tmp_path, monkeypatch):
    assert find_cuda(monkeypatch, cuda="0", home=toolkit(tmp_path)) == (None, "FASTVIT_CUDA=0")
    with pytest.raises(SystemExit, match="FASTVIT_CUDA is 'yes'; auto, 0 or 1 expected"):
        find_cuda(monkeypatch, cuda="yes")
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "this torch is a ROCm build" in find_cuda(monkeypatch)[1]


def test_toolkits(tmp_path, monkeypatch):
    """nvcc on PATH may be a script that prints the toolkit's folder; Debian's headers are not in that."""
    real = toolkit(tmp_path / "cuda")
    assert find_cuda(monkeypatch, home=real) == (real, f"toolkit at {real}")
    assert setup_globals()["cuda_version"](tmp_path) == "unknown"
    wrapper = toolkit(tmp_path / "other", nvcc=f"echo '#$ TOP={real}/bin/..' >&2")
    (wrapper / "include/cuda_runtime.h").unlink()
    assert find_cuda(monkeypatch, path=wrapper / "bin")[0] == real
    debian = toolkit(tmp_path / "usr", nvcc="echo '#$ TOP=/usr/lib/nvidia-cuda-toolkit' >&2")
    assert find_cuda(monkeypatch, path=debian / "bin")[0] == debian
    old = toolkit(tmp_path / "old", version="11080")
    with pytest.raises(SystemExit, match="has CUDA 11.8, and the kernels need 12.4 or later"):
        find_cuda(monkeypatch, home=old)


@pytest.mark.skipif(Path("/usr/local/cuda").exists(), reason="this machine has a toolkit where all look")
def test_no_toolkit(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    cuda, why = find_cuda(monkeypatch, home=tmp_path)
    assert cuda is None and why.startswith("no CUDA toolkit found")
    with pytest.raises(SystemExit, match="FASTVIT_CUDA=1, but there is no CUDA toolkit; set CUDA_HOME"):
        find_cuda(monkeypatch, cuda="1")


def test_an_editable_install_builds_no_kernels_that_its_torch_cannot_load(tmp_path, monkeypatch):
    toolkit(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    found, why = find_cuda(monkeypatch, editable=True, home=tmp_path)
    assert found is None and "this torch is a CPU build" in why
    assert find_cuda(monkeypatch, home=tmp_path)[0] == tmp_path  # a wheel is for every torch
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert find_cuda(monkeypatch, editable=True, home=tmp_path)[0] == tmp_path


def test_a_script_beside_the_clone_imports_the_package(tmp_path):
    """And not the clone's folder, which has the package's name."""
    (tmp_path / "fastvit").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import fastvit; print(fastvit.InPlaceABN(4))\n")
    result = python("script.py", cwd=tmp_path, PYTHONPATH="")
    assert result.returncode == 0 and result.stdout.startswith("InPlaceABN(4"), result.stderr


NEWEST = "75 80 86 90 100 120"


@pytest.mark.parametrize(
    "wish,known,gpu,codes",
    [
        ("", NEWEST, False, "compute_75 sm_75 sm_80 sm_90 sm_100 compute_120 sm_120"),
        ("", "80 86 89 90", False, "sm_80 sm_90"),  # those that an older toolkit knows
        ("8.6 9.0a;", NEWEST, False, "sm_86 sm_90a"),
        ("8.0 8.6+PTX", NEWEST, False, "sm_80 compute_86 sm_86"),
        ("Ampere", NEWEST, False, "sm_80 compute_86 sm_86"),
        ("", NEWEST, True, "compute_86 sm_86"),
        ("native", NEWEST, True, "compute_86 sm_86"),
    ],
)
def test_architectures(tmp_path, monkeypatch, wish, known, gpu, codes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
    found = setup_globals()["gencode_flags"](toolkit(tmp_path, known))
    assert sorted(option.rsplit("=", 1)[1] for option in found) == sorted(codes.split())
    lines = setup_globals()["build_ninja_text"]("g++", tmp_path, "a toolkit", ["baseline"], found)
    assert f" {' '.join(found)} " in lines and "with CUDA 13.0" in lines


@pytest.mark.parametrize(
    "wish,message",
    [
        ("native", "TORCH_CUDA_ARCH_LIST=native, but torch sees no GPU; name one"),
        ("8.0;Fermi", r"TORCH_CUDA_ARCH_LIST=8.0;Fermi: Unknown CUDA arch \(Fermi\)"),
        ("Volta", "compute_70, which nvcc 13.0 does not know; it knows 75, 80, 86, 90, 100, 120"),
    ],
)
def test_architectures_that_cannot_be(tmp_path, monkeypatch, wish, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
    with pytest.raises(SystemExit, match=message):
        setup_globals()["gencode_flags"](toolkit(tmp_path))


def test_a_compiler_with_flags(tmp_path):
    lines = setup_globals()["build_ninja_text"]("ccache g++ -m64", tmp_path, "", ["baseline"], [])
    assert "-ccbin g++ -Xcompiler '-m64 -fPIC " in lines and "g++ -m64 -O3" in lines


def test_a_package_without_kernels(monkeypatch, tmp_path):
    """On any system, and its wheel is for any."""
    monkeypatch.setattr(sys, "platform", "darwin")
    setup_globals(FASTVIT_KERNELS="0")  # raises nothing
    with pytest.raises(SystemExit, match="Linux expected, this is darwin.* FASTVIT_KERNELS=0 installs what"):
        setup_globals(FASTVIT_KERNELS="1")
    with pytest.raises(SystemExit, match="FASTVIT_KERNELS is 'no'; 0 or 1 expected"):
        setup_globals(FASTVIT_KERNELS="no")
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


def test_kernels_know_the_sources_that_they_were_built_from(tmp_path):
    """Whatever is built, and in whichever folder."""

    def checksum(root, *given):
        setup = setup_globals()
        setup["build_ninja_text"].__globals__["ROOT"] = root
        (found,) = set(re.findall(r"; sources ([0-9a-f]{8})\b", setup["build_ninja_text"]("g++", *given)))
        return found

    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    given = None, "FASTVIT_CUDA=0", ["baseline"], []
    assert checksum(ROOT, *given) == checksum(tmp_path, *given)
    with_cuda = toolkit(tmp_path / "cuda"), "", ["baseline"], ["-gencode=arch=compute_90,code=sm_90"]
    assert checksum(ROOT, *given) == checksum(tmp_path, *with_cuda)
    with (tmp_path / "csrc/ops.cpp").open("a") as file:
        file.write("\n")
    assert checksum(ROOT, *given) != checksum(tmp_path, *given)


def test_instruction_sets():
    setup = setup_globals(FASTVIT_CPU="")
    assert setup["cpu_capabilities"](editable=True) == [setup["native_capability"]()]
    assert setup["cpu_capabilities"](editable=False) == list(setup["CPU_CAPABILITY_FLAGS"])
    assert setup_globals(FASTVIT_CPU="all")["cpu_capabilities"](editable=True) == list(
        setup["CPU_CAPABILITY_FLAGS"]
    )
    assert setup_globals(FASTVIT_CPU="native")["cpu_capabilities"](editable=False) == [
        setup["native_capability"]()
    ]
    with pytest.raises(SystemExit, match="FASTVIT_CPU is 'avx9'; native or all expected"):
        setup_globals(FASTVIT_CPU="avx9")["cpu_capabilities"](editable=False)


def test_kernels_that_do_not_compile_are_an_error(tmp_path):
    """With a toolkit the CUDA kernels are built, and a failure is an error."""
    toolkit(tmp_path, nvcc="echo this is no GPU compiler >&2\nexit 1")
    (tmp_path / "bin/g++").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    (tmp_path / "bin/g++").chmod(0o755)
    wish = {"FASTVIT_CUDA": "auto", "CUDA_HOME": str(tmp_path), "CXX": str(tmp_path / "bin/g++")}
    run = python("setup.py", "build_ext", "-t", tmp_path / "temp", "-b", tmp_path / "lib", **wish)
    assert run.returncode == 1 and "this is no GPU compiler" in run.stdout
    assert run.stderr.strip().splitlines()[-1] == (
        "fastvit: compiling the kernels failed; the compiler's messages are above. "
        "FASTVIT_CUDA=0 builds without the CUDA kernels, CXX=g++-12 with another compiler."
    )
    assert not list((tmp_path / "lib").rglob("*.so"))
