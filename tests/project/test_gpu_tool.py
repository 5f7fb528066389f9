"""`make gpu`: a hang costs one step, the time is kept, and every step's result is written as it ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.nightly
TRIVIAL = [sys.executable, "-c", "print('here')"]


@pytest.fixture
def gpu(monkeypatch):
    """The program, whose changes of the environment and of signals are undone."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import run_gpu_checks

    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run_gpu_checks
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(variables)
    del sys.modules["run_gpu_checks"], sys.modules["gpu_steps"]


def call(gpu, monkeypatch, out: Path, *options: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """The exit status of the program, the lines of its summary by step, and the files in its archive."""
    monkeypatch.setattr(sys, "argv", ["run_gpu_checks.py", "--out", str(out), *options])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    with tarfile.open(out / "gpu.tar.gz") as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        files = {Path(member.name).name: tar.extractfile(member).read().decode() for member in members}
    assert {path.name for path in out.iterdir()} == {"gpu.tar.gz", "summary.txt"}
    assert files["summary.txt"] == (out / "summary.txt").read_text()
    return end.value.code, {line.split()[0]: line for line in files["summary.txt"].splitlines()}, files


def change(gpu, monkeypatch, **steps) -> None:
    """Gives steps other seconds, needs or commands."""
    plan = gpu.plan_steps
    monkeypatch.setattr(gpu, "plan_steps", lambda *given: plan(*given) | {"facts": (60, "", TRIVIAL)} | steps)


def test_a_hang_costs_one_step_and_its_children_end(gpu, tmp_path, monkeypatch):
    mark = tmp_path / "survived"
    hang = f"echo started; (trap '' INT; sleep 5; touch {mark}) & trap '' INT; sleep 60; sleep 60"
    leave = f"echo fine; (sleep 3; touch {mark}) &"
    change(
        gpu,
        monkeypatch,
        test_cuda=(1, "", ["bash", "-c", hang]),
        tests=(60, "", TRIVIAL),
        bench_ops=(60, "", ["bash", "-c", leave]),
    )
    monkeypatch.setattr(gpu, "MIN_STEP_SECONDS", 0)
    monkeypatch.setattr(gpu, "KILL_SECONDS", 1)
    begin = time.monotonic()
    steps = ["test_cuda", "tests", "bench_ops"]
    status, lines, files = call(gpu, monkeypatch, tmp_path / "out", "--device", "cuda", "--steps", *steps)
    assert status == 1 and time.monotonic() - begin < 5
    assert re.match(r"test_cuda +LATE +\d+ s  started$", lines["test_cuda"]), lines
    assert "started" in files["test_cuda.log"]
    assert re.match("tests +passed .*here$", lines["tests"]) and lines["bench_ops"].endswith("fine")
    time.sleep(max(0, begin + 7 - time.monotonic()))
    assert not mark.exists()


TROUBLE = """
import time, pytest

@pytest.mark.parametrize("i", ["a", "b c"])
def test_fine(i): pass

@pytest.mark.parametrize("i", range(6))
def test_wrong(i, device_option): assert device_option == "cuda"

def test_slow(request):
    request.path.with_name("late").touch()
    time.sleep(60)
"""


def test_a_failing_step_keeps_no_other_from_running(gpu, tmp_path, monkeypatch, capsys):
    """The output of an interrupted pytest is reported, and equal failures are counted.

    The last test of test_cuda ends the step's time, however long its collection took.
    """
    trouble = tmp_path / "tests/test_trouble.py"
    trouble.parent.mkdir()
    trouble.write_text(TROUBLE)
    shutil.copy(ROOT / "tests/conftest.py", trouble.parent)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    late, poll = trouble.with_name("late"), gpu.Step.poll

    def poll_until_late(step):
        if late.exists():
            late.unlink()
            step.end = time.monotonic()
        return poll(step)

    monkeypatch.setattr(gpu.Step, "poll", poll_until_late)
    _, needs, command = gpu.plan_steps("cpu", tmp_path, "")["test_cuda"]
    command = [*command[: command.index("tests/gpu")], str(trouble)]
    change(
        gpu,
        monkeypatch,
        test_cuda=(60, needs, command),
        test_compile=(60, "", ["false"]),
        ncu=(60, "", TRIVIAL),
    )
    steps = ["--steps", "test_cuda", "test_compile", "ncu"]
    named = "tests/test_trouble.py::test_fine[b c]  tests/test_trouble.py::test_fine[a]"
    status, lines, files = call(
        gpu, monkeypatch, tmp_path / "out", "--device", "cpu", "--tests", named, *steps
    )
    assert status == 1 and list(lines) == ["facts", "named", "test_cuda", "test_compile", "ncu"]
    assert " passed " in lines["named"] and "2 passed" in lines["named"]
    assert " LATE " in lines["test_cuda"] and "6 failed, 2 passed" in lines["test_cuda"]
    assert " FAILED 1 " in lines["test_compile"] and " passed " in lines["ncu"]
    said = capsys.readouterr().out.partition("what failed:")[2]
    assert re.search(r"^ +6 x FAILED .*test_trouble.py::test_wrong\[\d\]", said, re.M)
    assert re.search("^ +6 x E  .*cpu", said, re.M) and "test_slow" not in said


def test_the_time_is_kept(gpu, tmp_path, monkeypatch):
    """A step gets what is left, and none begins in the last seconds."""
    sleep = (100, "", ["sleep", "50"])
    change(gpu, monkeypatch, test_cuda=sleep, tests=sleep, bench_ops=sleep)
    begin, steps = time.monotonic(), ["test_cuda", "tests", "bench_ops"]
    status, lines, _ = call(
        gpu, monkeypatch, tmp_path, "--device", "cpu", "--minutes", "0.4", "--steps", *steps
    )
    assert status == 1 and time.monotonic() - begin < 24
    assert " LATE " in lines["test_cuda"]
    assert all(re.match(f"{step} +not run +no time is left$", lines[step]) for step in steps[1:]), lines


def test_what_a_sanitizer_says_decides(gpu, tmp_path, monkeypatch):
    """Both run beside the other tests."""
    fake = tmp_path / "compute-sanitizer"
    both = f"test -e {tmp_path}/memcheck -a -e {tmp_path}/racecheck"
    fake.write_text(
        f"""#!/bin/sh
        touch {tmp_path}/$4
        for i in $(seq 50); do {both} && break; sleep 0.1; done
        {both} || exit 3
        echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@"; echo "=== 3 passed in 1s ==="
        test $4 = racecheck || {{ echo "========= ERROR SUMMARY: 2 errors"; exit 99; }}
        echo "========= RACECHECK SUMMARY: 0 hazards displayed"
        """
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    change(gpu, monkeypatch)
    status, lines, files = call(gpu, monkeypatch, tmp_path / "out", "--steps", "memcheck", "racecheck")
    assert status == 1 and "FAILED 99" in lines["memcheck"] and lines["memcheck"].endswith("2 errors")
    assert re.search("passed +.* 3 passed in 1s.*; RACECHECK SUMMARY: 0 hazards", lines["racecheck"])
    assert "1 --error-exitcode 99 --tool racecheck" in files["racecheck.log"]


def test_a_sanitizer_sees_every_kind_of_kernel(gpu):
    plan = gpu.plan_steps("cpu", ROOT, "")
    command = plan["memcheck"][2]
    command = [*command[command.index(sys.executable) :], "--collect-only"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    found = re.findall(r"^tests/\w+/(\w+)\.py::(\w+)", run.stdout, re.M)
    assert 40 < len(found) < 80
    assert set(found) == {
        ("test_batch_norm", "test_batch_norm_ops_match_reference_and_each_other"),
        ("test_batch_norm", "test_ops_that_invert_y_match_reference"),
        ("test_layer_norm", "test_layer_norm_ops_match_reference"),
        ("test_activations", "test_activation_ops_match_reference"),
        ("test_messages", "test_collective_messages_merge_in_rank_order"),
    }
    for _, _, command in plan.values():  # pytest would run nothing with one name that is wrong
        for word in command:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_without_a_gpu_it_ends_at_once(gpu, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, lines, files = call(gpu, monkeypatch, tmp_path)
    assert status == 1 and list(lines) == ["facts"] and lines["facts"].endswith("there is no GPU")


def test_facts_once_for_the_same_sources(gpu, tmp_path, monkeypatch):
    """Libraries of other sources are built on the spot, as are those that do not load."""
    facts = [sys.executable, "-c", f"print('a kernel runs, sources {gpu.source_checksum()}')"]
    change(gpu, monkeypatch, facts=(60, "", facts), ncu=(60, "", TRIVIAL))
    for _ in range(2):
        status, _, files = call(gpu, monkeypatch, tmp_path, "--device", "cpu", "--steps", "ncu")
        assert status == 0
    assert [line.split()[0] for line in files["summary.txt"].splitlines()] == ["facts", "ncu", "ncu"]
    built = tmp_path / "built"
    facts = ["bash", "-c", f"test -e {built} && echo loaded"]
    change(
        gpu, monkeypatch, facts=(60, "", facts), build=(60, "", ["touch", str(built)]), ncu=(60, "", TRIVIAL)
    )
    monkeypatch.setattr(gpu, "source_checksum", lambda: "other")
    status, _, files = call(gpu, monkeypatch, tmp_path / "out", "--device", "cpu", "--steps", "ncu")
    found = [" ".join(line.split()[:2]) for line in files["summary.txt"].splitlines()]
    assert status == 0 and found == ["facts FAILED", "build passed", "facts passed", "ncu passed"]


def test_carried_libraries_are_taken_if_they_are_of_these_sources(tmp_path):
    """In a copy of the tree: the library lies in build/carried, as tools/build_for_gpu.sh leaves it."""
    for name in ("csrc", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "fastvit", tmp_path / "fastvit", ignore=shutil.ignore_patterns("*.so"))
    carried, taken = tmp_path / "build/carried/fastvit/_C.so", tmp_path / "fastvit/_C.so"
    carried.parent.mkdir(parents=True)
    shutil.copy(ROOT / "fastvit/_C.so", carried)
    command = [sys.executable, "tools/gpu_steps.py", "facts", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "a kernel runs on the CPU" in run.stdout, run.stderr
    assert taken.read_bytes() == carried.read_bytes()
    (tmp_path / "csrc/moments.h").write_text("// changed\n")
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "no libraries of the sources" in run.stderr


def test_a_rehearsal_of_the_benchmarks(gpu, tmp_path, monkeypatch):
    steps = ["bench_ops", "bench_layers"]
    status, lines, files = call(gpu, monkeypatch, tmp_path, "--device", "cpu", "--steps", *steps)
    assert status == 0, lines
    assert {"ops_cpu.csv", "layers_cpu.csv", "facts.log"} <= files.keys()


LOST = """
import pytest, torch

@pytest.mark.parametrize("i", range(4))
def test_after_an_illegal_access(i, monkeypatch):
    if i == 0:
        def lost(): raise RuntimeError("an illegal memory access was encountered")
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = lost
    torch.cuda.is_initialized() and torch.cuda.synchronize()
"""


def test_a_process_that_lost_its_gpu_ends(tmp_path):
    """Its later tests run in another process."""
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_lost.py").write_text(LOST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", "."]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert re.search(r"^[12] failed, 3 passed", run.stdout, re.M), run.stdout
