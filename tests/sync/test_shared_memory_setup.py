"""The set-up of shared memory: what it needs of the system, and ranks that end during it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastvit
from fastvit.sync import shared_memory
from sync.layer_steps import catch_error, make_leaf

pytestmark = pytest.mark.nightly

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
    ("options", "expected"),
    [
        pytest.param("ro", "Collective: ranks 0, 1: /dev/shm is not writable", id="read-only"),
        pytest.param("size=64k", "Collective: rank 0: [Errno 28]", id="64k"),
        pytest.param("size=1m", "SharedMemory, host", id="1m"),
    ],
)
def test_shared_memory_that_cannot_be_written_or_is_small(options, expected, tmp_path):
    command = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    mount = ["unshare", "--mount", "sh", "-c", command, "-"]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount another /dev/shm")
    program = [*mount, sys.executable, "-c", ONE_STEP, str(tmp_path / "store")]
    environment = os.environ | {"FASTVIT_STATISTICS": "auto"}
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert [expected in line for line in ran.stdout.splitlines()] == [True, True], ran.stdout


def kill_this_rank(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def end_rank_during_setup(rank, world, folder, rank_to_kill):
    """Kills rank 0 when it has made the segment, or rank 1 when it is about to map the segment."""
    shared_memory.SHM_DIR = Path(folder)  # of this test alone, in memory
    if rank == rank_to_kill == 0:
        os.posix_fallocate = kill_this_rank
    elif rank == rank_to_kill:
        shared_memory._map_segment = kill_this_rank
    return catch_error(lambda: fastvit.SyncBatchNorm(6)(make_leaf()))


@pytest.mark.parametrize("killed", [0, 1], ids=["rank 0 has made it", "rank 1 maps it"])
def test_a_rank_that_is_killed_with_the_segment_leaves_nothing_behind(ranks, killed):
    with tempfile.TemporaryDirectory(dir=shared_memory.SHM_DIR) as folder:
        results = ranks.run(2, end_rank_during_setup, folder, killed, group_timeout=30, breaks=True)
        assert not list(Path(folder).iterdir())
    ranks.close()  # running ranks have another folder
    message, seconds = results[1 - killed]
    assert results[killed] is None and f"rank {killed} has ended" in message and seconds < 5
