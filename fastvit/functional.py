"""The layers as functions: argument checks, the choice of statistics, and autograd around the ops.

Each function saves one activation for backward, plus O(C) numbers: a plain layer saves its input, a layer in
place its output, which the next layer often saves too.

Arguments are in the order of mapillary's inplace_abn, `(x, weight, bias, running_mean, running_var, ...)`,
with `training=True`. torch's `F.batch_norm` has the running statistics before the weight, and
`training=False`.
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
    select_apply,
)
from ._checks import (
    autocast_dtype,
    check_can_overwrite,
    check_gpu_has_kernels,
    check_input,
    check_tensor,
    is_distributed,
    resolve_activation_param,
    resolve_invertible_param,
)
from ._deprecation import renamed_arguments, renamed_names
from ._formulas import apply_activation

__all__ = [
    "act",
    "batch_norm_act",
    "gated_act",
    "inplace_abn",
    "inplace_abn_sync",
    "layer_norm",
    "sync_batch_norm",
]


class NormTensors(NamedTuple):
    """The parameters and buffers of a batch norm: `(C,)` each, the counter one number; None is left out."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None


class NormOptions(NamedTuple):
    """The options of a batch norm: its arguments that are no tensors."""

    function_name: str  # The function of this module, for errors.
    training: bool  # Normalise by batch statistics, and update the running ones.
    momentum: float | None
    eps: float
    activation: str = "identity"
    activation_param: float = 0.0
    channel_last: bool = False
    inplace: bool = False
    is_recomputable: bool = True  # A recompute scope may recompute the output.
    layer_id: int = 0  # Unique among the layers of this process; ranks compare it.

    def channel_dim(self, x: Tensor) -> int:
        return x.dim() - 1 if self.channel_last else 1

    def shared_arguments(self, x: Tensor) -> tuple[str, float, int]:
        """Returns what every op of a batch norm takes after its tensors."""
        return self.activation, self.activation_param, self.channel_dim(x)

    def forward_arguments(self) -> tuple[float | None, float, bool]:
        """Returns what the forward ops take after the running statistics."""
        return self.momentum, self.eps, self.training


def apply_batch_norm(
    x: Tensor,
    residual: Tensor | None,
    tensors: NormTensors,
    options: NormOptions,
    process_group: "torch.distributed.ProcessGroup | None",
) -> Tensor:
    """Runs a batch norm of any layer, or of any function of this module.

    Between ranks, check_input runs before any number is sent. For one process the op checks its arguments
    before it writes. Then check_input runs only after the op has raised, for an error in the layer's words,
    because check_input takes as long as the op. For the same reason only then are strided parameters and
    buffers copied.

    Args:
        process_group: the ranks that share statistics; None is this process alone.
    """
    check_tensor(options.function_name, x)
    is_compiling = torch.compiler.is_compiling()
    if (is_compiling or process_group is not None) and _are_strided(tensors):
        return _apply_to_strided(x, residual, tensors, options, process_group)
    if options.inplace and not is_compiling:
        check_can_overwrite(options.function_name, x)
    transport = _choose_transport(options, process_group, is_compiling)
    is_checked = is_compiling or transport is not sync.LOCAL_TRANSPORT or x.dim() < 2
    if is_checked:
        check_input(options, x, residual, tensors)
    _check_values_per_channel(x, options, transport)
    if is_compiling:
        return _forward_traced(x, residual, tensors, options, transport)
    weight, bias, *running = tensors
    arguments = x, weight, bias, residual, *running, options, transport
    try:
        return select_apply(InPlaceABNFunction if options.inplace else BatchNormFunction, x)(*arguments)
    except RuntimeError:
        if _are_strided(tensors):
            return _apply_to_strided(x, residual, tensors, options, process_group)
        if not is_checked:
            check_input(options, x, residual, tensors)
        raise


