"""What `python -m fastvit.info` says is what is there."""

import os
import subprocess
import sys

import torch

from fastvit import _library, info


def test_facts():
    facts = info.facts()
    assert facts["torch"].startswith(torch.__version__)
    assert facts["CPU kernels"].split(",")[0] in ("baseline", "avx2", "avx512")
    assert (facts["CUDA kernels"] == "not built") == (not (_library.FOLDER / "_cuda.so").exists())
    if (_library.FOLDER / "_cuda.so").exists() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        assert facts["CUDA kernels"].endswith("built for compute_90, sm_80, sm_90")
    assert _library.HAS_CUDA <= (torch.version.cuda is not None)
    assert "gloo" in facts["process groups"]


def test_command_line():
    run = subprocess.run([sys.executable, "-m", "fastvit.info"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert [line.split("  ")[0] for line in run.stdout.splitlines()] == list(info.facts())


def test_lower_instruction_sets_can_be_asked_for():
    """ATEN_CPU_CAPABILITY works as for torch, so every copy of the kernels can be tested on one machine."""
    code = "import torch, fastvit; print(torch.ops.fastvit.cpu_capability())"
    for wish, allowed in [("default", {"baseline"}), ("avx2", {"avx2", "baseline"})]:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
            env={**os.environ, "ATEN_CPU_CAPABILITY": wish},
        )  # fmt: skip
        assert run.stdout.strip() in allowed, run.stderr
