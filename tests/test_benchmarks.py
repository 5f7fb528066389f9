"""The benchmarks run, and write rows of one form."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RAW_OPS = {"bn_stats", "bn_forward", "abn_forward_", "bn_reduce", "abn_reduce", "bn_backward", "abn_backward"}
DIRECTIONS = {"forward", "backward", "both"}


def bench(program, folder, **environment):
    """Runs a benchmark on small inputs."""
    command = [sys.executable, f"benchmarks/{program}.py", "--quick", "--turns", "3", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr


def rows_of(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        times = [float(row[f"p{p}_us"]) for p in (20, 50, 80)]
        assert 0 < times[0] <= times[1] <= times[2], row
        assert float(row["share_of_copy"]) > 0 and row["threads"] == "1", row
        assert row["torch"] and row["commit"] and row["date"] and row["device"]
        assert row["contender"] != "torch" or float(row["times"]) == 1
    return rows


def test_bench_ops_measures_every_op(tmp_path):
    """Without git, it takes the commit that it is told."""
    bench("bench_ops", tmp_path, PATH="/nowhere", FASTVIT_COMMIT="abc1234")
    rows = rows_of(tmp_path / "ops_cpu.csv")
    for op in RAW_OPS:
        assert sum((row["what"], row["contender"]) == (op, "fastvit") for row in rows) == 3, op
    assert sum(row["what"] == "bn_reduce, bn_backward" for row in rows) == 3
    table = (tmp_path / "ops_cpu.md").read_text()
    assert "bn_stats | 4x9x16 tokens | bf16 | 1" in table and "commit abc1234" in table


def test_bench_layers_measures_every_layer(tmp_path):
    bench("bench_layers", tmp_path)
    layers = rows_of(tmp_path / "layers_cpu.csv")
    for layer, kept in (("torch", 2), ("InPlaceABN", 1), ("SyncBatchNorm", 2)):
        found = [row for row in layers if row["contender"] == layer]
        assert len(found) == 9 and {row["direction"] for row in found} == DIRECTIONS, layer
        assert all(float(row["kept"]) == pytest.approx(kept, rel=0.3) for row in found), layer
    whats = {"layer_norm", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"}
    rows = rows_of(tmp_path / "layers_cpu.csv")
    assert {row["what"] for row in rows} == whats and len(rows) == 2 * 3 * (3 * 6 + 1)
    assert "| InPlaceABN |" in (tmp_path / "layers_cpu.md").read_text()
