"""tools/sass.py reads ptxas' report, and fails where a kernel spills."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SASS = Path(__file__).resolve().parents[1] / "tools/sass.py"
LOG = """
ptxas info    : Compiling entry function '_ZN7fastvit3oneEv' for 'sm_90'
    16 bytes stack frame, {spills} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 3088 bytes smem
ptxas info    : Compiling entry function '_ZN7fastvit3twoEv' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""


@pytest.mark.skipif(not shutil.which("c++filt"), reason="there is no c++filt")
def test_a_spill_is_an_error(tmp_path):
    """With a toolkit whose nvcc says so; stores and loads of spills are added up."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime.h").touch()
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{LOG.format(spills=8)}\nEND\n")
    nvcc.chmod(0o755)
    command = [sys.executable, str(SASS), "--arch", "90", "--only", "message"]
    environment = {"CUDA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 1, result.stderr
    assert "90\t72\t16\t12\t3088\tone\n90\t10\t0\t0\t0\ttwo\n" in result.stdout
    assert result.stdout.endswith("2 kernels, 1 spill or have a stack frame\nfastvit::one sm_90\n")
