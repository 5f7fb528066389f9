"""tools/gpu.py: a hang costs one step, and every step's result is written as it ends."""

import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu

    yield gpu
    del sys.modules["gpu"]


def call(gpu, monkeypatch, out: Path, *options: str) -> tuple[int, dict[str, str]]:
    """The exit status of the program, and the files in its archive."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), *options])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    with tarfile.open(out / "gpu.tar.gz") as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        files = {Path(member.name).name: tar.extractfile(member).read().decode() for member in members}
    return end.value.code, files


def test_a_command_that_takes_too_long_is_ended_with_its_children(gpu, tmp_path):
    mark, log = tmp_path / "survived", tmp_path / "log"
    command = ["bash", "-c", f"echo started; (trap '' INT; sleep 4; touch {mark}) & sleep 60"]
    begin = time.monotonic()
    assert gpu.run(command, log, 1, {}) == "late" and "started" in log.read_text()
    assert time.monotonic() - begin < 15
    assert gpu.run(["bash", "-c", "echo fine; (sleep 60 &)"], log, 30, {}) == 0
    assert gpu.said(log) == "fine"
    time.sleep(4)
    assert not mark.exists()


TROUBLE = """
import os, time, pytest

@pytest.mark.parametrize("i", range(6))
def test_fine(i): pass

def test_wrong(): assert os.environ["FASTVIT_TEST_DEVICE"] == "cuda"

def test_slow(): time.sleep(60)
"""


def test_a_step_that_fails_or_hangs_keeps_no_other_from_running(gpu, tmp_path, monkeypatch):
    """What a step has printed until it was ended is there, with the tests that failed in it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_trouble.py").write_text(TROUBLE)
    (tmp_path / "tests/test_good.py").write_text("def test_good(): pass\n")
    steps = {"test_ops": "test_trouble", "test_cuda": "test_good", "test_layers": "test_missing"}
    monkeypatch.setattr(gpu, "TESTS", steps)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "FACTS", "print('here')")
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 1)
    monkeypatch.setitem(gpu.SECONDS, "test_ops", 20)
    status, files = call(gpu, monkeypatch, tmp_path / "out", "--device", "cpu", "--steps", *steps, "memcheck")
    facts, troubled, good, missing, sanitized = files["summary.txt"].splitlines()
    assert status == 1 and "facts          passed" in facts and facts.endswith("here")
    assert troubled.startswith("test_ops       FAILED") and "status late" in troubled
    assert "1 failed, 6 passed" in troubled and "::test_wrong" in files["test_ops.log"]
    assert "test_cuda      passed" in good and "1 passed" in good
    assert "FAILED" in missing and "not run" in sanitized


def test_what_a_sanitizer_says_decides(gpu, tmp_path, monkeypatch):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text('#!/bin/sh\necho "$@"\n[ "$2" = racecheck ] || exit 99\necho "3 passed in 1s"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu, "FACTS", "")
    status, files = call(gpu, monkeypatch, tmp_path / "out", "--steps", "memcheck", "racecheck")
    _, memory, races = files["summary.txt"].splitlines()
    assert status == 1 and "FAILED" in memory and "status 99" in memory
    assert "passed" in races and races.endswith("status 0: 3 passed in 1s")


def test_without_a_gpu_it_ends_at_once(gpu, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, files = call(gpu, monkeypatch, tmp_path)
    assert status == 1 and len(files["summary.txt"].splitlines()) == 1 and "facts.log" in files


def test_a_rehearsal_of_the_benchmarks(gpu, tmp_path, monkeypatch):
    steps = ["bench_ops", "bench_layers"]
    status, files = call(gpu, monkeypatch, tmp_path, "--device", "cpu", "--steps", *steps)
    assert status == 0, files["summary.txt"]
    assert {"ops_cpu.csv", "layers_cpu.csv", "facts.log"} <= files.keys()
