"""examples/apex_script: a script in the old style, run unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "apex_script" / "main.py"


def run(*command, cwd):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)], done.stderr


def test_two_ranks_then_one(tmp_path):
    launch = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "fastvit.compat", SCRIPT)
    options = ("--opt-level", "O2", "--accumulate", 2, "--checkpoint", "last.pt")
    accuracy, messages = run(*launch, *options, "--epochs", 2, cwd=tmp_path)
    assert len(accuracy) == 2 and accuracy[-1] >= 0.9
    assert messages.count("half precision is bfloat16") <= 1 and "terminate" not in messages
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert saved["amp"]["loss_scaler0"]["loss_scale"] == 2.0**16
    assert saved["model"]["0.weight"].dtype == torch.float32
    accuracy, _ = run(
        "fastvit.compat", SCRIPT, "--opt-level", "O1", "--resume", "last.pt", "--epochs", 3, cwd=tmp_path
    )
    assert len(accuracy) == 1 and accuracy[0] >= 0.9
