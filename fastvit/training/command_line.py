"""Reads the configuration: a value on the command line, else in a TOML file, else the default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import FIELDS, KINDS, Config, ConfigError, checked, flag, from_text

OF_A_START = frozenset({"device", "evaluate", "out", "resume", "stop_after", "threads", "timeout"})
# Options that may change when a run is resumed. All others define the training, and must be equal.
CHANGEABLE = OF_A_START | {"compile", "data_path", "keep", "workers"}
OF_A_HOST = frozenset({"data_path", "threads", "workers"})  # may differ between the ranks


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags that are not given are absent from the namespace."""
    parser = argparse.ArgumentParser(
        prog="fastvit-train",
        description="Train a vision transformer, or a timm model, with the BatchNorm layers of fastvit: "
        "alone, under torchrun, torch.distributed.launch, srun or mpirun.",
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
        if KINDS[item.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:  # values stay texts; `checked` complains of them as of those of a file
            choices = item.metadata["choices"]
            options["nargs"] = "*" if KINDS[item.name] is tuple else None
            options["metavar"] = (
                f"{{{','.join(choices)}}}" if choices else item.name.rpartition("_")[2].upper()
            )
        groups[item.metadata["group"]].add_argument(flag(item.name), **options)
    return parser


def read_file(path: str | Path) -> dict[str, Any]:
    """The options in a TOML file, checked."""
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        # Windows' editors begin a file with a BOM. A path may hold any bytes.
        values = tomllib.loads(Path(path).read_text("utf-8-sig", "surrogateescape"))
    except (ImportError, OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    given = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise ConfigError(f"--config {path}: unknown key {key!r}")
        given[name] = checked(name, value, f"--config {path}: {key}")
    return given


def parse(arguments: Sequence[str] | None = None) -> tuple[Config, dict[str, Any]]:
    """Read the command line (`sys.argv` when None) and the file it names.

    Returns:
        The configuration with the defaults filled in, and the values that were given explicitly.
    """
    parser = make_parser()
    flags = vars(parser.parse_args(arguments))
    try:
        given = read_file(flags["config"]) if "config" in flags else {}
        for name in FIELDS.keys() & flags.keys():
            value = flags[name]
            given[name] = checked(name, from_text(KINDS[name], value) if isinstance(value, str) else value)
        return Config(**given), given
    except ConfigError as error:
        parser.error(str(error))


def merge_saved(given: Mapping[str, Any], saved: Mapping[str, Any], run_directory: Path) -> Config:
    """The configuration of a resumed run: a value that is given now, else the value of the checkpoint.

    Without `--out` it is continued in `run_directory`, that of the checkpoint.
    """
    option = flag("evaluate" if "evaluate" in given else "resume")
    for name in given.keys() - CHANGEABLE:
        if given[name] != (expected := saved.get(name, FIELDS[name].default)):
            raise ConfigError(
                f"{option}: {flag(name)} must be {expected!r} as in the checkpoint, got {given[name]!r}; "
                f"start a new run to change it"
            )
    kept = {name: saved[name] for name in saved.keys() & FIELDS.keys() - OF_A_START}
    return Config(**{**kept, "out": str(run_directory), **given})
