"""fastvit.compat besides imports: a distribution for `importlib.metadata`, `python -m` on its modules,
`apex.parallel.multiproc`.
"""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import fastvit
from fastvit.compat import _finder, install
from fastvit.compat.apex import parallel
from fastvit.compat.apex.parallel import multiproc

ROOT = Path(__file__).parents[1]
LIMIT = 90


@pytest.fixture
def installed(monkeypatch, tmp_path):
    monkeypatch.setattr(_finder, "_install_in_children", lambda: None)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _finder._Finder)])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    install()
    return tmp_path


def test_distribution(installed):
    """Programs such as transformers read it before they import."""
    assert importlib.metadata.version("apex") == "25.05+fastvit"
    assert importlib.metadata.version("inplace-abn") == importlib.metadata.version("inplace_abn")
    found = importlib.metadata.distribution("apex")
    assert found.metadata["Name"] == "apex" and "fastvit.compat" in found.metadata["Summary"]
    assert found.read_text("RECORD") is None and found.requires is None
    assert {"apex", "inplace_abn"} <= {d.metadata["Name"] for d in importlib.metadata.distributions()}
    assert importlib.metadata.packages_distributions()["apex"] == ["apex"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apexes")


@pytest.mark.parametrize("prefer", ["apex", "fastvit"])
def test_distribution_of_a_real_one(installed, prefer):
    install(prefer)
    folder = installed / "apex-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    importlib.invalidate_caches()
    assert importlib.metadata.version("apex") == "0.1"
    assert [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] == "apex"] == ["0.1"]


def test_names_of_parallel():
    assert parallel.ReduceOp is dist.ReduceOp
    for module in (parallel.sync_batchnorm, parallel.optimized_sync_batchnorm):
        assert module.SyncBatchNorm is fastvit.SyncBatchNorm


SCRIPT = """\
import argparse, os, sys, time, apex
parser = argparse.ArgumentParser()
parser.add_argument("--world-size", type=int)
parser.add_argument("--rank", type=int)
parser.add_argument("--fail", type=int, default=-1)
args = parser.parse_args()
print("rank", args.rank, "of", args.world_size, apex.amp.__name__, flush=True)
if args.fail == args.rank:
    sys.exit(5)
if args.fail >= 0:
    open(f"pid{args.rank}", "w").write(str(os.getpid()))
    time.sleep(1000)
"""


def run(folder, *arguments, module="fastvit.compat"):
    (folder / "main.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=env)


def test_multiproc_starts_ranks(tmp_path):
    done = run(tmp_path, "-m", "apex.parallel.multiproc", "main.py", "--world-size", "3", "--rank", "9")
    assert done.returncode == 0, done.stderr
    said = [done.stdout, *((tmp_path / f"GPU_{rank}.log").read_text() for rank in (1, 2))]
    assert said == [f"rank {rank} of 3 fastvit.compat.apex.amp\n" for rank in range(3)]


def test_multiproc_counts_gpus(tmp_path, monkeypatch):
    done = run(tmp_path, "main.py", module="fastvit.compat.apex.parallel.multiproc")
    assert done.stdout.startswith("rank 0 of "), done.stderr
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert multiproc._world_size(["main.py"]) == 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert multiproc._world_size(["main.py"]) == 1


def test_multiproc_ends_with_the_rank_that_fails(tmp_path, monkeypatch):
    """The others are terminated, and the status is that of the failed rank."""
    monkeypatch.setattr(multiproc, "_PATIENCE", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(
        SCRIPT.replace(
            "if args.fail == args.rank:",
            """\
if args.fail == args.rank:
    while not os.path.exists("pid0"):
        time.sleep(0.05)
""",
        )
    )
    start = time.monotonic()
    assert multiproc.main(["main.py", "--world-size", "2", "--fail", "1"]) == 5
    assert time.monotonic() - start < LIMIT
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given"),
        (["--world-size", "2"], "no script given"),
        (["main.py", "--world-size"], "--world-size takes a number of processes, got ''"),
        (["main.py", "--world-size", "many"], "got 'many'"),
        (["main.py", "--world-size", "0"], "got '0'"),
    ],
)
def test_wrong_use_of_multiproc(arguments, message):
    with pytest.raises(SystemExit, match=message):
        multiproc.main(arguments)
