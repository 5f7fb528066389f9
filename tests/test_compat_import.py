"""The import hook of fastvit.compat, and `python -m fastvit.compat`."""

import argparse
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fastvit.compat.amp_C
import fastvit.compat.apex
import fastvit.compat.inplace_abn
from fastvit.compat import __main__ as runner
from fastvit.compat import _finder, install
from fastvit.compat._local_rank import spell_local_rank

ROOT = Path(__file__).parents[1]
LIMIT = 60


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake({path: text})` puts packages on the path; imports of apex and inplace_abn start afresh."""

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in _finder._ROOTS]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _finder._Finder)]
        importlib.invalidate_caches()

    def write(files, prefer="apex"):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        install(prefer)

    monkeypatch.setattr(_finder, "_install_in_children", lambda: None)
    forget()
    yield write
    forget()


def test_without_a_real_one(fake):
    fake({})
    import apex
    import inplace_abn
    from apex import amp
    from apex.amp._amp_state import _amp_state
    from apex.parallel import LARC as exported
    from apex.parallel.LARC import LARC

    assert apex is fastvit.compat.apex and amp is apex.amp is fastvit.compat.apex.amp
    assert inplace_abn is fastvit.compat.inplace_abn
    assert apex.__spec__.name == "fastvit.compat.apex"
    assert _amp_state is amp._amp_state and LARC is exported
    assert importlib.import_module("inplace_abn.functions").inplace_abn_sync is inplace_abn.inplace_abn_sync
    assert importlib.import_module("inplace_abn.abn").ABN is inplace_abn.ABN
    for name in apex.__all__:
        assert getattr(apex, name) is not None
    assert importlib.import_module("apex.optimizers") is apex.optimizers
    import amp_C
    from apex.contrib.layer_norm.layer_norm import FastLayerNormFN

    assert amp_C is fastvit.compat.amp_C and FastLayerNormFN.apply
    for lines in (
        "import apex.transformer",
        "from apex import transformer",
        "from apex.contrib import fmha",
        "from apex.transformer import parallel_state",
        "from apex.contrib.sparsity import ASP",
        "from apex.amp import utils",
        "import apex.parallel.multiproc",
        "from apex.fp16_utils import prep_param_lists",
    ):
        with pytest.raises(ModuleNotFoundError, match="No module named .*; see docs/migrating-from-apex.md"):
            exec(lines)


def test_names_with_something_instead(fake):
    fake({})
    from apex import amp, optimizers

    for package, name, instead in (
        (amp, "init", "amp.initialize"),
        (optimizers, "FusedAdagrad", "torch.optim.Adagrad"),
    ):
        with pytest.raises(AttributeError, match=f"has no {name}; use {instead}, see docs/migrating"):
            getattr(package, name)
        path = package.__name__.removeprefix("fastvit.compat.")
        for lines in (f"from {path} import {name}", f"from fastvit.compat.{path} import {name}"):
            with pytest.raises(ImportError, match=f"{name}' in fastvit.compat; use {instead}, see docs"):
                exec(lines)


def test_real_one_without_the_parts(fake):
    """Like apex since 2025, and like PyPI's unrelated package apex."""
    fake(
        {
            "apex/__init__.py": "from . import optimizers\nversion = 1\n",
            "apex/optimizers.py": "class FusedAdam: real = True\n",
            "apex/contrib/__init__.py": "real = True\n",
        }
    )
    import apex
    from apex import amp
    from apex.contrib import real
    from apex.optimizers import FusedAdam, FusedLAMB
    from apex.parallel import convert_syncbn_model

    assert apex.version == 1 and real and FusedAdam.real
    assert amp is apex.amp is fastvit.compat.apex.amp
    assert FusedLAMB is fastvit.compat.apex.optimizers.FusedLAMB
    assert convert_syncbn_model is fastvit.convert_syncbn_model
    assert apex.FP16_Optimizer is fastvit.compat.apex.FP16_Optimizer
    assert "class FusedAdam" in __import__("inspect").getsource(FusedAdam)
    with pytest.raises(AttributeError, match="module 'apex' has no attribute 'nothing'"):
        _ = apex.nothing


REAL = {
    "apex/__init__.py": "from . import amp\nreal = True\ndef __getattr__(name):\n"
    "    if name == 'lazy': return 7\n    raise AttributeError(name)\n",
    "apex/amp/__init__.py": "def initialize(): return 'real'\n",
    "apex/contrib.py": "real = True\n",
    "inplace_abn.py": "class InPlaceABN: real = True\n",
}


def test_real_one_with_the_part_is_used(fake):
    fake(REAL)
    import apex
    import inplace_abn

    assert apex.amp.initialize() == "real" and apex.real and apex.lazy == 7
    assert apex.amp.scale_loss is fastvit.compat.apex.amp.scale_loss
    assert apex.parallel is fastvit.compat.apex.parallel
    assert inplace_abn.InPlaceABN.real and inplace_abn.ABN is fastvit.compat.inplace_abn.ABN


def test_prefer_fastvit(fake):
    fake(REAL, prefer="fastvit")
    import apex
    import inplace_abn
    from apex import contrib
    from apex.amp import initialize

    assert apex.amp is fastvit.compat.apex.amp and initialize is apex.amp.initialize
    assert apex.real and contrib.real and apex.lazy == 7  # the rest of it stays
    assert inplace_abn is fastvit.compat.inplace_abn


@pytest.mark.parametrize("broken", ["import not_there_at_all", "raise ImportError('no such symbol')"])
def test_real_one_that_does_not_import(fake, broken):
    fake({"apex/__init__.py": f"from . import amp\n{broken}\n", "apex/amp.py": "real = True\n"})
    with pytest.warns(UserWarning, match="the installed apex fails to import"):
        import apex
    from apex.amp import initialize

    assert apex is fastvit.compat.apex and initialize is fastvit.compat.apex.amp.initialize


def test_clone_beside_the_script_is_no_package(fake):
    fake({"apex/apex/__init__.py": "real = True\n"})
    import apex

    assert apex is fastvit.compat.apex


def test_wrong_preference():
    with pytest.raises(ValueError, match="prefer takes apex or fastvit, got 'torch'"):
        install("torch")


# The runner


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
    if "--say" in sys.argv: sys.exit("goodbye")
    fail()
"""


@pytest.mark.parametrize("flag", ["--say", "--raise"])
def test_same_as_python(tmp_path, flag):
    """argv, __main__, sys.path, traceback and exit status are those of `python script.py`."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "main.py").write_text(SCRIPT)
    arguments = ("scripts/main.py", "--prefer", "mine", flag, "-m", "x")
    plain = run(*arguments, cwd=tmp_path, module=None)
    ours = run(*arguments, cwd=tmp_path)
    assert ours.stdout == plain.stdout and len(plain.stdout.splitlines()) == 7
    assert (ours.stderr, ours.returncode) == (plain.stderr, plain.returncode)
    assert plain.returncode == 1


def test_scripts_and_modules_find_apex(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import os, sys, torch\nfrom apex import amp\n"
        "assert 'fastvit.compat._cpu' not in sys.modules and 'FASTVIT_COMPAT_CPU' not in os.environ\n"
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
    assert not any("children" in folder for folder in sys.path), sys.path
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
    [(["gone.py"], "can't open file 'gone.py'"), (["--prefer", "torch", "x.py"], "invalid choice: 'torch'")],
)
def test_wrong_use(monkeypatch, capsys, fake, arguments, message):
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    monkeypatch.setattr("atexit.register", lambda function: None)
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 2 and message in capsys.readouterr().err


OLD, NEW = ("--local_rank",), ("--local-rank",)


@pytest.mark.parametrize("explicit", [False, True])
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
def test_local_rank_is_spelled_as_declared(monkeypatch, declared, environment, given, want, explicit):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)
    monkeypatch.setattr("sys.argv", ["main.py", *given])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    spell_local_rank()
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    if declared:
        parser.add_argument(*declared, type=int, default=-1)
    args = parser.parse_args(sys.argv[1:]) if explicit else parser.parse_args()
    assert args.file == "a" and getattr(args, "local_rank", None) == want
    assert parser.parse_known_args(iter(["b"]))[0].file == "b"  # not the command line
    assert sys.argv == ["main.py", *given]


@pytest.mark.parametrize(
    ("environment", "given"),
    [("3", []), (None, ["--local-rank=3"]), ("9", ["--local_rank", "3"]), ("3", ["--local-rank=3"])],
)
def test_parsers_after_the_first_find_the_local_rank(monkeypatch, environment, given):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    spell_local_rank()

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


def test_local_rank_that_another_module_declares(tmp_path):
    (tmp_path / "options.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\nargs = parser.parse_args()\n"
    )
    (tmp_path / "main.py").write_text("from options import args\nprint('rank', args.local_rank)\n")
    assert run("--local-rank=5", "main.py", cwd=tmp_path, check=0).stdout == "rank 5\n"
    assert run("-m", "main", cwd=tmp_path, check=0, LOCAL_RANK="6").stdout == "rank 6\n"


def test_arguments_of_the_launcher():
    options, words = runner._parse(["--local-rank=1", "--prefer", "fastvit", "main.py", "--prefer", "x"])
    assert options.prefer == "fastvit" and not options.module
    assert words == ["main.py", "--local-rank=1", "--prefer", "x"]
    options, words = runner._parse(["--local_rank", "1", "-m", "pack.main", "-m", "y"])
    assert options.module and words == ["pack.main", "--local-rank=1", "-m", "y"]


def test_no_script(capsys):
    with pytest.raises(SystemExit, match="2"):
        runner._parse(["--prefer", "apex"])
    assert "no script given" in capsys.readouterr().err


# Ranks

GROUP = """\
import argparse, sys, torch, torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--fail", type=int, default=-1)
args = parser.parse_args()
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
model = DDP(model)
for _ in range(3):
    with amp.scale_loss(model(torch.randn(2, 4)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
sys.stdout.write(f"rank {args.local_rank}\\n")  # in one piece, beside the other rank's
sys.stdout.flush()
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


def test_ranks_that_leave_their_group_open(tmp_path):
    (tmp_path / "main.py").write_text(GROUP)
    launch = ("--nproc_per_node=2", "--standalone", "-m", "fastvit.compat", "main.py")
    done = run(*launch, cwd=tmp_path, module="torch.distributed.run", check=0)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0",
        "rank 1",
    ]
    assert "destroy_process_group" not in done.stderr and "terminate" not in done.stderr, done.stderr


def test_rank_that_fails(tmp_path):
    """Its status reaches the launcher, here the one that passes --local-rank, and no rank waits for it."""
    (tmp_path / "main.py").write_text(GROUP)
    launch = ("--nproc_per_node=2", "--standalone", "-m", "fastvit.compat", "main.py", "--fail", "1")
    done = run(*launch, cwd=tmp_path, module="torch.distributed.launch", check=1)
    assert "exitcode  : 3" in done.stderr


def test_every_rank_fails(tmp_path):
    """As after a loss that is not finite: the script's exit handlers run, and no rank aborts."""
    (tmp_path / "main.py").write_text(GROUP)
    launch = ("--nproc_per_node=2", "--standalone", "-m", "fastvit.compat", "main.py", "--fail", "2")
    done = run(*launch, cwd=tmp_path, module="torch.distributed.run", check=1)
    assert "exitcode  : 1" in done.stderr and "loss is nan" in done.stderr
    assert "at the end of" in done.stdout and "logged" in done.stdout
    assert "torn down" not in done.stderr and "terminate" not in done.stderr, done.stderr
