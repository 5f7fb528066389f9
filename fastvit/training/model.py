"""The model of a run: built by name, with its normalisation, initial weights and frozen parameters."""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..convert_syncbn import convert_syncbn_model
from ..models import create_vit
from .config import Config, ConfigError, first_line, some
from .nvidia_apex import import_apex


def build_model(config: Config, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model of `--model` with the normalisation of `--norm`, on the CPU, in fp32."""
    outputs = config.classes or classes
    if outputs < classes:
        raise ConfigError(f"--classes must be at least the {classes} classes of the data, got {outputs}")
    # fastvit's ViT is built with its norm; apex's norm is inserted by apex's converter.
    if config.model.startswith("timm/"):
        model = _from_timm(config, shape, outputs)
    else:
        by_size = "vit_digits" if shape[1] <= 16 else "vit_cifar" if shape[1] <= 64 else "vit_small"
        name = config.model if config.model != "auto" else by_size
        norm = "torch" if config.norm == "apex-sync" else config.norm
        try:
            model = create_vit(name, shape[1], shape[0], outputs, norm, config.mlp_norm)
        except ValueError as error:
            raise ConfigError(f"--model {name} does not fit images of {shape[1]} pixels: {error}") from None
    if config.norm == "apex-sync":
        try:
            model = import_apex("parallel").convert_syncbn_model(model)
        except ImportError as error:
            raise ConfigError(
                f"--norm apex-sync needs apex.parallel of NVIDIA apex 25.05 or older, which is not found "
                f"({error}); install it, or let FASTVIT_APEX be a folder of its sources"
            ) from None
    return model


def _from_timm(config: Config, shape: tuple[int, int, int], outputs: int) -> nn.Module:
    import timm
    from timm.layers import convert_sync_batchnorm

    if config.norm.startswith("inplace-abn"):
        raise ConfigError(
            f"--norm {config.norm} is built into fastvit's ViT; for --model {config.model} use torch, "
            f"torch-sync, apex-sync or fastvit-sync, and --memory convert to save memory"
        )
    name, options = config.model.removeprefix("timm/"), {"in_chans": shape[0], "num_classes": outputs}
    if not timm.is_model(name):
        raise ConfigError(f"--model {config.model}: timm {timm.__version__} has no model {name!r}")
    pretrained = config.pretrained == "timm"
    try:
        model = timm.create_model(name, pretrained=pretrained, img_size=shape[1], **options)
    except TypeError:  # convolutional models take every size and have no such argument
        model = timm.create_model(name, pretrained=pretrained, **options)
    if config.norm == "torch-sync":
        model = convert_sync_batchnorm(model)  # torch's drops the activation of timm's BatchNormAct2d
    elif config.norm == "fastvit-sync":
        try:
            model = convert_syncbn_model(model)
        except ValueError as error:
            raise ConfigError(
                f"--norm fastvit-sync: {error}; --norm torch trains without synchronising"
            ) from None
    return model


_AVERAGED = re.compile("(?<![a-z])(ema|teacher|average)")  # what trainers call averaged weights
# What torch puts into names: torch.compile, FSDP, its checkpointing.
_WRAPPERS = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options, in many public files
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--pretrained: cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged file may raise any exception; code in it is refused
        reason = first_line(error)
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            reason = (
                f"it holds an object of {refused[1]}, which may run code; save the model's state_dict() alone"
            )
        raise ConfigError(f"--pretrained: {path} is damaged or no file of weights: {reason}") from None


def _tensors(content: Any, before: str = "") -> dict[str, Tensor]:
    """The tensors in nested dicts, by their keys with dots between."""
    if isinstance(content, Tensor):
        return {_WRAPPERS.sub("", before[:-1]): content}
    parts = content.items() if isinstance(content, dict) else ()
    return {name: value for key, part in parts for name, value in _tensors(part, f"{before}{key}.").items()}


def _prefix(names: Iterable[str], own: Collection[str], path: Path) -> str:
    """What trainers and wrappers put before the model's names, such as `state_dict.module.`.

    At least half of the model's names are behind it. Averaged weights come first.
    """
    ends = ((name, name.split(".", dots)[-1]) for name in names for dots in range(name.count(".") + 1))
    hits = Counter(name.removesuffix(end) for name, end in ends if end in own)
    found = sorted((not _AVERAGED.search(p), -count, p) for p, count in hits.items() if 2 * count >= len(own))
    if len(found) > 1 and found[0][:2] == found[1][:2]:
        one, other = (prefix for *_, prefix in found[:2])
        raise ConfigError(
            f"--pretrained: {path} has the model as {one}* and as {other}*; save one of them alone"
        )
    return found[0][2] if found else ""


def _as_timm_converts(weights: dict[str, Tensor], model: nn.Module, path: Path) -> dict[str, Tensor]:
    """`weights` as timm's loader changes them for `model`: other trainers' names, positions for another size.

    timm hands this function to its loader alone, but almost all of its modules have it by one name.
    """
    module = type(model).__module__
    convert = getattr(sys.modules[module], "checkpoint_filter_fn", None)
    if convert is None or not module.startswith("timm."):
        return weights
    try:
        return convert(dict(weights), model)
    except Exception as error:  # it takes names and shapes for granted
        raise ConfigError(
            f"--pretrained: timm cannot convert {path} for a {type(model).__name__}: {error!r}; "
            f"the file has {some(weights)}"
        ) from None


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Load weights by name, and return a report of missing, unexpected and unused ones.

    The heads are not loaded where the file has them for another number of classes: tensors that nothing but
    one number of outputs tells from those of the file.
    """
    own, content = model.state_dict(), _read(path)
    tensors = _tensors(content)
    prefix = _prefix(tensors, own, path)
    weights = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
    if any(name not in weights or weights[name].shape != value.shape for name, value in own.items()):
        weights = _as_timm_converts(weights, model, path)
    if not weights.keys() & own.keys():
        got = tensors or (content if isinstance(content, dict) else [type(content).__name__])
        raise ConfigError(
            f"--pretrained: no name in {path} is a name of the model, such as {next(iter(own))}; "
            f"the file has {some(got)}"
        )
    other = [name for name, value in own.items() if name in weights and weights[name].shape != value.shape]
    outputs = {(weights[name].shape[:1], own[name].shape[:1]) for name in other}
    for name in other:
        if len(outputs) > 1 or weights[name].shape[1:] != own[name].shape[1:]:
            raise ConfigError(
                f"--pretrained: {name} must have the shape {tuple(own[name].shape)}, "
                f"got {tuple(weights[name].shape)} in {path}"
            )
    loaded = {name: value for name, value in weights.items() if name not in other}
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    within = f" ({prefix[:-1]})" if prefix else ""
    lines = [f"pretrained: {len(loaded) - len(unexpected)} of {len(own)} tensors from {path}{within}"]
    for names, what in (
        ([name for name in missing if name not in other], "missing in the file"),
        (unexpected, "unexpected, not in the model"),
        (other, "for another number of classes, not loaded"),
    ):
        if names:
            lines.append(f"  {what}: {', '.join(names)}")
    return "\n".join(lines)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> int:
    """Freeze every parameter whose name matches one of the patterns; returns their number.

    BatchNorm layers stay in training mode and use batch statistics.
    """
    parameters, frozen = dict(model.named_parameters()), set()
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ConfigError(
                f"--freeze {pattern!r} matches no parameter; they have names such as "
                f"{', '.join(list(parameters)[:3])}"
            )
        frozen.update(names)
    if len(frozen) == len(parameters):
        raise ConfigError(f"--freeze {' '.join(patterns)} leaves nothing to train")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return len(frozen)
