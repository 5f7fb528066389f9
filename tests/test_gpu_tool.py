"""tools/gpu.py: reports failures and steps that cannot run; everything ends in time."""

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("gpu", "gpu_bench", "gpu_process", "gpu_tests", "gpu_smoke")


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", os.environ.get("CUDA_LAUNCH_BLOCKING", "0"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def gpu(tools):
    import gpu

    return gpu


def proof(gpu, out, steps, device="cpu", limit=530):
    return gpu.Run("proof", out, device, limit, steps)


def states(run) -> dict[str, str]:
    return {result.step: result.state for result in run.results}


def details(run) -> dict[str, str]:
    return {result.step: result.details for result in run.results}


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
    table = gpu.CALLS["proof"]
    run = proof(gpu, tmp_path, ["build", "smoke", "tests", "sanitizer"])
    kept = sum(least for _, least in table.values())
    assert run.seconds("build") == table["build"][0] <= 530 - kept
    run.begin -= 300  # so much is gone
    assert run.seconds("tests") == pytest.approx(230 - table["sanitizer"][1], abs=1)
    run.begin -= 300
    assert run.seconds("sanitizer") == 1
    slowest = table["environment"][0] + table["build"][0] + kept
    assert slowest <= 640, "a slow start and a slow build leave too little of nine minutes"


# A GPU that is slow to come up, hangs or is not there.
UP = '{"GPUs": "NVIDIA X (sm_90)", "architecture": "9.0"}'


def starts(gpu, monkeypatch, *answers, driver=True):
    """Replaces torch's answers, one after the other."""
    given = iter(answers)

    def run(commands, seconds, *rest, **options):
        if commands[0][-1] == gpu.MACHINE:
            return [next(given)]
        return [(0, "")] * len(commands)

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.time, "sleep", lambda _: None)
    monkeypatch.setattr(gpu.Path, "exists", lambda path: driver)


def test_a_driver_that_is_there_before_its_gpu_is_waited_for(gpu, tmp_path, monkeypatch, capsys):
    run = proof(gpu, tmp_path, [], "cuda")
    starts(gpu, monkeypatch, (0, '{"GPUs": "none"}'), (1, "RuntimeError: CUDA unknown error"), (0, UP))
    run.environment()
    assert states(run) == {"environment": "passed"} and run.facts["architecture"] == "9.0"
    said = capsys.readouterr().out
    assert said.count("not yet, but there is a driver") == 2 and "CUDA unknown error" in said


def test_a_torch_that_is_missing_is_not_waited_for(gpu, tmp_path, monkeypatch):
    run = proof(gpu, tmp_path, ["build"], "cuda")
    starts(gpu, monkeypatch, (1, "ModuleNotFoundError: No module named 'torch'"))
    assert run.all() == 1 and "No module named 'torch'" in details(run)["environment"]


def test_a_gpu_that_is_not_there_is_not_waited_for(gpu, tmp_path, monkeypatch):
    run = proof(gpu, tmp_path, ["build", "smoke"], "cuda")
    starts(gpu, monkeypatch, (0, '{"GPUs": "none"}'), driver=False)
    assert run.all() == 1
    assert states(run) == {"environment": "FAILED"} and "there is no GPU" in details(run)["environment"]
    summary = (tmp_path / "summary_proof.txt").read_text()
    assert "build                    not begun" in summary and "smoke                    not begun" in summary


def test_a_start_of_cuda_that_hangs_is_said(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpu.CALLS["proof"], "environment", (2.5, 0))
    monkeypatch.setattr(gpu.gpu_process, "SAY_EVERY", 1)
    monkeypatch.setattr(gpu, "MACHINE", "import time; time.sleep(60)")
    run = proof(gpu, tmp_path, ["build"], "cuda")
    begin = time.monotonic()
    assert run.all() == 1 and time.monotonic() - begin < 10
    assert "no answer within 2 s" in details(run)["environment"] and states(run).keys() == {"environment"}
    assert "waiting for CUDA to come up: 1 of 2 s" in capsys.readouterr().out


def builds(gpu, monkeypatch, *answers, missing=()):
    """Answers to the probe and the build; the environment of each."""
    given, environments = iter(answers), []

    def run(commands, seconds, environment=None, **options):
        environments.append((commands[0][1:3], environment or {}))
        return [next(given)]

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "missing_for_a_build", lambda: list(missing))
    return environments


