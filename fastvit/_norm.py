"""What the normalisation layers have in common: whose statistics a forward uses, and argument checks."""

import copy

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


def check_num_features(name: str, num_features: int) -> None:
    if isinstance(num_features, bool) or not isinstance(num_features, int) or num_features < 1:
        raise ValueError(f"{name}: num_features is {num_features!r}; a positive int expected")


def forward_state(layer: _NormBase) -> dict[str, "Tensor | bool | None"]:
    """Which statistics and buffers a forward of `layer` takes, by torch BatchNorm's rules.

    Batch statistics in training, and in evaluation when there are no running ones. Running statistics are
    updated only in training with track_running_stats.
    """
    training = layer.training or layer.running_mean is None
    use_running = not layer.training or layer.track_running_stats
    update = layer.training and layer.track_running_stats
    # torch leaves the running statistics alone when there is nothing to count a cumulative average with
    uncounted = layer.momentum is None and layer.num_batches_tracked is None
    return {
        "training": training,
        "running_mean": layer.running_mean if use_running else None,
        "running_var": layer.running_var if use_running else None,
        "num_batches_tracked": layer.num_batches_tracked if update else None,
        # without running statistics to update the factor is not used, but an op wants a number
        "momentum": layer.momentum if update and not uncounted else 0.0,
    }


def check_channels(layer: _NormBase, x: Tensor, channel_last: bool) -> None:
    """Raises ValueError when x has not `layer.num_features` channels (a layer may have no weight to tell)."""
    name = type(layer).__name__
    if not 2 <= x.dim() <= 5:
        raise ValueError(f"{name}: expected an input of 2 to 5 dimensions, got {x.dim()}D {tuple(x.shape)}")
    channel_dim = x.dim() - 1 if channel_last else 1
    if x.shape[channel_dim] != layer.num_features:
        raise ValueError(
            f"{name}: expected {layer.num_features} channels in dimension {channel_dim}, "
            f"got {x.shape[channel_dim]} (input {tuple(x.shape)}, channel_last={channel_last})"
        )


def cannot_read_values(x: Tensor) -> bool:
    """Whether reading a number on the host is impossible or would stall: tracing, or capturing a graph."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def without_group(layer: torch.nn.Module, attribute: str) -> dict:
    """What to pickle of a layer. A process group exists in its own process alone, so it becomes None."""
    return layer.__dict__ | {attribute: None}


def copy_sharing(layer: torch.nn.Module) -> torch.nn.Module:
    """A shallow copy, group included."""
    copied = layer.__class__.__new__(layer.__class__)
    copied.__dict__.update(layer.__dict__)
    return copied


def deepcopy_sharing(layer: torch.nn.Module, attribute: str, memo: dict) -> torch.nn.Module:
    """A deep copy of a layer that talks to the same process group (groups cannot be copied)."""
    group = getattr(layer, attribute)
    if group is not None:
        memo[id(group)] = group
    copied = layer.__class__.__new__(layer.__class__)
    memo[id(layer)] = copied
    copied.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return copied
