"""The layers' autograd functions: the ops of forward and backward, the saved tensors, mark_dirty.

A recompute scope reads four members of a function:

- `recompute_function(ctx)` returns a function that recomputes the output, or None where the output must be
  kept. The function takes the saved tensors in the order of save_for_backward, None for an absent one.
- `ctx.fastvit_unsaved_inputs` maps an index in that order to the position of an argument that forward did not
  save.
- `fastvit_private` has the indices of saved tensors that forward made and nobody else refers to.
- `ctx.fastvit_expected_version` is the version counter of an output that the function wrote over its input.
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from ._library import increment_versions
from .sync import LOCAL_TRANSPORT, Transport


class UncheckedFunction(torch.autograd.Function):
    """torch's Function with `apply_unchecked`, which skips the Python code of `apply`: 6 of 60 us a layer."""

    apply_unchecked: Callable[..., Tensor]

    def __init_subclass__(cls) -> None:
        cls.apply_unchecked = super(torch.autograd.Function, cls).apply  # type: ignore[misc]


def select_apply(function: type[UncheckedFunction], x: Tensor) -> Callable[..., Tensor]:
    """Returns the `apply` to call for x outside of torch.compile.

    This is torch's own for a tensor that outlived a transform of torch.func, because it unwraps the tensor.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{function.__name__}: fastvit's layers have no rules for torch.func's transforms (vmap, grad, "
            "jvp, ...); use torch's layers inside of them"
        )
    return function.apply if torch._C._functorch.is_functorch_wrapped_tensor(x) else function.apply_unchecked


def strict_once_differentiable(backward):
    """Decorates a backward `(ctx, saved_tensors, dy)`, so that a derivative of its results is an error.

    torch's once_differentiable connects the results with dy alone, and not where dy has no graph, as the
    gradient of a sum has none. A penalty on gradients would then lose its own gradient in silence. Here the
    results are connected with the saved tensors too. These are unpacked once, because torch.utils.checkpoint
    allows no more.
    """

    @functools.wraps(backward)
    def guarded_backward(ctx, dy):
        saved_tensors = ctx.saved_tensors
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, saved_tensors, dy)
        with torch.no_grad():
            gradients = backward(ctx, saved_tensors, dy)
            # A view that a node returns could not be written to.
            gradients = [g.clone() if g is not None and (g is dy or g._is_view()) else g for g in gradients]
        return select_apply(NotDifferentiable, dy)(ctx.name(), tuple(gradients), dy, *saved_tensors)

    return guarded_backward


class NotDifferentiable(UncheckedFunction):
    """`apply(name, values, *sources)` returns the values; their derivatives by the sources are an error."""

    @staticmethod
    def forward(ctx, name, values, *sources):
        ctx.node_name = name
        return values

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.node_name}: fastvit's layers are differentiable once; use torch's layers for derivatives "
            "of gradients, such as penalties on them"
        )


def fuses_statistics(transport: Transport, x: Tensor) -> bool:
    """Returns whether one fused op computes the statistics of x and normalises by them.

    The statistics must be those of this process alone. On a GPU the op may be one kernel whose blocks wait
    for each other. While a collective kernel holds some multiprocessors, these blocks would hold the other
    ones and wait. A job of several ranks therefore launches two kernels, which give the same bits.
    """
    if transport is not LOCAL_TRANSPORT:
        return False
    return not x.is_cuda or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def match_strides(dy: Tensor, x: Tensor) -> Tensor:
    """Returns dy with the strides of x: on a GPU a copy, where the strides differ.

    Kernels read operands of different strides element by element. dy is not copied where x has gaps in
    memory.
    """
    if not x.is_cuda or dy.stride() == x.stride():
        return dy
    copy = torch.empty_like(x)
    return copy.copy_(dy) if copy.stride() == x.stride() else dy


class NormFunction(UncheckedFunction):
    """A batch norm: `apply(x, weight, bias, residual, mean, var, batches, options, transport)`.

    `mean`, `var` and `batches` are the running statistics and their counter. A layer in place has no
    residual. `options`, a `functional.NormOptions`, has the other arguments of the ops.
    """

    fastvit_private: tuple[int, ...] = (4, 5)

    @staticmethod
    def get_moments(ctx, x, options, transport: Transport):
        """Returns the moments and their tag, or None twice. Stores options and transport on ctx.

        None: the forward op computes the moments itself, or normalises by the running statistics.
        """
        ctx.options, ctx.transport = options, transport
        if not options.training or fuses_statistics(transport, x):
            return None, None
        return transport.compute_moments(x, options.channel_dim(x))

    @staticmethod
    @strict_once_differentiable
    def backward(ctx, saved_tensors, dy):
        input, weight, bias, residual, saved, tag = saved_tensors  # The input is x, or y in place.
        options = ctx.options
        needs_dx, needs_dweight, needs_dbias, needs_dresidual, *_ = ctx.needs_input_grad
        tail = weight, bias, residual, *options.shared_arguments(input), options.inplace
        operands = input, match_strides(dy, input), saved, *tail
        is_fused = needs_dx and options.training and fuses_statistics(ctx.transport, input)
        local_sums, global_sums = (None, None) if is_fused else _reduce_sums(ctx, operands, tag)
        dx = dresidual = None
        if needs_dx or (needs_dresidual and residual is not None):
            uses_batch_statistics = is_fused or global_sums is not None
            dx, dresidual, fused_sums = ops.bn_backward(*operands, global_sums, uses_batch_statistics)
            local_sums = fused_sums if is_fused else local_sums
        if residual is None:  # There is none, or it has no activation behind it: its gradient is dy.
            dresidual = dy
        dweight, dbias = _compute_parameter_gradients(local_sums, weight, bias, needs_dweight, needs_dbias)
        return dx if needs_dx else None, dweight, dbias, dresidual if needs_dresidual else None, *(None,) * 5


def _reduce_sums(ctx, operands: tuple, tag: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the local sums, which parameters need, and the global sums, which dx needs in training."""
    needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
    if needs_dx and ctx.options.training:
        rows = ctx.transport.compute_sums(lambda exchange: ops.bn_reduce(*operands, exchange), tag).unbind()
        return rows[0], rows[-1]
    if needs_dweight or needs_dbias:
        return ops.bn_reduce(*operands)[0], None
    return None, None


