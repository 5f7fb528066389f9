"""The layers' autograd: which ops run forward and backward, what is saved, what is dirty."""

import torch
from torch.autograd.function import once_differentiable

from . import ops
from .sync import Local


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
        tag = None
        if training and isinstance(shared, Local):
            y, saved = ops.bn_local_forward(x, *rest)
        else:
            moments, tag = shared.moments(x, channel_dim) if training else (None, None)
            y, saved = ops.bn_forward(x, moments, *rest)
        # Without an activation z decides nothing in backward: its gradient is dy itself.
        ctx.save_for_backward(x, weight, bias, None if activation == "identity" else z, saved, tag)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, z, saved, tag = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_z = ctx.needs_input_grad[:4]
        activation, activation_param = ctx.activation
        rest = (weight, bias, activation, activation_param, ctx.channel_dim)
        dx = dz = None
        if wants_x and ctx.training and isinstance(ctx.shared, Local):
            dx, dz, own = ops.bn_local_backward(x, dy, z, saved, *rest)
        else:
            own, total = _sums(ctx, tag, lambda exchange: ops.bn_reduce(x, dy, z, saved, *rest, exchange))
            if wants_x or (wants_z and z is not None):
                dx, dz = ops.bn_backward(x, dy, z, saved, total, *rest)
        dweight, dbias = _parameter_gradients(own, weight, bias, wants_weight, wants_bias)
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
        tag = None
        if training and isinstance(shared, Local):
            saved = ops.abn_local_forward_(x, *rest)
        else:
            moments, tag = shared.moments(x, channel_dim) if training else (None, None)
            saved = ops.abn_forward_(x, moments, *rest)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, saved, tag)
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
        moments, tag = shared.moments(x, channel_dim) if training else (None, None)
        y, saved = ops.abn_forward(
            x, moments, weight, bias, running_mean, running_var, num_batches_tracked,
            momentum, eps, activation, activation_param, channel_dim,
        )  # fmt: skip
        ctx.save_for_backward(y, weight, bias, saved, tag)
        _remember(ctx, shared, training, activation, activation_param, channel_dim)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, output_dtype):
        y, saved = ops.layer_norm_forward(x, weight, bias, eps, output_dtype)
        ctx.save_for_backward(x, weight, bias, saved)  # with bias, so that y can be rebuilt
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, saved = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx, sums = ops.layer_norm_backward(x, dy, saved, weight, wants_weight or wants_bias)
        dweight, dbias = _parameter_gradients(sums, weight, bias, wants_weight, wants_bias)
        return dx if wants_x else None, dweight, dbias, None, None


class ActFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation, activation_param):
        ctx.save_for_backward(x)
        ctx.activation = activation, activation_param
        return ops.act_forward(x, activation, activation_param)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return ops.act_backward(x, dy, *ctx.activation), None, None


class GluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, activation, activation_param):
        ctx.save_for_backward(a, b)
        ctx.activation = activation, activation_param
        return ops.glu_forward(a, b, activation, activation_param)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return *ops.glu_backward(a, b, dy, *ctx.activation), None, None


def _remember(ctx, shared, training, activation, activation_param, channel_dim):
    ctx.shared, ctx.training = shared, training
    ctx.activation, ctx.channel_dim = (activation, activation_param), channel_dim


def _invertible_backward(ctx, dy):
    y, weight, bias, saved, tag = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    activation, activation_param = ctx.activation
    rest = (weight, bias, activation, activation_param, ctx.channel_dim)
    dx = None
    if wants_x and ctx.training and isinstance(ctx.shared, Local):
        dx, own = ops.abn_local_backward(y, dy, saved, *rest)
    else:
        own, total = _sums(ctx, tag, lambda exchange: ops.abn_reduce(y, dy, saved, *rest, exchange))
        if wants_x:
            dx = ops.abn_backward(y, dy, saved, total, *rest)
    dweight, dbias = _parameter_gradients(own, weight, bias, wants_weight, wants_bias)
    return (dx, dweight, dbias, *[None] * 10)


def _sums(ctx, tag, reduce):
    """This rank's sums and, where dx takes them, those of all ranks; None where nobody wants any."""
    if ctx.needs_input_grad[0] and ctx.training:
        sums = ctx.shared.sums(reduce, tag)
        return sums[0], sums[-1]
    if any(ctx.needs_input_grad[1:3]):
        return reduce(None)[0], None
    return None, None


def _parameter_gradients(sums, weight, bias, wants_weight, wants_bias):
    """Gradients of weight and bias from this rank's sums: ranks are averaged by DDP, like all parameters."""
    if not (wants_weight or wants_bias):
        return None, None
    dbias, dweight = sums.chunk(2)
    return (
        dweight.to(weight.dtype) if wants_weight else None,
        dbias.to(bias.dtype) if wants_bias else None,
    )
