"""The raw ops: four memory-bound steps of a normalisation layer, for plain BN and in place; LayerNorm,
activations and gates.

Each op is registered as `torch.ops.fastvit.<name>` for CPU and CUDA, has a fake for tracing, and has the
same definition in plain PyTorch in `fastvit.reference`. None of them is differentiable by itself:
`fastvit.functional` puts them together.

Shapes. An activation `x` is `(N, C, *)` with 2 to 5 dimensions, or any layout of them in memory (NCHW,
channels_last, cropped, transposed); `channel_dim` says which dimension is C, so `(N, L, C)` is
`channel_dim=2`. Dtypes: float16, bfloat16, float32, float64. The accumulation type is float64 for float64
and float32 for the rest; `moments`, `saved` and `sums` have it. `weight`, `bias` and the running statistics
are `(C,)` in any floating-point dtype of their own, and may be None.

Packed tensors. `moments` is `mean[C], M2[C], count` and `saved` is `mean[C], invstd[C], count`, `2C + 2`
numbers each: the count takes two (`high * 2**24 + low`), so it is exact in float32. M2 is the sum of squared
deviations from the mean. `sums` is `sum dz[C], sum dz*xhat[C]`, with dz the gradient before the activation.

`exchange` (made by `fastvit.sync`) is a group of ranks that see each other's memory. With it, the ops that
form moments and sums send this rank's to all ranks, await theirs, and merge in rank order. After a failed
exchange the result is NaN, the count included. y and `saved` are NaN then, and nothing else is written.

Activations: "identity", "leaky_relu" (`activation_param` is the slope), "elu" (`activation_param` is alpha),
and not in place "relu", "relu6", "gelu", "gelu_tanh", "silu" and "hardswish".

The ops of LayerNorm, activations and gates take any shape; the rows of LayerNorm are the last dimension.

Errors are RuntimeErrors that name the op and the argument, before anything is read or written. All tensors of
a call are on one device; only `exchange` is on the CPU. On the meta device ops compute shapes only. A tensor
whose storage was freed or shrunk (by `resize_`, as FSDP does) is an error unless it is empty.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from . import _library

__all__ = [
    "abn_backward",
    "abn_forward",
    "abn_forward_",
    "abn_reduce",
    "act_backward",
    "act_forward",
    "bn_apply",
    "bn_backward",
    "bn_forward",
    "bn_reduce",
    "bn_stats",
    "glu_backward",
    "glu_forward",
    "layer_norm_backward",
    "layer_norm_forward",
]

_ops = _library.ops
F = TypeVar("F", bound=Callable)


def _mutated(*tensors: Tensor | None) -> None:
    """Increments autograd's version counters, which ops registered from C++ do not do."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_devices(op: str, tensors: dict[str, Tensor]) -> None:
    """Raises RuntimeError unless all tensors are on the first one's device, and `exchange` on the CPU.

    For fakes: torch calls a fake instead of a kernel when one argument is on meta. If the others are real
    tensors, its result is uninitialised memory.
    """
    first, device = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if name == "exchange":
            if tensor.device.type != "cpu":
                raise RuntimeError(f"{op}: {name} is on {tensor.device}; the CPU expected")
        elif tensor.device != device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}; {device} expected, where {first} is")


def _fake(allocate: Callable[..., object]) -> Callable[[F], F]:
    """Registers `allocate` as the fake of a function's op; it gets all arguments but the first by name."""

    def register(function: F) -> F:
        op = function.__name__
        if _library.NOT_BUILT:
            return function
        names = [argument.name for argument in getattr(_ops, op).default._schema.arguments]

        def checked(*args, **kwargs):
            named = dict(zip(names, args, strict=False)) | kwargs
            _check_devices(op, {name: t for name, t in named.items() if isinstance(t, Tensor)})
            return allocate(named.pop(names[0]), **named)

        torch.library.register_fake(f"fastvit::{op}")(checked)
        return function

    return register


def _packed(x: Tensor, channel_dim: int, extra: int = 2, **_) -> Tensor:
    return x.new_empty(2 * x.shape[channel_dim] + extra, dtype=accumulation_dtype(x.dtype))


def _like(x: Tensor, **_) -> Tensor:
    return torch.empty_like(x)


def _like_and_packed(x: Tensor, channel_dim: int, **_) -> tuple[Tensor, Tensor]:
    return _like(x), _packed(x, channel_dim)


def _sums(x: Tensor, channel_dim: int, exchange: Tensor | None = None, **_) -> Tensor:
    return x.new_empty(
        1 if exchange is None else 2, 2 * x.shape[channel_dim], dtype=accumulation_dtype(x.dtype)
    )


