"""Checkpoints: each is one file, written completely or not at all, and loaded without running code in it.

`<run>/checkpoints/epoch-0012.pt` (or `epoch-0012-step-000340.pt`, 340 steps into the epoch after) is a dict
that `torch.load(..., weights_only=True)` reads: `model` has parameters and buffers under the names of the
model's state_dict, and with `--ema` `average` has their moving average. The other keys are optimizer, loss
scale, epoch, configuration and history. The schedule and the random numbers follow from epoch and step.

A checkpoint is written under another name and renamed when all of it is on the disk, so a crash at any moment
leaves the previous checkpoint intact. The links `last.pt` and `best.pt` are replaced in the same way.
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

CHECKPOINT_NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?\.pt")


def parse_checkpoint_name(path: Path) -> tuple[int, int]:
    """Returns the finished epochs, and steps of the next epoch, that the name of a checkpoint has."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match  # The caller has checked the name.
    return int(match[1]), int(match[2] or 0)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first."""
    paths = (run_dir / "checkpoints").glob("epoch-*")
    return sorted((path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)), key=parse_checkpoint_name)


def _replace_link(link: Path, target: str) -> None:
    """Makes `link` point to `target` at once: the link exists at any moment."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def save_checkpoint(run_dir: Path, state: dict[str, Any], keep: int = 2, best: bool = False) -> Path:
    """Writes a checkpoint, and makes `last.pt`, and `best.pt` if `best`, point to it.

    Older checkpoints are removed, except for the best one and the newest `keep`. Later ones are removed too:
    they belong to an abandoned continuation of the run.
    """
    older = list_checkpoints(run_dir)
    step = state["progress"]["step"]
    name = f"epoch-{state['epoch']:04d}" + (f"-step-{step:06d}" if step else "")
    checkpoint_path = run_dir / "checkpoints" / f"{name}.pt"
    temporary, best_link = (
        checkpoint_path.with_name(checkpoint_path.name + ".tmp"),
        checkpoint_path.with_name("best.pt"),
    )
    try:
        checkpoint_path.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:  # torch.save of a path hides why a write failed.
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        for path in older:
            if parse_checkpoint_name(path) > parse_checkpoint_name(checkpoint_path):
                path.unlink()
        os.replace(temporary, checkpoint_path)
        _replace_link(checkpoint_path.with_name("last.pt"), checkpoint_path.name)
        if best or not best_link.exists():
            _replace_link(best_link, checkpoint_path.name)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        reason = _find_reason(error)
        previous = f"; {older[-1]} is intact" if older else ""
        raise OSError(f"cannot write the checkpoint {checkpoint_path}: {reason}{previous}") from error
    for path in list_checkpoints(run_dir)[:-keep]:
        if path.resolve() != best_link.resolve():
            path.unlink()
    return checkpoint_path


def _find_reason(error: BaseException) -> str:
    """Returns why a write failed. torch may raise an error of its own while it handles the OSError."""
    while not isinstance(error, OSError) and error.__context__:
        error = error.__context__
    return first_line(error)


def find_checkpoint(path: Path, option: str = "--resume") -> Path:
    """Returns the checkpoint that `--resume path` means: `path` itself, or the last one of the run `path`."""
    path = Path(os.path.abspath(path))  # The folder of checkpoints may be a link, so it is not resolved.
    if path.is_file():
        return path.resolve() if path.is_symlink() else path
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise TrainingError(f"{option}: {path} must be a run directory or a checkpoint; no checkpoint found")
    return checkpoints[-1]


def run_dir_of(resumed: Path) -> Path:
    """Returns the directory of the resumed run. A checkpoint outside of a run gets a folder."""
    path = find_checkpoint(resumed)
    return path.parent.parent if path.parent.name == "checkpoints" else path.with_suffix("")


def load_checkpoint(path: Path, option: str = "--resume") -> dict[str, Any]:
    """Returns the state in a checkpoint, with its tensors on the CPU."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # A truncated zip may raise any exception.
        raise TrainingError(
            f"{option}: {path} is missing, cut off or damaged ({type(error).__name__}: "
            f"{first_line(error)}); resume from another checkpoint, or start again"
        ) from error
    if not isinstance(state, dict) or "progress" not in state:
        raise TrainingError(f"{option}: {path} is no checkpoint of fastvit-train; give a run directory")
    return state


def lock_run_dir(run_dir: Path, exit_stack: ExitStack) -> None:
    """Makes the directory of a run, and locks it until the stack is closed.

    The kernel releases the lock when the process ends for any reason. Unlike a lock of `fcntl.flock` the lock
    is not inherited by workers, so surviving workers of a killed rank do not block a restarted run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = exit_stack.enter_context((run_dir / "lock").open("a+"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(
                f"fastvit-train: --out {run_dir} cannot be locked ({first_line(error)}): start no second run "
                "in that directory, which would not be detected",
                flush=True,
            )
            return
        file.seek(0)
        raise TrainingError(
            f"--out {run_dir} is in use by another run ({file.read().strip()}); wait for its end, or "
            f"give another directory"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
