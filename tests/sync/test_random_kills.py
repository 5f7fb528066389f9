"""Ranks killed at random moments: all others raise soon, and none hangs.

Ranks are forked from one process that has loaded everything, so that a kill takes a fraction of a second.
Their store is another process: torch's FileStore never returns after a rank was killed while it wrote.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

LIMIT_SECONDS = 8.0  # the group's timeout is far longer


def _train(rank: int, world: int, port: int, seed: int, statistics: str, ready_pipe: int) -> None:
    """Runs steps for ever, and writes a byte when all ranks have met."""
    import datetime

    import torch
    import torch.distributed as dist

    import fastvit

    os.environ["FASTVIT_STATISTICS"] = statistics
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    store = dist.PrefixStore(str(seed), dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    net = torch.nn.Sequential(fastvit.SyncBatchNorm(6), fastvit.InPlaceABNSync(6), fastvit.SyncBatchNorm(6))
    x = torch.randn(4, 6, 3)
    net[0](x)  # from here on the ranks know each other's processes; the other layers are agreed on below
    os.write(ready_pipe, b"-")
    while True:
        net(x.clone().requires_grad_()).square().sum().backward()


def _fork_rank(*arguments) -> int:
    """Starts a rank as a child process. Its exit status is 0 if an error of fastvit or torch ended it."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _train(*arguments)
    except RuntimeError:  # ValueError, TypeError and the like are faults of the test
        status = 0
    finally:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(status)


def kill_at_random(seed: int, port: int) -> str:
    """Kills a rank, and returns a description of the failure, or nothing. `port` is the store's."""
    generator = random.Random(seed)
    world, statistics = generator.choice([2, 3]), generator.choice(["peer", "collective"])
    victim, delay = generator.randrange(world), generator.choice([0.02, 0.2, 0.8]) * generator.random()
    reading_end, writing_end = os.pipe()
    children = [_fork_rank(rank, world, port, seed, statistics, writing_end) for rank in range(world)]
    living = dict(enumerate(children))
    try:
        for _ in range(world):  # behind torch's own set-up, which waits for the group's timeout
            os.read(reading_end, 1)
        time.sleep(delay)
        os.kill(living[victim], signal.SIGKILL)
        os.waitpid(living.pop(victim), 0)
        deadline = time.monotonic() + LIMIT_SECONDS
        while living and time.monotonic() < deadline:
            for rank, child in list(living.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    del living[rank]
                    if status:
                        return f"seed {seed}: rank {rank} of {world}, {statistics}: status {status}"
            time.sleep(0.01)
        what = f"ranks {sorted(living)} of {world}, {statistics}, wait after {delay:.3f} s"
        return f"seed {seed}: {what}" if living else ""
    finally:
        os.close(reading_end), os.close(writing_end)
        for child in living.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve_store() -> int:
    """Starts a store in a process that ends with this one, and returns its port."""
    import torch.distributed as dist

    reading_end, writing_end = os.pipe()
    if not os.fork():
        os.close(reading_end)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing_end, str(store.port).encode())
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    return int(os.read(reading_end, 5))


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_no_rank_hangs_after_any_of_twenty_kills():
    ran = subprocess.run([sys.executable, __file__, "0", "20"], capture_output=True, text=True, timeout=360)
    assert ran.returncode == 0 and ran.stdout == "", ran.stdout + ran.stderr


if __name__ == "__main__":
    import fastvit  # noqa: F401  (before the forks)

    port = _serve_store()
    for seed in range(*map(int, sys.argv[1:])):
        if failure := kill_at_random(seed, port):
            print(failure, flush=True)
