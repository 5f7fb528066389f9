"""The layers as functions: argument checks, the choice of statistics, and autograd around the ops.

Each saves one activation for backward, plus O(C) numbers: the plain layers their input, the in-place layers
their output, which the next layer often saves too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops, sync
from ._autograd import (
    ActFunction,
    BatchNormFunction,
    InPlaceABNFunction,
    LayerNormFunction,
    apply_of,
)
from ._checks import (
    autocast_dtype,
    check_activation,
    check_in_place_activation,
    check_input,
    check_kernels,
    check_may_be_overwritten,
    check_tensor,
    is_distributed,
)
from ._formulas import activate

__all__ = [
    "act",
    "batch_norm_act",
    "glu",
    "inplace_abn",
    "inplace_abn_sync",
    "layer_norm",
    "sync_batch_norm",
]


class NormOptions(NamedTuple):
    """What a normalisation takes besides its tensors."""

    function: str  # the name of a function of this module, for errors
    training: bool  # normalises by batch statistics, and updates the running ones
    momentum: float | None
    eps: float
    activation: str = "identity"
    activation_param: float = 0.0
    channel_last: bool = False
    inplace: bool = False
    recompute: bool = True  # a recompute scope may make the result again
    layer_number: int = 0  # unique among the layers of this process; ranks compare it

    def channel_dim(self, x: Tensor) -> int:
        return x.dim() - 1 if self.channel_last else 1

    def shared_arguments(self, x: Tensor) -> tuple[str, float, int]:
        """What every op of a batch norm takes after its tensors."""
        return self.activation, self.activation_param, self.channel_dim(x)

    def forward_arguments(self) -> tuple[float | None, float, bool]:
        """What the forward ops take after the running statistics."""
        return self.momentum, self.eps, self.training


def normalise(
    x: Tensor,
    residual: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    options: NormOptions,
    process_group: "torch.distributed.ProcessGroup | None",
) -> Tensor:
    """A batch norm of every kind: its layers, and the functions of this module, call it.

    With other ranks check_input runs before they send numbers. Otherwise the op checks its arguments before
    it writes. Only after it has raised does check_input run, which takes as long as the op, for an error in
    the layer's words; and only then are strided parameters and buffers copied.

    Args:
        tensors: weight, bias, running_mean, running_var, num_batches_tracked.
        process_group: None is this process alone.
    """
    function = options.function
    check_tensor(function, x)
    compiling = torch.compiler.is_compiling()
    if (compiling or process_group is not None) and _are_strided(tensors):
        return _normalise_strided(x, residual, tensors, options, process_group)
    if options.inplace and not compiling:
        check_may_be_overwritten(function, x)
    transport: sync.Transport = sync.LOCAL_TRANSPORT
    if process_group is not None:
        if options.training:
            key = sync.LayerKey(function, options.layer_number, options.momentum)
            transport = sync.get_transport(process_group, key)
        elif not compiling:
            sync.check()  # raises errors of the last exchanges of training
    checked = compiling or transport is not sync.LOCAL_TRANSPORT or x.dim() < 2
    if checked:
        check_input(options, x, residual, tensors)
    # Not checked with several ranks: others may have values, and counts are not read back to the host.
    if (
        options.training
        and transport is sync.LOCAL_TRANSPORT
        and x.numel() == x.shape[options.channel_dim(x)] > 0
    ):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    weight, bias, *running = tensors
    arguments = x, weight, bias, residual, *running, options, transport
    if compiling and options.inplace:
        return x.copy_(InPlaceABNFunction.apply(*arguments))
    if compiling:
        return _trace(*arguments)
    try:
        return apply_of(InPlaceABNFunction if options.inplace else BatchNormFunction, x)(*arguments)
    except RuntimeError:
        if _are_strided(tensors):
            return _normalise_strided(x, residual, tensors, options, process_group)
        if not checked:
            check_input(options, x, residual, tensors)
        raise


def _are_strided(tensors) -> bool:
    return any(isinstance(t, Tensor) and not t.is_contiguous() for t in tensors)


def _normalise_strided(x, residual, tensors, options, process_group) -> Tensor:
    """`normalise` with parameters and buffers of any strides: the ops read and write contiguous ones.

    A tensor may be a slice of a matrix, or, unless it is updated, one number expanded.
    """
    check_input(options, x, residual, tensors)
    for name, buffer in zip(("running_mean", "running_var"), tensors[2:4], strict=True):
        if options.training and buffer is not None and buffer.stride() == (0,) and buffer.numel() > 1:
            raise RuntimeError(
                f"{options.function}: {name} is expanded (stride 0), so it cannot be updated; a tensor that "
                "owns its memory expected"
            )
    contiguous = tuple(t if t is None else t.contiguous() for t in tensors)
    y = normalise(x, residual, contiguous, options, process_group)
    for buffer, updated in zip(tensors[2:], contiguous[2:], strict=True):
        if options.training and updated is not buffer:
            buffer.copy_(updated)
    return y


def _trace(x, weight, bias, residual, mean, var, batches, options, transport) -> Tensor:
    """torch's ops, which torch.compile can fuse and recompute, where they compute the same."""
    dtypes = {t.dtype for t in (weight, bias, mean, var) if t is not None}
    narrow = x.dtype in (torch.float16, torch.bfloat16) and dtypes == {torch.float32}
    # F.batch_norm needs a number as factor, which a cumulative average would have to read from the device.
    if (
        options.momentum is None
        or transport is not sync.LOCAL_TRANSPORT
        or not (narrow or dtypes <= {x.dtype})
    ):
        return BatchNormFunction.apply(x, weight, bias, residual, mean, var, batches, options, transport)
    if batches is not None:
        batches.add_(1)

    def normalised(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, options.training, options.momentum, options.eps)

    if options.channel_dim(x) == 1:
        y = normalised(x)
    elif x.is_contiguous():  # so is y, which it would not be after movedim
        y = normalised(x.flatten(0, -2)).view_as(x)
    else:
        y = normalised(x.movedim(-1, 1)).movedim(1, -1)
    return activate(y if residual is None else y + residual, options.activation, options.activation_param)


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    fuse_relu: bool = False,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """Batch normalisation over the ranks of a group, plus a residual, plus ReLU.

    Args:
        x: `(N, C, *)`, 2 to 5 dimensions, or `(N, *, C)` with channel_last; float16, bfloat16, float32 or
            float64. N may be 0 and may differ between ranks.
        weight, bias: `(C,)` or None.
        running_mean, running_var: `(C,)` or None; updated in place in training, used otherwise.
        residual: of x's shape and dtype, added before the ReLU.
        momentum: None averages cumulatively and needs num_batches_tracked (int64, one number, counted up).
        process_group: None is the default group, or this process alone when there is none.

    Returns:
        A new tensor of x's dtype and memory format. Saves x for backward, and residual with fuse_relu;
        inside `fastvit.recompute_scope()` it is rebuilt for later ops that save it. Not differentiable twice.

    Raises:
        ValueError: wrong rank, dtype, device or channel count; one value per channel in training where the
            sizes are known; a group that does not contain this rank.
        RuntimeError: an argument that an op cannot take; ranks that differ in this layer's channels, dtype
            or momentum, or are in another layer; a rank that died or did not arrive within the group's
            timeout. Nothing is written then.
    """
    tensors = weight, bias, running_mean, running_var, num_batches_tracked
    options = NormOptions(
        function="sync_batch_norm",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation="relu" if fuse_relu else "identity",
    )
    return normalise(x, residual, tensors, options, sync.default_group(process_group))


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "relu",
    activation_param: float | None = None,
    *,
    channel_last: bool = False,
    num_batches_tracked: Tensor | None = None,
    recompute: bool = True,
    process_group: "torch.distributed.ProcessGroup | None" = None,
) -> Tensor:
    """Batch normalisation, plus a residual, and an activation.

    Args:
        activation: "identity", "relu", "relu6", "leaky_relu", "elu", "gelu" (by erf), "gelu_tanh", "silu" or
            "hardswish", as in torch.nn.functional, derivatives at kinks included.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.
        recompute: inside `fastvit.recompute_scope()` the result may be rebuilt for later ops that save it;
            elsewhere this has no effect.
        process_group: the ranks that share statistics; None is this process alone.

    Other arguments and errors as in `sync_batch_norm`. Saves x for backward, and residual where the
    activation's gradient depends on it. torch.compile traces plain torch ops where they compute the same.
    """
    tensors = weight, bias, running_mean, running_var, num_batches_tracked
    options = NormOptions(
        function="batch_norm_act",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=check_activation(activation, activation_param),
        recompute=recompute,
    )
    return normalise(x, residual, tensors, options, process_group)


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
    process_group: "torch.distributed.ProcessGroup | None" = None,
) -> Tensor:
    """Batch normalisation and activation written over x, which is returned.

    x is lost, also in evaluation and without gradients. So it must not be a leaf that requires grad, must not
    be read again after the call, and must not be saved by the op that made it. Backward recovers xhat from
    the output, the only activation that is saved.

    Args:
        activation: "identity", "leaky_relu" (activation_param is the slope, > 0) or "elu"
            (activation_param is alpha, > 0).
        abs_weight: gamma is `|weight| + eps`, as in mapillary's inplace_abn; otherwise the signed weight, at
            least a small floor away from 0 (see `fastvit.ops.bn_forward_inplace`).
        process_group: the ranks that share statistics; None is this process alone.

    Other arguments and errors as in `sync_batch_norm`. Source: Rota Bulò, Porzi, Kontschieder, "In-Place
    Activated BatchNorm for Memory-Optimized Training of DNNs", arXiv:1712.02616.
    """
    check_in_place_activation(activation, activation_param)
    if abs_weight and isinstance(weight, Tensor):
        weight = absolute_weight(weight, eps)
    tensors = weight, bias, running_mean, running_var, num_batches_tracked
    options = NormOptions(
        function="inplace_abn",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=activation_param,
        inplace=True,
    )
    return normalise(x, None, tensors, options, process_group)


