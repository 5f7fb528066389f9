"""Normalisations that are repeated, from the input and the statistics that the op has saved.

The eps, and a bias without gradient, are those of the call (calls.py). Running statistics are never written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .graph import Node
from .values import Argument, Rebuild, Unknown


def layer_norm(read: Node) -> Rebuild:
    eps, _ = read.noted()
    return _layer_norm_of(read.number("normalized_shape"), eps), _present(read, "input", "weight", "bias")


@lru_cache(256)
def _layer_norm_of(shape: tuple[int, ...], eps: float) -> Callable[..., Tensor]:
    return lambda x, w=None, b=None: torch.native_layer_norm(x, shape, w, b, eps)[0]


def rms_norm(read: Node) -> Rebuild:
    eps, _ = read.noted()
    return _rms_norm_of(read.number("normalized_shape"), eps), _present(read, "input", "weight")


@lru_cache(256)
def _rms_norm_of(shape: tuple[int, ...], eps: float | None) -> Callable[..., Tensor]:
    return lambda x, w=None: torch.ops.aten._fused_rms_norm(x, shape, w, eps)[0]


def _present(read: Node, *names: str) -> tuple[Argument, ...]:
    """The arguments of a normalisation, without trailing parameters that are None."""
    found = [read.saved(name) for name in names]
    while found and found[-1] is None:
        found.pop()
    if not found or None in found:
        raise Unknown
    return tuple(found)


def group_norm(read: Node) -> Rebuild:
    eps, _ = read.noted()
    n, c, area, groups = (read.integer(name) for name in ("N", "C", "HxW", "group"))
    weight, bias = read.saved("weight"), read.bias(2)
    present = weight is not None, bias is not None

    def norm(x: Tensor, *affine: Tensor) -> Tensor:
        weight, bias = _affine(affine, *present)
        return torch.native_group_norm(x, weight, bias, n, c, area, groups, eps)[0]

    return norm, _all_of(read.saved("input"), weight, bias)


def _affine(present: tuple[Tensor, ...], weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias, of which `present` has those that there are."""
    tensors = iter(present)
    return next(tensors) if weight else None, next(tensors) if bias else None


def _all_of(x: Argument | None, *rest: Argument | None) -> tuple[Argument, ...]:
    if x is None:
        raise Unknown
    return x, *[argument for argument in rest if argument is not None]


def batch_norm(read: Node) -> Rebuild:
    return _batch_norm_of(read, read.number("eps"), _from_statistics)


def cudnn_batch_norm(read: Node) -> Rebuild:
    return _batch_norm_of(read, read.number("epsilon"), _by_cudnn)


def _batch_norm_of(read: Node, eps: float, in_training: Callable[..., Tensor]) -> Rebuild:
    """BatchNorm; running statistics are read in evaluation alone, and never written."""
    weight, bias = read.saved("weight"), read.bias(2)
    present = weight is not None, bias is not None
    if read.number("training"):
        statistics = read.saved("result1"), read.saved("result2")
    else:
        statistics = read.saved("running_mean"), read.saved("running_var")
        in_training = _in_evaluation
    if None in statistics:
        raise Unknown

    def norm(x: Tensor, mean: Tensor, spread: Tensor, *affine: Tensor) -> Tensor:
        return in_training(x, *_affine(affine, *present), mean, spread, eps)

    return norm, _all_of(read.input("input", 0), *statistics, weight, bias)


def _in_evaluation(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, eps: float):
    return torch.native_batch_norm(x, w, b, mean, var, False, 0.0, eps)[0]


def _by_cudnn(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return torch.cudnn_batch_norm(x, w, b, None, None, True, 0.0, eps)[0]


def _from_statistics(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """BatchNorm from its saved mean and 1 / sqrt(var + eps), in one pass over x where that has the same bits.

    torch's CPU kernel for dense tensors computes x * scale + (bias - mean * scale) with scale = weight *
    invstd, in training as in evaluation. With `scale` for a weight, a variance of 1 and an eps of 0 the
    evaluation computes the same numbers. Elsewhere the statistics are computed again.
    """
    if x.is_cuda:
        return torch.batch_norm_elemt(x, w, b, mean, invstd, eps)
    # In half precision the product would be rounded.
    wide = mean.dtype in (torch.float32, torch.float64) and (w is None or w.dtype == mean.dtype)
    if x.device.type == "cpu" and wide and _is_dense(x):
        scale = invstd if w is None else invstd * w
        return torch.native_batch_norm(x, scale, b, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)[0]


def _is_dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def sync_batch_norm(read: Node) -> Rebuild:
    """torch.nn.SyncBatchNorm, from the statistics of all ranks, which it saves."""
    packed = [one.data for one in read.node._raw_saved_tensors]
    x, weight, mean, invstd, *_ = [None if one is None else read.packed(one) for one in packed]
    bias = read.bias(2)
    present = weight is not None, bias is not None

    def norm(x: Tensor, mean: Tensor, invstd: Tensor, *affine: Tensor) -> Tensor:
        return torch.batch_norm_elemt(x, *_affine(affine, *present), mean, invstd, 0.0)

    return norm, _all_of(x, mean, invstd, weight, bias)
