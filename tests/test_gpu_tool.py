"""tools/gpu.py: reports failures and steps that cannot run; everything ends in time."""

import os
import re
import subprocess
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


def proof(gpu, out, steps, device="cpu", limit=530):
    return gpu.Run("proof", out, device, limit, steps)


def states(run) -> dict[str, str]:
    return {step: state for step, (state, _) in run.results.items()}


def details(run) -> dict[str, str]:
    return {step: text.partition("s  ")[2] for step, (_, text) in run.results.items()}


def test_a_command_that_takes_too_long_is_ended_with_its_children(gpu, tmp_path):
    mark = tmp_path / "survived"
    command = ["bash", "-c", f"echo started; (sleep 3; touch {mark}) & sleep 60"]
    begin = time.monotonic()
    assert gpu.run(command, 1) == (124, "started\n")
    assert time.monotonic() - begin < 10
    assert gpu.run(["bash", "-c", "echo fine; (sleep 60 &)"], 30) == (0, "fine\n")
    status, output = gpu.run(["/nowhere/program"], 1)
    assert status == 127 and "/nowhere/program" in output
    time.sleep(3)
    assert not mark.exists()


def test_time_is_kept_for_the_steps_that_follow(gpu, tmp_path):
    table = gpu.CALLS["proof"]
    run = proof(gpu, tmp_path, ["smoke", "tests", "sanitizer"])
    reserved = sum(least for _, least in table.values())
    assert run.seconds("environment") == table["environment"][0] <= 530 - reserved
    run.begin -= 300  # so much is gone
    assert run.seconds("tests") == pytest.approx(230 - table["sanitizer"][1], abs=1)
    run.begin -= 300
    assert run.seconds("sanitizer") == 1


# A GPU that is slow to come up, hangs or is not there.
UP = '{"GPUs": "1 x NVIDIA X"}'


def starts(gpu, monkeypatch, *answers, driver=True):
    """Replaces the answers of the probe, one after the other."""
    given = iter(answers)

    def run(command, seconds, *rest, **options):
        return next(given) if gpu.PROBE in command else (0, "")

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.time, "sleep", lambda _: None)
    monkeypatch.setattr(gpu.Path, "exists", lambda path: driver)


def test_a_driver_that_is_there_before_its_gpu_is_waited_for(gpu, tmp_path, monkeypatch, capsys):
    run = proof(gpu, tmp_path, [], "cuda")
    starts(gpu, monkeypatch, (1, "No CUDA GPUs are available"), (1, "CUDA unknown error - this"), (0, UP))
    run.environment()
    assert states(run) == {"environment": "passed"} and run.facts["GPUs"] == "1 x NVIDIA X"
    said = capsys.readouterr().out
    assert said.count("not yet, but there is a driver") == 2 and "CUDA unknown error" in said


@pytest.mark.parametrize(
    "said,driver",
    [
        ("ModuleNotFoundError: No module named 'torch'", True),
        ("ImportError: fastvit has no library; `make install` builds it", True),
        ("RuntimeError: Found no NVIDIA driver on your system", False),
    ],
)
def test_what_is_not_there_is_not_waited_for(gpu, tmp_path, monkeypatch, said, driver):
    run = proof(gpu, tmp_path, ["smoke", "tests"], "cuda")
    starts(gpu, monkeypatch, (1, said), driver=driver)
    assert run.all() == 1
    assert states(run) == {"environment": "FAILED"} and said in details(run)["environment"]
    summary = (run.out / "summary.txt").read_text()
    assert "smoke                    not begun" in summary and "tests                    not begun" in summary


def test_a_start_of_cuda_that_hangs_is_said(gpu, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.CALLS["proof"], "environment", (2.5, 0))
    monkeypatch.setattr(gpu, "PROBE", "import time; time.sleep(60)")
    run = proof(gpu, tmp_path, ["smoke"], "cuda")
    begin = time.monotonic()
    assert run.all() == 1 and time.monotonic() - begin < 10
    assert "no answer in time" in details(run)["environment"] and states(run).keys() == {"environment"}


