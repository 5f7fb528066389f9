"""The layers as functions: checks, whose statistics, and autograd around the ops.

Each saves one activation for backward, plus O(C) numbers: the plain layer its input (which the layer before
often saves too), the in-place layer its output (which the layer after saves anyway).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops, sync
from ._arguments import (
    check_activation,
    check_in_place_activation,
    check_input,
    check_kernels,
    check_may_be_overwritten,
    check_more_than_one_value,
)
from ._autograd import (
    ActFunction,
    BatchNormFunction,
    GluFunction,
    InPlaceABNFunction,
    InvertibleABNFunction,
    LayerNormFunction,
)
from ._formulas import activate
from .recompute import active_scope

__all__ = [
    "act",
    "batch_norm_act",
    "batch_norm_act_sync",
    "glu",
    "inplace_abn",
    "inplace_abn_sync",
    "layer_norm",
    "sync_batch_norm",
]


def _shared(op: str, training: bool, group, layer: int, momentum: float | None):
    if not training:
        if not torch.compiler.is_compiling():
            sync.check()  # what became of the last exchanges of training
        return sync.Local()
    return sync.over(group, sync.LayerKey(op, layer, momentum))


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    z: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    fuse_relu: bool = False,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """Batch normalisation over the ranks of a group, plus a residual, plus ReLU.

    Args:
        x: `(N, C, *)`, 2 to 5 dimensions, or `(N, *, C)` with channel_last; float16, bfloat16, float32 or
            float64. N may be 0 and may differ between ranks.
        weight, bias: `(C,)` or None.
        running_mean, running_var: `(C,)` or None; updated in place in training, used otherwise.
        z: residual of x's shape and dtype, added before the ReLU.
        momentum: None averages cumulatively and needs num_batches_tracked (int64, one number, counted up).
        process_group: None is the default group, or this process alone when there is none.
        layer: a number that tells this layer from the others of this process, so that ranks which are in
            different layers notice; 0 for those that have none.

    Returns a new tensor of x's dtype and memory format. Saves x for backward (and z with fuse_relu).
    Not differentiable twice.

    Raises:
        ValueError: wrong rank, dtype, device or channel count; one value per channel in training where the
            sizes are known; a group that does not contain this rank.
        RuntimeError: an argument that an op cannot take; ranks that differ in this layer's channels, dtype
            or momentum, or are in another layer; a rank that died or did not come within the group's
            timeout. Nothing has been written then.
    """
    return _batch_norm_act(
        "sync_batch_norm", x, weight, bias, running_mean, running_var, z, training, momentum, eps,
        "relu" if fuse_relu else "identity", 0.0, channel_last, num_batches_tracked,
        _shared("sync_batch_norm", training, process_group, layer, momentum), False,
    )  # fmt: skip


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    z: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "relu",
    activation_param: float | None = None,
    *,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """Batch normalisation, plus a residual, and an activation, with the statistics of this process.

    Args:
        activation: "identity", "relu", "relu6", "leaky_relu", "elu", "gelu" (by erf), "gelu_tanh", "silu" or
            "hardswish", as in torch.nn.functional, derivatives at kinks included.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.
        recompute: inside `fastvit.recompute_scope()` those who save the result for backward get it rebuilt
            instead; elsewhere this changes nothing.

    The rest as in `sync_batch_norm`. Saves x for backward, and z where the activation's gradient depends on
    it. Traced by torch.compile as plain torch ops wherever those can do it.
    """
    return _batch_norm_act(
        "batch_norm_act", x, weight, bias, running_mean, running_var, z, training, momentum, eps,
        activation, check_activation(activation, activation_param), channel_last, num_batches_tracked,
        sync.Local(), recompute,
    )  # fmt: skip


def batch_norm_act_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    z: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "relu",
    activation_param: float | None = None,
    *,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    recompute: bool = False,
    layer: int = 0,
) -> Tensor:
    """`batch_norm_act` with statistics over the ranks of `process_group` (None: the default group).

    layer, and what raises RuntimeError: as in `sync_batch_norm`.
    """
    return _batch_norm_act(
        "batch_norm_act_sync", x, weight, bias, running_mean, running_var, z, training, momentum, eps,
        activation, check_activation(activation, activation_param), channel_last, num_batches_tracked,
        _shared("batch_norm_act_sync", training, process_group, layer, momentum), recompute,
    )  # fmt: skip


def _batch_norm_act(
    name, x, weight, bias, running_mean, running_var, z, training, momentum, eps,
    activation, activation_param, channel_last, num_batches_tracked, shared, recompute,
):  # fmt: skip
    channel_dim = check_input(
        name, x, channel_last, z, num_batches_tracked,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    if training:
        check_more_than_one_value(x, channel_dim, shared)
    state = (weight, bias, running_mean, running_var)
    if torch.compiler.is_compiling() and _torch_can(x, *state, momentum, shared):
        return _plain_batch_norm_act(
            x, *state, z, num_batches_tracked,
            training, momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip

    def layer():
        return BatchNormFunction.apply(
            x, weight, bias, z, running_mean, running_var, num_batches_tracked,
            shared, training, momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip

    scope = active_scope() if recompute else None
    if scope is None or (z is not None and activation == "identity"):  # which does not save z to rebuild from
        return layer()
    given = [t is not None for t in (x, weight, bias, z)] + [True]

    def rebuild(*saved_tensors):  # the last may be the tag of an exchange
        tensors = iter(saved_tensors)
        arguments: list[Any] = [next(tensors) if there else None for there in given]
        x, weight, bias, z, saved = arguments
        return ops.bn_apply(x, saved, weight, bias, z, activation, activation_param, channel_dim)

    return scope.call(layer, rebuild)


def _torch_can(x, weight, bias, running_mean, running_var, momentum, shared) -> bool:
    """Whether torch's own batch_norm means the same for these arguments, within one graph."""
    # F.batch_norm wants a number for the factor, which a cumulative average would read back from the device
    if momentum is None or not isinstance(shared, sync.Local):
        return False
    dtypes = {t.dtype for t in (weight, bias, running_mean, running_var) if t is not None}
    return dtypes <= {x.dtype} or (x.dtype in (torch.float16, torch.bfloat16) and dtypes == {torch.float32})


