"""Set-up of shared memory: its needs of the system, and ranks that end during it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastvit
from fastvit import _library, sync
from fastvit.sync import shared_memory
from sync.test_faults import error_of, leaf

ONE_STEP = """
import os, sys, torch, torch.distributed as dist, fastvit
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
fastvit.SyncBatchNorm(4)(torch.randn(3, 4)).sum()
os.write(1, (fastvit.sync.describe_groups()[0] + "\\n").encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "options,said",
    [
        ("ro", "Collective: ranks 0, 1: /dev/shm is not writable"),
        ("size=64k", "Collective: rank 0: [Errno 28]"),
        ("size=1m", "SharedMemory, host"),
    ],
)
def test_shared_memory_that_cannot_be_written_or_is_small(options, said, tmp_path):
    command = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    mount = ["unshare", "--mount", "sh", "-c", command, "-"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount another /dev/shm")
    program = [*mount, sys.executable, "-c", ONE_STEP, str(tmp_path / "store")]
    environment = os.environ | {"FASTVIT_STATISTICS": "auto"}
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert [said in line for line in ran.stdout.splitlines()] == [True, True], ran.stdout


def killed_with_the_segment(rank, world, folder, when):
    shared_memory.SHM_DIR = Path(folder)  # of this test alone, in memory
    if (rank == 0) == (when == "made"):
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if when == "made":
            os.posix_fallocate = kill
        else:
            shared_memory._map_segment = kill
    return error_of(lambda: fastvit.SyncBatchNorm(6)(leaf()))


@pytest.mark.parametrize("when", ["made", "told"])
def test_killed_with_the_segment_leaves_nothing_behind(ranks, when):
    with tempfile.TemporaryDirectory(dir=shared_memory.SHM_DIR) as folder:
        results = ranks.run(2, killed_with_the_segment, folder, when, group_timeout=30, breaks=True)
        assert not list(Path(folder).iterdir())
    ranks.close()  # running ranks have another folder
    dead = 0 if when == "made" else 1
    message, seconds = results[1 - dead]
    assert results[dead] is None and f"rank {dead} has ended" in message and seconds < 5


BOTH = "CPU SharedMemory on one host, CUDA CudaIpc on one host with peer access"


@pytest.mark.parametrize(
    "wish,cuda,memory,said",
    [
        (None, True, True, f"auto: {BOTH}, otherwise Collective"),
        ("auto", False, True, "auto: CPU SharedMemory on one host, CUDA Collective, otherwise Collective"),
        ("auto", False, False, "auto: CPU Collective, CUDA Collective, otherwise Collective"),
        ("collective", True, True, "collective: CPU Collective, CUDA Collective, otherwise Collective"),
        ("peer", True, True, f"peer: {BOTH}, otherwise an error"),
    ],
)
def test_what_a_group_would_take(monkeypatch, wish, cuda, memory, said):
    monkeypatch.delenv("FASTVIT_STATISTICS", raising=False)
    if wish:
        monkeypatch.setenv("FASTVIT_STATISTICS", wish)
    monkeypatch.setattr(_library, "HAS_CUDA_KERNELS", cuda)

    def host_name(device):
        if not memory:
            raise OSError("no /dev/shm")

    monkeypatch.setattr(shared_memory.SharedMemoryBackend, "host_name", host_name)
    assert sync.available_backends() == f"FASTVIT_STATISTICS={said}"
