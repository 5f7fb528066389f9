"""The benchmarks run, write their results and name what they leave out."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RAW_OPS = {"bn_stats", "bn_forward", "abn_forward_", "bn_reduce", "abn_reduce", "bn_backward", "abn_backward"}


def bench(program, folder, *options, **environment):
    """Runs a benchmark on small inputs."""
    command = [sys.executable, f"benchmarks/{program}.py", "--quick", "--out", str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr


def test_bench_ops_measures_every_layer_and_op(tmp_path):
    bench("bench_ops", tmp_path)
    with (tmp_path / "ops_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    for layer in ("torch", "InPlaceABN", "SyncBatchNorm"):
        found = [(row["op"], row["layout"], row["dtype"]) for row in rows if row["contender"] == layer]
        assert len(found) == 9, f"{layer}: {found}"
    for op in RAW_OPS:
        assert sum(row["contender"] == f"fastvit.ops.{op}" for row in rows) == 3, op
    assert sum(row["contender"] == "torch bn_reduce, bn_backward" for row in rows) == 3
    for row in rows:
        times = [float(row[f"p{p}_us"]) for p in (20, 50, 80)]
        assert 0 < times[0] <= times[1] <= times[2], row
        elements = float(row["MB"]) * 1e6
        assert float(row["GB_s"]) == pytest.approx(int(row["passes"]) * elements / times[1] / 1e3, rel=2e-3)
        assert row["torch"] and row["commit"] and row["date"] and row["device"]
    table = (tmp_path / "ops_cpu.md").read_text()
    assert "4x9x16 | tokens | fp32 | 1 | InPlaceABN" in table


def test_bench_ops_needs_no_git_and_takes_the_commit_it_is_told(tmp_path):
    bench("bench_ops", tmp_path, PATH="/nowhere", FASTVIT_COMMIT="abc1234")
    assert "commit abc1234" in (tmp_path / "ops_cpu.md").read_text()


def test_bench_vit_ops_measures_both_contenders(tmp_path):
    bench("bench_vit_ops", tmp_path, "--repeats", "1")
    with (tmp_path / "vit_ops_cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert len(pairs) == 2 * (3 * 6 + 1)
    for torchs, own in pairs:
        assert (torchs["contender"], own["contender"]) == ("torch", "fastvit")
        assert all(torchs[key] == own[key] for key in ("op", "dtype", "direction")), own
        assert float(torchs["times"]) == 1 and float(own["times"]) > 0 and own["commit"]
