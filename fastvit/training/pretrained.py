"""Loads the initial weights of `--pretrained` by name, from the files that many trainers write."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import ConfigError, abbreviate, first_line

# Trainers use these names for averaged weights.
_AVERAGED_WEIGHTS = re.compile("(?<![a-z])(ema|teacher|average)")
# torch.compile, FSDP and torch's checkpointing put these prefixes into names.
_WRAPPER_PREFIXES = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Loads weights by name. Returns a report of missing, unexpected and unused weights.

    Tensors that differ from the file's in their first dimension alone, all by the same two sizes, are taken
    for heads of another number of classes, and are not loaded.
    """
    model_state, content = model.state_dict(), _read_weights_file(path)
    tensors = _flatten_tensors(content)
    weights, prefix = _match_names(tensors, model, path)
    if not weights.keys() & model_state.keys():
        file_names = tensors or (content if isinstance(content, dict) else [type(content).__name__])
        raise ConfigError(
            f"--pretrained: no name in {path} is a name of the model, such as {next(iter(model_state))}; "
            f"the file has {abbreviate(file_names)}"
        )
    heads = _find_other_heads(weights, model_state, path)
    loaded = {name: value for name, value in weights.items() if name not in heads}
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    prefix_note = f" ({prefix[:-1]})" if prefix else ""
    num_loaded = len(loaded) - len(unexpected)
    lines = [f"pretrained: {num_loaded} of {len(model_state)} tensors from {path}{prefix_note}"]
    for names, description in (
        ([name for name in missing if name not in heads], "missing in the file"),
        (unexpected, "unexpected, not in the model"),
        (heads, "for another number of classes, not loaded"),
    ):
        if names:
            lines.append(f"  {description}: {', '.join(names)}")
    return "\n".join(lines)


def _read_weights_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # Many public files have the options of their run in an argparse.Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--pretrained: cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # A damaged file may raise any exception. Code in a file is refused.
        reason = first_line(error)
        if class_match := re.search(r"GLOBAL (\S+)", str(error)):
            reason = (
                f"it holds an object of {class_match[1]}, which may run code; "
                "save the model's state_dict() alone"
            )
        raise ConfigError(f"--pretrained: {path} is damaged or no file of weights: {reason}") from None


def _flatten_tensors(content: Any, key_prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors in nested dicts. The keys of the dicts are joined by dots."""
    if isinstance(content, Tensor):
        return {_WRAPPER_PREFIXES.sub("", key_prefix[:-1]): content}
    items = content.items() if isinstance(content, dict) else ()
    return {
        name: tensor
        for key, value in items
        for name, tensor in _flatten_tensors(value, f"{key_prefix}{key}.").items()
    }


def _match_names(tensors: dict[str, Tensor], model: nn.Module, path: Path) -> tuple[dict[str, Tensor], str]:
    """Returns the weights by the model's names, and the prefix that the file has before these names."""
    model_state = model.state_dict()
    prefix = _find_prefix(tensors, model_state, path)
    weights = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    if any(name not in weights or weights[name].shape != value.shape for name, value in model_state.items()):
        weights = _convert_keys_by_timm(weights, model, path)
    return weights, prefix


def _find_prefix(names: Iterable[str], model_names: Collection[str], path: Path) -> str:
    """Returns what trainers and wrappers put before the model's names, such as `state_dict.module.`.

    At least half of the model's names must have the prefix. Averaged weights come first.
    """
    ends = ((name, name.split(".", dots)[-1]) for name in names for dots in range(name.count(".") + 1))
    counts = Counter(name.removesuffix(end) for name, end in ends if end in model_names)
    ranking = sorted(
        (not _AVERAGED_WEIGHTS.search(prefix), -count, prefix)
        for prefix, count in counts.items()
        if 2 * count >= len(model_names)
    )
    if len(ranking) > 1 and ranking[0][:2] == ranking[1][:2]:
        raise ConfigError(
            f"--pretrained: {path} has the model as {ranking[0][2]}* and as {ranking[1][2]}*; "
            "save one of them alone"
        )
    return ranking[0][2] if ranking else ""


def _convert_keys_by_timm(weights: dict[str, Tensor], model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Converts weights as timm's loader does for `model`: other trainers' names, positions of other sizes.

    timm passes the function that converts to its loader alone, but nearly all of timm's modules have one,
    under the same name.
    """
    module = type(model).__module__
    convert_keys = getattr(sys.modules[module], "checkpoint_filter_fn", None)
    if convert_keys is None or not module.startswith("timm."):
        return weights
    try:
        return convert_keys(dict(weights), model)
    except Exception as error:  # timm's function checks neither names nor shapes.
        raise ConfigError(
            f"--pretrained: timm cannot convert {path} for a {type(model).__name__}: {error!r}; "
            f"the file has {abbreviate(weights)}"
        ) from None


def _find_other_heads(weights: dict[str, Tensor], model_state: dict[str, Tensor], path: Path) -> list[str]:
    """Returns the names of heads for another number of classes. Any other difference of shape is an error."""
    mismatched = [
        name for name, value in model_state.items() if name in weights and weights[name].shape != value.shape
    ]
    first_sizes = {(weights[name].shape[:1], model_state[name].shape[:1]) for name in mismatched}
    for name in mismatched:
        if len(first_sizes) > 1 or weights[name].shape[1:] != model_state[name].shape[1:]:
            raise ConfigError(
                f"--pretrained: {name} must have the shape {tuple(model_state[name].shape)}, "
                f"got {tuple(weights[name].shape)} in {path}"
            )
    return mismatched
