"""The raw ops: the memory-bound steps of a batch norm, LayerNorm, activations and gates.

Each op is `torch.ops.fastvit.<name>` for CPU and CUDA. The order and the defaults of its arguments are in
its schema alone, in csrc/batch_norm.h, layer_norm.h or activation_ops.h. Its `__doc__` begins with the
schema. This file has the documentation of each op, and its fake, which gives shapes and dtypes in tracing.
`fastvit.functional` makes the ops differentiable, and increments the version counters of tensors that they
write.

Shapes. An activation `x` is `(N, C, *)` with 2 to 5 dimensions, or any layout of them in memory (NCHW,
channels_last, cropped, transposed); `channel_dim` says which dimension is C, so `(N, L, C)` is
`channel_dim=2`. Dtypes: float16, bfloat16, float32, float64. The accumulation type is float64 for float64
and float32 for the rest; `moments`, `saved` and sums have it. `weight`, `bias` and the running statistics
are `(C,)` in any floating-point dtype of their own, and may be None. `residual`, of x's shape and dtype, is
added before the activation.

Packed tensors. `moments` is `mean[C], M2[C], count` and `saved` is `mean[C], invstd[C], count`, `2C + 2`
numbers each: the count takes two (`high * 2**24 + low`), so it is exact in float32. M2 is the sum of squared
deviations from the mean. Sums are `sum dv[C], sum dv*xhat[C]`, with v the value before the activation and dv
its gradient: `local_sums` of this rank, `global_sums` of all ranks.

`exchange` (made by `fastvit.sync`) is a group of ranks that see each other's memory. With it, the ops that
form moments and sums send this rank's to all ranks, await theirs, and merge in rank order. After a failed
exchange the result is NaN, the count included. y and `saved` are NaN then, and nothing else is written.

Activations: "identity", "leaky_relu" (`activation_param` is the slope), "elu" (`activation_param` is alpha),
and in ops that do not recover x from y "relu", "relu6", "gelu", "gelu_tanh", "silu" and "hardswish".

The ops of LayerNorm, activations and gates take any shape; the rows of LayerNorm are the last dimension.

Errors are RuntimeErrors that name the op and the argument, before anything is read or written. All tensors of
a call are on one device; only `exchange` is on the CPU. On the meta device ops compute shapes only. A tensor
whose storage was freed or shrunk (by `resize_`, as FSDP does) is an error unless it is empty.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _library, _old_ops

__all__ = [
    "act_backward",
    "act_forward",
    "bn_apply",
    "bn_backward",
    "bn_forward",
    "bn_forward_inplace",
    "bn_reduce",
    "bn_stats",
    "layer_norm_backward",
    "layer_norm_forward",
]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_devices(op: str, tensors: dict[str, Tensor]) -> None:
    """Raises RuntimeError unless all tensors are on the first one's device, and `exchange` on the CPU.

    torch runs a fake if any argument is on meta. If other arguments were real tensors, the result would be
    uninitialised memory.
    """
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if name == "exchange":
            if tensor.device.type != "cpu":
                raise RuntimeError(f"{op}: {name} is on {tensor.device}; the CPU expected")
        elif tensor.device != device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}; {device} expected, where {first} is")


def _op_with_fake(fake: Callable[..., Any]) -> Any:
    """Registers a function as the fake of the op of its name, and returns the op.

    The fake gets all arguments by name, those with defaults too. Its docstring is the op's.
    """
    name = fake.__name__
    if _library.NOT_BUILT_REASON:
        return lambda *args, **kwargs: _library.require_kernels(f"fastvit.ops.{name}")
    op = getattr(_library.fastvit_ops, name).default
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}

    def fake_with_device_check(*args, **kwargs):
        named = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        _check_devices(name, {argument: t for argument, t in named.items() if isinstance(t, Tensor)})
        return fake(**named)

    torch.library.register_fake(f"fastvit::{name}")(fake_with_device_check)
    op.__doc__ = f"{op._schema}\n\n{inspect.cleandoc(fake.__doc__ or '')}"
    return op


def _fake_packed(x: Tensor, *sizes: int) -> Tensor:
    return x.new_empty(sizes, dtype=accumulation_dtype(x.dtype))


@_op_with_fake
def bn_stats(x: Tensor, channel_dim: int, **_) -> Tensor:
    """Returns the `moments` of x per channel, `(2C + 2,)`; with `exchange` those of all ranks.

    An empty x gives zeros. Sums of squares are never formed: pieces merge
    by Chan, Golub, LeVeque (1979).
    """
    return _fake_packed(x, 2 * x.shape[channel_dim] + 2)


@_op_with_fake
def bn_forward(x: Tensor, channel_dim: int, **_) -> tuple[Tensor, Tensor]:
    """Returns `(y, saved)` with `y = act((x - mean) * invstd * weight + bias + residual)`.

    In training x is normalised by `moments`. If they are None, the op computes the moments of x, with the
    bits of `bn_stats(x)`; on CUDA one kernel then reads x once, if x fits on chip (into the shared memory of
    all multiprocessors together). `running_mean`, `running_var` (unbiased) and `num_batches_tracked` are
    updated in place; a `momentum` of None averages cumulatively, with the factor `1 / num_batches_tracked`.
    If the count is 0, only num_batches_tracked changes; if the count is NaN, nothing does. Without `training`
    x is normalised by the running statistics, and nothing is written.

    `invertible` says that y is inverted later, by an op with `from_output`, as after `bn_forward_inplace`.
    torch.compile traces this form, and the compiler chooses the memory of y.
    """
    return torch.empty_like(x), _fake_packed(x, 2 * x.shape[channel_dim] + 2)


@_op_with_fake
def bn_forward_inplace(x: Tensor, channel_dim: int, **_) -> Tensor:
    """Writes the y of `bn_forward(invertible=True)` over x, and returns `saved`.

    gamma is taken as `copysign(max(|weight|, floor), weight)`; the floor is `max(1e-7, 2^-17 |bias|)` for
    float32, `max(1e-12, 2^-46 |bias|)` for float64, 1e-7 for bfloat16 and 1e-4 for float16. It is used for y
    and for the inversion, where it bounds the error of xhat (to 2^-7 in the first two). Gradients are those
    of the weight itself, which is never written. x must own its memory (no stride of 0), and there is no
    residual. Source: Rota Bulò, Porzi, Kontschieder, arXiv:1712.02616.
    """
    return _fake_packed(x, 2 * x.shape[channel_dim] + 2)


@_op_with_fake
def bn_apply(x: Tensor, **_) -> Tensor:
    """Recomputes, bit for bit, the y of a `bn_forward` without `invertible` that returned `saved`."""
    return torch.empty_like(x)


@_op_with_fake
def bn_reduce(input: Tensor, channel_dim: int, exchange: Tensor | None, **_) -> Tensor:
    """Returns the sums of dv and dv*xhat per channel: `local_sums`, `(1, 2C)`; with `exchange` `global_sums`
    too, `(2, 2C)`.

    The local sums are the gradients of bias and weight. dx needs the global sums. `input` is x, or with
    `from_output` y, from which xhat is recovered and clamped to `|xhat| <= sqrt(count - 1)`. The other
    arguments are those of the forward op.
    """
    return _fake_packed(input, 1 if exchange is None else 2, 2 * input.shape[channel_dim])


@_op_with_fake
def bn_backward(
    input: Tensor,
    residual: Tensor | None,
    channel_dim: int,
    global_sums: Tensor | None,
    training: bool,
    **_,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dx, dresidual, local_sums)`.

    dx = weight * invstd * (dv - sum dv / n - xhat * sum(dv*xhat) / n), with n the count in `saved`. If
    `global_sums`, `(2C,)`, are None in training, the op computes the sums with the bits of `bn_reduce` and
    returns them as `local_sums`, which is empty otherwise; on CUDA that is one kernel where the operands fit
    on chip. Without `training` the statistics were constants, so dx = weight * invstd * dv. dresidual, which
    is dv, is empty where residual is None. `input` is as in `bn_reduce`.
    """
    return (
        torch.empty_like(input),
        input.new_empty(0) if residual is None else torch.empty_like(residual),
        _fake_packed(input, 2 * input.shape[channel_dim] if training and global_sums is None else 0),
    )