def inplace_abn_sync(
    x: Tensor,
    *arguments,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    **options,
) -> Tensor:
    """`inplace_abn` with statistics over the ranks of `process_group` (None: the default group)."""
    return inplace_abn(x, *arguments, process_group=sync.default_group(process_group), **options)


def absolute_weight(weight: Tensor, eps: float) -> Tensor:
    """`|weight| + eps`, with a slope of 1 at 0."""
    return weight * torch.where(weight < 0, -1.0, 1.0).to(weight.dtype) + eps


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
        output_dtype: of the result. None is x's dtype; for a float32 x under autocast it is autocast's, so
            that the next Linear does not cast. Only float32 may become another dtype: float16 or bfloat16.

    Returns:
        A new contiguous tensor. Statistics and sums are in float32 (float64 for float64). Saves x for
        backward, and two numbers a row; inside `fastvit.recompute_scope()` the result is rebuilt for later
        ops that save it. torch.compile and DTensors use torch's ops. Not differentiable twice. Its bits
        differ from torch's.

    Raises:
        ValueError: x does not end with normalized_shape, or is on a GPU and there are no CUDA kernels.
        RuntimeError: an argument that `fastvit.ops.layer_norm_forward` cannot take.
    """
    check_tensor("layer_norm", x)
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"layer_norm: x has shape {tuple(x.shape)}; (*, {', '.join(map(str, shape))}) expected"
        )
    if output_dtype is None:
        half = autocast_dtype(x) if x.dtype == torch.float32 else None
        output_dtype = half or x.dtype
    if torch.compiler.is_compiling() or is_distributed(x):
        wide = ops.accumulation_dtype(x.dtype)
        weight, bias = (t if t is None else t.to(wide) for t in (weight, bias))
        return F.layer_norm(x.to(wide), shape, weight, bias, eps).to(output_dtype)
    check_kernels("layer_norm", x)
    weight, bias = (t.contiguous() if isinstance(t, Tensor) else t for t in (weight, bias))
    if len(shape) > 1:
        weight, bias = (t.flatten() if isinstance(t, Tensor) else t for t in (weight, bias))
        rows = layer_norm(
            x.flatten(-len(shape)), (math.prod(shape),), weight, bias, eps, output_dtype=output_dtype
        )
        return rows.view(x.shape)

    return apply_of(LayerNormFunction, x)(x, weight, bias, eps, output_dtype)


def act(x: Tensor, activation: str = "gelu", activation_param: float | None = None) -> Tensor:
    """An activation: "gelu" (by erf), "gelu_tanh", "silu" and the others of `batch_norm_act`.

    On a CPU only "gelu_tanh" is much faster than torch's.

    Args:
        x: any shape and strides, in float16, bfloat16, float32 or float64.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.

    Returns:
        A new tensor of x's dtype and memory format. Saves x for backward. torch.compile, `recompute_scope`
        and derivatives as in `layer_norm`.
    """
    param = check_activation(activation, activation_param)
    check_tensor("act", x)
    if torch.compiler.is_compiling() or is_distributed(x):
        return activate(x, activation, param)
    check_kernels("act", x)
    return apply_of(ActFunction, x)(activation, param, x)


def glu(a: Tensor, b: Tensor, activation: str = "silu", activation_param: float | None = None) -> Tensor:
    """`act(a) * b` in one pass: SwiGLU, or GEGLU with "gelu".

    Args:
        a, b: one shape and dtype; any strides, so they may be the halves of one tensor.

    Other arguments and the result as in `act`. Saves a and b for backward; torch's two ops save `act(a)` too.
    """
    param = check_activation(activation, activation_param)
    check_tensor("glu", a)
    check_tensor("glu", b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"glu: b is {tuple(b.shape)}, {b.dtype}; {tuple(a.shape)}, {a.dtype} expected, as a")
    if torch.compiler.is_compiling() or is_distributed(a):
        return activate(a, activation, param) * b
    check_kernels("glu", a)
    return apply_of(ActFunction, a)(activation, param, a, b)