def test_the_smoke_test_notices_a_wrong_op_and_comes_first(gpu, tmp_path, monkeypatch):
    file = tmp_path / "test_wrong.py"
    file.write_text(
        "import pytest, torch\nfrom fastvit import ops\nright = ops.bn_stats\n"
        "ops.bn_stats = lambda *a: right(*a) + 0.1\n"
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from test_ops import test_bn_stats\n@pytest.fixture\ndef device(): return 'cpu'\n"
    )
    monkeypatch.setattr(gpu, "OPS_TESTS", [str(file)])
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    run = proof(gpu, tmp_path / "out", ["smoke"])
    run.smoke()
    first = (run.out / "summary.txt").read_text().splitlines()[0]
    assert states(run) == {"smoke": "FAILED"} and first.startswith("FAILED ") and "test_bn_stats" in first


TROUBLE = """
import os, time, pytest

@pytest.mark.parametrize("i", range(6))
def test_fine(i): pass

def test_wrong(): assert 1 == 2

def test_slow(): time.sleep(60)

def test_fault(): os._exit(134)

def test_device(): assert os.environ["FASTVIT_TEST_DEVICE"] == "cpu"
"""


def test_no_test_takes_the_rest_with_it(gpu, tmp_path, monkeypatch):
    """Slow ones, crashes and failures."""
    file = tmp_path / "test_trouble.py"
    file.write_text(TROUBLE)
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    monkeypatch.setitem(gpu.SLOW, "tests", 2)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"}
    said, log = details(run)["tests"], (run.out / "tests.log").read_text()
    assert "3 failed, 7 passed, 0 skipped of 10" in said
    assert log.count("crashed while running") >= 2 and "::test_slow" in log and "::test_fault" in log
    assert "assert 1 == 2" in log


def test_tests_are_cut_to_the_time(gpu, tmp_path, monkeypatch):
    file = tmp_path / "test_many.py"
    file.write_text("import pytest, time\n@pytest.mark.parametrize('i', range(400))\n"
                    "def test(i): time.sleep(0.1)\n")  # fmt: skip
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    run = proof(gpu, tmp_path / "out", ["tests"], limit=12)
    begin = time.monotonic()
    run.tests()
    assert time.monotonic() - begin < 20
    said = details(run)["tests"]
    passed = int(said.partition("failed, ")[2].split()[0])
    assert 5 < passed < 300 and "of 400" in said


def test_files_that_cannot_be_collected_fail(gpu, tmp_path, monkeypatch):
    bad, good = tmp_path / "test_bad.py", tmp_path / "test_good.py"
    bad.write_text("import a_module_that_is_not_there\n")
    good.write_text("def test_good(): pass\n")
    monkeypatch.setattr(gpu, "TESTS", [str(bad), str(good)])
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"} and "1 failed, 1 passed" in details(run)["tests"], details(run)
    assert "a_module_that_is_not_there" in (run.out / "tests.log").read_text()


def test_skipping_everything_is_no_success(gpu, tmp_path, monkeypatch):
    file = tmp_path / "test_skipped.py"
    file.write_text("import pytest\n@pytest.mark.skip\ndef test(): pass\n")
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"} and "0 passed, 1 skipped of 1" in details(run)["tests"]


def test_every_test_file_is_there(gpu):
    assert all((ROOT / "tests" / name).exists() for name in gpu.TESTS + gpu.OPS_TESTS)


def test_a_step_that_fails_keeps_no_other_from_running(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.Run, "environment", lambda self: None)
    monkeypatch.setattr(gpu.Run, "smoke", lambda self: 1 / 0)
    monkeypatch.setattr(gpu.Run, "tests", lambda self: self.say("tests", "passed", ""))
    run = proof(gpu, tmp_path / "out", ["smoke", "tests", "sanitizer"])
    assert run.all() == 1
    assert states(run) == {"smoke": "FAILED", "tests": "passed", "sanitizer": "not run"}
    summary = (run.out / "summary.txt").read_text()
    assert "FAILED: smoke" in summary and "ZeroDivisionError" in summary
    assert summary in capsys.readouterr().out


