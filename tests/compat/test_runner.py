"""`python -m fastvit.compat`: scripts, modules, processes that they start, the local rank, the example."""

import argparse
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
from fastvit.compat._local_rank import patch_local_rank_parsing

ROOT = Path(__file__).parents[2]
LIMIT = 100


def run(*arguments, cwd, module="fastvit.compat", check=None, **environment):
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


def test_same_as_python(tmp_path):
    """argv, __main__, sys.path, traceback and exit status are those of `python script.py`."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/main.py").write_text(SCRIPT)
    arguments = ("scripts/main.py", "--prefer", "mine", "-m", "x")
    plain = run(*arguments, cwd=tmp_path, module=None)
    ours = run(*arguments, cwd=tmp_path)
    assert ours.stdout == plain.stdout and len(plain.stdout.splitlines()) == 7
    assert (ours.stderr, ours.returncode) == (plain.stderr, plain.returncode)
    assert plain.returncode == 1


@pytest.mark.parametrize("kind", ["folder", "zip", "app.pyz"])
def test_folders_and_zip_files(tmp_path, kind):
    """Run as by `python folder` and `python file.zip`, whatever the file is called."""
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
        plain = run(*arguments, cwd=tmp_path, module=None, check=status)
        ours = run(*arguments, cwd=tmp_path, check=status)
        address = r" at 0x\w+"
        assert re.sub(address, "", ours.stdout) == re.sub(address, "", plain.stdout)
        trace = re.sub(r'(?m)^  File ".*runpy.*\n(    .*\n)*', "", plain.stderr)
        assert ours.stderr == trace and ("KeyError" in trace) == (status == 1)
    assert run(kind, "--apex", "--exit", cwd=tmp_path, check=7).stdout.splitlines()[-1] == (
        "fastvit.compat.apex.amp neighbour"
    )


def test_compiled_script(tmp_path):
    (tmp_path / "main.py").write_text("import apex, sys\nprint(apex.amp.__name__, __file__, sys.argv)\n")
    py_compile.compile(str(tmp_path / "main.py"), str(tmp_path / "main.pyc"))
    done = run("main.pyc", "x", cwd=tmp_path, check=0)
    assert done.stdout == f"fastvit.compat.apex.amp {tmp_path / 'main.pyc'} ['main.pyc', 'x']\n"


def test_folder_without_a_main_module(tmp_path):
    (tmp_path / "empty").mkdir()
    done = run("empty", cwd=tmp_path, check=1)
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
    done = run("--prefer", "fastvit", "main.py", "--apex", "--exit", cwd=tmp_path, check=7)
    assert done.stdout.splitlines()[-1] == "fastvit.compat.apex.amp neighbour"
    done = run("-m", "pack.main", "-m", "--prefer", cwd=tmp_path, check=0)
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


@pytest.mark.parametrize("how", START)
def test_processes_that_a_script_starts_find_apex(tmp_path, how):
    """And the local rank, and the start-up hook that was there before."""
    (tmp_path / "main.py").write_text(f"{LAUNCHER}    {START[how]}\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("mine = 'hook'\n")
    done = run("main.py", cwd=tmp_path, check=0, PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    assert sorted(done.stdout.splitlines()) == [f"rank {r} fastvit.compat.apex.amp hook" for r in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py"], "can't open file 'gone.py'"),
        (["--prefer", "torch", "x.py"], "invalid choice: 'torch'"),
        (["--half", "half", "x.py"], "invalid choice: 'half'"),
        (["--prefer", "apex"], "got no script; a script or -m module expected"),
    ],
)
def test_wrong_use(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    monkeypatch.setattr("atexit.register", lambda function: None)
    for name in ("install", "patch_local_rank_parsing"):
        monkeypatch.setattr(runner, name, lambda *arguments: None)
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


OLD, NEW = ("--local_rank",), ("--local-rank",)


@pytest.fixture
def spelled(monkeypatch):
    for name in ("parse_known_args", "_parse_optional"):
        monkeypatch.setattr(argparse.ArgumentParser, name, getattr(argparse.ArgumentParser, name))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    patch_local_rank_parsing()


@pytest.mark.parametrize(
    ("declared", "environment", "given", "want"),
    [
        (OLD, None, ["--local-rank=1", "a"], 1),
        (OLD, None, ["--local-rank", "1", "a"], 1),
        (OLD, None, ["--local_rank=1", "a"], 1),
        (OLD, "3", ["a"], 3),
        (OLD, "3", ["--local_rank", "2", "a"], 2),
        (OLD, None, ["a"], -1),
        (NEW, None, ["--local_rank=1", "a"], 1),
        (NEW, "2", ["a"], 2),
        (OLD + NEW, None, ["--local-rank=1", "a"], 1),
        ((), "2", ["a"], None),
    ],
)
def test_local_rank_is_spelled_as_declared(monkeypatch, spelled, declared, environment, given, want):
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)
    monkeypatch.setattr("sys.argv", ["main.py", *given])
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    if declared:
        parser.add_argument(*declared, type=int, default=-1)
    for args in (parser.parse_args(), parser.parse_args(sys.argv[1:])):
        assert args.file == "a" and getattr(args, "local_rank", None) == want
    assert parser.parse_known_args(iter(["b"]))[0].file == "b"  # not the command line
    assert sys.argv == ["main.py", *given]


@pytest.mark.parametrize(
    ("environment", "given"),
    [("3", []), (None, ["--local-rank=3"]), ("9", ["--local_rank", "3"]), ("3", ["--local-rank=3"])],
)
def test_parsers_after_the_first_find_the_local_rank(monkeypatch, spelled, environment, given):
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)

    def parser(rank=True, **options):
        made = argparse.ArgumentParser(**options)
        if rank:
            made.add_argument("--local_rank", type=int, default=-1)
        return made

    for outer in (False, True):  # the command's parser alone declares it, and both do
        monkeypatch.setattr("sys.argv", ["main.py", *given, "train", "--lr", "2"])
        commands = parser(outer)
        train = commands.add_subparsers(dest="command").add_parser("train")
        train.add_argument("--local_rank", type=int, default=-1)
        train.add_argument("--lr", type=int)
        args = commands.parse_args()
        assert (args.command, args.local_rank, args.lr) == ("train", 3, 2)

        monkeypatch.setattr("sys.argv", ["main.py", *given, "--lr", "2"])
        _, rest = parser(outer).parse_known_args()
        second = parser()
        second.add_argument("--lr", type=int)
        args = second.parse_args(rest)
        assert (args.local_rank, args.lr) == (3, 2)
    assert second.parse_args(["--local_rank=5"]).local_rank == 5


POSITIONALS = {
    "a remainder": {"rest": {"nargs": argparse.REMAINDER}},
    "a script and a remainder": {"script": {}, "rest": {"nargs": "..."}},
    "any number": {"rest": {"nargs": "*"}},
    "a command": {"rest": {"nargs": argparse.PARSER}},
}
WORDS = [
    "--local_rank=1 train.py --local_rank=9",
    "--local_rank 1 train.py --local_rank 9 -- --local_rank=8",
    "--local_rank=1 -- --local_rank 9",
    "--local_rank=1 -- --local-rank 9",
    "-- --local_rank=9",
    "train.py --local_rank=9",
    "train.py --local_rank 9 --local_rank=2",
    "--local_r 1 train.py",
    "--local 1 train.py --lr 2",
    "--lr=2 --local=1 a b",
    "--local_rank",
    "--local_rank --lr 2 train.py",
    "--local_rank=a train.py",
    "",
]


@pytest.mark.parametrize("positionals", POSITIONALS)
def test_argparse_tells_which_words_give_the_local_rank(monkeypatch, positionals):
    """A word after `--`, in a remainder, or abbreviated is what it is for argparse alone."""

    def outcomes(environment=None):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if environment is not None:
            monkeypatch.setenv("LOCAL_RANK", environment)
        for words in WORDS:
            parser = argparse.ArgumentParser(prog="main.py")
            parser.add_argument("--local_rank", type=int, default=-1)
            parser.add_argument("--lr", type=int)
            for name, options in POSITIONALS[positionals].items():
                parser.add_argument(name, **options)
            parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))
            monkeypatch.setattr("sys.argv", ["main.py", *words.split()])
            try:
                yield words, *parser.parse_known_args()
            except ValueError as error:
                yield words, str(error), None

    alone = list(outcomes())
    assert any(getattr(found, "rest", None) and "--local_rank=9" in found.rest for _, found, _ in alone)
    with monkeypatch.context() as patch:
        for name in ("parse_known_args", "_parse_optional"):
            patch.setattr(argparse.ArgumentParser, name, getattr(argparse.ArgumentParser, name))
        patch_local_rank_parsing()
        assert list(outcomes()) == alone
        for (words, expected, _), (_, found, _) in zip(alone, outcomes("7"), strict=True):
            if isinstance(expected, argparse.Namespace):
                if expected.local_rank == -1:
                    expected.local_rank = 7  # LOCAL_RANK, where the words do not give it
                assert found == expected, words


def test_words_that_are_no_options_keep_their_spelling(spelled):
    parser = argparse.ArgumentParser()
    parser.add_argument(*OLD, type=int)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    for rank in (["--local-rank=1"], ["--local-rank", "1"]):
        for rest in (
            ["train.py", "--local-rank=9"],
            ["train.py", "--local-rank", "9"],
            ["a", "--local-rank"],
        ):
            found = parser.parse_args([*rank, *rest])
            assert (found.local_rank, found.rest) == (1, rest)
    other = argparse.ArgumentParser()  # declares none
    other.add_argument("rest", nargs=argparse.REMAINDER)
    assert other.parse_args(["train.py", "--local-rank=9"]).rest == ["train.py", "--local-rank=9"]
    assert other.parse_known_args(["--local-rank=9"])[1] == ["--local-rank=9"]


def test_arguments_of_the_launcher():
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


def launch(folder, module, *arguments, check):
    (folder / "main.py").write_text(GROUP)
    ranks = ("--nproc_per_node=2", "--standalone", "-m", "fastvit.compat", "main.py", *arguments)
    done = run(*ranks, cwd=folder, module=module, check=check)
    assert "terminate" not in done.stderr and "destroy_process_group" not in done.stderr, done.stderr
    return done


def test_rank_that_fails(tmp_path):
    """Its status reaches the launcher, here the one that passes --local-rank, and no rank waits for it."""
    done = launch(tmp_path, "torch.distributed.launch", "--fail", "1", check=1)
    assert "exitcode  : 3" in done.stderr


def test_every_rank_fails(tmp_path):
    """As after a loss that is not finite: the script's exit handlers run, and no rank aborts."""
    done = launch(tmp_path, "torch.distributed.run", "--fail", "2", check=1)
    assert "exitcode  : 1" in done.stderr and "loss is nan" in done.stderr
    assert "at the end of" in done.stdout and "logged" in done.stdout
    assert "torn down" not in done.stderr


