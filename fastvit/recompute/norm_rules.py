"""Rules of normalisations, which are recomputed from the input and the statistics that the op has saved.

The eps, and a bias without gradient, come from the call (call_observer.py). Recipes do not write running
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .node_reader import NodeReader, NotRecomputable
from .planner import OpCall
from .recipe import Operand


def layer_norm_rule(reader: NodeReader) -> OpCall:
    eps, shape = reader.call_args().scalar, reader.attribute("normalized_shape")
    arguments = _norm_operands(reader, "input", "weight", "bias")
    return partial(_native_layer_norm, shape, eps), arguments


def _native_layer_norm(
    shape: tuple[int, ...], eps: float, x: Tensor, w: Tensor | None, b: Tensor | None
) -> Tensor:
    return torch.native_layer_norm(x, shape, w, b, eps)[0]


def rms_norm_rule(reader: NodeReader) -> OpCall:
    eps, shape = reader.call_args().scalar, reader.attribute("normalized_shape")
    return lambda x, w: torch.ops.aten._fused_rms_norm(x, shape, w, eps)[0], _norm_operands(
        reader, "input", "weight"
    )


def _norm_operands(reader: NodeReader, x_name: str, *saved_names: str) -> tuple[Operand, ...]:
    return reader.operand(x_name, 0), *[reader.saved_operand(name) for name in saved_names]


def group_norm_rule(reader: NodeReader) -> OpCall:
    eps = reader.call_args().scalar
    n, c, area, groups = (reader.attribute(name) for name in ("N", "C", "HxW", "group"))
    arguments = *_norm_operands(reader, "input", "weight"), reader.bias(2)
    return lambda x, w, b: torch.native_group_norm(x, w, b, n, c, area, groups, eps)[0], arguments


def batch_norm_rule(reader: NodeReader) -> OpCall:
    return _batch_norm_op_call(reader, reader.attribute("eps"), _native_batch_norm)


def cudnn_batch_norm_rule(reader: NodeReader) -> OpCall:
    return _batch_norm_op_call(reader, reader.attribute("epsilon"), _cudnn_batch_norm)


def _batch_norm_op_call(reader: NodeReader, eps: float, norm: Callable[..., Tensor]) -> OpCall:
    """Returns the call of `norm`, with saved mean and 1 / std in training, else with running statistics."""
    training = reader.attribute("training")
    names = ("result1", "result2") if training else ("running_mean", "running_var")
    statistics = [reader.saved_operand(name) for name in names]
    if None in statistics:
        raise NotRecomputable
    arguments = *_norm_operands(reader, "input", "weight"), reader.bias(2), *statistics
    return lambda *tensors: norm(*tensors, training, eps), arguments


def _cudnn_batch_norm(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, training: bool, eps: float):
    """Runs cuDNN's kernel in evaluation too, because cuDNN rounds otherwise than torch's own kernel."""
    running_mean, running_var = (None, None) if training else (mean, var)
    return torch.cudnn_batch_norm(x, w, b, running_mean, running_var, training, 0.0, eps)[0]


def _native_batch_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, training: bool, eps: float
) -> Tensor:
    if training:
        return _batch_norm_from_statistics(x, w, b, mean, var, eps)
    return torch.native_batch_norm(x, w, b, mean, var, False, 0.0, eps)[0]


def _batch_norm_from_statistics(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Recomputes BatchNorm from its saved mean and 1 / sqrt(var + eps), in one pass over x if possible.

    torch's CPU kernel for dense tensors computes x * scale + (bias - mean * scale) with scale = weight *
    invstd, in training as in evaluation. With `scale` as the weight, a variance of 1 and an eps of 0, the
    evaluation computes the same bits. For other tensors the kernel computes the statistics again.
    """
    if x.is_cuda:
        return torch.batch_norm_elemt(x, w, b, mean, invstd, eps)
    # In half precision `scale` would be rounded, and the bits would differ.
    is_full_precision = mean.dtype in (torch.float32, torch.float64) and (w is None or w.dtype == mean.dtype)
    if x.device.type == "cpu" and is_full_precision and _is_dense(x):
        scale = invstd if w is None else invstd * w
        return torch.native_batch_norm(x, scale, b, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    # The dtype of the running statistics chooses the one in which the kernel computes.
    running = (torch.zeros_like(mean), torch.ones_like(mean)) if w is None else (None, None)
    return torch.native_batch_norm(x, w, b, running[0], running[1], True, 0.0, eps)[0]


def _is_dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def sync_batch_norm_rule(reader: NodeReader) -> OpCall:
    """Recomputes torch.nn.SyncBatchNorm from the statistics of all ranks, which the op has saved."""
    saved = [one.data for one in reader.node._raw_saved_tensors]
    x, weight, mean, invstd, *_ = map(reader.packed_operand, saved)
    bias = getattr(saved[3], "bias", None)
    if bias is None:
        raise NotRecomputable("the call was not seen")
    normalize: Callable[..., Tensor] = torch.batch_norm_elemt
    return lambda *tensors: normalize(*tensors, 0.0), (x, weight, bias, mean, invstd)