FAKE = """#!/bin/sh
[ "$1" = --help ] && echo "  {option} arg   key1=val1" && exit 0
echo "$@" >> {folder}/calls
case "$2" in
memcheck) echo "========= Invalid __global__ read of size 4 bytes"
          echo "=========     at void fastvit::stats_kernel<float>(T1)+0x100"
          echo "========= ERROR SUMMARY: 1 error"; exit 99;;
racecheck) echo "3 passed in 1s"; echo "========= RACECHECK SUMMARY: 0 hazards displayed"; exit 0;;
synccheck) echo "========= Error: Device not supported. Please refer to the documentation"; exit 1;;
esac
"""


@pytest.mark.parametrize("option", ["--kernel-name", "--kernel-regex"])
@pytest.mark.parametrize(
    "tool,said",
    [
        ("memcheck", ("FAILED", "status 99: Invalid __global__ read of size 4 bytes")),
        ("racecheck", ("passed", "3 passed in 1s")),
        ("synccheck", ("not run", "compute-sanitizer does not support this device here")),
    ],
)
def test_what_a_sanitizer_says_is_read_rightly(gpu, tmp_path, monkeypatch, option, tool, said):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE.format(option=option, folder=tmp_path))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(gpu.SANITIZED, "proof", (tool, *gpu.SANITIZED["proof"][1:]))
    run = proof(gpu, tmp_path / "out", ["sanitizer"], "cuda")
    run.sanitizer()
    assert (states(run)["sanitizer"], details(run)["sanitizer"]) == said
    assert f"--tool {tool} " in (call := (tmp_path / "calls").read_text()) and f"{option} kns=fastvit" in call


@pytest.mark.parametrize("call,number", [("proof", 32), ("measure", 24)])
def test_the_sanitized_selection_exists(gpu, call, number):
    """A renamed test must not leave the sanitizers with nothing to do."""
    _, file, selection = gpu.SANITIZED[call]
    command = gpu.pytest("-q --collect-only", selection, file)
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    for layout in ("nchw_wide", "nhwc_c96", "one_sample", "cropped_nhwc"):
        assert f"{layout}-dtype0-leaky_relu]" in output
    assert sum("::" in line for line in output.splitlines()) == number