def test_libraries_that_were_carried_along_need_no_build(gpu, tmp_path, monkeypatch):
    run = proof(gpu, tmp_path, [], "cuda")
    calls = builds(gpu, monkeypatch, (0, "CUDA kernels loaded"), missing=["nvcc", "setuptools>=77"])
    run.build()
    assert details(run) == {"build": "not needed: CUDA kernels loaded"} and len(calls) == 1


def test_what_is_missing_for_a_build_is_named_and_nothing_else_is_tried(gpu, tmp_path, monkeypatch):
    run = proof(gpu, tmp_path, ["build", "smoke", "tests"], "cuda")
    monkeypatch.setattr(gpu.Run, "environment", lambda self: None)
    builds(gpu, monkeypatch, (3, "CUDA kernels not built"), missing=["nvcc", "setuptools>=77 (found 65.5)"])
    assert run.all() == 1 and states(run) == {"build": "FAILED"}
    assert "(CUDA kernels not built)" in details(run)["build"]
    assert "nvcc, setuptools>=77 (found 65.5) missing" in details(run)["build"]


def test_a_build_is_for_the_architecture_at_hand_and_stops_all_when_it_fails(gpu, tmp_path, monkeypatch):
    run = proof(gpu, tmp_path, ["build", "smoke", "tests", "sanitizer"], "cuda")
    monkeypatch.setattr(gpu.Run, "environment", lambda self: self.facts.update(architecture="9.0"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    calls = builds(gpu, monkeypatch, (1, "no library"), (1, "forward.cu(12): error: no\nit did not compile"))
    assert run.all() == 1 and states(run) == {"build": "FAILED"}
    assert calls[1] == (["setup.py", "-q"], {"FASTVIT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"})
    assert "the build failed: it did not compile" in details(run)["build"]
    assert "forward.cu(12): error: no" in (tmp_path / "build.log").read_text()


def test_tools_that_a_build_needs(gpu, monkeypatch):
    import gpu_process

    assert gpu_process.missing_for_a_build() in ([], ["nvcc"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "65.5.1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    missing = gpu_process.missing_for_a_build()
    assert missing[-3:] == ["a C++ compiler", "ninja", "setuptools>=77 (found 65.5.1)"]


def test_a_smoke_test_that_fails_comes_first_in_the_summary(gpu, tmp_path, monkeypatch):
    answers = [
        (0, "9 passed, 0 failed"),
        (1, "FAILED bn_stats nchw bfloat16: error 1 > 0.1\n8 passed, 1 failed"),
    ]
    answers += [(0, "9 passed, 0 failed"), (-11, "started")]
    monkeypatch.setattr(gpu, "run", lambda commands, seconds, *rest: answers)
    run = proof(gpu, tmp_path, ["smoke"])
    run.smoke()
    assert states(run) == {"smoke": "FAILED"}
    first, second, *_ = (tmp_path / "summary_proof.txt").read_text().splitlines()
    assert first == "FAILED bn_stats nchw bfloat16: error 1 > 0.1" and second == "FAILED float64: started"


def test_the_smoke_test_notices_a_wrong_op(tools, monkeypatch, capsys):
    import gpu_smoke

    from fastvit import ops

    right = ops.bn_backward
    wrong = lambda *a, **k: tuple(t + 0.1 for t in right(*a, **k))  # noqa: E731
    monkeypatch.setattr(ops, "bn_backward", wrong)
    command = ["gpu_smoke.py", "--device", "cpu", "--dtype", "float32", "--seconds", "2"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        gpu_smoke.main()
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and said[0].startswith("FAILED bn_backward nchw float32: bn_backward")
    assert all("bn_backward" in line for line in said[:-1]) and " passed, " in said[-1]


def test_the_smoke_test_ends_when_a_fault_has_spoiled_the_process(tools, monkeypatch, capsys):
    import gpu_smoke

    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_smoke.ops, "bn_stats", broken)
    monkeypatch.setattr(gpu_smoke, "usable", lambda device: False)
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py", "--device", "cpu", "--dtype", "float16"])
    with pytest.raises(SystemExit):
        gpu_smoke.main()
    assert capsys.readouterr().out.splitlines() == [
        "FAILED bn_stats nchw float16: CUDA error: an illegal memory access was encountered",
        "after bn_stats nchw float16 the GPU takes no more work of this process; 0 passed, 1 failed",
    ]


def test_the_order_of_tests_tells_most_first(tools):
    import gpu_tests

    def test(function, **parameters):
        ids = "-".join(map(str, parameters.values()))
        return SimpleNamespace(nodeid=f"{function}[{ids}]", callspec=SimpleNamespace(params=parameters))

    tests = [test("a.py::f", dtype=d, layout=x) for d in range(4) for x in range(10)]
    tests += [SimpleNamespace(nodeid="a.py::g"), test("a.py::h", seed=0)]
    ordered = gpu_tests.informative(tests)
    assert sorted(t.nodeid for t in ordered) == sorted(t.nodeid for t in tests)
    assert {t.nodeid.split("[")[0] for t in ordered[:3]} == {"a.py::f", "a.py::g", "a.py::h"}
    begin = [t.callspec.params for t in ordered[:16] if "::f" in t.nodeid]
    assert {p["dtype"] for p in begin} == set(range(4)) and {p["layout"] for p in begin} == set(range(10))
    again = gpu_tests.informative(tests[::-1])
    assert [t.nodeid for t in again[16:]] == [t.nodeid for t in ordered[16:]]


TROUBLE = """
import os, time, pytest

@pytest.mark.parametrize("i", range(6))
def test_fine(i): pass

def test_wrong(): assert 1 == 2

def test_slow(): time.sleep(60)

def test_fault(): os._exit(134)

def test_device(): assert os.environ["FASTVIT_TEST_DEVICE"] == "cpu"
"""


@pytest.mark.parametrize("plugin", ["with", "without"])
def test_no_test_takes_the_rest_with_it(gpu, tmp_path, monkeypatch, plugin):
    """Slow ones, crashes and failures, with pytest-timeout and without."""
    file = tmp_path / "test_trouble.py"
    file.write_text(TROUBLE)
    if plugin == "without":
        found = gpu.gpu_process.importlib.util.find_spec
        monkeypatch.setattr(
            gpu.gpu_process.importlib.util, "find_spec", lambda n: None if n == "pytest_timeout" else found(n)
        )
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    monkeypatch.setattr(gpu, "ROOT", ROOT)
    monkeypatch.setattr(gpu, "SLOW", 2)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"}
    said, log = details(run)["tests"], (tmp_path / "out/tests.log").read_text()
    assert "2 failed, 1 slow, 7 passed, 0 skipped of 10" in said
    assert "test_slow took more than 2 s" in log and "test_fault ended pytest (134)" in log
    assert "assert 1 == 2" in log


def test_tests_are_cut_to_the_time(gpu, tmp_path, monkeypatch):
    file = tmp_path / "test_many.py"
    file.write_text("import pytest, time\n@pytest.mark.parametrize('i', range(400))\n"
                    "def test(i): time.sleep(0.1)\n")  # fmt: skip
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)
    run = proof(gpu, tmp_path / "out", ["tests"], limit=8)
    begin = time.monotonic()
    run.tests()
    assert time.monotonic() - begin < 12 and states(run) == {"tests": "passed"}
    passed = int(details(run)["tests"].split()[0])
    assert 5 < passed < 200 and "of 400" in details(run)["tests"]


def test_files_that_cannot_be_collected_fail(gpu, tmp_path, monkeypatch):
    bad, good = tmp_path / "test_bad.py", tmp_path / "test_good.py"
    bad.write_text("import a_module_that_is_not_there\n")
    good.write_text("def test_good(): pass\n")
    monkeypatch.setattr(gpu, "TESTS", [str(bad), str(good)])
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"} and "1 failed, 1 passed" in details(run)["tests"]
    assert "a_module_that_is_not_there" in (tmp_path / "out/tests.log").read_text()


def test_skipping_everything_is_no_success(gpu, tmp_path, monkeypatch):
    file = tmp_path / "test_skipped.py"
    file.write_text("import pytest\n@pytest.mark.skip\ndef test(): pass\n")
    monkeypatch.setattr(gpu, "TESTS", [str(file)])
    run = proof(gpu, tmp_path / "out", ["tests"])
    run.tests()
    assert states(run) == {"tests": "FAILED"} and "0 passed, 1 skipped of 1" in details(run)["tests"]


def test_every_test_file_is_there(gpu):
    assert all((ROOT / "tests" / name).exists() for name in gpu.TESTS)


def test_a_step_that_fails_keeps_no_other_from_running(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.Run, "environment", lambda self: None)
    monkeypatch.setattr(gpu.Run, "smoke", lambda self: 1 / 0)
    monkeypatch.setattr(gpu.Run, "tests", lambda self: self.say("tests", "passed", ""))
    run = proof(gpu, tmp_path / "out", ["smoke", "tests", "sanitizer"])
    assert run.all() == 1
    assert states(run) == {"smoke": "FAILED", "tests": "passed", "sanitizer": "not run"}
    summary = (tmp_path / "out/summary_proof.txt").read_text()
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
    run = proof(gpu, tmp_path / "out", ["sanitizer"], "cuda")
    run.sanitizer()
    said = {result.step.split()[1]: (result.state, result.details) for result in run.results}
    assert said["memcheck"] == ("FAILED", "status 99: Invalid __global__ read of size 4 bytes")
    assert said["racecheck"][0] == "passed" and "3 passed" in said["racecheck"][1]
    assert said["synccheck"] == ("not run", "compute-sanitizer does not support this device here")
    assert said["initcheck"][0] == "passed" and "torch's kernels alone" in said["initcheck"][1]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [f"{option} kns=fastvit" in call for call in calls] == [True, True, True, False]


@pytest.mark.parametrize(
    "call,tool,number", [("proof", "memcheck", 32), ("proof", "initcheck", 4), ("measure", "racecheck", 24)]
)
def test_the_sanitized_selection_exists(gpu, call, tool, number):
    """A renamed test must not leave the sanitizers with nothing to do."""
    _, file, selection = gpu.SANITIZED[call][tool]
    command = gpu.pytest(file, "--collect-only", "-k", selection)
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    for layout in ("nchw_wide", "nhwc_c96", "one_sample", "cropped_nhwc"):
        assert f"{layout}-dtype0-leaky_relu]" in output
    assert sum("::" in line for line in output.splitlines()) == number


NCU = """#!/bin/sh
echo "$@" > {folder}/ncu.calls
echo "{said}"
exit {status}
"""


@pytest.mark.parametrize(
    "said,status,state",
    [
        ("    Section: GPU Speed Of Light Throughput", 0, "passed"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, "not run"),
        ("==ERROR== unknown option", 1, "FAILED"),
    ],
)
def test_what_ncu_says_is_read_rightly(gpu, tmp_path, monkeypatch, said, status, state):
    fake = tmp_path / "ncu"
    fake.write_text(NCU.format(folder=tmp_path, said=said, status=status))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = gpu.Run("measure", tmp_path / "out", "cuda", 530, ["ncu"])
    run.ncu()
    assert states(run) == {"ncu": state}
    calls = (tmp_path / "ncu.calls").read_text()
    assert "benchmarks/bench_gpu.py six_kernels" in calls and "--clock-control none" in calls


def call(tmp_path, *options, **environment):
    return subprocess.run(
        [sys.executable, "tools/gpu.py", *options, "--out", str(tmp_path / "gpu")],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def packed(tmp_path) -> dict[str, str]:
    """The files of the archive."""
    with tarfile.open(tmp_path / "gpu.tar.gz") as tar:
        files = {m.name.removeprefix("gpu/"): tar.extractfile(m).read() for m in tar.getmembers()}
    return {name: content.decode(errors="replace") for name, content in files.items()}


PARTS = (
    "copy versus row_ops four_ops models exchange host on_chip slices stream graph ipc activations"
).split()


@pytest.mark.parametrize("steps", [PARTS[:4], PARTS[4:8], PARTS[8:], ["sanitizer", "ncu", "layers"]])
def test_a_rehearsal_of_the_measurements(tmp_path, steps):
    result = call(tmp_path, "measure", "--device", "cpu", "--steps", *steps)
    assert result.returncode == 0, result.stdout + result.stderr
    tables = {"on_chip": ["on_chip_two", "on_chip_one"], "layers": ["ops"], "sanitizer": [], "ncu": []}
    files = packed(tmp_path)
    for step in steps:
        for table in tables.get(step, [step]):
            assert len(files[f"{table}_cpu.csv"].splitlines()) > 1, table
            assert f"{step}: {table}" in result.stdout
    assert "nothing failed" in files["summary_measure.txt"]


@pytest.mark.parametrize(
    "kind,why",
    [
        ("fail", "RuntimeError: a fault for rehearsal"),
        ("hang", "no answer in 4 s"),
        ("spoil", "ended its process (70)"),
    ],
)
def test_one_fault_costs_one_row(gpu, tmp_path, monkeypatch, capsys, kind, why):
    monkeypatch.setenv("FASTVIT_REHEARSE", f"{kind}:bn_stats 4x8x6x6 channels_last")
    monkeypatch.setattr(gpu, "PATIENCE", 4)
    run = gpu.Run("measure", tmp_path / "gpu", "cpu", 60, ["four_ops"])
    run.part("four_ops")
    assert states(run) == {"four_ops: four_ops": "FAILED"}
    assert f"bn_stats 4x8x6x6 channels_last bf16: {why}" in details(run)["four_ops: four_ops"]
    rows = packed(tmp_path)["four_ops_cpu.csv"].splitlines()[1:]
    assert len(rows) == 7 * 3 - 1 and sum("fastvit.ops.bn_stats" in row for row in rows) == 2


def test_a_full_disk_stops_nothing(tmp_path):
    """What cannot be written is printed all the same."""
    limit = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)); "
        "sys.argv = sys.argv[1:]; sys.path.insert(0, 'tools'); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    steps = ["measure", "--device", "cpu", "--steps", "copy", "graph", "--out", str(tmp_path / "gpu")]
    result = subprocess.run(
        [sys.executable, "-c", limit, "tools/gpu.py", *steps],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "not written: [Errno 27] File too large" in result.stdout, result.stdout + result.stderr
    assert "what copy  MB" in result.stdout and "what replayed" in result.stdout
    assert "copy: copy" in result.stdout and "graph: graph" in result.stdout


def test_without_a_profiler_tables_have_no_kernels(monkeypatch):
    import harness

    def broken(**_):
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(torch.profiler, "profile", broken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert harness.kernel_count(lambda: None) == 0
    monkeypatch.setenv("FASTVIT_PROFILER", "0")
    monkeypatch.setattr(torch.profiler, "profile", None)
    assert harness.kernel_count(lambda: None) == 0


HEADER = "contender,op,shape,layout,dtype,p50_us,activation\n"


def test_a_row_that_is_off_its_prediction_is_marked(gpu, tmp_path):
    import compare

    (tmp_path / "four_ops_cuda.csv").write_text(
        f"{HEADER}fastvit.ops.bn_forward,bn_forward,128x256x56x56,channels_last,bf16,100,\n"
        "fastvit.ops.bn_stats,bn_stats,128x256x56x56,channels_last,bf16,1000,\n"
        "fastvit.ops.bn_stats,bn_stats,1x2x3x4,channels_last,bf16,1000,\n"
        "torch,bn_forward,128x256x56x56,channels_last,bf16,1,\n"
    )
    predicted = compare.predictions()
    close, far = compare.compared(compare.read(tmp_path / "four_ops_cuda.csv"), predicted)
    assert (close["mark"], far["mark"]) == ("", "off") and far["difference"] < -0.9
    *_, second, counts = compare.lines([close, far])
    assert second.endswith(" off") and counts == "2 rows were predicted; 1 differ by more than 15%"
    (tmp_path / "exchange_cuda.csv").write_text(
        "what,world,channels,exchange_us,p50_us\nmoments,4,2048,0.1,9\n"
    )
    (one,) = compare.compared(compare.read(tmp_path / "exchange_cuda.csv"), predicted)
    assert one["row"] == "moments 4 2048" and one["mark"] == "off"


def test_libraries_are_unpacked_where_none_lie(gpu, tmp_path, monkeypatch):
    (tmp_path / "fastvit").mkdir()
    (tmp_path / "fastvit/_cuda.so").write_text("a library")
    with tarfile.open(tmp_path / "libraries.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "fastvit", "fastvit")
    monkeypatch.setattr(gpu, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(gpu, "CARRIED", tmp_path / "libraries.tar.xz")
    builds(gpu, monkeypatch, (0, "CUDA kernels loaded"))
    proof(gpu, tmp_path / "out", [], "cuda").build()
    assert (tmp_path / "copy/fastvit/_cuda.so").read_text() == "a library"


def test_every_part_has_its_time(gpu, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_gpu

    methods = {step for step in gpu.CALLS["measure"] if not hasattr(gpu.Run, step)}
    assert methods == bench_gpu.PARTS.keys() - {"six_kernels"}
    assert set(PARTS) == methods


def test_command_line_of_a_proof(tmp_path):
    """A rehearsal on the CPU; and, where there is no GPU, a refusal that says so."""
    result = call(tmp_path, "proof", "--device", "cpu", "--steps", "smoke", "copy", "versus", "sanitizer")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "nothing failed" in result.stdout and "sanitizer                not run" in result.stdout
    files = packed(tmp_path)
    assert "bfloat16" in files["smoke.log"] and {"first_copy_cpu.csv", "first_versus_cpu.csv"} <= files.keys()
    if not torch.cuda.is_available():
        result = call(tmp_path, "measure")
        assert result.returncode == 1 and "there is no GPU that torch can use" in result.stdout
        assert "there is no GPU" in packed(tmp_path)["summary_measure.txt"]
