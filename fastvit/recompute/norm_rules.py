"""Normalisations that are repeated, from the input and the statistics that the op has saved.

The eps, and a bias without gradient, are those of the call (calls.py). Running statistics are never written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .packed_tensor import Operand
from .planner import Node, Rebuild, Unknown


def layer_norm(read: Node) -> Rebuild:
    (eps, _), shape = read.noted(), read.number("normalized_shape")
    arguments = _inputs(read, "input", "weight", "bias")
    return lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0], arguments


def rms_norm(read: Node) -> Rebuild:
    (eps, _), shape = read.noted(), read.number("normalized_shape")
    return lambda x, w: torch.ops.aten._fused_rms_norm(x, shape, w, eps)[0], _inputs(read, "input", "weight")


def _inputs(read: Node, x: str, *optional: str) -> tuple[Operand, ...]:
    return read.input(x, 0), *[read.saved(name) for name in optional]


def group_norm(read: Node) -> Rebuild:
    eps, _ = read.noted()
    n, c, area, groups = (read.number(name) for name in ("N", "C", "HxW", "group"))
    arguments = *_inputs(read, "input", "weight"), read.bias(2)
    return lambda x, w, b: torch.native_group_norm(x, w, b, n, c, area, groups, eps)[0], arguments


def batch_norm(read: Node) -> Rebuild:
    return _batch_norm_of(read, read.number("eps"), _natively)


def cudnn_batch_norm(read: Node) -> Rebuild:
    return _batch_norm_of(read, read.number("epsilon"), _by_cudnn)


def _batch_norm_of(read: Node, eps: float, norm: Callable[..., Tensor]) -> Rebuild:
    """BatchNorm by `norm`, from saved mean and 1 / std, or in evaluation running mean and variance."""
    names, training = ("result1", "result2"), read.number("training")
    if not training:
        names = "running_mean", "running_var"
    statistics = [read.saved(name) for name in names]
    if None in statistics:
        raise Unknown
    arguments = *_inputs(read, "input", "weight"), read.bias(2), *statistics
    return lambda *tensors: norm(*tensors, training, eps), arguments


def _by_cudnn(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool, eps: float):
    """Also in evaluation, which has other roundings than torch's own kernel."""
    running_mean, running_var = (None, None) if training else (mean, var)
    return torch.cudnn_batch_norm(x, w, b, running_mean, running_var, training, 0.0, eps)[0]


def _natively(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, training: bool, eps: float
) -> Tensor:
    if training:
        return _from_statistics(x, w, b, mean, var, eps)
    return torch.native_batch_norm(x, w, b, mean, var, False, 0.0, eps)[0]


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
    x, weight, mean, invstd, *_ = [read.packed(one.data) for one in read.node._raw_saved_tensors]
    elemt: Callable[..., Tensor] = torch.batch_norm_elemt
    return lambda *tensors: elemt(*tensors, 0.0), (x, weight, read.bias(2), mean, invstd)
