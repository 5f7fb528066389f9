"""`python -m apex.parallel.multiproc main.py args...`

Starts `python -m fastvit.compat main.py args... --world-size N --rank R` once for each rank. N is the value
of `--world-size`, or the number of GPUs, or 1. Rank 0 prints, the others write to GPU_1.log and so on. When
one of them fails, the others are terminated, and its status is returned.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

__all__ = ["main"]

_PATIENCE = 10.0  # seconds before the other ranks are terminated after a failure, and again before a kill


def _with(arguments: list[str], name: str, value: int) -> list[str]:
    """`arguments` with option `name` set to `value`."""
    if name not in arguments:
        return [*arguments, name, str(value)]
    place = arguments.index(name) + 1
    return [*arguments[:place], str(value), *arguments[place + 1 :]]


def _world_size(arguments: list[str]) -> int:
    if "--world-size" not in arguments:
        return torch.cuda.device_count() or 1
    given = arguments[arguments.index("--world-size") + 1 :][:1]
    if not given or not given[0].isdigit() or int(given[0]) < 1:
        sys.exit(
            f"apex.parallel.multiproc: --world-size takes a number of processes, got {' '.join(given)!r}"
        )
    return int(given[0])


def _ended(workers: list[subprocess.Popen], seconds: float) -> bool:
    """Waits for at most `seconds`; returns whether all workers have ended."""
    deadline = time.monotonic() + seconds
    while (running := [worker.poll() for worker in workers].count(None)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running


def _wait(workers: list[subprocess.Popen]) -> int:
    """Waits for all workers; returns the status of the first that fails, or 0."""
    while not any(statuses := [worker.poll() for worker in workers]) and None in statuses:
        time.sleep(0.05)
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        if not _ended(workers, _PATIENCE):
            for worker in workers:
                end(worker)
    _ended(workers, _PATIENCE)
    return next(filter(None, statuses), 0)


def main(arguments: list[str]) -> int:
    """Runs the ranks and returns the status of the one that failed first, 128 + n for signal n; else 0."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit("python -m apex.parallel.multiproc: error: no script given")
    world = _world_size(arguments)
    arguments = _with(arguments, "--world-size", world)
    workers: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            command = [sys.executable, "-m", "fastvit.compat", *_with(arguments, "--rank", rank)]
            if rank:
                with Path(f"GPU_{rank}.log").open("w") as log:
                    workers.append(subprocess.Popen(command, stdout=log))
            else:
                workers.append(subprocess.Popen(command))
        status = _wait(workers)
    finally:
        for worker in workers:
            worker.kill()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
