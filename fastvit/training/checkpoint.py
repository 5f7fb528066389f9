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
    "mend_links",
    "save_checkpoint",
    "set_rng_state",
]

STATE = "state.pt"
SUFFIX = ".safetensors"
NAME = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")

# Keys that a run reads from a state, and from those parts of it that are dicts or lists of dicts; by type.
KEYS = {
    "epoch": int, "step": int, "world": int, "averaged": int, "progress": dict, "history": list, "rng": list,
    "config": dict, "classes": list, "optimizer": dict, "scheduler": dict, "precision": dict,
}  # fmt: skip
KEYS_OF_PARTS: dict[str, dict[str, type]] = {
    "progress": {"step": int, "loss": float, "norm": float, "norms": int},
    "history": {"epoch": int, "time": float, "test_loss": float, "test_accuracy": float},
    "rng": {"cpu": Tensor},
}

Weights = dict[str, dict[str, Tensor]]  # by file, then by name


def _place(path: Path) -> tuple[int, int]:
    """The finished epochs, and steps of the next epoch, of a checkpoint, from its name."""
    found = NAME.fullmatch(path.name)
    assert found  # checked by the caller
    return int(found[1]), int(found[2] or 0)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return _checkpoints_in(run / "checkpoints")


def _checkpoints_in(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("epoch-*") if NAME.fullmatch(path.name)), key=_place)


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
        if final.exists():  # the run was resumed from an earlier checkpoint than this one
            shutil.rmtree(final)
        os.replace(temporary, final)
        _flush(final.parent)
        _link(final.parent / "last", final.name)
        if best or not (final.parent / "best").exists():
            _link(final.parent / "best", final.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        previous = f"; {older[-1]} is intact" if older else ""
        raise OSError(f"cannot write the checkpoint {final}: {_first_line(error)}{previous}") from error
    _remove_others(run, final, keep)
    return final


def _remove_others(run: Path, newest: Path, keep: int) -> None:
    found = checkpoints(run)
    abandoned = [path for path in found if _place(path) > _place(newest)]
    best = (newest.parent / "best").resolve()
    for path in abandoned + found[: len(found) - len(abandoned)][:-keep]:
        if path in abandoned or path.resolve() != best:
            shutil.rmtree(path)
    if not (newest.parent / "best").exists():
        _link(newest.parent / "best", newest.name)


def mend_links(run: Path) -> None:
    """Turn `last` and `best` back into links where copying the run has replaced them by directories.

    Raises:
        TrainingError: a copied file does not name its checkpoint.
    """
    for link in (run / "checkpoints" / "last", run / "checkpoints" / "best"):
        if link.is_dir() and not link.is_symlink():
            _, name = _read_weights(link / ("model" + SUFFIX))
            if not NAME.fullmatch(name):
                raise TrainingError(
                    f"--resume: {link} must be a link to a checkpoint; remove it, or make it one"
                )
            if (link.parent / name).is_dir():
                shutil.rmtree(link)
            else:
                os.replace(link, link.parent / name)
            _link(link, name)


def last_checkpoint(run: Path) -> Path | None:
    """The checkpoint from which a run is resumed, or None when it has none."""
    last = run / "checkpoints" / "last"
    if last.is_dir():  # a copy of the run may have followed the link
        return last.parent / os.readlink(last) if last.is_symlink() else last
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
    except (
        Exception
    ) as error:  # a truncated zip file raises RuntimeError, EOFError, KeyError or UnpicklingError
        raise TrainingError(_damaged(path / STATE, error)) from error
    _check_state(path / STATE, state)
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


def _check_state(path: Path, state: Any) -> None:
    _check_keys(path, "the state", state, KEYS)
    for name, keys in KEYS_OF_PARTS.items():
        for part in state[name] if KEYS[name] is list else [state[name]]:
            _check_keys(path, name, part, keys)
    if len(state["rng"]) != state["world"]:
        raise TrainingError(
            f"--resume: {path}: rng must have {state['world']} states, as many as world says, got "
            f"{len(state['rng'])}"
        )


def _check_keys(path: Path, name: str, part: Any, keys: dict[str, type]) -> None:
    for key, kind in keys.items():
        value = part.get(key) if isinstance(part, dict) else None
        if not isinstance(value, kind):
            found = "nothing" if value is None else type(value).__name__
            raise TrainingError(
                f"--resume: {path}: {key!r} in {name} must be of type {kind.__name__}, got {found}"
            )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _damaged(path: Path, error: Exception) -> str:
    others = [other.name for other in _checkpoints_in(path.parent.parent) if other != path.parent]
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
