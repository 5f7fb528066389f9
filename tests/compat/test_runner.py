"""`python -m fastvit.compat` runs scripts, modules, the processes that they start, and the example."""

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fastvit.compat import __main__ as runner

ROOT = Path(__file__).parents[2]
LIMIT = 100


def run_python(*arguments, cwd, module="fastvit.compat", check=None, **environment):
    command = [sys.executable, *(["-m", module] if module else []), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, env=env)
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


SCRIPT = """\
import pickle, sys
class Own: pass
def fail(): raise KeyError("in the script")
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Own)) is Own
    main = sys.modules["__main__"]
    print(sys.argv, __file__, __spec__, __package__, main.Own is Own, sys.path[0], sep="\\n")
    print(sorted(globals()), __builtins__)
    if "--apex" in sys.argv:
        from apex import amp
        import apex, helper
        print(apex.amp.__name__, helper.value)
    if "--exit" in sys.argv: sys.exit(7)
    fail()
"""


def test_a_script_runs_as_without_the_runner(tmp_path):
    """argv, __main__, sys.path, traceback and exit status are those of `python script.py`."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/main.py").write_text(SCRIPT)
    arguments = ("scripts/main.py", "--prefer", "mine", "-m", "x")
    plain = run_python(*arguments, cwd=tmp_path, module=None)
    ours = run_python(*arguments, cwd=tmp_path)
    assert ours.stdout == plain.stdout and len(plain.stdout.splitlines()) == 7
    assert (ours.stderr, ours.returncode) == (plain.stderr, plain.returncode)
    assert plain.returncode == 1


@pytest.mark.parametrize("kind", ["folder", pytest.param("app.pyz", marks=pytest.mark.nightly)])
def test_folders_and_zip_files_run_as_without_the_runner(tmp_path, kind):
    files = {"__main__.py": SCRIPT, "helper.py": "value = 'neighbour'\n"}
    if kind == "folder":
        (tmp_path / kind).mkdir()
        for name, text in files.items():
            (tmp_path / kind / name).write_text(text)
    else:
        with zipfile.ZipFile(tmp_path / kind, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    for arguments, status in (((kind, "--exit", "-m", "x"), 7), ((kind,), 1)):
        plain = run_python(*arguments, cwd=tmp_path, module=None, check=status)
        ours = run_python(*arguments, cwd=tmp_path, check=status)
        address = r" at 0x\w+"
        assert re.sub(address, "", ours.stdout) == re.sub(address, "", plain.stdout)
        trace = re.sub(r'(?m)^  File ".*runpy.*\n(    .*\n)*', "", plain.stderr)
        assert ours.stderr == trace and ("KeyError" in trace) == (status == 1)
    assert run_python(kind, "--apex", "--exit", cwd=tmp_path, check=7).stdout.splitlines()[-1] == (
        "fastvit.compat.apex.amp neighbour"
    )


def test_a_compiled_script_runs(tmp_path):
    (tmp_path / "main.py").write_text("import apex, sys\nprint(apex.amp.__name__, __file__, sys.argv)\n")
    py_compile.compile(str(tmp_path / "main.py"), str(tmp_path / "main.pyc"))
    done = run_python("main.pyc", "x", cwd=tmp_path, check=0)
    assert done.stdout == f"fastvit.compat.apex.amp {tmp_path / 'main.pyc'} ['main.pyc', 'x']\n"


def test_a_folder_without_a_main_module_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    done = run_python("empty", cwd=tmp_path, check=1)
    assert re.fullmatch(r".*: can't find '__main__' module in '.*empty'\n", done.stderr)


def test_scripts_and_modules_find_apex(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import os, sys, torch\nfrom apex import amp\n"
        "assert 'fastvit.compat._cuda_on_cpu' not in sys.modules and 'FASTVIT_COMPAT_CPU' not in os.environ\n"
        "assert torch.overrides._len_torch_function_stack() == 0\n"
        "print(amp.__name__, sys.argv[1:], torch.cuda.is_available.__module__)\n"
    )
    (tmp_path / "main.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("value = 'neighbour'\n")
    done = run_python("--prefer", "fastvit", "main.py", "--apex", "--exit", cwd=tmp_path, check=7)
    assert done.stdout.splitlines()[-1] == "fastvit.compat.apex.amp neighbour"
    done = run_python("-m", "pack.main", "-m", "--prefer", cwd=tmp_path, check=0)
    assert done.stdout == "fastvit.compat.apex.amp ['-m', '--prefer'] torch.cuda\n"  # nothing of --cpu


LAUNCHER = """\
import argparse, os, subprocess, sys
def work(rank):
    import apex, sitecustomize
    assert not any("subprocess_hook" in folder for folder in sys.path), sys.path
    os.write(1, f"rank {rank} {apex.amp.__name__} {sitecustomize.mine}\\n".encode())
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    rank = parser.parse_args().local_rank
    if rank >= 0:
        work(rank)
        sys.exit()
    import torch
    python = [sys.executable, __file__]
