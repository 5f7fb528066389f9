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

SOON = 8.0  # seconds; the group's timeout is far longer


def _train(rank: int, world: int, store: tuple[int, int], statistics: str, ready: int) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    import fastvit

    os.environ["FASTVIT_STATISTICS"] = statistics
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    port, seed = store
    ours = dist.PrefixStore(str(seed), dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=ours, rank=rank, world_size=world, timeout=limit)
    net = torch.nn.Sequential(fastvit.SyncBatchNorm(6), fastvit.InPlaceABNSync(6), fastvit.SyncBatchNorm(6))
    x = torch.randn(4, 6, 3)
    net[0](x)  # from here on the ranks know each other's processes; the other layers are agreed on below
    os.write(ready, b"-")
    while True:
        net(x.clone().requires_grad_()).square().sum().backward()


def _rank(*arguments) -> int:
    """A rank in a child process; the exit status is the kind of its end."""
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
    """A description of the failure, or nothing. `port` is the store's."""
    choose = random.Random(seed)
    world, statistics = choose.choice([2, 3]), choose.choice(["peer", "collective"])
    victim, delay = choose.randrange(world), choose.choice([0.02, 0.2, 0.8]) * choose.random()
    ours, theirs = os.pipe()
    children = [_rank(rank, world, (port, seed), statistics, theirs) for rank in range(world)]
    left = dict(enumerate(children))
    try:
        for _ in range(world):  # behind torch's own set-up, which waits for the group's timeout
            os.read(ours, 1)
        time.sleep(delay)
        os.kill(left[victim], signal.SIGKILL)
        os.waitpid(left.pop(victim), 0)
        deadline = time.monotonic() + SOON
        while left and time.monotonic() < deadline:
            for rank, child in list(left.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    del left[rank]
                    if status:
                        return f"seed {seed}: rank {rank} of {world}, {statistics}: status {status}"
            time.sleep(0.01)
        what = f"ranks {sorted(left)} of {world}, {statistics}, wait after {delay:.3f} s"
        return f"seed {seed}: {what}" if left else ""
    finally:
        os.close(ours), os.close(theirs)
        for child in left.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve_store() -> int:
    """The port of a store in a process that ends with this one."""
    import torch.distributed as dist

    ours, theirs = os.pipe()
    if not os.fork():
        os.close(ours)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    return int(os.read(ours, 5))


def test_twenty_kills():
    ran = subprocess.run([sys.executable, __file__, "0", "20"], capture_output=True, text=True, timeout=360)
    assert ran.returncode == 0 and ran.stdout == "", ran.stdout + ran.stderr


if __name__ == "__main__":
    import fastvit  # noqa: F401  (before the forks)

    port = _serve_store()
    for seed in range(*map(int, sys.argv[1:])):
        if said := kill_at_random(seed, port):
            print(said, flush=True)
