"""The layers' autograd functions: the ops of forward and backward, the saved tensors, mark_dirty.

A recompute scope reads four members. `rebuilding(ctx)` returns a function that computes the result again, or
None where the result must be kept; the function takes the saved tensors in the order of save_for_backward,
None for an absent one. `ctx.fastvit_unsaved` maps an index in that order to the position of a tensor among
the arguments, where forward has not saved it. `fastvit_private` has the indices of tensors that the forward
has made and nobody else knows. `ctx.fastvit_written` is the version of a result that the
function writes over its input.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from ._library import bump_versions
from .sync import LOCAL_TRANSPORT, Transport


class Function(torch.autograd.Function):
    """torch's, with `applied_directly`, without the Python code of `apply`: 6 of 60 us that a layer takes."""

    applied_directly: Callable[..., Tensor]

    def __init_subclass__(cls) -> None:
        cls.applied_directly = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


def apply_of(function: type[Function], x: Tensor) -> Callable[..., Tensor]:
    """The `apply` to call for x outside of torch.compile.

    torch's own `apply` unwraps a tensor that has outlived a transform of torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fastvit's layers have no rules for torch.func's transforms (vmap, grad, jvp, ...), here "
            f"{function.__name__}; use torch's layers inside them"
        )
    return function.apply if torch._C._functorch.is_functorch_wrapped_tensor(x) else function.applied_directly


def differentiable_once(backward):
    """A backward of `(ctx, saved_tensors, dy)`, whose results in a graph depend on a node that raises.

    torch's once_differentiable makes such a node for dy alone, and none where dy has no graph, as that of a
    sum. A penalty on gradients would lose its own gradient, unnoticed. Here results depend on what was saved
    too. It is unpacked once, since torch.utils.checkpoint allows no more.
    """

    @functools.wraps(backward)
    def chosen(ctx, dy):
        saved_tensors = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, saved_tensors, dy)
        with torch.no_grad():
            gradients = backward(ctx, saved_tensors, dy)
            # A view that a node returns cannot be written to.
            gradients = [g.clone() if g is not None and (g is dy or g._is_view()) else g for g in gradients]
        return apply_of(NotDifferentiable, dy)(ctx.name(), tuple(gradients), dy, *saved_tensors)

    return chosen


class NotDifferentiable(Function):
    """`apply(name, values, *sources)`: the values, whose derivatives by the sources are an error."""

    @staticmethod
    def forward(ctx, name, values, *sources):
        ctx.node = name
        return values

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.node}: fastvit's layers are differentiable once; use torch's layers for derivatives of "
            "gradients, such as penalties on them"
        )


def in_one_pass(transport: Transport, x: Tensor) -> bool:
    """Whether one op makes the statistics and uses them: where they are of this process alone.

    On a GPU this may be one kernel whose blocks wait for each other. While a collective kernel holds some
    multiprocessors, those blocks would hold the others and wait. So in a job of several ranks two kernels are
    launched, which give the same bits.
    """
    if transport is not LOCAL_TRANSPORT:
        return False
    return not x.is_cuda or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def match_strides(dy: Tensor, x: Tensor) -> Tensor:
    """dy, or on a GPU a copy of it, with the strides of x: kernels read operands of different strides element
    by element. Where x has gaps in memory, dy is not copied.
    """
    if not x.is_cuda or dy.stride() == x.stride():
        return dy
    copy = torch.empty_like(x)
    return copy.copy_(dy) if copy.stride() == x.stride() else dy


class NormFunction(Function):
    """A normalisation: `apply(x, weight, bias, residual, *running, options, transport)`.

    In place there is no residual. `options`, a `functional.NormOptions`, has the ops' other arguments.
    """

    fastvit_private: tuple[int, ...] = (4, 5)

    @staticmethod
    def moments(ctx, x, options, transport: Transport):
        """The moments and their tag; None where the op makes its own, or uses the running statistics."""
        ctx.options, ctx.transport = options, transport
        if not options.training or in_one_pass(transport, x):
            return None, None
        return transport.compute_moments(x, options.channel_dim(x))

    @staticmethod
    @differentiable_once
    def backward(ctx, saved_tensors, dy):
        input, weight, bias, residual, saved, tag = saved_tensors  # input: x, or y in place
        options, transport = ctx.options, ctx.transport
        wants_x, wants_weight, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        tail = weight, bias, residual, *options.shared_arguments(input)
        arguments = input, match_strides(dy, input), saved, *tail, options.inplace
        local_sums = global_sums = dx = dresidual = None
        one_pass = wants_x and options.training and in_one_pass(transport, input)
        if wants_x and options.training and not one_pass:
            rows = transport.compute_sums(lambda exchange: ops.bn_reduce(*arguments, exchange), tag).unbind()
            local_sums, global_sums = rows[0], rows[-1]
        elif (wants_weight or wants_bias) and not one_pass:
            local_sums = ops.bn_reduce(*arguments)[0]
        if wants_x or (wants_residual and residual is not None):
            training = one_pass or global_sums is not None
            dx, dresidual, own_sums = ops.bn_backward(*arguments, global_sums, training)
            local_sums = own_sums if one_pass else local_sums
        if residual is None:
            dresidual = dy
        parameters = _parameter_gradients(local_sums, weight, bias, wants_weight, wants_bias)
        return dx if wants_x else None, *parameters, dresidual if wants_residual else None, *(None,) * 5


class BatchNormFunction(NormFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, mean, var, batches, options, transport):
        moments, tag = NormFunction.moments(ctx, x, options, transport)
        statistics = moments, mean, var, batches, *options.forward_arguments()
        y, saved = ops.bn_forward(x, weight, bias, residual, *options.shared_arguments(x), *statistics)
        if options.training:
            bump_versions(mean, var, batches)
        if options.activation == "identity" and residual is not None:  # its gradient is dy
            ctx.fastvit_unsaved, residual = {3: 3}, None
        ctx.save_for_backward(x, weight, bias, residual, saved, tag)
        return y

    @staticmethod
    def rebuilding(ctx):
        options = ctx.options
        if not options.recompute:
            return None
        return lambda x, weight, bias, residual, saved, _: ops.bn_apply(
            x, saved, weight, bias, residual, *options.shared_arguments(x)
        )


class InPlaceABNFunction(NormFunction):
    """Writes its result over x, except under torch.compile.

    torch 2.13 loses the backward of a function that calls mark_dirty on an input of a compiled graph:
    aot_autograd takes the gradient of the plain overwrite. So a traced function does not mutate x. The
    caller copies y over x, and the compiler removes the copy where x is its own buffer.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, mean, var, batches, options, transport):
        moments, tag = NormFunction.moments(ctx, x, options, transport)
        statistics = moments, mean, var, batches, *options.forward_arguments()
        arguments = x, weight, bias, residual, *options.shared_arguments(x), *statistics
        if torch.compiler.is_compiling():
            y, saved = ops.bn_forward(*arguments, invertible=True)
            ctx.save_for_backward(y, weight, bias, residual, saved, tag)
            return y
        saved = ops.bn_forward_inplace(*arguments)
        if options.training:
            bump_versions(mean, var, batches)
        ctx.mark_dirty(x)  # raises x's version, after this function has returned
        if not x.is_inference():  # which has no version
            ctx.fastvit_written = x._version + 1
        ctx.save_for_backward(x, weight, bias, residual, saved, tag)
        return x


