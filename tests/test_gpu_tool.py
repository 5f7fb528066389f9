"""tools/gpu.py: what fails is said, what cannot run is said, nothing outlasts its time."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tools/gpu.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu"]


def states(run) -> dict[str, str]:
    return {result.step: result.state for result in run.results}


def test_a_command_that_takes_too_long_is_ended_with_its_children(gpu, tmp_path):
    mark = tmp_path / "survived"
    command = ["bash", "-c", f"echo started; (sleep 3; touch {mark}) & sleep 60"]
    begin = time.monotonic()
    results = gpu.run([command, ["bash", "-c", "echo fine"], ["/nowhere/program"]], 1)
    assert time.monotonic() - begin < 10
    assert results[0] == (124, "started\n") and results[1] == (0, "fine\n")
    assert results[2][0] == 127 and "/nowhere/program" in results[2][1]
    time.sleep(3)
    assert not mark.exists()


def test_time_is_kept_for_the_steps_that_follow(gpu, tmp_path):
    run = gpu.Run(tmp_path, "cpu", 530, ["build", "tests", "benchmarks", "sanitizer"])
    assert run.seconds("build") == gpu.SECONDS["build"][0]
    run.begin -= 300  # so much is gone
    kept = gpu.SECONDS["benchmarks"][1] + gpu.SECONDS["sanitizer"][1]
    assert run.seconds("tests") == pytest.approx(230 - kept, abs=1)
    run.begin -= 300
    assert run.seconds("sanitizer") == 1
    most = sum(seconds for _, seconds in gpu.SECONDS.values()) + gpu.SECONDS["build"][0]
    assert most < 530, "with a build there is not time for the rest"


def test_a_failed_step_fails_the_run_and_the_next_steps_still_run(gpu, tmp_path, monkeypatch, capsys):
    bad, good = tmp_path / "test_bad.py", tmp_path / "test_good.py"
    bad.write_text("def test_bad(): assert 1 == 2\n")
    good.write_text("import os\ndef test_good(): assert os.environ['FASTVIT_TEST_DEVICE'] == 'cpu'\n")
    monkeypatch.setattr(gpu, "TESTS", {"bad": [str(bad)], "good": [str(good)]})
    monkeypatch.setattr(gpu.Run, "benchmarks", lambda self: 1 / 0)
    run = gpu.Run(tmp_path / "out", "cpu", 530, ["build", "tests", "benchmarks", "sanitizer"])
    assert run.all() == 1
    assert states(run) == {
        "environment": "passed",
        "build": "passed",
        "tests: bad": "FAILED",
        "tests: good": "passed",
        "benchmarks": "FAILED",
        "sanitizer": "not run",
    }
    summary = (tmp_path / "out/summary.txt").read_text()
    assert "FAILED: tests: bad, benchmarks" in summary and "ZeroDivisionError" in summary
    assert "1 failed" in summary and "assert 1 == 2" in (tmp_path / "out/tests.log").read_text()
    assert summary in capsys.readouterr().out


def test_without_pytest_the_tests_fail_and_say_so(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "pytest", lambda *files: [sys.executable, "-m", "pytest_that_is_not_there"])
    monkeypatch.setattr(gpu, "TESTS", {"ops": ["tests/test_ops.py"]})
    run = gpu.Run(tmp_path, "cpu", 530, ["tests"])
    run.tests()
    assert states(run) == {"tests: ops": "FAILED"}
    assert "No module named pytest_that_is_not_there" in run.results[0].details


FAKE = """#!/bin/sh
[ "$1" = --help ] && echo "  {option} arg   key1=val1" && exit 0
echo "$@" >> {folder}/calls
case "$2" in
memcheck) echo "========= Invalid __global__ read of size 4 bytes"
          echo "=========     at void fastvit::stats_kernel<float>(T1)+0x100"
          echo "========= ERROR SUMMARY: 1 error"; exit 99;;
racecheck) echo "3 passed in 1s"; echo "========= RACECHECK SUMMARY: 0 hazards displayed"; exit 0;;
synccheck) echo "========= Error: Device not supported. Please refer to the documentation"; exit 1;;
initcheck) echo "========= Uninitialized __global__ memory read of size 4 bytes"
           echo "=========     at void at::native::reduce_kernel<float>(T1)+0x100"; exit 99;;
esac
"""


@pytest.mark.parametrize("option", ["--kernel-name", "--kernel-regex"])
def test_what_the_sanitizers_say_is_read_rightly(gpu, tmp_path, monkeypatch, option):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE.format(option=option, folder=tmp_path))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = gpu.Run(tmp_path / "out", "cuda", 530, ["sanitizer"])
    run.sanitizer()
    details = {result.step.split()[1]: (result.state, result.details) for result in run.results}
    assert details["memcheck"] == ("FAILED", "status 99: Invalid __global__ read of size 4 bytes")
    assert details["racecheck"][0] == "passed" and "3 passed" in details["racecheck"][1]
    assert details["synccheck"] == ("not run", "compute-sanitizer does not support this device here")
    assert details["initcheck"][0] == "passed" and "torch's kernels alone" in details["initcheck"][1]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [f"{option} kns=fastvit" in call for call in calls] == [True, True, True, False]


@pytest.mark.parametrize("tool,number", [("memcheck", 32), ("initcheck", 4)])
def test_the_sanitized_selection_exists(gpu, tool, number):
    """A renamed test must not leave the sanitizers with nothing to do."""
    command = gpu.pytest("tests/test_ops.py", "--collect-only", "-k", gpu.TOOLS[tool][1])
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    for layout in ("nchw_wide", "nhwc_c96", "one_sample", "cropped_nhwc"):
        assert f"test_abn_ops[{layout}-dtype0-leaky_relu]" in output
    assert sum("::" in line for line in output.splitlines()) == number


def test_command_line(tmp_path):
    """A rehearsal on the CPU; and, where there is no GPU, a refusal that says so."""
    import torch

    def call(*options):
        return subprocess.run(
            [sys.executable, "tools/gpu.py", "--out", str(tmp_path), *options],
            cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    result = call("--device", "cpu", "--steps", "benchmarks", "sanitizer")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {p.name for p in tmp_path.iterdir()} >= {
        "summary.txt",
        "benchmarks.log",
        "ops_cpu.csv",
        "ops_cpu.md",
    }
    assert "nothing failed" in result.stdout and "| InPlaceABN |" in result.stdout
    if not torch.cuda.is_available():
        result = call()
        assert result.returncode == 1 and "there is no GPU that torch can use" in result.stdout
        assert "there is no GPU" in (tmp_path / "summary.txt").read_text()