class BatchNormFunction(NormFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, mean, var, batches, options, transport):
        moments, tag = NormFunction.get_moments(ctx, x, options, transport)
        statistics = moments, mean, var, batches, *options.forward_arguments()
        y, saved = ops.bn_forward(x, weight, bias, residual, *options.shared_arguments(x), *statistics)
        if options.training:
            increment_versions(mean, var, batches)
        if options.activation == "identity" and residual is not None:  # Its gradient is dy.
            ctx.fastvit_unsaved_inputs, residual = {3: 3}, None
        ctx.save_for_backward(x, weight, bias, residual, saved, tag)
        return y

    @staticmethod
    def recompute_function(ctx):
        options = ctx.options
        if not options.is_recomputable:
            return None
        return lambda x, weight, bias, residual, saved, _: ops.bn_apply(
            x, saved, weight, bias, residual, *options.shared_arguments(x)
        )


class InPlaceABNFunction(NormFunction):
    """Writes its result over x, except under torch.compile.

    torch 2.13 loses the backward of a function that calls mark_dirty on an input of a compiled graph:
    aot_autograd takes the gradient of the plain overwrite. A traced function therefore does not write x. The
    caller copies y over x, and the compiler removes the copy where x is its own buffer.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, mean, var, batches, options, transport):
        moments, tag = NormFunction.get_moments(ctx, x, options, transport)
        statistics = moments, mean, var, batches, *options.forward_arguments()
        arguments = x, weight, bias, residual, *options.shared_arguments(x), *statistics
        if torch.compiler.is_compiling():
            y, saved = ops.bn_forward(*arguments, invertible=True)
            ctx.save_for_backward(y, weight, bias, residual, saved, tag)
            return y
        saved = ops.bn_forward_inplace(*arguments)
        if options.training:
            increment_versions(mean, var, batches)
        ctx.mark_dirty(x)  # This raises x's version counter after this function has returned.
        if not x.is_inference():  # An inference tensor has no version counter.
            ctx.fastvit_expected_version = x._version + 1
        ctx.save_for_backward(x, weight, bias, residual, saved, tag)
        return x


class LayerNormFunction(UncheckedFunction):
    fastvit_private = (3,)

    @staticmethod
    def forward(ctx, x, weight, bias, eps, output_dtype):
        y, saved = ops.layer_norm_forward(x, weight, bias, eps, output_dtype)
        ctx.save_for_backward(x, weight, bias, saved)  # The bias is saved too, so that y can be recomputed.
        ctx.options = eps, output_dtype
        return y

    @staticmethod
    def recompute_function(ctx):
        options = ctx.options
        return lambda x, weight, bias, _: ops.layer_norm_forward(x, weight, bias, *options)[0]

    @staticmethod
    @strict_once_differentiable
    def backward(ctx, saved_tensors, dy):
        x, weight, bias, saved = saved_tensors
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        dx, sums = ops.layer_norm_backward(x, dy, saved, weight, needs_dweight or needs_dbias)
        dweight, dbias = _compute_parameter_gradients(sums, weight, bias, needs_dweight, needs_dbias)
        return dx if needs_dx else None, dweight, dbias, None, None


class ActFunction(UncheckedFunction):
    """`apply(activation, activation_param, x, gate=None)` returns `activation(x)`, times the gate."""

    fastvit_private = ()

    @staticmethod
    def forward(ctx, activation, activation_param, x, gate=None):
        ctx.save_for_backward(x) if gate is None else ctx.save_for_backward(x, gate)
        ctx.activation_args = activation, activation_param
        return ops.act_forward(x, gate, activation, activation_param)

    @staticmethod
    def recompute_function(ctx):
        activation_args = ctx.activation_args
        return lambda x, gate=None: ops.act_forward(x, gate, *activation_args)

    @staticmethod
    @strict_once_differentiable
    def backward(ctx, saved_tensors, dy):
        x, *gate = saved_tensors
        dx, dgate = ops.act_backward(x, dy, *(gate or [None]), *ctx.activation_args)
        return None, None, dx, *([dgate] if gate else [])


def _compute_parameter_gradients(sums, weight, bias, needs_dweight, needs_dbias):
    """Returns the gradients of weight and bias from the local sums. DDP averages them like all gradients."""
    if not (needs_dweight or needs_dbias):
        return None, None
    dbias, dweight = sums.chunk(2)
    if needs_dweight and weight.dtype != sums.dtype:
        dweight = dweight.to(weight.dtype)
    if needs_dbias and bias.dtype != sums.dtype:
        dbias = dbias.to(bias.dtype)
    return dweight if needs_dweight else None, dbias if needs_dbias else None