class LayerNormFunction(Function):
    fastvit_private = (3,)

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
    @differentiable_once
    def backward(ctx, saved_tensors, dy):
        x, weight, bias, saved = saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx, sums = ops.layer_norm_backward(x, dy, saved, weight, wants_weight or wants_bias)
        dweight, dbias = _parameter_gradients(sums, weight, bias, wants_weight, wants_bias)
        return dx if wants_x else None, dweight, dbias, None, None


class ActFunction(Function):
    """`apply(activation, activation_param, x)`, and with a fourth argument the gate of a GLU."""

    fastvit_private = ()

    @staticmethod
    def forward(ctx, activation, activation_param, x, gate=None):
        ctx.save_for_backward(x) if gate is None else ctx.save_for_backward(x, gate)
        ctx.activation = activation, activation_param
        return ops.act_forward(x, gate, activation, activation_param)

    @staticmethod
    def rebuilding(ctx):
        activation = ctx.activation
        return lambda x, gate=None: ops.act_forward(x, gate, *activation)

    @staticmethod
    @differentiable_once
    def backward(ctx, saved_tensors, dy):
        x, *gate = saved_tensors
        dx, dgate = ops.act_backward(x, dy, *(gate or [None]), *ctx.activation)
        return None, None, dx, *([dgate] if gate else [])


def _parameter_gradients(sums, weight, bias, wants_weight, wants_bias):
    """Gradients of weight and bias from this rank's sums; DDP averages them like all gradients."""
    if not (wants_weight or wants_bias):
        return None, None
    dbias, dweight = sums.chunk(2)
    if wants_weight and weight.dtype != sums.dtype:
        dweight = dweight.to(weight.dtype)
    if wants_bias and bias.dtype != sums.dtype:
        dbias = dbias.to(bias.dtype)
    return dweight if wants_weight else None, dbias if wants_bias else None