"""
START = {
    "spawn": "torch.multiprocessing.spawn(work, nprocs=2)",
    "subprocess": "[started.wait() for started in [subprocess.Popen([*python, f'--local-rank={rank}'])"
    " for rank in (0, 1)]]",
    "shell": "os.system('LOCAL_RANK=0 {0} & LOCAL_RANK=1 {0}; wait'.format(' '.join(python)))",
    "exec": "subprocess.run([*python, '--local_rank=0']); os.execv(python[0], [*python, '--local-rank=1'])",
}


@pytest.mark.parametrize(
    "how",
    ["subprocess", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("spawn", "shell", "exec"))],
)
def test_processes_that_a_script_starts_find_apex(tmp_path, how):
    """The local rank reaches them too, and the start-up hook that was there before."""
    (tmp_path / "main.py").write_text(f"{LAUNCHER}    {START[how]}\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("mine = 'hook'\n")
    done = run_python("main.py", cwd=tmp_path, check=0, PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    assert sorted(done.stdout.splitlines()) == [f"rank {r} fastvit.compat.apex.amp hook" for r in (0, 1)]


def test_wrong_arguments_end_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr("atexit.register", lambda function: None)
    for name in ("install", "patch_local_rank_parsing"):
        monkeypatch.setattr(runner, name, lambda *arguments: None)
    for arguments, message in (
        (["gone.py"], "can't open file 'gone.py'"),
        (["--prefer", "torch", "x.py"], "invalid choice: 'torch'"),
        (["--half", "half", "x.py"], "invalid choice: 'half'"),
        (["--prefer", "apex"], "got no script; a script or -m module expected"),
    ):
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        with pytest.raises(SystemExit) as end:
            runner.main()
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_arguments_of_a_launcher_go_to_the_script():
    options, words = runner._parse_arguments(
        ["--local-rank=1", "--prefer", "fastvit", "main.py", "--prefer", "x"]
    )
    assert options.prefer == "fastvit" and not options.module
    assert words == ["main.py", "--local-rank=1", "--prefer", "x"]
    options, words = runner._parse_arguments(["--local_rank", "1", "-m", "pack.main", "-m", "y"])
    assert options.module and words == ["pack.main", "--local-rank=1", "-m", "y"]


GROUP = """\
import argparse, sys, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--fail", type=int, default=-1)
args = parser.parse_args()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if args.fail == args.local_rank:
    raise SystemExit(3)
if args.fail == 2:
    class Global:
        def __del__(self):
            sys.__stderr__.write("torn down\\n")
    kept = Global()
    import atexit, logging, logging.handlers
    atexit.register(print, "at the end of", args.local_rank)
    handler = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))
    handler.handle(logging.makeLogRecord({"msg": "logged", "levelno": 20}))
    dist.barrier()
    raise SystemExit("loss is nan")
"""


def launch_two_ranks(folder, module, *arguments, check):
    (folder / "main.py").write_text(GROUP)
    ranks = ("--nproc_per_node=2", "--standalone", "-m", "fastvit.compat", "main.py", *arguments)
    done = run_python(*ranks, cwd=folder, module=module, check=check)
    assert "terminate" not in done.stderr and "destroy_process_group" not in done.stderr, done.stderr
    return done


def test_the_status_of_a_rank_that_fails_reaches_the_launcher(tmp_path):
    """This launcher passes --local-rank. No rank waits for the one that failed."""
    done = launch_two_ranks(tmp_path, "torch.distributed.launch", "--fail", "1", check=1)
    assert "exitcode  : 3" in done.stderr


@pytest.mark.nightly
def test_exit_handlers_run_if_every_rank_fails(tmp_path):
    """A loss that is not finite ends all ranks so. No rank aborts."""
    done = launch_two_ranks(tmp_path, "torch.distributed.run", "--fail", "2", check=1)
    assert "exitcode  : 1" in done.stderr and "loss is nan" in done.stderr
    assert "at the end of" in done.stdout and "logged" in done.stdout
    assert "torn down" not in done.stderr


def find_accuracies(done) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]


@pytest.mark.nightly
@pytest.mark.parametrize("norm", ["apex", "inplace-abn"])
def test_the_example_trains_on_two_ranks_then_on_one(tmp_path, norm):
    # A CPU without bf16 instructions takes 30 times as long in half precision.
    level = "O2" if torch.cpu._is_avx512_bf16_supported() else "O0"
    ranks = ("--standalone", "--nproc_per_node=2", "-m", "fastvit.compat")
    example = (ROOT / "examples/train_vit_apex.py", "--norm", norm, "--opt-level", level, "--out", "out")
    options = (*ranks, *example, "--accumulate", 2, "--epochs", 4)
    done = run_python(*options, cwd=tmp_path, module="torch.distributed.run", check=0)
    accuracy, messages = find_accuracies(done), done.stderr
    assert len(accuracy) == 4 and accuracy[-1] >= 0.75, accuracy
    assert messages.count("half precision is bfloat16") <= 1 and "terminate" not in messages
    saved = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert saved["amp"]["loss_scaler0"]["loss_scale"] == (2.0**16 if level == "O2" else 1)
    assert saved["model"]["head.weight"].dtype == torch.float32
    assert any(name.name.startswith("events") for name in (tmp_path / "out").iterdir())
    done = run_python(*example, "--resume", "out/last.pt", "--epochs", 5, cwd=tmp_path, check=0)
    after = find_accuracies(done)
    assert len(after) == 1 and after[0] >= accuracy[-1] - 0.02
