"""The benchmarks run, and write rows of one form."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_layers
import bench_ops
import harness
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RAW_OPS = {"bn_stats", "bn_forward", "bn_forward_inplace", "bn_reduce", "bn_backward"}
RAW_OPS |= {bench_ops.REDUCE_OUTPUT, bench_ops.BACKWARD_OUTPUT, bench_ops.BOTH_OUTPUT}
DIRECTIONS = {"forward", "backward", "both"}
# torch.compile traces only in a quick run; Inductor would keep 2.
KEPT = {"torch": 2, "torch.compile": 3, "BatchNormAct": 2, "InPlaceABN": 1, "SyncBatchNorm": 2}


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
        assert float(row["copy_us"]) > 0 and float(row["spread"]) >= 0 and row["late"] == "0", row
        assert row["torch"] and row["commit"] and row["date"] and row["device"]
        assert row["contender"] != "torch" or float(row["times"]) == 1
    return rows


@pytest.mark.nightly
def test_bench_ops_measures_every_op(tmp_path):
    """Without git, it takes the commit that it is told."""
    bench("bench_ops", tmp_path, PATH="/nowhere", FASTVIT_COMMIT="abc1234")
    rows = rows_of(tmp_path / "ops_cpu.csv")
    for op in [*RAW_OPS, bench_ops.FORWARD, bench_ops.BACKWARD, "act"]:
        assert sum((row["what"], row["contender"]) == (op, "fastvit") for row in rows) == 3, op
    for op in ("bn_stats", "bn_forward", bench_ops.FORWARD, bench_ops.BACKWARD, "act"):
        assert sum((row["what"], row["contender"]) == (op, "torch") for row in rows) == 3, op
    table = (tmp_path / "ops_cpu.md").read_text()
    assert "bn_stats | 4x9x16 tokens | bf16 | 1" in table and "commit abc1234" in table


@pytest.mark.nightly
def test_bench_layers_measures_every_layer(tmp_path):
    bench("bench_layers", tmp_path)
    rows = rows_of(tmp_path / "layers_cpu.csv")
    for layer, kept in KEPT.items():
        found = [row for row in rows if row["contender"] == layer and row["what"] == "batch norm"]
        assert len(found) == 9 and {row["direction"] for row in found} == DIRECTIONS, layer
        assert all(float(row["kept"]) == pytest.approx(kept, rel=0.3) for row in found), layer
    assert {row["what"] for row in rows} == {"batch norm", "layer_norm", *bench_layers.POINTWISE}
    assert sum(row["what"] != "batch norm" for row in rows) == 3 * 3 * (3 * 6 + 1)
    assert "| InPlaceABN |" in (tmp_path / "layers_cpu.md").read_text()


class Gpu:
    """A stream whose clock, and the host's, tests advance. Both count milliseconds."""

    def __init__(self, monkeypatch, l2_bytes=50 << 20):
        self.host = self.stream = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                self.at = 0.0

            def record(self):
                gpu.queue(0, 1e-6)  # an event takes time, too
                self.at = gpu.stream

            def query(self):
                return self.at <= gpu.host

            def elapsed_time(self, other):
                return other.at - self.at

        def synchronize():
            gpu.host = max(gpu.host, gpu.stream)

        faked = {
            "Event": Event,
            "_sleep": lambda cycles: gpu.queue(0, cycles / 1e6),
            "synchronize": synchronize,
            "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=l2_bytes),
        }
        for name, value in faked.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: gpu.host / 1e3))
        self.timer = harness.CudaTimer("cpu", 1 << 16)

    def queue(self, host_ms, stream_ms):
        self.host += host_ms
        self.stream = max(self.stream, self.host) + stream_ms


def test_a_gpus_time_is_without_that_of_a_host_which_is_slower(monkeypatch):
    gpu = Gpu(monkeypatch)
    calls = [lambda: gpu.queue(0.15, 0.1)] * 10
    taken = gpu.timer(calls, "work")
    assert (taken.ms, taken.host_ms, taken.num_late) == pytest.approx((0.1, 0.15, 0), rel=1e-3)