def _plain_batch_norm_act(
    x, weight, bias, running_mean, running_var, z, num_batches_tracked,
    training, momentum, eps, activation, activation_param, channel_dim,
):  # fmt: skip
    """What torch.compile is given: ops it can fuse with their neighbours and recompute as it likes."""
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    moved = channel_dim != 1
    y = F.batch_norm(
        x.movedim(channel_dim, 1) if moved else x,
        running_mean, running_var, weight, bias, training, momentum, eps,
    )  # fmt: skip
    y = y.movedim(1, channel_dim) if moved else y
    return activate(y if z is None else y + z, activation, activation_param)


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    abs_weight: bool = False,
) -> Tensor:
    """Batch normalisation and activation written over x, which is returned.

    x must not be needed by anyone else: not a leaf that requires grad, not read again after the call, not
    saved by the op that made it. Backward recovers what it needs from the output, the one activation saved.
    In evaluation and without gradients x is overwritten too.

    Args:
        activation: "identity", "leaky_relu" (activation_param is the slope, > 0) or "elu"
            (activation_param is alpha, > 0).
        abs_weight: take gamma as `|weight| + eps`, as mapillary's inplace_abn does. Otherwise the signed
            weight, kept at least a small floor away from 0 (see `fastvit.ops.abn_forward_`).

    The rest as in `sync_batch_norm`. Source: Rota Bulò, Porzi, Kontschieder, "In-Place Activated BatchNorm
    for Memory-Optimized Training of DNNs", arXiv:1712.02616.
    """
    return _inplace_abn(
        x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
        channel_last, num_batches_tracked, abs_weight, sync.Local(), "inplace_abn",
    )  # fmt: skip


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: "torch.distributed.ProcessGroup | None" = None,
    *,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    abs_weight: bool = False,
    layer: int = 0,
) -> Tensor:
    """`inplace_abn` with statistics over the ranks of `group` (None: the default group).

    layer, and what raises RuntimeError: as in `sync_batch_norm`.
    """
    return _inplace_abn(
        x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
        channel_last, num_batches_tracked, abs_weight,
        _shared("inplace_abn_sync", training, group, layer, momentum), "inplace_abn_sync",
    )  # fmt: skip


def absolute_weight(weight: Tensor, eps: float) -> Tensor:
    """`|weight| + eps`, with a slope of 1 at 0."""
    return weight * torch.where(weight < 0, -1.0, 1.0).to(weight.dtype) + eps


