"""The model of a run: built by name, with its normalisation, initial weights and frozen parameters."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..fuse import convert_syncbn_model
from ..models import SYNCHRONISED, create_vit
from .config import Config, ConfigError
from .engine import engine_part

SYNCHRONISED_NORMS = SYNCHRONISED | {"apex-sync"}


def build_model(config: Config, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model of `--model` with the normalisation of `--norm`, on the CPU, in fp32.

    Args:
        shape: C, H, W of the images.
        classes: of the data.

    Raises:
        ConfigError: the name, the norm or the number of classes is invalid.
    """
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
        model = engine_part("apex", "parallel", "--norm apex-sync").convert_syncbn_model(model)
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
        model = convert_syncbn_model(model)
    return model


def _read_weights(path: Path) -> dict[str, Tensor]:
    weights: Any
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise any exception; code in it is refused
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"--pretrained: {path} is damaged or no file of weights: {reason}") from None
    # Other trainers write the weights as one entry of a dict, or with DistributedDataParallel's prefix.
    for key in ("state_dict", "model"):
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ConfigError(f"--pretrained: {path} must hold a dict of tensors")
    return {name.removeprefix("module."): value for name, value in weights.items()}


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Load weights by name, and return a report of missing, unexpected and unused ones.

    The head is not loaded where the file has one for another number of classes.

    Raises:
        OSError, ConfigError: the file cannot be read, no name fits, or a tensor other than the head's has
            another shape.
    """
    weights, own = _read_weights(path), model.state_dict()
    if not weights.keys() & own.keys():
        raise ConfigError(
            f"--pretrained: no name in {path} is a name of the model, such as {next(iter(own))}"
        )
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    head, other = linear[-1], []  # the last one computes the logits
    for name in own.keys() & weights.keys():
        if weights[name].shape == own[name].shape:
            continue
        if name.rpartition(".")[0] != head:
            raise ConfigError(
                f"--pretrained: {name} must have the shape {tuple(own[name].shape)}, "
                f"got {tuple(weights[name].shape)} in {path}"
            )
        other.append(name)
    loaded = {name: value for name, value in weights.items() if name not in other}
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    lines = [f"pretrained: {len(loaded) - len(unexpected)} of {len(own)} tensors from {path}"]
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

    Raises:
        ConfigError: a pattern matches no parameter, or all parameters are frozen.
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
