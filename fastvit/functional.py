"""The layers as functions: autograd around the ops, and who shares statistics.

Each saves one activation for backward, plus O(C) numbers: the plain layer its input (which the layer before
often saves too), the in-place layer its output (which the layer after saves anyway).
"""

from numbers import Real

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _library, ops, statistics

_SMALLEST = 2.0**-126  # normal float32
IN_PLACE_ACTIVATIONS = ("identity", "leaky_relu", "elu")


def check_in_place_activation(activation: str, activation_param: float) -> None:
    """Raises ValueError unless the activation can be inverted."""
    if activation not in IN_PLACE_ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}; in place it is recovered from its output, so it must be one of "
            f"{', '.join(IN_PLACE_ACTIVATIONS)}"
        )
    if activation != "identity" and not (
        isinstance(activation_param, Real) and _SMALLEST <= activation_param <= 1 / _SMALLEST
    ):
        raise ValueError(
            f"activation_param is {activation_param!r}; {activation} in place is inverted, so it must be > 0 "
            "and a finite float32, as must its reciprocal"
            + (" (slope 0 is relu, which cannot be inverted)" if activation_param == 0 else "")
        )


def channel_dimension(name: str, x: Tensor, channel_last: bool) -> int:
    """Which dimension of x is C; raises ValueError when x has not 2 to 5 dimensions."""
    if not 2 <= x.dim() <= 5:
        raise ValueError(f"{name}: expected an input of 2 to 5 dimensions, got {x.dim()}D {tuple(x.shape)}")
    return x.dim() - 1 if channel_last else 1


def _check_input(
    name: str,
    x: Tensor,
    channel_last: bool,
    z: Tensor | None = None,
    **per_channel: Tensor | None,
) -> int:
    """The channel dimension of x; raises ValueError for a shape, dtype or device that cannot be.

    Before anything is written or sent: an error here leaves no statistics half updated.
    """
    channel_dim = channel_dimension(name, x, channel_last)
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point input, got {x.dtype}")
    if x.is_cuda and not _library.HAS_CUDA:
        raise ValueError(
            f"{name}: the input is on {x.device}, but the CUDA kernels are {_library.CUDA_STATUS}"
        )
    for what, tensor in per_channel.items():
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.shape[0] != x.shape[channel_dim]:
            raise ValueError(
                f"{name}: {what} has shape {tuple(tensor.shape)}, so expected as many channels in dimension "
                f"{channel_dim}, got {x.shape[channel_dim]} (input {tuple(x.shape)}, {channel_last=})"
            )
        if tensor.device != x.device:
            raise ValueError(
                f"{name}: the input is on {x.device} and {what} on {tensor.device}; one expected"
            )
    if z is not None and (z.shape != x.shape or z.dtype != x.dtype or z.device != x.device):
        raise ValueError(
            f"{name}: z is {tuple(z.shape)}, {z.dtype}, on {z.device}; "
            f"{tuple(x.shape)}, {x.dtype}, on {x.device} expected, as the input"
        )
    return channel_dim


def _check_may_be_overwritten(name: str, x: Tensor) -> None:
    """Raises RuntimeError where autograd would, but before x is overwritten and not after."""
    if torch.compiler.is_compiling():
        return
    refuse = None
    if x.is_inference() and not torch.is_inference_mode_enabled():
        refuse = "is an inference tensor outside inference mode"
    elif torch.is_grad_enabled() and x._is_view() and x._base.is_leaf and x._base.requires_grad:
        refuse = "is a view of a leaf that requires grad"
    elif torch.is_grad_enabled() and x.requires_grad and x.is_leaf:
        refuse = "is a leaf that requires grad"
    elif torch.is_grad_enabled() and x._is_view() and _several_views_made(x):
        refuse = "is one of several views that one op made (chunk, split, unbind) or a view made without grad"
    if refuse:
        raise RuntimeError(
            f"{name}: the input {refuse}, which cannot be overwritten; "
            "pass the result of an op (its clone, say)"
        )


def _several_views_made(x: Tensor) -> bool:
    meta = torch._C._autograd
    return x.requires_grad and meta._get_creation_meta(x) != meta.CreationMeta.DEFAULT