def _own_sums(x: Tensor, channel_dim: int, wanted: bool) -> Tensor:
    own = _packed(x, channel_dim, 0)
    return own if wanted else own.new_empty(0)


@_fake(_packed)
def bn_stats(x: Tensor, channel_dim: int = 1, exchange: Tensor | None = None) -> Tensor:
    """Per-channel moments of x, or with `exchange` of all ranks'.

    Returns `moments`, `(2C + 2,)`. An empty x gives zeros. Sums of squares are never formed: pieces merge
    by Chan, Golub, LeVeque (1979).
    """
    return _ops.bn_stats(x, channel_dim, exchange)


@_fake(_like_and_packed)
def bn_forward(
    x: Tensor,
    moments: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "identity",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """`y = act((x - mean) * invstd * weight + bias + z)`; returns `(y, saved)`.

    In training x is normalised by `moments`, or where they are None by its own, with the bits of
    `bn_stats(x)`: on CUDA an x that fits on chip (the shared memory of all multiprocessors together) is then
    read once, by one kernel. `running_mean`, `running_var` (unbiased) and `num_batches_tracked` are updated
    in place; a `momentum` of None averages cumulatively, with the factor `1 / num_batches_tracked`. If the
    count is 0, only num_batches_tracked changes; if it is NaN, nothing does. Without `training` the running
    statistics normalise and nothing is written. `z`, of x's shape and dtype, is added before the activation.
    """
    running = running_mean, running_var, num_batches_tracked
    options = momentum, eps, activation, activation_param, channel_dim, training
    y, saved = _ops.bn_forward(x, moments, weight, bias, z, *running, *options)
    if training:
        _mutated(*running)
    return y, saved


@_fake(_like)
def bn_apply(
    x: Tensor,
    saved: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    activation: str = "identity",
    activation_param: float = 0.01,
    channel_dim: int = 1,
) -> Tensor:
    """The y of a `bn_forward` that returned `saved`, computed again, bit for bit."""
    return _ops.bn_apply(x, saved, weight, bias, z, activation, activation_param, channel_dim)


@_fake(_packed)
def abn_forward_(
    x: Tensor,
    moments: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    training: bool = True,
) -> Tensor:
    """`bn_forward` written over x, to be inverted later; returns `saved`.

    gamma is taken as `copysign(max(|weight|, floor), weight)`; the floor is `max(1e-7, 2^-17 |bias|)` for
    float32, `max(1e-12, 2^-46 |bias|)` for float64, 1e-7 for bfloat16 and 1e-4 for float16. It is used for y
    and for the inversion, where it bounds the error of xhat (to 2^-7 in the first two). Gradients are those
    of the weight itself, which is never written. x must own its memory (no stride of 0). Source: Rota Bulò,
    Porzi, Kontschieder, arXiv:1712.02616.
    """
    running = running_mean, running_var, num_batches_tracked
    options = momentum, eps, activation, activation_param, channel_dim, training
    saved = _ops.abn_forward_(x, moments, weight, bias, *running, *options)
    _mutated(x)
    if training:
        _mutated(*running)
    return saved


@_fake(_like_and_packed)
def abn_forward(
    x: Tensor,
    moments: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """`abn_forward_` with a new result; returns `(y, saved)` and does not change x.

    torch.compile traces this op, and the compiler chooses the memory of y.
    """
    running = running_mean, running_var, num_batches_tracked
    options = momentum, eps, activation, activation_param, channel_dim, training
    y, saved = _ops.abn_forward(x, moments, weight, bias, *running, *options)
    if training:
        _mutated(*running)
    return y, saved


@_fake(_sums)
def bn_reduce(
    x: Tensor,
    dy: Tensor,
    z: Tensor | None,
    saved: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "identity",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    exchange: Tensor | None = None,
) -> Tensor:
    """`sums`: sum dz and sum dz*xhat per channel, xhat from x. `(1, 2C)`, this rank's; with `exchange`
    `(2, 2C)`, this rank's and those of all ranks.

    The first are the gradients of bias and weight, the last give dx. The other arguments are those of
    bn_forward.
    """
    return _ops.bn_reduce(x, dy, z, saved, weight, bias, activation, activation_param, channel_dim, exchange)


@_fake(_sums)
def abn_reduce(
    y: Tensor,
    dy: Tensor,
    saved: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    exchange: Tensor | None = None,
) -> Tensor:
    """`bn_reduce` with xhat recovered from the output y, and clamped to `|xhat| <= sqrt(count - 1)`."""
    return _ops.abn_reduce(y, dy, saved, weight, bias, activation, activation_param, channel_dim, exchange)


@_fake(
    lambda x, z, sums, channel_dim, training=True, **_: (
        _like(x),
        x.new_empty(0) if z is None else _like(z),
        _own_sums(x, channel_dim, training and sums is None),
    )
)
def bn_backward(
    x: Tensor,
    dy: Tensor,
    z: Tensor | None,
    saved: Tensor,
    sums: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "identity",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    training: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dx, dz, own)`: dx = weight * invstd * (dz - sum dz / n - xhat * sum(dz*xhat) / n).

    `sums`, `(2C,)`, are over all ranks and n is the count in `saved`. Where they are None in training, the op
    computes them with the bits of `bn_reduce` and returns them as `own`, which is empty otherwise; on CUDA
    that is one kernel where the operands fit on chip. Without `training` the statistics were
    constants, so dx = weight * invstd * dz. dz, the residual's gradient, is empty when z is None.
    """
    return _ops.bn_backward(
        x, dy, z, saved, sums, weight, bias, activation, activation_param, channel_dim, training
    )


@_fake(
    lambda y, sums, channel_dim, training=True, **_: (
        _like(y),
        _own_sums(y, channel_dim, training and sums is None),
    )
)
def abn_backward(
    y: Tensor,
    dy: Tensor,
    saved: Tensor,
    sums: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    channel_dim: int = 1,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """`(dx, own)` of `bn_backward` with xhat recovered from the output y."""
    return _ops.abn_backward(
        y, dy, saved, sums, weight, bias, activation, activation_param, channel_dim, training
    )


@_fake(
    lambda x, output_dtype=None, **_: (
        x.new_empty(x.shape, dtype=output_dtype),
        x.new_empty(2 * math.prod(x.shape[:-1]), dtype=accumulation_dtype(x.dtype)),
    )
)
def layer_norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`y = (x - mean) * invstd * weight + bias` over the last dimension; returns `(y, saved)`.

    Args:
        x: `(*, D)`, D >= 1; copied first where it is not contiguous.
        weight, bias: `(D,)`, or None.
        output_dtype: of y; None is x's. Only a float32 x may have another: float16 or bfloat16.

    y is contiguous. `saved` is `mean[rows], invstd[rows]` in the accumulation type. Source: Ba, Kiros,
    Hinton, arXiv:1607.06450.
    """
    return _ops.layer_norm_forward(x, weight, bias, eps, output_dtype)


@_fake(lambda x, parameters, **_: (x.new_empty(x.shape), _own_sums(x, -1, parameters)))
def layer_norm_backward(
    x: Tensor, dy: Tensor, saved: Tensor, weight: Tensor | None = None, parameters: bool = True
) -> tuple[Tensor, Tensor]:
    """`(dx, sums)` of `layer_norm_forward`: `sums` is `sum dy[D], sum dy*xhat[D]`, the gradients of bias and
    weight, and empty without `parameters`.

    dy has y's dtype, dx has x's. The order of summation depends on the shapes, and on CUDA also on the
    device.
    """
    return _ops.layer_norm_backward(x, dy, saved, weight, parameters)


@_fake(_like)
def act_forward(x: Tensor, activation: str = "gelu", activation_param: float = 0.0) -> Tensor:
    """`act(x)`, in x's dtype and memory format.

    These four ops read operands of any strides without a copy. The exception is an operand of more than 5
    dimensions whose strides differ from those of the first operand.
    """
    return _ops.act_forward(x, activation, activation_param)


@_fake(_like)
def act_backward(x: Tensor, dy: Tensor, activation: str = "gelu", activation_param: float = 0.0) -> Tensor:
    """`dx = dy * act'(x)`."""
    return _ops.act_backward(x, dy, activation, activation_param)


@_fake(_like)
def glu_forward(a: Tensor, b: Tensor, activation: str = "silu", activation_param: float = 0.0) -> Tensor:
    """`act(a) * b`, the gate of a GLU: SwiGLU with "silu", GEGLU with "gelu".

    a and b have one shape and dtype and any strides, so they may be the halves of one tensor. Source:
    Shazeer, arXiv:2002.05202.
    """
    return _ops.glu_forward(a, b, activation, activation_param)


@_fake(lambda a, **_: (_like(a), _like(a)))
def glu_backward(
    a: Tensor, b: Tensor, dy: Tensor, activation: str = "silu", activation_param: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`(da, db)`: da = dy * b * act'(a), db = dy * act(a), in one pass."""
    return _ops.glu_backward(a, b, dy, activation, activation_param)