def _inplace_abn(
    x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
    channel_last, num_batches_tracked, abs_weight, shared, name,
):  # fmt: skip
    check_in_place_activation(activation, activation_param)
    channel_dim = check_input(
        name, x, channel_last, None, num_batches_tracked,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    if training:
        check_more_than_one_value(x, channel_dim, shared)
    check_may_be_overwritten(name, x)
    if abs_weight and weight is not None:
        weight = absolute_weight(weight, eps)
    arguments = (
        x, weight, bias, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, activation, activation_param, channel_dim,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return x.copy_(InvertibleABNFunction.apply(*arguments))
    return InPlaceABNFunction.apply(*arguments)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalisation over the last dimensions, as torch.nn.functional.layer_norm but for its dtypes.

    Args:
        x: `(*, *normalized_shape)` in float16, bfloat16, float32 or float64.
        weight, bias: of normalized_shape in any dtype, or None.
        output_dtype: of the result. None is x's dtype, or under autocast, for a float32 x, autocast's: what
            the next Linear would cast to anyhow is written so at once. float32 may become float16 or
            bfloat16, and nothing else another dtype.

    Returns a new contiguous tensor. Statistics and sums are in float32 (float64 for float64). Saves x for
    backward, and two numbers a row; inside `fastvit.recompute_scope()` those who save the result get it
    rebuilt. Traced by torch.compile as torch's ops. Not differentiable twice. The bits are not torch's.

    Raises:
        ValueError: x does not end with normalized_shape, or is on a GPU and there are no CUDA kernels.
        RuntimeError: an argument that `fastvit.ops.layer_norm_forward` cannot take.
    """
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"layer_norm: x has shape {tuple(x.shape)}; (*, {', '.join(map(str, shape))}) expected"
        )
    if output_dtype is None:
        kind, output_dtype = x.device.type, x.dtype
        # meta, say, knows no autocast
        if x.dtype == torch.float32 and torch.amp.is_autocast_available(kind):
            output_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if torch.compiler.is_compiling():
        wide = ops.accumulation_dtype(x.dtype)
        weight, bias = (t if t is None else t.to(wide) for t in (weight, bias))
        return F.layer_norm(x.to(wide), shape, weight, bias, eps).to(output_dtype)
    check_kernels("layer_norm", x)
    if len(shape) > 1:
        weight, bias = (t if t is None else t.flatten() for t in (weight, bias))
        rows = layer_norm(
            x.flatten(-len(shape)), (math.prod(shape),), weight, bias, eps, output_dtype=output_dtype
        )
        return rows.view(x.shape)
    given = [t is not None for t in (x, weight, bias)]

    def rebuild(*saved_tensors):
        tensors = iter(saved_tensors)
        arguments: list[Any] = [next(tensors) if there else None for there in given]
        x, weight, bias = arguments
        return ops.layer_norm_forward(x, weight, bias, eps, output_dtype)[0]

    return _rebuildable(lambda: LayerNormFunction.apply(x, weight, bias, eps, output_dtype), rebuild)


def act(x: Tensor, activation: str = "gelu", activation_param: float | None = None) -> Tensor:
    """An activation: "gelu" (by erf), "gelu_tanh", "silu" and the others of `batch_norm_act`.

    On a CPU "gelu_tanh" is what it is for: torch's own "gelu" and "silu" are about as fast there.

    Args:
        x: any shape and strides, in float16, bfloat16, float32 or float64.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.

    Returns a new tensor of x's dtype and memory format. Saves x for backward. torch.compile,
    `recompute_scope` and derivatives: as in `layer_norm`.
    """
    param = check_activation(activation, activation_param)
    if torch.compiler.is_compiling():
        return activate(x, activation, param)
    check_kernels("act", x)
    return _rebuildable(
        lambda: ActFunction.apply(x, activation, param), lambda x: ops.act_forward(x, activation, param)
    )


def glu(a: Tensor, b: Tensor, activation: str = "silu", activation_param: float | None = None) -> Tensor:
    """`act(a) * b` in one pass: SwiGLU, or GEGLU with "gelu".

    Args:
        a, b: one shape and dtype; any strides, so they may be the halves of one tensor.

    The rest as in `act`. Saves a and b for backward, where the two ops of torch save `act(a)` besides.
    """
    param = check_activation(activation, activation_param)
    if torch.compiler.is_compiling():
        return activate(a, activation, param) * b
    check_kernels("glu", a)
    return _rebuildable(
        lambda: GluFunction.apply(a, b, activation, param),
        lambda a, b: ops.glu_forward(a, b, activation, param),
    )


def _rebuildable(layer, rebuild) -> Tensor:
    """layer(), which a scope knows from then on as what `rebuild` makes of the tensors that it saves."""
    scope = active_scope()
    return layer() if scope is None else scope.call(layer, rebuild)
