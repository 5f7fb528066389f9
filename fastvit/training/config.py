"""The configuration of a run: one dataclass, from which the command line is made."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..models import MLP_NORMS, NORMS

__all__ = ["Config", "make_parser", "merge_saved", "parse"]

# What a resumed run may set anew. Everything else defines what is trained, and must stay as it was.
CHANGEABLE = frozenset({"out", "resume", "stop_after", "device", "threads", "timeout"})


def _option(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Everything that a run can be told. Each field is a flag: ``batch_size`` is ``--batch-size``."""

    data: str = _option("digits", "data set: scikit-learn's digits, 1797 images of 8x8", ("digits",))
    data_seed: int = _option(0, "seed of the random 80/20 split into training and test images")
    norm: str = _option("inplace-abn-sync", "BatchNorm and activation; torch-sync needs CUDA", NORMS)
    mlp_norm: str = _option("batch", "MLP of the blocks: GELU, or BatchNorm and leaky_relu", MLP_NORMS)
    epochs: int = _option(30, "epochs of the whole schedule")
    batch_size: int = _option(32, "images per step and rank")
    lr: float = _option(2e-3, "learning rate at the top of the schedule (warm-up, then cosine to 0)")
    weight_decay: float = _option(0.05, "weight decay of matrices and kernels; biases and norms have none")
    warmup_epochs: int = _option(3, "epochs over which the learning rate rises linearly")
    optimizer: str = _option("adamw", "AdamW, or SGD with momentum 0.9", ("sgd", "adamw"))
    seed: int = _option(0, "seed of the initial weights, the order of images and the augmentation")
    out: str = _option("runs/train", "directory of the run: config, metrics, TensorBoard events, checkpoint")
    resume: str = _option("", "continue from this run directory, or from one of its checkpoints")
    stop_after: int = _option(
        0, "end after this many epochs of this start and leave the rest to --resume; 0: none"
    )
    device: str = _option(
        "auto", "auto takes CUDA when every rank has a GPU of its own", ("auto", "cpu", "cuda")
    )
    threads: int = _option(0, "CPU threads of each rank; 0 shares the machine's cores among its ranks")
    deterministic: bool = _option(False, "use only operations that give the same bits in every run")
    timeout: float = _option(300.0, "seconds after which a rank that waits for another gives up")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, choices = getattr(self, item.name), item.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{_flag(item)} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("epochs", "batch_size"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("data_seed", "seed", "warmup_epochs", "stop_after", "threads", "weight_decay"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("lr", "timeout"):
            _require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        if self.norm == "torch-sync" and self.device == "cpu":
            raise ValueError(
                "--norm torch-sync trains on CUDA only, got --device cpu; "
                "fastvit-sync and inplace-abn-sync synchronise on the CPU too"
            )

    def save(self, path: Path) -> None:
        """Write the fields as JSON."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(temporary, path)


def _flag(item: Field | str) -> str:
    return "--" + (item if isinstance(item, str) else item.name).replace("_", "-")


def _require(holds: bool, name: str, takes: str, got: object) -> None:
    # A comparison with nan is false, so nan is refused with the rest.
    if not holds:
        raise ValueError(f"{_flag(name)} must be {takes}, got {got}")


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags that are not given are absent from the namespace (a resumed run fills them)."""
    parser = argparse.ArgumentParser(
        prog="fastvit-train",
        description="Train a small vision transformer with the fused BatchNorm layers of fastvit, "
        "on one rank or under torchrun on several.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for item in fields(Config):
        assert item.default is not MISSING
        shown = "" if item.default == "" else f" (default {item.default})"
        kind: dict[str, Any] = {"help": item.metadata["help"] + shown}
        if isinstance(item.default, bool):
            kind["action"] = argparse.BooleanOptionalAction
        else:
            kind["type"] = type(item.default)
            kind["choices"] = item.metadata["choices"]
            kind["metavar"] = None if item.metadata["choices"] else item.name.rpartition("_")[2].upper()
        parser.add_argument(_flag(item), **kind)
    return parser


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, dict[str, Any]]:
    """Read the command line (``sys.argv`` when None).

    Returns:
        the configuration with the defaults filled in, and the flags that were really given.

    Raises:
        SystemExit: status 2 for a wrong flag, after a message that names it, what it got and what it takes.
    """
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    try:
        return Config(**given), given
    except ValueError as error:
        parser.error(str(error))


def merge_saved(given: Mapping[str, Any], saved: Mapping[str, Any], run_directory: Path) -> Config:
    """The configuration of a resumed run: a flag that was given, else what the run was started with.

    Args:
        given: the flags on the command line of this start.
        saved: the configuration stored in the checkpoint.
        run_directory: where the checkpoint lies; the run goes on there unless ``--out`` was given.

    Raises:
        ValueError: a flag contradicts the checkpoint about what is trained.
    """
    defaults = asdict(Config())
    for name, value in given.items():
        if name not in CHANGEABLE and value != saved.get(name, value):
            raise ValueError(
                f"--resume: {_flag(name)} must be {saved[name]!r} as in the checkpoint, got {value!r}; "
                f"start a new run to change it"
            )
    kept = {name: saved.get(name, default) for name, default in defaults.items() if name not in CHANGEABLE}
    new = {name: given.get(name, defaults[name]) for name in CHANGEABLE}
    new["out"] = given.get("out", str(run_directory))
    return Config(**kept, **new)
