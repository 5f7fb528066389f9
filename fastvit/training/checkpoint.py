"""Checkpoints: written whole or not at all, and loaded without running code from the file.

A checkpoint is a directory ``<run>/checkpoints/epoch-0012`` with two files:

``model.safetensors``
    parameters and buffers under the model's own names, for anyone who wants the weights.
``state.pt``
    optimizer, schedule, epoch, random generators of every rank, configuration and history;
    ``torch.load(..., weights_only=True)`` reads it.

It is written under another name and renamed when both files are on the disk, so a crash at any moment leaves
the previous checkpoint as it was.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import TrainingError

__all__ = ["find_checkpoint", "get_rng_state", "load_checkpoint", "save_checkpoint", "set_rng_state"]

WEIGHTS = "model.safetensors"
STATE = "state.pt"


def _checkpoints(run: Path) -> list[Path]:
    return sorted(p for p in (run / "checkpoints").glob("epoch-*") if p.name[len("epoch-") :].isdigit())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(run: Path, epoch: int, model: nn.Module, state: dict[str, Any]) -> Path:
    """Write the checkpoint of an epoch, then remove the older ones of the run.

    Args:
        run: directory of the run.
        epoch: number of finished epochs.
        model: without DistributedDataParallel's wrapper.
        state: what `torch.load(weights_only=True)` can read: tensors, numbers, strings, lists and dicts.

    Raises:
        OSError: the disk is full or not writable; the previous checkpoint is intact.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    older = _checkpoints(run)
    final = run / "checkpoints" / f"epoch-{epoch:04d}"
    temporary = final.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    try:
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt", "epoch": str(epoch)})
        torch.save(state, temporary / STATE)
        for path in (temporary / WEIGHTS, temporary / STATE, temporary):
            _flush(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = f"; {older[-1]} is intact" if older else ""
        raise OSError(f"cannot write the checkpoint {final}: {error}{kept}") from error
    if final.exists():  # the run was resumed from an earlier checkpoint than its newest
        shutil.rmtree(final)
    os.replace(temporary, final)
    _flush(final.parent)
    for path in older:
        if path != final:
            shutil.rmtree(path)
    return final


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``--resume path`` means: ``path`` itself, or the newest one of the run ``path``.

    Raises:
        TrainingError: there is none.
    """
    if (path / STATE).is_file() or (path / WEIGHTS).is_file():
        return path
    found = _checkpoints(path)
    if not found:
        raise TrainingError(
            f"--resume: {path} must be a run directory or a checkpoint, and has no checkpoint in it"
        )
    return found[-1]


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state of a checkpoint directory, on the CPU.

    Raises:
        TrainingError: a file is missing, cut off or damaged, or the two files are of different epochs.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            epoch = int((file.metadata() or {}).get("epoch", -1))
    except (OSError, SafetensorError) as error:
        raise TrainingError(_damaged(path / WEIGHTS, error)) from error
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        same = state["epoch"] == epoch
    except Exception as error:  # a cut zip file gives RuntimeError, EOFError, KeyError or UnpicklingError
        raise TrainingError(_damaged(path / STATE, error)) from error
    if not same:
        raise TrainingError(
            f"--resume: {WEIGHTS} is of epoch {epoch} and {STATE} of epoch {state['epoch']} in {path}; "
            f"they must come from one checkpoint"
        )
    return weights, state


def _damaged(path: Path, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return (
        f"--resume: {path} is missing, cut off or damaged ({type(error).__name__}: {first}); "
        f"resume from another checkpoint or start again"
    )


def get_rng_state(device: torch.device) -> dict[str, Tensor]:
    """State of the random generators that training on ``device`` draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `get_rng_state` gave; a CUDA state is ignored on the CPU."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