def _choose_transport(
    options: NormOptions, process_group: "torch.distributed.ProcessGroup | None", is_compiling: bool
) -> sync.Transport:
    """Returns from where the layer gets its statistics. In evaluation no rank exchanges numbers."""
    if process_group is None:
        return sync.LOCAL_TRANSPORT
    if options.training:
        key = sync.LayerKey(options.function_name, options.layer_id, options.momentum)
        return sync.get_transport(process_group, key)
    if not is_compiling:
        sync.check()  # Raises errors of the last exchanges of training.
    return sync.LOCAL_TRANSPORT


def _check_values_per_channel(x: Tensor, options: NormOptions, transport: sync.Transport) -> None:
    """Raises ValueError for one value per channel in training.

    With several ranks this is not checked: another rank may have more values, and reading the global count
    back would wait for the GPU.
    """
    if (
        options.training
        and transport is sync.LOCAL_TRANSPORT
        and x.numel() == x.shape[options.channel_dim(x)] > 0
    ):
        raise ValueError(
            f"{options.function_name}: Expected more than 1 value per channel when training, got input size "
            f"{x.shape}"
        )


def _are_strided(tensors: NormTensors) -> bool:
    return any(isinstance(t, Tensor) and not t.is_contiguous() for t in tensors)


def _apply_to_strided(x, residual, tensors: NormTensors, options, process_group) -> Tensor:
    """Does as `apply_batch_norm` for parameters and buffers of any strides, by contiguous copies.

    A tensor may be a slice of a matrix. One that is not updated may be an expanded number.
    """
    check_input(options, x, residual, tensors)
    for name, buffer in zip(("running_mean", "running_var"), tensors[2:4], strict=True):
        if options.training and buffer is not None and buffer.stride() == (0,) and buffer.numel() > 1:
            raise RuntimeError(
                f"{options.function_name}: {name} is expanded (stride 0), so it cannot be updated; a tensor "
                "that owns its memory expected"
            )
    contiguous = NormTensors(*(t if t is None else t.contiguous() for t in tensors))
    y = apply_batch_norm(x, residual, contiguous, options, process_group)
    for buffer, updated in zip(tensors[2:], contiguous[2:], strict=True):
        if options.training and buffer is not None and updated is not None and updated is not buffer:
            buffer.copy_(updated)
    return y


def _forward_traced(
    x: Tensor,
    residual: Tensor | None,
    tensors: NormTensors,
    options: NormOptions,
    transport: sync.Transport,
) -> Tensor:
    """Runs a batch norm inside torch.compile, by torch's ops where these compute the same."""
    weight, bias, *running = tensors
    arguments = x, weight, bias, residual, *running, options, transport
    if options.inplace:
        return x.copy_(InPlaceABNFunction.apply(*arguments))
    if transport is sync.LOCAL_TRANSPORT and _has_torch_ops(x, tensors, options):
        return _forward_with_torch_ops(x, residual, tensors, options)
    return BatchNormFunction.apply(*arguments)


def _has_torch_ops(x: Tensor, tensors: NormTensors, options: NormOptions) -> bool:
    """Returns whether torch's ops compute the same."""
    dtypes = {t.dtype for t in tensors[:4] if t is not None}
    is_mixed = x.dtype in (torch.float16, torch.bfloat16) and dtypes == {torch.float32}
    # F.batch_norm needs a number as its factor; a cumulative average would read the number from the device.
    return options.momentum is not None and (is_mixed or dtypes <= {x.dtype})


