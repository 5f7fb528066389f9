"""The layers' autograd functions: the ops of forward and backward, the saved tensors, mark_dirty.

`rebuilding(ctx)` returns the function by which a recompute scope makes the result again from the saved
tensors, in their order, None where there is none; or None where the result cannot be made.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from . import ops
from .sync import Local, Transport


class Options(NamedTuple):
    """The arguments of the functions that have no gradient and are no tensors."""

    shared: Transport
    training: bool
    momentum: float | None
    eps: float
    activation: str
    activation_param: float
    channel_dim: int
    has_z: bool = False
    recompute: bool = False

    @property
    def of_forward(self) -> tuple[float | None, float, str, float, int]:
        """The last arguments of a forward op."""
        return self.momentum, self.eps, self.activation, self.activation_param, self.channel_dim

    @property
    def of_backward(self) -> tuple[str, float, int]:
        """The last arguments of a backward op."""
        return self.activation, self.activation_param, self.channel_dim

    def in_one_pass(self, x: torch.Tensor) -> bool:
        """Whether a local op does both passes: with batch statistics of this process alone.

        On a GPU its blocks wait for each other, which holds up the multiprocessors while a collective kernel
        takes the places of some. So beside other ranks both passes are launched, which give the same bits.
        """
        beside_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return self.training and isinstance(self.shared, Local) and not (x.is_cuda and beside_others)

    def moments(self, x: torch.Tensor) -> tuple:
        """The moments and their tag; None where running statistics are used."""
        return self.shared.moments(x, self.channel_dim) if self.training else (None, None)


def lying_like(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy, or on a GPU a copy of it, with the strides of x: operands that lie differently are read element by
    element. An x with gaps in memory takes no copy.
    """
    if not x.is_cuda or dy.stride() == x.stride():
        return dy
    copy = torch.empty_like(x)
    return copy.copy_(dy) if copy.stride() == x.stride() else dy


class BatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, z, running_mean, running_var, num_batches_tracked, options):
        rest = (weight, bias, z, running_mean, running_var, num_batches_tracked, *options.of_forward)
        tag = None
        if options.in_one_pass(x):
            y, saved = ops.bn_local_forward(x, *rest)
        else:
            moments, tag = options.moments(x)
            y, saved = ops.bn_forward(x, moments, *rest)
        # Without an activation backward does not need z: its gradient is dy.
        ctx.save_for_backward(x, weight, bias, None if options.activation == "identity" else z, saved, tag)
        ctx.options = options
        return y

    @staticmethod
    def rebuilding(ctx):
        options: Options = ctx.options
        # With a residual and no activation z is not saved.
        if not options.recompute or (options.has_z and options.activation == "identity"):
            return None
        return lambda x, weight, bias, z, saved, _: ops.bn_apply(
            x, saved, weight, bias, z, *options.of_backward
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, z, saved, tag = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_z = ctx.needs_input_grad[:4]
        options: Options = ctx.options
        dy = lying_like(dy, x)
        rest = (weight, bias, *options.of_backward)
        dx = dz = None
        if wants_x and options.in_one_pass(x):
            dx, dz, own = ops.bn_local_backward(x, dy, z, saved, *rest)
        else:
            own, total = _sums(ctx, tag, lambda exchange: ops.bn_reduce(x, dy, z, saved, *rest, exchange))
            if wants_x or (wants_z and z is not None):
                dx, dz = ops.bn_backward(x, dy, z, saved, total, *rest)
        dweight, dbias = _parameter_gradients(own, weight, bias, wants_weight, wants_bias)
        if wants_z and z is None:
            dz = dy
        return (dx if wants_x else None, dweight, dbias, dz if wants_z else None, *[None] * 4)


class InPlaceABNFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, num_batches_tracked, options):
        rest = (weight, bias, running_mean, running_var, num_batches_tracked, *options.of_forward)
        tag = None
        if options.in_one_pass(x):
            saved = ops.abn_local_forward_(x, *rest)
        else:
            moments, tag = options.moments(x)
            saved = ops.abn_forward_(x, moments, *rest)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias, saved, tag)
        ctx.options = options
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _invertible_backward(ctx, dy)


class InvertibleABNFunction(torch.autograd.Function):
    """InPlaceABNFunction with a new result, for torch.compile.

    torch 2.13 loses the backward of a function that calls mark_dirty on an input of a compiled graph:
    aot_autograd takes the gradient of the plain overwrite. So the traced function does not mutate x. The
    caller copies y over x, and the compiler removes the copy where x is its own buffer.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, num_batches_tracked, options):
        moments, tag = options.moments(x)
        y, saved = ops.abn_forward(
            x, moments, weight, bias, running_mean, running_var, num_batches_tracked, *options.of_forward
        )
        ctx.save_for_backward(y, weight, bias, saved, tag)
        ctx.options = options
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
        ctx.options = eps, output_dtype
        return y

    @staticmethod
    def rebuilding(ctx):
        options = ctx.options
        return lambda x, weight, bias, _: ops.layer_norm_forward(x, weight, bias, *options)[0]

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
    def rebuilding(ctx):
        activation = ctx.activation
        return lambda x: ops.act_forward(x, *activation)

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
    def rebuilding(ctx):
        activation = ctx.activation
        return lambda a, b: ops.glu_forward(a, b, *activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return *ops.glu_backward(a, b, dy, *ctx.activation), None, None


def _invertible_backward(ctx, dy):
    y, weight, bias, saved, tag = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    options: Options = ctx.options
    dy = lying_like(dy, y)
    rest = (weight, bias, *options.of_backward)
    dx = None
    if wants_x and options.in_one_pass(y):
        dx, own = ops.abn_local_backward(y, dy, saved, *rest)
    else:
        own, total = _sums(ctx, tag, lambda exchange: ops.abn_reduce(y, dy, saved, *rest, exchange))
        if wants_x:
            dx = ops.abn_backward(y, dy, saved, total, *rest)
    dweight, dbias = _parameter_gradients(own, weight, bias, wants_weight, wants_bias)
    return (dx, dweight, dbias, *[None] * 4)


def _sums(ctx, tag, reduce):
    """This rank's sums and, where dx needs them, those of all ranks; None where no gradient needs them."""
    if ctx.needs_input_grad[0] and ctx.options.training:
        rows = ctx.options.shared.sums(reduce, tag).unbind()
        return rows[0], rows[-1]
    if any(ctx.needs_input_grad[1:3]):
        return reduce(None)[0], None
    return None, None


def _parameter_gradients(sums, weight, bias, wants_weight, wants_bias):
    """Gradients of weight and bias from this rank's sums; DDP averages them like all gradients."""
    if not (wants_weight or wants_bias):
        return None, None
    dbias, dweight = sums.chunk(2)
    return (
        dweight.to(weight.dtype) if wants_weight else None,
        dbias.to(bias.dtype) if wants_bias else None,
    )
