"""Checkpoints: written whole or not at all, and loaded without running code from the file.

A checkpoint is a directory `<run>/checkpoints/epoch-0012` (or `epoch-0012-step-000340`, 340 steps into
the epoch after) with these files:

`model.safetensors`
    parameters and buffers under the names of the model's state_dict.
`average.safetensors`
    their moving average, with `--ema`.
`state.pt`
    optimizer, schedule, loss scale, epoch, random generators of every rank, configuration and history;
    `torch.load(..., weights_only=True)` reads it.

It is written under another name and renamed when all files are on the disk, so a crash at any moment leaves
the previous checkpoint intact. The links `last` and `best` beside it are replaced in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import TrainingError

__all__ = [
    "find_checkpoint",
    "get_rng_state",
    "last_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "set_rng_state",
]

STATE = "state.pt"
SUFFIX = ".safetensors"
NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")

KEYS = frozenset(
    "epoch step world averaged progress history rng config classes optimizer scheduler precision".split()
)

Weights = dict[str, dict[str, Tensor]]  # by file, then by name


def _place(path: Path) -> tuple[int, int]:
    """The finished epochs, and steps of the next epoch, of a checkpoint, from its name."""
    found = NAME.fullmatch(path.name)
    assert found  # checked by the caller
    return int(found[1]), int(found[2] or 0)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("epoch-*")
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=_place)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    if link.is_dir() and not link.is_symlink():  # in a copy of a run, which followed the link
        shutil.rmtree(link)
    os.replace(temporary, link)


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses tensors that share memory, as tied weights do.
    seen, result = set(), {}
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        result[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return result


def save_checkpoint(
    run: Path, weights: Weights, state: dict[str, Any], keep: int = 2, best: bool = False
) -> Path:
    """Write a checkpoint and make `last` point to it, then remove older ones.

    Later checkpoints than this one belong to an abandoned continuation of the run, and are removed too.

    Args:
        run: directory of the run.
        weights: for each file its tensors; `model` among them.
        state: values that `torch.load(weights_only=True)` can read; `epoch` and `step` name the checkpoint.
        keep: number of newest checkpoints that are not removed; the best one is not removed either.
        best: make `best` point to it.

    Raises:
        OSError: the disk is full or not writable; the previous checkpoint is intact.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    older = checkpoints(run)
    step = f"-step-{state['step']:06d}" if state["step"] else ""
    final = run / "checkpoints" / f"epoch-{state['epoch']:04d}{step}"
    temporary = final.with_name(final.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        origin = {"format": "pt", "checkpoint": final.name}  # the name of the checkpoint, in every file
        for name, tensors in weights.items():
            save_file(_own_memory(tensors), temporary / (name + SUFFIX), origin)
        torch.save(state, temporary / STATE)
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        for later in (path for path in older if _place(path) >= _place(final)):
            shutil.rmtree(later)  # the run was resumed from an earlier checkpoint
        os.replace(temporary, final)
        _flush(final.parent)
        _link(final.parent / "last", final.name)
        if best or not (final.parent / "best").exists():
            _link(final.parent / "best", final.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        previous = f"; {older[-1]} is intact" if older else ""
        raise OSError(f"cannot write the checkpoint {final}: {_first_line(error)}{previous}") from error
    for path in checkpoints(run)[:-keep]:
        if path.resolve() != (final.parent / "best").resolve():
            shutil.rmtree(path)
    return final


def last_checkpoint(run: Path) -> Path | None:
    """The checkpoint from which a run is resumed, or None when it has none."""
    return next(reversed(checkpoints(run)), None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `--resume path` means: `path` itself, or the last one of the run `path`.

    Raises:
        TrainingError: there is no checkpoint.
    """
    path = Path(os.path.abspath(path))
    if (path / STATE).is_file() or (path / ("model" + SUFFIX)).is_file():
        return path.resolve() if path.is_symlink() else path
    found = last_checkpoint(path)
    if found is None:
        raise TrainingError(
            f"--resume: {path} must be a run directory or a checkpoint, and has no checkpoint in it"
        )
    return found


def load_checkpoint(path: Path) -> tuple[Weights, dict[str, Any]]:
    """Weights and state of a checkpoint directory, on the CPU.

    Raises:
        TrainingError: a file is missing, cut off or damaged, or the files are of different checkpoints.
    """
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # of a truncated zip: RuntimeError, EOFError, KeyError or UnpicklingError
        raise TrainingError(_damaged(path / STATE, error)) from error
    missing = sorted(KEYS - state.keys()) if isinstance(state, dict) else sorted(KEYS)
    if missing:
        raise TrainingError(
            f"--resume: {path / STATE} has no {', '.join(missing)}: no checkpoint of this trainer"
        )
    place = state["epoch"], state["step"]
    weights: Weights = {}
    expected = ("model", "average") if state["config"].get("ema") else ("model",)
    for file in {*(path / (name + SUFFIX) for name in expected), *path.glob("*" + SUFFIX)}:
        weights[file.stem], origin = _read_weights(file)
        if not NAME.fullmatch(origin) or _place(Path(origin)) != place:
            raise TrainingError(
                f"--resume: {file.name} is of {origin or 'another trainer'} and {STATE} of epoch {place[0]}, "
                f"step {place[1]} in {path}; they must come from one checkpoint"
            )
    return weights, state


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, and the name of its checkpoint."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, (file.metadata() or {}).get("checkpoint", "")
    except (OSError, SafetensorError) as error:
        raise TrainingError(_damaged(path, error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _damaged(path: Path, error: Exception) -> str:
    others = [other.name for other in checkpoints(path.parent.parent.parent) if other != path.parent]
    instead = f"resume from {others[-1]} beside it" if others else "resume from another checkpoint"
    return (
        f"--resume: {path} is missing, cut off or damaged ({type(error).__name__}: {_first_line(error)}); "
        f"{instead}, or start again"
    )


def get_rng_state(device: torch.device) -> dict[str, Tensor]:
    """State of the random generators that training on `device` uses."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore a state of `get_rng_state`; a CUDA state is ignored on the CPU."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