def _forward_with_torch_ops(
    x: Tensor, residual: Tensor | None, tensors: NormTensors, options: NormOptions
) -> Tensor:
    """Runs torch's ops, which torch.compile can fuse and recompute."""
    weight, bias, mean, var, batches = tensors
    momentum = options.momentum
    assert momentum is not None
    if batches is not None:
        batches.add_(1)

    def batch_norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, options.training, momentum, options.eps)

    if options.channel_dim(x) == 1:
        y = batch_norm(x)
    elif x.is_contiguous():  # The result is contiguous too, which it would not be after movedim.
        y = batch_norm(x.flatten(0, -2)).view_as(x)
    else:
        y = batch_norm(x.movedim(-1, 1)).movedim(1, -1)
    v = y if residual is None else y + residual
    return apply_activation(v, options.activation, options.activation_param)


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
        residual: a tensor of x's shape and dtype that is added before the ReLU.
        momentum: None averages cumulatively and needs num_batches_tracked (int64, one number, counted up).
        process_group: the ranks that share statistics; None is the default group, or this process alone when
            torch.distributed is not initialised.

    Returns:
        A new tensor of x's dtype and memory format. Saves x for backward, and residual with fuse_relu;
        inside `fastvit.recompute_scope()` it is recomputed for later ops that save it. Not differentiable
        twice.

    Raises:
        ValueError: wrong rank, dtype, device or channel count; one value per channel in training where the
            sizes are known; a group that does not contain this rank.
        RuntimeError: an argument that an op cannot take; ranks that differ in this layer's channels, dtype
            or momentum, or are in another layer; a rank that died or did not arrive within the group's
            timeout. Nothing is written then.
    """
    tensors = NormTensors(weight, bias, running_mean, running_var, num_batches_tracked)
    options = NormOptions(
        function_name="sync_batch_norm",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation="relu" if fuse_relu else "identity",
    )
    return apply_batch_norm(x, residual, tensors, options, sync.default_group(process_group))


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
        recompute: inside `fastvit.recompute_scope()` the result may be recomputed for later ops that save it;
            elsewhere this has no effect.
        process_group: the ranks that share statistics; None is this process alone.

    Other arguments and errors as in `sync_batch_norm`. Saves x for backward, and residual where the
    activation's gradient depends on it. torch.compile traces plain torch ops where they compute the same.
    """
    tensors = NormTensors(weight, bias, running_mean, running_var, num_batches_tracked)
    options = NormOptions(
        function_name="batch_norm_act",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=resolve_activation_param("batch_norm_act", activation, activation_param),
        is_recomputable=recompute,
    )
    return apply_batch_norm(x, residual, tensors, options, process_group)


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
    activation_param: float | None = None,
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
        activation: "identity", "leaky_relu" or "elu".
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1), > 0.
        abs_weight: gamma is `|weight| + eps`, as in mapillary's inplace_abn; otherwise the signed weight, at
            least a small floor away from 0 (see `fastvit.ops.bn_forward_inplace`).
        process_group: the ranks that share statistics; None is this process alone.

    Other arguments and errors as in `sync_batch_norm`. Source: Rota Bulò, Porzi, Kontschieder, "In-Place
    Activated BatchNorm for Memory-Optimized Training of DNNs", arXiv:1712.02616.
    """
    activation_param = resolve_invertible_param("inplace_abn", activation, activation_param)
    if abs_weight and isinstance(weight, Tensor):
        weight = abs_weight_plus_eps(weight, eps)
    tensors = NormTensors(weight, bias, running_mean, running_var, num_batches_tracked)
    options = NormOptions(
        function_name="inplace_abn",
        channel_last=channel_last,
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=activation_param,
        inplace=True,
    )
    return apply_batch_norm(x, None, tensors, options, process_group)


def inplace_abn_sync(
    x: Tensor,
    *arguments,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    **options,
) -> Tensor:
    """Does as `inplace_abn`, with statistics over the ranks of `process_group`.

    Args:
        process_group: the ranks that share statistics; None is the default group, or this process alone when
            torch.distributed is not initialised.
    """
    return inplace_abn(x, *arguments, process_group=sync.default_group(process_group), **options)


def abs_weight_plus_eps(weight: Tensor, eps: float) -> Tensor:
    """Returns `|weight| + eps`, whose derivative at a weight of 0 is 1."""
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
    """Normalises over the last dimensions, as torch.nn.functional.layer_norm but for its dtypes.

    Args:
        x: `(*, *normalized_shape)` in float16, bfloat16, float32 or float64.
        weight, bias: `normalized_shape` in any dtype, or None.
        output_dtype: dtype of the result. None is x's dtype; for a float32 x under autocast it is autocast's,
            so that the next Linear does not cast. Only float32 may become another dtype: float16 or bfloat16.

    Returns:
        A new contiguous tensor. Statistics and sums are in float32 (float64 for float64). Saves x for
        backward, and two numbers a row; inside `fastvit.recompute_scope()` the result is recomputed for later
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
        autocast_half = autocast_dtype(x) if x.dtype == torch.float32 else None
        output_dtype = autocast_half or x.dtype
    if torch.compiler.is_compiling() or is_distributed(x):
        accumulation = ops.accumulation_dtype(x.dtype)
        weight, bias = (t if t is None else t.to(accumulation) for t in (weight, bias))
        return F.layer_norm(x.to(accumulation), shape, weight, bias, eps).to(output_dtype)
    check_gpu_has_kernels("layer_norm", x)
    weight, bias = (t.contiguous() if isinstance(t, Tensor) else t for t in (weight, bias))
    if len(shape) > 1:
        weight, bias = (t.flatten() if isinstance(t, Tensor) else t for t in (weight, bias))
        rows = layer_norm(
            x.flatten(-len(shape)), (math.prod(shape),), weight, bias, eps, output_dtype=output_dtype
        )
        return rows.view(x.shape)
    return select_apply(LayerNormFunction, x)(x, weight, bias, eps, output_dtype)