# examples/train_vit_apex.py, a script that imports apex


def accuracies(done):
    return [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)], done.stderr


@pytest.mark.parametrize("norm", ["apex", "fastvit", "inplace-abn"])
def test_the_example_on_two_ranks_then_one(tmp_path, norm):
    # A CPU without bf16 instructions takes 30 times as long in half precision.
    level = "O2" if torch.cpu._is_avx512_bf16_supported() else "O0"
    ranks = ("--standalone", "--nproc_per_node=2", "-m", "fastvit.compat")
    example = (ROOT / "examples/train_vit_apex.py", "--norm", norm, "--opt-level", level, "--out", "out")
    options = (*ranks, *example, "--accumulate", 2, "--epochs", 4)
    accuracy, messages = accuracies(run(*options, cwd=tmp_path, module="torch.distributed.run", check=0))
    assert len(accuracy) == 4 and accuracy[-1] >= 0.75, accuracy
    assert messages.count("half precision is bfloat16") <= 1 and "terminate" not in messages
    saved = torch.load(tmp_path / "out/last.pt", weights_only=True)
    assert saved["amp"]["loss_scaler0"]["loss_scale"] == (2.0**16 if level == "O2" else 1)
    assert saved["model"]["head.weight"].dtype == torch.float32
    assert any(name.name.startswith("events") for name in (tmp_path / "out").iterdir())
    after, _ = accuracies(run(*example, "--resume", "out/last.pt", "--epochs", 5, cwd=tmp_path, check=0))
    assert len(after) == 1 and after[0] >= accuracy[-1] - 0.02
