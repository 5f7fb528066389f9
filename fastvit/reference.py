"""The ops in plain PyTorch: the definition against which the kernels are tested.

Signatures, shapes and results are those of `fastvit.ops`. bn_reduce and bn_backward with in_place=True
compute abn_reduce and abn_backward. Everything is computed in float64, and results are rounded to the dtypes
that the ops return.
"""

import torch
from torch import Tensor

from ._formulas import activate, effective_gamma
from .ops import accumulation_dtype

RADIX = 2.0**24


def pack_count(count: float) -> tuple[float, float]:
    return count // RADIX, count % RADIX


def unpack_count(packed: Tensor) -> Tensor:
    """The count in the last two numbers of a packed tensor, as a float64 scalar (or one per row)."""
    return packed[..., -2].double() * RADIX + packed[..., -1].double()


def channels_first(x: Tensor, channel_dim: int) -> Tensor:
    """x as (C, values) in float64."""
    return x.double().movedim(channel_dim, 0).reshape(x.shape[channel_dim], -1)


def _along(vector: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return vector.double().reshape([-1 if d == channel_dim else 1 for d in range(x.dim())])


def _gamma_in_place(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor | None:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    return None if weight is None else effective_gamma(weight, bias, x.dtype)


def _derivative(v: Tensor, activation: str, param: float) -> Tensor:
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        return torch.autograd.grad(activate(v, activation, param).sum(), v)[0]


def _invert(y: Tensor, activation: str, param: float, accumulation: torch.dtype) -> Tensor:
    match activation:
        case "identity":
            return y
        case "leaky_relu":
            return torch.where(y > 0, y, y / param)
        case "elu":
            lowest = -1 + torch.finfo(accumulation).eps / 2
            return torch.where(y > 0, y, torch.log1p((y / param).clamp(min=lowest, max=0)))
    raise RuntimeError(f"reference: activation {activation!r} cannot be inverted")


def bn_stats(x, channel_dim=1):
    values = channels_first(x, channel_dim)
    count = values.shape[1]
    mean = values.mean(1) if count else values.new_zeros(values.shape[0])
    m2 = ((values - mean[:, None]) ** 2).sum(1)
    packed = torch.cat([mean, m2, torch.tensor(pack_count(count), dtype=torch.float64, device=x.device)])
    return packed.to(accumulation_dtype(x.dtype))


def merge_moments(moments: Tensor) -> Tensor:
    """(ranks, 2C + 2) to the moments over all ranks, one row (Chan et al., in rank order)."""
    rows = moments.double()
    channels = (rows.shape[1] - 2) // 2
    count = rows.new_zeros(())
    mean = m2 = rows.new_zeros(channels)
    for row in rows:
        other = unpack_count(row)
        total = count + other
        if total > 0:
            delta = row[:channels] - mean
            mean = mean + delta * other / total
            m2 = m2 + row[channels : 2 * channels] + delta**2 * count * other / total
        count = total
    packed = torch.tensor(pack_count(count.item()), dtype=torch.float64, device=moments.device)
    return torch.cat([mean, m2, packed]).to(moments.dtype)


def bn_forward(
    x,
    moments=None,
    weight=None,
    bias=None,
    z=None,
    running_mean=None,
    running_var=None,
    num_batches_tracked=None,
    momentum=0.1,
    eps=1e-5,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    training=True,
):
    if training and moments is None:
        moments = bn_stats(x, channel_dim)
    if moments is None:
        mean, var = running_mean.double(), running_var.double()
        packed_count = (float("inf"), 0.0)
    else:
        channels, count = x.shape[channel_dim], unpack_count(moments)
        mean, m2 = moments[: 2 * channels].double().chunk(2)
        var = m2 if count == 0 else m2 / count
        packed_count = pack_count(count.item())
        if num_batches_tracked is not None and not count.isnan():
            num_batches_tracked += 1
        if running_mean is not None and count > 0:
            factor = 1.0 / num_batches_tracked.item() if momentum is None else momentum
            running_mean.copy_(running_mean.double().lerp(mean, factor))
            running_var.copy_(running_var.double().lerp(m2 / max(count.item() - 1, 1), factor))
    count = torch.tensor(packed_count, dtype=torch.float64, device=x.device)
    saved = torch.cat([mean, torch.rsqrt(var + eps), count])
    y = bn_apply(x, saved, weight, bias, z, activation, activation_param, channel_dim)
    return y, saved.to(accumulation_dtype(x.dtype))


def bn_apply(
    x, saved, weight=None, bias=None, z=None, activation="identity", activation_param=0.01, channel_dim=1
):
    mean, invstd = saved[: 2 * x.shape[channel_dim]].chunk(2)
    v = (x.double() - _along(mean, x, channel_dim)) * _along(invstd, x, channel_dim)
    v = v * (1.0 if weight is None else _along(weight, x, channel_dim))
    v = v + (0 if bias is None else _along(bias, x, channel_dim)) + (0 if z is None else z.double())
    return torch.empty_like(x).copy_(activate(v, activation, activation_param))


def abn_forward(x, moments=None, weight=None, bias=None, *running, activation="leaky_relu", **options):
    options |= {"activation": activation}
    return bn_forward(x, moments, _gamma_in_place(weight, bias, x), bias, None, *running, **options)


def abn_forward_(x, *arguments, **options):
    y, saved = abn_forward(x, *arguments, **options)
    x.copy_(y)
    return saved


def _recover(input, dy, z, saved, weight, bias, activation, param, channel_dim, in_place):
    """(dz, xhat, invstd, count) of a backward step, all float64."""
    channels = input.shape[channel_dim]
    saved_dtype, saved = saved.dtype, saved.double()
    mean, invstd, count = saved[:channels], saved[channels : 2 * channels], unpack_count(saved)
    beta = 0 if bias is None else _along(bias, input, channel_dim)
    gamma = _gamma_in_place(weight, bias, input) if in_place else weight
    gamma = 1.0 if gamma is None else _along(gamma, input, channel_dim)
    if in_place:
        v = _invert(input.double(), activation, param, saved_dtype)
        limit = (count - 1).clamp(min=0).sqrt()
        xhat = ((v - beta) / gamma).clamp(-limit, limit)
        dz, y = dy.double(), input.double()
        if activation == "leaky_relu":
            dz = torch.where(y > 0, dz, dz * param)
        elif activation == "elu":
            dz = torch.where(y > 0, dz, dz * (y + param))
    else:
        xhat = (input.double() - _along(mean, input, channel_dim)) * _along(invstd, input, channel_dim)
        v = xhat * gamma + beta + (0 if z is None else z.double())
        dz = dy.double() * _derivative(v, activation, param)
    return dz, xhat, invstd, count


def bn_reduce(
    x,
    dy,
    z,
    saved,
    weight=None,
    bias=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    in_place=False,
):
    norm = weight, bias, activation, activation_param, channel_dim, in_place
    dz, xhat, *_ = _recover(x, dy, z, saved, *norm)
    values = [channels_first(t, channel_dim) for t in (dz, dz * xhat)]
    return torch.cat([t.sum(1) for t in values])[None].to(accumulation_dtype(x.dtype))


def abn_reduce(y, dy, saved, weight=None, bias=None, activation="leaky_relu", **options):
    return bn_reduce(y, dy, None, saved, weight, bias, activation, **options, in_place=True)


def bn_backward(
    x,
    dy,
    z,
    saved,
    sums=None,
    weight=None,
    bias=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    training=True,
    in_place=False,
):
    norm = weight, bias, activation, activation_param, channel_dim, in_place
    dz, xhat, invstd, count = _recover(x, dy, z, saved, *norm)
    dx, own = dz, saved[:0]
    if training and sums is None:
        (own,) = bn_reduce(x, dy, z, saved, *norm)
        sums = own
    if sums is not None and count > 0:
        mean_dz, mean_dz_xhat = (sums.double() / count).chunk(2)
        dx = dz - _along(mean_dz, x, channel_dim) - xhat * _along(mean_dz_xhat, x, channel_dim)
    gamma = 1.0 if weight is None else weight.double()  # the floor applies to the inversion only
    dx = torch.empty_like(x).copy_(dx * _along(gamma * invstd, x, channel_dim))
    return dx, x.new_empty(0) if z is None else torch.empty_like(z).copy_(dz), own


def abn_backward(y, dy, saved, sums=None, weight=None, bias=None, activation="leaky_relu", **options):
    dx, _, own = bn_backward(y, dy, None, saved, sums, weight, bias, activation, **options, in_place=True)
    return dx, own


def _per_row(saved, x):
    """mean and invstd of layer_norm_forward, as columns."""
    return (part.double().reshape(*x.shape[:-1], 1) for part in saved.chunk(2))


def layer_norm_forward(x, weight=None, bias=None, eps=1e-5, output_dtype=None):
    values = x.double()
    mean = values.mean(-1, keepdim=True)
    invstd = torch.rsqrt((values - mean).square().mean(-1, keepdim=True) + eps)
    y = (values - mean) * invstd * (1.0 if weight is None else weight.double())
    y = y + (0.0 if bias is None else bias.double())
    saved = torch.cat([mean.flatten(), invstd.flatten()]).to(accumulation_dtype(x.dtype))
    return y.to(output_dtype or x.dtype).contiguous(), saved


def layer_norm_backward(x, dy, saved, weight=None, parameters=True):
    mean, invstd = _per_row(saved, x)
    xhat, dy = (x.double() - mean) * invstd, dy.double()
    g = dy if weight is None else dy * weight.double()
    dx = invstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    sums = torch.cat([t.reshape(-1, x.shape[-1]).sum(0) for t in (dy, dy * xhat)])
    return dx.to(x.dtype).contiguous(), sums[: None if parameters else 0].to(accumulation_dtype(x.dtype))


def act_forward(x, activation="gelu", activation_param=0.0):
    return torch.empty_like(x).copy_(activate(x.double(), activation, activation_param))


def act_backward(x, dy, activation="gelu", activation_param=0.0):
    slope = _derivative(x.double(), activation, activation_param)
    return torch.empty_like(x).copy_(dy.double() * slope)


def glu_forward(a, b, activation="silu", activation_param=0.0):
    return torch.empty_like(a).copy_(activate(a.double(), activation, activation_param) * b.double())


def glu_backward(a, b, dy, activation="silu", activation_param=0.0):
    da = dy.double() * b.double() * _derivative(a.double(), activation, activation_param)
    db = dy.double() * activate(a.double(), activation, activation_param)
    return torch.empty_like(a).copy_(da), torch.empty_like(a).copy_(db)