def test_a_late_host_is_marked_and_has_more_time_in_the_next_turn(monkeypatch):
    gpu = Gpu(monkeypatch)
    calls = [lambda: gpu.queue(0.9, 0.1)] * 10
    late, later = gpu.timer(calls, "work"), gpu.timer(calls, "work")
    assert late.num_late == 1 and late.ms > 0.5
    assert later.num_late == 0 and later.ms == pytest.approx(0.1, rel=1e-3)
    assert gpu.timer([lambda: gpu.queue(99, 0)], "other").num_late == 1
    gpu.host = before = gpu.stream
    assert gpu.timer([lambda: gpu.queue(99, 0)], "other").num_late == 1
    assert gpu.stream - before < 200, "the delay has a limit"


@pytest.mark.parametrize("nbytes", [1 << 10, 6 << 20, 39 << 20, 205 << 20], ids=str)
def test_inputs_rotate_over_more_than_the_cache(monkeypatch, nbytes):
    timer = Gpu(monkeypatch, l2_bytes=50 << 20).timer
    for passes in (1, 5):
        sets, calls = timer.plan_rotation(nbytes, passes * nbytes)
        assert sets >= 2 and calls % sets == 0 and 8 <= calls <= 2 * timer.MAX_CALLS
        assert sets * nbytes >= 6 * 50 << 20 or sets == timer.MAX_SETS
        assert calls * passes * nbytes < 20 << 30


def test_each_call_on_a_gpu_has_inputs_of_its_own(monkeypatch):
    timer = Gpu(monkeypatch, l2_bytes=1 << 16).timer
    seen, gradients = [], []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x.data_ptr())
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            gradients.append(dy.data_ptr())
            return 2 * dy

    x = torch.randn(64, 256)
    bytes_moved = {"forward": 2 * x.nbytes, "backward": 3 * x.nbytes, "both": 5 * x.nbytes}
    case = bench_layers.Case("twice", "64x256", "fp32", [x], {"torch": Twice.apply}, bytes_moved)
    rows = bench_layers.bench(case, timer, turns=2)
    sets, calls = timer.plan_rotation(x.nbytes, bytes_moved["both"])
    assert {row["direction"] for row in rows} == DIRECTIONS and calls == 60
    for turn in range(harness.WARM_UP_TURNS + 2):
        part = slice(1 + turn * calls, 1 + (turn + 1) * calls)  # the first call told the shape of a result
        assert len(set(seen[part])) == calls
        assert len(set(gradients[turn * calls : (turn + 1) * calls])) == sets


def test_each_op_on_a_gpu_rotates_over_its_sets(monkeypatch):
    timer = Gpu(monkeypatch, l2_bytes=1 << 12).timer
    case, seen = bench_ops.image_cases(4, 8, 6, "fp32")[0], []

    def made(case, x, dy):
        return {"bn_stats": lambda: seen.append(x.data_ptr())}

    monkeypatch.setattr(bench_ops, "PASSES", {"bn_stats": 1})
    monkeypatch.setattr(bench_ops, "fastvit_ops", made)
    monkeypatch.setattr(bench_ops, "torch_ops", made)
    rows = bench_ops.bench(case, timer, turns=1)
    assert [row["contender"] for row in rows] == ["fastvit", "torch"]
    sets, calls = timer.plan_rotation(4 * 8 * 36 * 4, 4 * 8 * 36 * 4)
    assert len(seen) == 2 * (harness.WARM_UP_TURNS + 1) * calls and sets > 2
    assert seen[:sets] * (len(seen) // sets) == seen and len(set(seen)) == sets


def test_rows_have_the_spread_the_late_turns_and_no_contender_that_failed(capsys):
    timer = SimpleNamespace(copy=lambda nbytes: harness.Timing(2.0))
    turns = iter(
        [harness.Timing(9.0), harness.Timing(9.0), *(harness.Timing(ms, 0.5, ms == 3) for ms in (1, 2, 3))]
    )

    def fails():
        raise RuntimeError("no compiler")

    contenders = {"torch": lambda: {"": next(turns)}, harness.COMPILED: fails}
    (row,) = harness.measure_in_turns(contenders, timer, 3, 1000, {"": 3000})
    assert (row["p50_us"], row["spread"], row["late"], row["host_us"]) == (2000, 1, 1, 500)
    assert row["share_of_copy"] == pytest.approx(1.5) and row["copy_us"] == 2000
    assert "not measured: torch.compile: RuntimeError: no compiler" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no compiler"):
        harness.measure_in_turns({"torch": fails}, timer, 3, 1000, {"": 3000})
