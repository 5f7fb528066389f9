"""Reads the configuration: a value on the command line, else in a TOML file, else the default."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, flag, kind_of

# Options that may change when a run is resumed. All others define the training, and must be equal.
CHANGEABLE = frozenset({
    "compile", "data_path", "device", "keep", "out", "resume", "stop_after", "threads",
    "timeout", "workers",
})  # fmt: skip
OF_A_HOST = frozenset({"data_path", "threads", "workers"})  # may differ between the ranks
FIELDS = {item.name: item for item in fields(Config)}


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags that are not given are absent from the namespace."""
    parser = argparse.ArgumentParser(
        prog="fastvit-train",
        description="Train a vision transformer, or a timm model, with the BatchNorm layers of fastvit: "
        "alone, under torchrun, torch.distributed.launch or srun.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with values; a flag overrides its value")
    # torch.distributed.launch passes one of these beside LOCAL_RANK, which is read.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    titles = dict.fromkeys(item.metadata["group"] for item in FIELDS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for item in FIELDS.values():
        shown = "" if item.default in ("", (), None) else f" (default {item.default})"
        kind: dict[str, Any] = {"help": item.metadata["help"].replace("%", "%%") + shown}
        if kind_of(item) is bool:
            kind["action"] = argparse.BooleanOptionalAction
        else:
            kind["type"] = str if kind_of(item) is tuple else kind_of(item)
            kind["nargs"] = "+" if kind_of(item) is tuple else None
            kind["choices"] = item.metadata["choices"]
            kind["metavar"] = None if item.metadata["choices"] else item.name.rpartition("_")[2].upper()
        groups[item.metadata["group"]].add_argument(flag(item.name), **kind)
    return parser


def read_file(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file, under the names of fields.

    Raises:
        ConfigError: the file cannot be read or a key is unknown.
    """
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (ImportError, OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    given = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"--config {path}: unknown key {key!r}")
        given[name] = value
    return given


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, dict[str, Any]]:
    """Read the command line (`sys.argv` when None) and the file it names.

    Returns:
        The configuration with the defaults filled in, and the values that were given explicitly.

    Raises:
        SystemExit: status 2 for a wrong option, after a message with its name, its value and valid values.
    """
    parser = make_parser()
    flags = vars(parser.parse_args(arguments))
    file, local_rank = flags.pop("config", None), flags.pop("local_rank", None)
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        given = (read_file(file) if file else {}) | flags
        config = Config(**given)
    except ConfigError as error:
        parser.error(str(error))
    return config, {name: getattr(config, name) for name in given}


def merge_saved(given: Mapping[str, Any], saved: Mapping[str, Any], run_directory: Path) -> Config:
    """The configuration of a resumed run: a value that is given now, else the value of the checkpoint.

    Args:
        given: the values on the command line and in the file of this start.
        saved: the configuration stored in the checkpoint.
        run_directory: the directory of the checkpoint's run, which is continued there without `--out`.

    Raises:
        ConfigError: a value that defines the training differs from the checkpoint.
    """
    saved = {name: value for name, value in saved.items() if name in FIELDS}
    before = Config(**saved)
    for name, value in given.items():
        if name not in CHANGEABLE and value != (expected := getattr(before, name)):
            raise ConfigError(
                f"--resume: {flag(name)} must be {expected!r} as in the checkpoint, got {value!r}; "
                f"start a new run to change it"
            )
    # Options of the machine are not taken from the checkpoint.
    machine = CHANGEABLE - {"data_path", "workers", "compile", "keep"}
    from_checkpoint = {name: value for name, value in saved.items() if name not in machine}
    changed = {name: value for name, value in given.items() if name in CHANGEABLE}
    return Config(**(from_checkpoint | {"out": str(run_directory)} | changed))