def _check_more_than_one_value(x: Tensor, channel_dim: int, shared: "statistics.Local | object") -> None:
    # Over several ranks the others may hold values, and their counts are never read back to the host.
    if shared.world_size == 1 and x.numel() == x.shape[channel_dim]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, z, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, activation, activation_param, channel_dim,
    ):  # fmt: skip
        rest = (
            weight, bias, z, running_mean, running_var, num_batches_tracked,
            momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip
        ticket = None
        if training and isinstance(shared, statistics.Local):
            y, saved = ops.bn_local_forward(x, *rest)
        else:
            moments, exchange, ticket = shared.moments(x, channel_dim) if training else (None, None, None)
            y, saved = ops.bn_forward(x, moments, *rest, exchange)
        # Without an activation z decides nothing in backward: its gradient is dy itself.
        ctx.save_for_backward(x, weight, bias, None if activation == "identity" else z, saved, ticket)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, z, saved, ticket = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_z = ctx.needs_input_grad[:4]
        rest = (weight, bias, *ctx.activation, ctx.channel_dim)
        sharing = wants_x and ctx.training
        dx = dz = sums = pending = exchange = None
        if sharing and isinstance(ctx.shared, statistics.Local):
            dx, dz, sums = ops.bn_local_backward(x, dy, z, saved, *rest)
        elif sharing or wants_weight or wants_bias:
            exchange = ctx.shared.exchange(x, ticket) if sharing else None
            sums = ops.bn_reduce(x, dy, z, saved, *rest, exchange)
            pending = ctx.shared.start_sum(sums, ticket, exchange) if sharing else None
        dweight, dbias = _parameter_gradients(sums, weight, bias, wants_weight, wants_bias)
        if dx is None and (wants_x or (wants_z and z is not None)):
            dx, dz = ops.bn_backward(x, dy, z, saved, pending.wait() if pending else None, *rest, exchange)
        if wants_z and z is None:
            dz = dy
        return (dx if wants_x else None, dweight, dbias, dz if wants_z else None, *[None] * 10)


class _InPlaceABN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, activation, activation_param, channel_dim,
    ):  # fmt: skip
        rest = (
            weight, bias, running_mean, running_var, num_batches_tracked,
            momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip
        ticket = None
        if training and isinstance(shared, statistics.Local):
            saved = ops.abn_local_forward_(x, *rest)
        else:
            moments, exchange, ticket = shared.moments(x, channel_dim) if training else (None, None, None)
            saved = ops.abn_forward_(x, moments, *rest, exchange)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, saved, ticket)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


class _InvertibleABN(torch.autograd.Function):
    """_InPlaceABN with a result of its own, for torch.compile.

    mark_dirty on an input of a compiled graph loses this backward in torch 2.13 (aot_autograd then takes the
    gradient of the plain overwrite), so what is traced never mutates. The caller copies y over x, which the
    compiler drops wherever x is its own.
    """

    @staticmethod
    def forward(
        ctx, x, weight, bias, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, activation, activation_param, channel_dim,
    ):  # fmt: skip
        moments, _, ticket = shared.moments(x, channel_dim) if training else (None, None, None)
        y, saved = ops.abn_forward(
            x, moments, weight, bias, running_mean, running_var, num_batches_tracked,
            momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip
        ctx.save_for_backward(y, weight, bias, saved, ticket)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


def _remember(ctx, shared, training, activation, activation_param, channel_dim):
    ctx.shared, ctx.training = shared, training
    ctx.activation, ctx.channel_dim = (activation, activation_param), channel_dim


def _invertible_backward(ctx, dy):
    y, weight, bias, saved, ticket = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    rest = (weight, bias, *ctx.activation, ctx.channel_dim)
    sharing = wants_x and ctx.training
    dx = sums = pending = exchange = None
    if sharing and isinstance(ctx.shared, statistics.Local):
        dx, sums = ops.abn_local_backward(y, dy, saved, *rest)
    elif sharing or wants_weight or wants_bias:
        exchange = ctx.shared.exchange(y, ticket) if sharing else None
        sums = ops.abn_reduce(y, dy, saved, *rest, exchange)
        pending = ctx.shared.start_sum(sums, ticket, exchange) if sharing else None
    dweight, dbias = _parameter_gradients(sums, weight, bias, wants_weight, wants_bias)
    if dx is None and wants_x:
        dx = ops.abn_backward(y, dy, saved, pending.wait() if pending else None, *rest, exchange)
    return (dx, dweight, dbias, *[None] * 10)


def _parameter_gradients(sums, weight, bias, wants_weight, wants_bias):
    """Gradients of weight and bias from this rank's sums: ranks are averaged by DDP, like all parameters."""
    if not (wants_weight or wants_bias):
        return None, None
    dbias, dweight = sums.chunk(2)
    return (
        dweight.to(weight.dtype) if wants_weight else None,
        dbias.to(bias.dtype) if wants_bias else None,
    )


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
    channel_dim = _check_input(
        "sync_batch_norm", x, channel_last, z,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    shared = statistics.Local()
    if training:
        shared = statistics.over(process_group, statistics.Layer("sync_batch_norm", layer, momentum))
    if training:
        _check_more_than_one_value(x, channel_dim, shared)
    return _BatchNorm.apply(
        x, weight, bias, z, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, "relu" if fuse_relu else "identity", 0.0, channel_dim,
    )  # fmt: skip


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
        channel_last, num_batches_tracked, abs_weight, statistics.Local(), "inplace_abn",
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
    shared = statistics.Local()
    if training:
        shared = statistics.over(group, statistics.Layer("inplace_abn_sync", layer, momentum))
    return _inplace_abn(
        x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
        channel_last, num_batches_tracked, abs_weight, shared, "inplace_abn_sync",
    )  # fmt: skip


def _inplace_abn(
    x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
    channel_last, num_batches_tracked, abs_weight, shared, name,
):  # fmt: skip
    check_in_place_activation(activation, activation_param)
    channel_dim = _check_input(
        name, x, channel_last,
        weight=weight, bias=bias, running_mean=running_mean, running_var=running_var,
    )  # fmt: skip
    if training:
        _check_more_than_one_value(x, channel_dim, shared)
    _check_may_be_overwritten(name, x)
    if abs_weight and weight is not None:
        weight = weight * torch.where(weight < 0, -1.0, 1.0).to(weight.dtype) + eps  # abs, with a slope at 0
    arguments = (
        x, weight, bias, running_mean, running_var, num_batches_tracked,
        shared, training, momentum, eps, activation, activation_param, channel_dim,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return x.copy_(_InvertibleABN.apply(*arguments))
    return _InPlaceABN.apply(*arguments)
