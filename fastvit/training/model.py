"""Builds the model of a run by its name, with its BatchNorm layers, and freezes parameters."""

from __future__ import annotations

import fnmatch

from torch import nn

from ..convert_syncbn import convert_syncbn_model as convert_to_fastvit_sync
from ..models import create_vit
from .config import Config, ConfigError
from .nvidia_apex import import_apex


def build_model(config: Config, shape: tuple[int, int, int], data_classes: int) -> nn.Module:
    """Returns the model of `--model` with the BatchNorm layers of `--norm`, on the CPU, in fp32."""
    channels, side, _ = shape  # `(C, H, W)` of square images
    outputs = config.classes or data_classes  # --classes may ask for more outputs.
    if outputs < data_classes:
        raise ConfigError(f"--classes must be at least the {data_classes} classes of the data, got {outputs}")
    if config.model.startswith("timm/"):
        model = _create_timm_model(config, channels, side, outputs)
    else:
        default_name = "vit_digits" if side <= 16 else "vit_cifar" if side <= 64 else "vit_small"
        name = config.model if config.model != "auto" else default_name
        # At the end of this function apex's converter replaces torch's layers.
        norm = "torch" if config.norm == "apex-sync" else config.norm
        try:
            model = create_vit(name, side, channels, outputs, norm, config.mlp_norm)
        except ValueError as error:
            raise ConfigError(f"--model {name} does not fit {side} x {side} pixels: {error}") from None
    if config.norm == "apex-sync":
        try:
            model = import_apex("parallel").convert_syncbn_model(model)
        except ImportError as error:
            raise ConfigError(
                f"--norm apex-sync needs apex.parallel of NVIDIA apex 25.05 or older, which is not found "
                f"({error}); install it, or set the variable FASTVIT_APEX to a folder of its sources"
            ) from None
    return model


def _create_timm_model(config: Config, channels: int, side: int, outputs: int) -> nn.Module:
    import timm
    from timm.layers import convert_sync_batchnorm as convert_to_torch_sync

    if config.norm.startswith("inplace-abn"):
        raise ConfigError(
            f"--norm {config.norm} is built into fastvit's ViT; for --model {config.model} use torch, "
            f"torch-sync, apex-sync or fastvit-sync, and --memory convert to save memory"
        )
    name, options = config.model.removeprefix("timm/"), {"in_chans": channels, "num_classes": outputs}
    if not timm.is_model(name):
        raise ConfigError(f"--model {config.model}: timm {timm.__version__} has no model {name!r}")
    pretrained = config.pretrained == "timm"
    try:
        model = timm.create_model(name, pretrained=pretrained, img_size=side, **options)
    except TypeError:  # Convolutional models take images of any size, and have no img_size.
        model = timm.create_model(name, pretrained=pretrained, **options)
    if config.norm == "torch-sync":
        # torch's own converter would drop the activation that timm's BatchNorm layers include.
        model = convert_to_torch_sync(model)
    elif config.norm == "fastvit-sync":
        try:
            model = convert_to_fastvit_sync(model)
        except ValueError as error:
            raise ConfigError(
                f"--norm fastvit-sync: {error}; --norm torch trains without synchronisation"
            ) from None
    return model


def freeze_parameters(model: nn.Module, patterns: tuple[str, ...]) -> int:
    """Freezes every parameter whose name matches one of the patterns. Returns their number.

    BatchNorm layers stay in training mode and use batch statistics.
    """
    parameters, frozen_names = dict(model.named_parameters()), set()
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise ConfigError(
                f"--freeze {pattern!r} matches no parameter; the model has {', '.join(list(parameters)[:3])}"
            )
        frozen_names.update(names)
    if len(frozen_names) == len(parameters):
        raise ConfigError(f"--freeze {' '.join(patterns)} leaves nothing to train")
    for name in frozen_names:
        parameters[name].requires_grad_(False)
    return len(frozen_names)
