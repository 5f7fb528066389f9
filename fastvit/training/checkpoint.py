"""Checkpoints: one file each, written whole or not at all, and loaded without running code from it.

`<run>/checkpoints/epoch-0012.pt` (or `epoch-0012-step-000340.pt`, 340 steps into the epoch after) is a dict
that `torch.load(..., weights_only=True)` reads: `model` has parameters and buffers under the names of the
model's state_dict, `average` their moving average with `--ema`. The others are optimizer, loss scale, epoch,
configuration and history. Schedule and random numbers follow from the epoch and step.

It is written under another name and renamed when all of it is on the disk, so a crash at any moment leaves
the previous checkpoint intact. The links `last.pt` and `best.pt` beside it are replaced in the same way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .config import TrainingError, first_line

NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?\.pt")


def epoch_and_step(path: Path) -> tuple[int, int]:
    """The finished epochs, and steps of the next epoch, of a checkpoint, from its name."""
    found = NAME.fullmatch(path.name)
    assert found  # checked by the caller
    return int(found[1]), int(found[2] or 0)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("epoch-*")
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=epoch_and_step)


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def save_checkpoint(run: Path, state: dict[str, Any], keep: int = 2, best: bool = False) -> Path:
    """Write a checkpoint and make `last.pt`, and `best.pt` if it is the best, point to it.

    Then older ones but for the best and the newest `keep` are removed. So are later ones, which belong to an
    abandoned continuation of the run.
    """
    older = checkpoints(run)
    step = state["progress"]["step"]
    name = f"epoch-{state['epoch']:04d}" + (f"-step-{step:06d}" if step else "")
    final = run / "checkpoints" / f"{name}.pt"
    temporary, best_link = final.with_name(final.name + ".tmp"), final.with_name("best.pt")
    try:
        final.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:  # torch's own writer hides why a write has failed
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        for path in older:
            if epoch_and_step(path) > epoch_and_step(final):
                path.unlink()
        os.replace(temporary, final)
        _link(final.with_name("last.pt"), final.name)
        if best or not best_link.exists():
            _link(best_link, final.name)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        previous = f"; {older[-1]} is intact" if older else ""
        raise OSError(f"cannot write the checkpoint {final}: {_reason(error)}{previous}") from error
    for path in checkpoints(run)[:-keep]:
        if path.resolve() != best_link.resolve():
            path.unlink()
    return final


def _reason(error: BaseException) -> str:
    """Why a write has failed; torch may raise an error of its own while it handles the system's."""
    while not isinstance(error, OSError) and error.__context__:
        error = error.__context__
    return first_line(error)


def find_checkpoint(path: Path, option: str = "--resume") -> Path:
    """The checkpoint that `--resume path` means: `path` itself, or the last one of the run `path`."""
    path = Path(os.path.abspath(path))  # of a run whose folder of checkpoints may be a link
    if path.is_file():
        return path.resolve() if path.is_symlink() else path
    found = checkpoints(path)
    if not found:
        raise TrainingError(
            f"{option}: {path} must be a run directory or a checkpoint, and has no checkpoint in it"
        )
    return found[-1]


def run_of(resumed: Path) -> Path:
    """The directory of a run, or of a checkpoint's run; for a moved checkpoint a folder of its name."""
    path = find_checkpoint(resumed)
    return path.parent.parent if path.parent.name == "checkpoints" else path.with_suffix("")


def load_checkpoint(path: Path, option: str = "--resume") -> dict[str, Any]:
    """The state in a checkpoint, on the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a truncated zip: RuntimeError, EOFError, KeyError or UnpicklingError
        raise TrainingError(
            f"{option}: {path} is missing, cut off or damaged ({type(error).__name__}: "
            f"{first_line(error)}); resume from another checkpoint, or start again"
        ) from error
    if not isinstance(state, dict) or "progress" not in state:
        raise TrainingError(f"{option}: {path} is no checkpoint of this trainer")
    return state


def lock(run: Path, until: ExitStack) -> None:
    """Make the directory of a run and lock it until the stack is closed.

    The kernel releases the lock when the process ends for any reason. Workers do not inherit it, unlike a
    lock of `fcntl.flock`, so surviving workers of a killed rank do not block a restarted run.
    """
    run.mkdir(parents=True, exist_ok=True)
    file = until.enter_context((run / "lock").open("a+"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f"{run} cannot be locked: a second run in it would not be detected", flush=True)
            return
        file.seek(0)
        raise TrainingError(
            f"--out {run} is in use by another run ({file.read().strip()}); wait for its end, or "
            f"give another directory"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
