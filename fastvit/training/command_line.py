"""Reads the configuration: the value on the command line, or else in a TOML file, or else the default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import (
    CONFIG_FIELDS,
    OPTION_TYPES,
    Config,
    ConfigError,
    check_value,
    option_flag,
    parse_text,
    replace_old_value,
)

PER_START_OPTIONS = frozenset({"device", "evaluate", "out", "resume", "stop_after", "threads", "timeout"})
# These options may change when a run is resumed. All other options define the training and must not change.
CHANGEABLE_ON_RESUME = PER_START_OPTIONS | {"compile", "data_path", "keep", "workers"}
PER_HOST_OPTIONS = frozenset({"data_path", "threads", "workers"})  # These may differ between the ranks.


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. Its namespace has only the flags that the user has set."""
    parser = argparse.ArgumentParser(
        prog="fastvit-train",
        description="Train a vision transformer, or a timm model, with the BatchNorm layers of fastvit: "
        "in one process, or under torchrun, torch.distributed.launch, srun or mpirun.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with values; a flag overrides its value")
    # torch.distributed.launch passes one of these flags. The trainer reads the variable LOCAL_RANK instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    titles = dict.fromkeys(item.metadata["group"] for item in CONFIG_FIELDS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for item in CONFIG_FIELDS.values():
        default_note = "" if item.default in ("", (), None) else f" (default {item.default})"
        flag_options: dict[str, Any] = {"help": item.metadata["help"].replace("%", "%%") + default_note}
        if OPTION_TYPES[item.name] is bool:
            flag_options["action"] = argparse.BooleanOptionalAction
        else:  # Values stay texts, so that check_value raises the errors of flags and of files.
            choices = item.metadata["choices"]
            flag_options["nargs"] = "*" if OPTION_TYPES[item.name] is tuple else None
            flag_options["metavar"] = (
                f"{{{','.join(choices)}}}" if choices else item.name.rpartition("_")[2].upper()
            )
        groups[item.metadata["group"]].add_argument(option_flag(item.name), **flag_options)
    return parser


def read_toml_options(path: str | Path) -> dict[str, Any]:
    """Returns the checked options in a TOML file, by the names of their fields in Config."""
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        # Windows' editors begin a file with a byte order mark. A path in the file may hold any bytes.
        values = tomllib.loads(Path(path).read_text("utf-8-sig", "surrogateescape"))
    except (ImportError, OSError, ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError.
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    options = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in CONFIG_FIELDS:
            raise ConfigError(f"--config {path}: unknown key {key!r}; fastvit-train --help lists the options")
        options[name] = check_value(name, value, f"--config {path}: {key}")
    return options


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Config, dict[str, Any]]:
    """Reads the command line (`sys.argv` when None) and the file that `--config` names.

    Returns:
        The configuration with all defaults, and the explicit options: those that the user has set, by name.
    """
    parser = make_parser()
    flags = vars(parser.parse_args(arguments))
    try:
        explicit = read_toml_options(flags["config"]) if "config" in flags else {}
        for name in CONFIG_FIELDS.keys() & flags.keys():
            value = flags[name]
            if isinstance(value, str):
                value = parse_text(OPTION_TYPES[name], value)
            explicit[name] = check_value(name, value)
        return Config(**explicit), explicit
    except ConfigError as error:
        parser.error(str(error))


def merge_saved(explicit: Mapping[str, Any], saved: Mapping[str, Any], run_dir: Path) -> Config:
    """Returns the configuration of a resumed run: explicit options, else the checkpoint's, `saved`.

    Without an explicit `--out` the run continues in `run_dir`, the directory of the checkpoint's run.
    """
    option = option_flag("evaluate" if "evaluate" in explicit else "resume")
    label = f"{option}: the checkpoint's --"
    saved = {name: replace_old_value(name, value, f"{label}{name}") for name, value in saved.items()}
    for name in explicit.keys() - CHANGEABLE_ON_RESUME:
        if explicit[name] != (expected := saved.get(name, CONFIG_FIELDS[name].default)):
            raise ConfigError(
                f"{option}: {option_flag(name)} must be {expected!r} as in the checkpoint, "
                f"got {explicit[name]!r}; start a new run to change it"
            )
    saved_options = {name: saved[name] for name in saved.keys() & CONFIG_FIELDS.keys() - PER_START_OPTIONS}
    return Config(**{**saved_options, "out": str(run_dir), **explicit})