def act(x: Tensor, activation: str = "gelu", activation_param: float | None = None) -> Tensor:
    """Applies an activation: "gelu" (by erf), "gelu_tanh", "silu" and the others of `batch_norm_act`.

    On a CPU only "gelu_tanh" is much faster than torch's.

    Args:
        x: any shape and strides, in float16, bfloat16, float32 or float64.
        activation_param: slope of leaky_relu (None: 0.01) or alpha of elu (None: 1); the others have none.

    Returns:
        A new tensor of x's dtype and memory format. Saves x for backward. torch.compile, `recompute_scope`
        and derivatives as in `layer_norm`.
    """
    param = resolve_activation_param("act", activation, activation_param)
    check_tensor("act", x)
    if torch.compiler.is_compiling() or is_distributed(x):
        return apply_activation(x, activation, param)
    check_gpu_has_kernels("act", x)
    return select_apply(ActFunction, x)(activation, param, x)


@renamed_arguments(a="x", b="gate")
def gated_act(
    x: Tensor, gate: Tensor, activation: str = "silu", activation_param: float | None = None
) -> Tensor:
    """Returns `act(x) * gate`, computed in one pass: SwiGLU, or GEGLU with "gelu".

    Args:
        x, gate: one shape and dtype; any strides, so they may be the halves of one tensor.

    Other arguments and the result as in `act`. Saves x and gate for backward; torch's two ops save `act(x)`
    too.
    """
    param = resolve_activation_param("gated_act", activation, activation_param)
    check_tensor("gated_act", x, "x")
    check_tensor("gated_act", gate, "gate")
    if x.shape != gate.shape or x.dtype != gate.dtype:
        raise ValueError(
            f"gated_act: gate is {tuple(gate.shape)}, {gate.dtype}; {tuple(x.shape)}, {x.dtype} expected, "
            "as x"
        )
    if torch.compiler.is_compiling() or is_distributed(x):
        return apply_activation(x, activation, param) * gate
    check_gpu_has_kernels("gated_act", x)
    return select_apply(ActFunction, x)(activation, param, x, gate)


__getattr__ = renamed_names(__name__, {"glu": "fastvit.functional.gated_act"})