@_op_with_fake
def layer_norm_forward(x: Tensor, output_dtype: torch.dtype | None, **_) -> tuple[Tensor, Tensor]:
    """Returns `(y, saved)` with `y = (x - mean) * invstd * weight + bias` over the last dimension.

    Args:
        x: `(*, D)`, D >= 1; copied first where it is not contiguous.
        weight, bias: `(D,)`, or None.
        output_dtype: dtype of y; None is x's. Only a float32 x may have another: float16 or bfloat16.

    y is contiguous. `saved` is `mean[rows], invstd[rows]` in the accumulation type. Source: Ba, Kiros,
    Hinton, arXiv:1607.06450.
    """
    return x.new_empty(x.shape, dtype=output_dtype), _fake_packed(x, 2 * math.prod(x.shape[:-1]))


@_op_with_fake
def layer_norm_backward(x: Tensor, parameters: bool, **_) -> tuple[Tensor, Tensor]:
    """Returns `(dx, sums)` for `layer_norm_forward`.

    `sums` is `sum dy[D], sum dy*xhat[D]`, the gradients of bias and weight. It is empty without `parameters`.
    dy has y's dtype, dx has x's. The order of summation depends on the shapes, and on CUDA also on the
    device.
    """
    return x.new_empty(x.shape), _fake_packed(x, 2 * x.shape[-1] if parameters else 0)


@_op_with_fake
def act_forward(x: Tensor, **_) -> Tensor:
    """Returns `act(x)`, or with a gate `act(x) * gate`, in x's dtype and memory format.

    The gated forms are SwiGLU with "silu" and GEGLU with "gelu".

    This op and its backward read operands of any strides without a copy, so that x and gate may be the halves
    of one tensor. The exception is an operand of more than 5 dimensions whose strides differ from those of x.
    Source of gates: Shazeer, arXiv:2002.05202.
    """
    return torch.empty_like(x)


@_op_with_fake
def act_backward(x: Tensor, gate: Tensor | None, **_) -> tuple[Tensor, Tensor]:
    """Returns `(dx, dgate)`, computed in one pass.

    dx = dy * act'(x), and with a gate dx = dy * gate * act'(x), dgate = dy * act(x). Without a gate dgate is
    empty.
    """
    return torch.empty_like(x), x.new_empty(0) if gate is None else torch.empty_like(x)


if not _library.NOT_BUILT_REASON:
    _old_ops.define_old_ops()


def __getattr__(name: str) -> Any:
    if name in _old_ops.NAMES:
        return getattr(_library.fastvit_ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
