"""The layers' autograd: which ops run forward and backward, what is saved, what is dirty."""

import torch
from torch.autograd.function import once_differentiable

from . import ops, statistics


class BatchNormFunction(torch.autograd.Function):
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
        _keep(ctx, ticket, x, weight, bias, None if activation == "identity" else z, saved)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        ticket, x, weight, bias, z, saved = _kept(ctx)
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


class InPlaceABNFunction(torch.autograd.Function):
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
        _keep(ctx, ticket, x, weight, bias, saved)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


class InvertibleABNFunction(torch.autograd.Function):
    """InPlaceABNFunction with a result of its own, for torch.compile.

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
        _keep(ctx, ticket, y, weight, bias, saved)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


def _keep(ctx, ticket, *tensors):
    """For `_kept`: tensors, and the ticket of an exchange, which is one only where a compiler traces."""
    traced = isinstance(ticket, torch.Tensor)
    ctx.ticket = None if traced else ticket
    ctx.save_for_backward(ticket if traced else None, *tensors)


def _kept(ctx):
    ticket, *tensors = ctx.saved_tensors
    return ctx.ticket if ticket is None else ticket, *tensors


def _remember(ctx, shared, training, activation, activation_param, channel_dim):
    ctx.shared, ctx.training = shared, training
    ctx.activation, ctx.channel_dim = (activation, activation_param), channel_dim


def _invertible_backward(ctx, dy):
    ticket, y, weight, bias, saved = _kept(ctx)
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