def call(tmp_path, *options, **environment):
    return subprocess.run(
        [sys.executable, "tools/gpu.py", *options, "--out", str(tmp_path / "gpu")],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def packed(tmp_path, call: str) -> dict[str, str]:
    """The files of the archive, which is all that a call writes."""
    (archive,) = (tmp_path / "gpu").iterdir()
    assert archive.name == f"{call}.tar.gz"
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        files = {member.name: tar.extractfile(member).read() for member in members}
    return {name: content.decode(errors="replace") for name, content in files.items()}


PARTS = "versus row_ops four_ops models exchange host_ops on_chip two_kernels".split()


@pytest.mark.parametrize("steps", [PARTS[:2], PARTS[2:5], [*PARTS[5:], "sanitizer"]])
def test_a_rehearsal_of_the_measurements(tmp_path, steps):
    result = call(tmp_path, "measure", "--device", "cpu", "--steps", *steps)
    assert result.returncode == 0, result.stdout + result.stderr
    files = packed(tmp_path, "measure")
    for step in set(steps) & set(PARTS):
        assert len(files[f"{step}_cpu.csv"].splitlines()) > 1, step
    assert "nothing failed" in files["summary.txt"]


TROUBLED = """
import sys, threading
sys.path.insert(0, {benchmarks!r})
import bench_gpu
bench_gpu.HANGS = 2

def four_ops(part):
    def work(name):
        if name == "raises":
            raise RuntimeError("a fault")
        if name == "spoils":
            part.usable = lambda: False
            raise RuntimeError("a GPU that is spoiled")
        if name == "hangs":
            threading.Event().wait()
        part.row(op=name)
    for name in "first raises second hangs third spoils last".split():
        yield name, lambda name=name: work(name)

bench_gpu.PARTS["four_ops"] = four_ops
bench_gpu.main()
"""


def test_one_fault_costs_one_task(gpu, tmp_path, monkeypatch):
    """One that raises, one that hangs, and one that spoils the GPU for its process."""
    program, right = TROUBLED.format(benchmarks=str(ROOT / "benchmarks")), gpu.run

    def troubled(command, *rest, **options):
        return right([command[0], "-c", program, *command[2:]], *rest, **options)

    monkeypatch.setattr(gpu, "run", troubled)
    run = gpu.Run("measure", tmp_path, "cpu", 60, ["four_ops"])
    run.bench("four_ops")
    said = details(run)["four_ops"]
    assert states(run) == {"four_ops": "FAILED"} and said.startswith("4 rows")
    for text in ("raises: RuntimeError: a fault", "hangs: status 1", "spoils: RuntimeError: a GPU that is"):
        assert said.count(text) == 1, said
    table = (run.out / "four_ops_cpu.csv").read_text()
    assert all(f",{name}," in table for name in ("first", "second", "third", "last"))
    assert "Timeout (0:00:02)!" in (run.out / "four_ops.log").read_text()  # with the stack of the hang


class Full:
    def __str__(self):
        raise OSError("no room")


def test_what_is_written_survives_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness

    table = harness.write_csv("table", [{"us": 1.0}], tmp_path)
    before = table.read_text()
    with pytest.raises(OSError, match="no room"):
        harness.write_csv("table", [{"us": 1.0}, {"us": Full()}], tmp_path)
    assert table.read_text() == before and list(tmp_path.iterdir()) == [table]


def test_a_benchmark_that_fails_is_said(gpu, tmp_path, monkeypatch):
    said = "begin one\nfailed one: RuntimeError: a fault\nended\n"
    monkeypatch.setattr(gpu, "run", lambda *_, **__: (1, said))
    run = gpu.Run("measure", tmp_path / "gpu", "cpu", 60, ["four_ops"])
    run.bench("four_ops")
    assert states(run) == {"four_ops": "FAILED"}
    assert "one: RuntimeError: a fault" in details(run)["four_ops"]


def test_a_full_disk_stops_nothing(tmp_path):
    """What cannot be written is printed all the same."""
    limit = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)); "
        "sys.argv = sys.argv[1:]; sys.path.insert(0, 'tools'); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    steps = ["measure", "--device", "cpu", "--steps", "host_ops", "exchange", "--out", str(tmp_path / "gpu")]
    # The count of lines writes too.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", limit, "tools/gpu.py", *steps],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert "not written: [Errno 27] File too large" in result.stdout, result.stdout + result.stderr
    assert "op bn_stats  layout" in result.stdout and "what moments" in result.stdout
    assert re.search(r"host_ops +passed .* [1-9]\d* rows", result.stdout), result.stdout


def test_libraries_are_unpacked_where_none_lie(gpu, tmp_path, monkeypatch):
    (tmp_path / "fastvit").mkdir()
    (tmp_path / "fastvit/_cuda.so").write_text("a library")
    with tarfile.open(tmp_path / "libraries.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "fastvit", "fastvit")
    monkeypatch.setattr(gpu, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(gpu, "CARRIED", tmp_path / "libraries.tar.xz")
    monkeypatch.setattr(gpu, "run", lambda command, *_: (0, UP))
    proof(gpu, tmp_path / "out", [], "cuda").environment()
    assert (tmp_path / "copy/fastvit/_cuda.so").read_text() == "a library"


def test_every_part_has_its_time(gpu, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_gpu

    assert {step for step in gpu.CALLS["measure"] if not hasattr(gpu.Run, step)} == bench_gpu.PARTS.keys()
    assert set(PARTS) == bench_gpu.PARTS.keys()


def test_command_line_of_a_proof(tmp_path):
    """A rehearsal on the CPU; and, where there is no GPU, a refusal that says so."""
    result = call(tmp_path, "proof", "--device", "cpu", "--steps", "smoke", "versus", "sanitizer")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing failed" in result.stdout and "sanitizer                not run" in result.stdout
    files = packed(tmp_path, "proof")
    assert "bfloat16" in files["smoke.log"] and "versus_cpu.csv" in files
    if not torch.cuda.is_available():
        (tmp_path / "gpu/proof.tar.gz").unlink()
        result = call(tmp_path, "measure")
        assert result.returncode == 1 and "fastvit does not run here" in result.stdout
        assert "fastvit does not run here" in packed(tmp_path, "measure")["summary.txt"]
