"""examples/train_vit_apex.py: a script that imports apex, run over fastvit's look-alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# A CPU without bf16 instructions takes 30 times as long in half precision.
LEVEL = "O2" if torch.cpu._is_avx512_bf16_supported() else "O0"
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/train_vit_apex.py"


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd, capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)], done.stderr


@pytest.mark.parametrize("norm", ["apex", "fastvit", "inplace-abn"])
def test_two_ranks_then_one(tmp_path, norm):
    launch = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "fastvit.compat", SCRIPT)
    options = ("--norm", norm, "--opt-level", LEVEL, "--out", "out")
    accuracy, messages = run(*launch, *options, "--accumulate", 2, "--epochs", 4, cwd=tmp_path)
    assert len(accuracy) == 4 and accuracy[-1] >= 0.75, accuracy
    assert messages.count("half precision is bfloat16") <= 1 and "terminate" not in messages
    saved = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert saved["amp"]["loss_scaler0"]["loss_scale"] == (2.0**16 if LEVEL == "O2" else 1)
    assert saved["model"]["head.weight"].dtype == torch.float32
    assert any(name.name.startswith("events") for name in (tmp_path / "out").iterdir())
    after, _ = run("fastvit.compat", SCRIPT, *options, "--resume", "out/last.pt", "--epochs", 5, cwd=tmp_path)
    assert len(after) == 1 and after[0] >= accuracy[-1] - 0.02
