"""Reads the configuration: a value on the command line, else in a TOML file, else the default."""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, flag

OF_A_START = frozenset({"device", "out", "resume", "stop_after", "threads", "timeout"})
# Options that may change when a run is resumed. All others define the training, and must be equal.
CHANGEABLE = OF_A_START | {"compile", "data_path", "keep", "workers"}
OF_A_HOST = frozenset({"data_path", "threads", "workers"})  # may differ between the ranks
FIELDS = {item.name: item for item in fields(Config)}
HINTS = typing.get_type_hints(Config)


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
        options: dict[str, Any] = {"help": item.metadata["help"].replace("%", "%%") + shown}
        first, *_ = typing.get_args(HINTS[item.name]) or [HINTS[item.name]]  # float, of `float | None`
        if first is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = first
            options["nargs"] = "*" if item.default == () else None
            options["choices"] = item.metadata["choices"]
            options["metavar"] = None if item.metadata["choices"] else item.name.rpartition("_")[2].upper()
        groups[item.metadata["group"]].add_argument(flag(item.name), **options)
    return parser


def read_file(path: str | Path) -> list[str]:
    """The values of a TOML file as flags."""
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (ImportError, OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    flags = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"--config {path}: unknown key {key!r}")
        if isinstance(value, bool):
            flags.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, list):
            flags += [flag(name), *map(str, value)]
        else:
            flags.append(f"{flag(name)}={value}")
    return flags


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, dict[str, Any]]:
    """Read the command line (`sys.argv` when None) and the file it names.

    Returns:
        The configuration with the defaults filled in, and the values that were given explicitly.
    """
    parser = make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    given = vars(parser.parse_args(arguments))
    try:
        if "config" in given:
            given = vars(parser.parse_args([*read_file(given["config"]), *arguments]))
        given = {name: given[name] for name in FIELDS if name in given}
        if "freeze" in given:
            given["freeze"] = tuple(given["freeze"])
        return Config(**given), given
    except ConfigError as error:
        parser.error(str(error))


def merge_saved(given: Mapping[str, Any], saved: Mapping[str, Any], run_directory: Path) -> Config:
    """The configuration of a resumed run: a value that is given now, else the value of the checkpoint.

    Without `--out` it is continued in `run_directory`, that of the checkpoint.
    """
    for name in given.keys() - CHANGEABLE:
        if given[name] != (expected := saved.get(name, FIELDS[name].default)):
            raise ConfigError(
                f"--resume: {flag(name)} must be {expected!r} as in the checkpoint, got {given[name]!r}; "
                f"start a new run to change it"
            )
    kept = {name: saved[name] for name in saved.keys() & FIELDS.keys() - OF_A_START}
    return Config(**{**kept, "out": str(run_directory), **given})
