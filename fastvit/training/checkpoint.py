"""Checkpoints: each is one file, written completely or not at all, and loaded without running code in it.

`<run>/checkpoints/epoch-0012.pt` (`epoch-0012-step-000340.pt` after 340 steps of epoch 13) is a dict
that `torch.load(..., weights_only=True)` reads: `model` has parameters and buffers under the names of the
model's state_dict. With `--ema` the key `average` has their moving average. The other keys are optimizer,
loss scale, epoch, configuration and history. The schedule and the random numbers follow from epoch and step.

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
    """Returns the numbers of finished epochs, and of steps in the next epoch, in the name of a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match  # The caller has checked the name.
    return int(match[1]), int(match[2] or 0)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first."""
    paths = (run_dir / "checkpoints").glob("epoch-*")
    return sorted((path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)), key=parse_checkpoint_name)


def _replace_link(link: Path, target: str) -> None:
    """Makes `link` point to `target` in one step, so that the link exists at any moment."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def save_checkpoint(run_dir: Path, state: dict[str, Any], keep: int = 2, best: bool = False) -> Path:
    """Writes a checkpoint, and makes `last.pt`, and `best.pt` if `best`, point to it.

    The function removes older checkpoints, except for the best one and the newest `keep`. Checkpoints of
    later steps are removed too: they are left from an earlier start of the run, which resumed before them.
    """
    old_checkpoints = list_checkpoints(run_dir)
    step = state["progress"]["step"]
    name = f"epoch-{state['epoch']:04d}" + (f"-step-{step:06d}" if step else "")
    checkpoint_path = run_dir / "checkpoints" / f"{name}.pt"
    temporary_path = checkpoint_path.with_name(checkpoint_path.name + ".tmp")
    best_link = checkpoint_path.with_name("best.pt")
    try:
        checkpoint_path.parent.mkdir(exist_ok=True)
        with temporary_path.open("wb") as file:  # torch.save of a path hides why a write failed.
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        for path in old_checkpoints:
            if parse_checkpoint_name(path) > parse_checkpoint_name(checkpoint_path):
                path.unlink()
        os.replace(temporary_path, checkpoint_path)
        _replace_link(checkpoint_path.with_name("last.pt"), checkpoint_path.name)
        if best or not best_link.exists():
            _replace_link(best_link, checkpoint_path.name)
    except (OSError, RuntimeError) as error:
        temporary_path.unlink(missing_ok=True)
        reason = _find_reason(error)
        hint = f"; {old_checkpoints[-1]} is intact" if old_checkpoints else ""
        raise OSError(f"cannot write the checkpoint {checkpoint_path}: {reason}{hint}") from error
    for path in list_checkpoints(run_dir)[:-keep]:
        if path.resolve() != best_link.resolve():
            path.unlink()
    return checkpoint_path


def _find_reason(error: BaseException) -> str:
    """Returns the first line of the OSError that made a write fail, or of `error` itself.

    torch may raise another error while it handles the OSError.
    """
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


def run_dir_of(resume_path: Path) -> Path:
    """Returns the directory of a resumed run; for a checkpoint outside of a run, its path without suffix."""
    path = find_checkpoint(resume_path)
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
    """Makes the directory of a run, and locks the directory until the stack is closed.

    The kernel releases the lock when the process ends for any reason. Workers do not inherit the lock, as
    they would inherit a lock of `fcntl.flock`, so workers that survive a killed rank block no new start.
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
