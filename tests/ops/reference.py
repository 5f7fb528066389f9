"""The ops in plain PyTorch: the definition against which the kernels are tested.

The functions have the names, arguments, defaults, shapes and results of `fastvit.ops`, but no `exchange`.
Everything is computed in float64, and results are rounded to the dtypes that the ops return.
"""

import torch
from torch import Tensor

from fastvit._formulas import apply_activation, effective_gamma
from fastvit.ops import accumulation_dtype

RADIX = 2.0**24  # float32 holds all integers up to it


def pack_count(count: float) -> tuple[float, float]:
    """Returns the two numbers that stand for a count in a packed tensor: exact also in float32."""
    return count // RADIX, count % RADIX


def unpack_count(packed: Tensor) -> Tensor:
    """Returns in float64 the count of each row of a packed tensor, from the row's last two numbers."""
    return packed[..., -2].double() * RADIX + packed[..., -1].double()


def channels_first(x: Tensor, channel_dim: int) -> Tensor:
    """Returns x as `(C, values)` in float64."""
    return x.double().movedim(channel_dim, 0).flatten(1)


def along_channels(
    vector: Tensor | None, x: Tensor, channel_dim: int, default: float = 0.0
) -> Tensor | float:
    """Returns a `(C,)` vector in float64, in a shape that broadcasts to x, or `default` for None."""
    if vector is None:
        return default
    return vector.double().reshape([-1 if d == channel_dim else 1 for d in range(x.dim())])


def invertible_gamma(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor | None:
    """Returns gamma with a floor, so that x can be recovered from y."""
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    return None if weight is None else effective_gamma(weight, bias, x.dtype)


def derivative(v: Tensor, activation: str, param: float) -> Tensor:
    """Returns the derivative of an activation at v."""
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        return torch.autograd.grad(apply_activation(v, activation, param).sum(), v)[0]


def invert_activation(y: Tensor, activation: str, param: float, accumulation: torch.dtype) -> Tensor:
    """Returns v for y. `accumulation` is the accumulation type of the op."""
    match activation:
        case "identity":
            return y
        case "leaky_relu":
            return torch.where(y > 0, y, y / param)
        case "elu":
            lower_bound = -1 + torch.finfo(accumulation).eps / 2  # log1p(-1) is infinite
            return torch.where(y > 0, y, torch.log1p((y / param).clamp(min=lower_bound, max=0)))
    raise RuntimeError(f"reference: activation {activation!r} cannot be inverted")


def bn_stats(x, channel_dim=1):
    values = channels_first(x, channel_dim)
    count = values.shape[1]
    mean = values.mean(1) if count else values.new_zeros(values.shape[0])
    m2 = ((values - mean[:, None]) ** 2).sum(1)
    packed = torch.cat([mean, m2, torch.tensor(pack_count(count), dtype=torch.float64, device=x.device)])
    return packed.to(accumulation_dtype(x.dtype))


def merge_moments(moments: Tensor) -> Tensor:
    """Merges the moments of all ranks, `(ranks, 2C + 2)`, in rank order by Chan's formula, to `(2C + 2,)`."""
    rows = moments.double()
    channels = (rows.shape[1] - 2) // 2
    count = rows.new_zeros(())
    mean = m2 = rows.new_zeros(channels)
    for row in rows:
        row_count = unpack_count(row)
        total = count + row_count
        if total > 0:
            delta = row[:channels] - mean
            mean = mean + delta * row_count / total
            m2 = m2 + row[channels : 2 * channels] + delta**2 * count * row_count / total
        count = total
    packed = torch.tensor(pack_count(count.item()), dtype=torch.float64, device=moments.device)
    return torch.cat([mean, m2, packed]).to(moments.dtype)


def bn_forward(
    x,
    weight=None,
    bias=None,
    residual=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    moments=None,
    running_mean=None,
    running_var=None,
    num_batches_tracked=None,
    momentum=0.1,
    eps=1e-5,
    training=True,
    invertible=False,
):
    if training and moments is None:
        moments = bn_stats(x, channel_dim)
    if moments is None:
        mean, var = running_mean.double(), running_var.double()
        packed_count = (float("inf"), 0.0)  # running statistics have no count of a batch
    else:
        channels, count = x.shape[channel_dim], unpack_count(moments)
        mean, m2 = moments[: 2 * channels].double().chunk(2)
        var = m2 if count == 0 else m2 / count  # m2 of an empty batch is 0
        packed_count = pack_count(count.item())
        if num_batches_tracked is not None and not count.isnan():
            num_batches_tracked += 1
        if running_mean is not None and count > 0:
            factor = 1.0 / num_batches_tracked.item() if momentum is None else momentum
            running_mean.copy_(running_mean.double().lerp(mean, factor))
            running_var.copy_(running_var.double().lerp(m2 / max(count.item() - 1, 1), factor))
    count = torch.tensor(packed_count, dtype=torch.float64, device=x.device)
    saved = torch.cat([mean, torch.rsqrt(var + eps), count])
    gamma = invertible_gamma(weight, bias, x) if invertible else weight
    y = bn_apply(x, saved, gamma, bias, residual, activation, activation_param, channel_dim)
    return y, saved.to(accumulation_dtype(x.dtype))


def bn_forward_inplace(
    x,
    weight=None,
    bias=None,
    residual=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    moments=None,
    running_mean=None,
    running_var=None,
    num_batches_tracked=None,
    momentum=0.1,
    eps=1e-5,
    training=True,
):
    shared_arguments = weight, bias, residual, activation, activation_param, channel_dim
    buffers = running_mean, running_var, num_batches_tracked
    y, saved = bn_forward(x, *shared_arguments, moments, *buffers, momentum, eps, training, invertible=True)
    x.copy_(y)
    return saved


def bn_apply(
    x,
    saved,
    weight=None,
    bias=None,
    residual=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
):
    mean, invstd = (along_channels(t, x, channel_dim) for t in saved[: 2 * x.shape[channel_dim]].chunk(2))
    v = (x.double() - mean) * invstd * along_channels(weight, x, channel_dim, 1.0)
    v = v + along_channels(bias, x, channel_dim) + (0 if residual is None else residual.double())
    return torch.empty_like(x).copy_(apply_activation(v, activation, activation_param))


def _compute_dv_and_xhat(input, dy, saved, shared_arguments, from_output):
    """Returns dv, the gradient of the value before the activation, and xhat, both in float64."""
    weight, bias, residual, activation, param, channel_dim = shared_arguments
    channels = input.shape[channel_dim]
    if not from_output:
        mean, invstd = (along_channels(t, input, channel_dim) for t in saved[: 2 * channels].chunk(2))
        xhat = (input.double() - mean) * invstd
        v = xhat * along_channels(weight, input, channel_dim, 1.0)
        v = v + along_channels(bias, input, channel_dim) + (0 if residual is None else residual.double())
        return dy.double() * derivative(v, activation, param), xhat
    y, gamma = input.double(), invertible_gamma(weight, bias, input)
    v = invert_activation(y, activation, param, saved.dtype)
    xhat = (v - along_channels(bias, y, channel_dim)) / along_channels(gamma, y, channel_dim, 1.0)
    limit = (unpack_count(saved) - 1).clamp(min=0).sqrt()  # no |xhat| of a batch of this count is larger
    derivatives = {"identity": torch.ones_like(y), "leaky_relu": torch.full_like(y, param), "elu": y + param}
    return torch.where(y > 0, dy.double(), dy.double() * derivatives[activation]), xhat.clamp(-limit, limit)


def bn_reduce(
    input,
    dy,
    saved,
    weight=None,
    bias=None,
    residual=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    from_output=False,
):
    shared_arguments = weight, bias, residual, activation, activation_param, channel_dim
    dv, xhat = _compute_dv_and_xhat(input, dy, saved, shared_arguments, from_output)
    sums = [channels_first(t, channel_dim).sum(1) for t in (dv, dv * xhat)]
    return torch.cat(sums)[None].to(accumulation_dtype(input.dtype))


def bn_backward(
    input,
    dy,
    saved,
    weight=None,
    bias=None,
    residual=None,
    activation="identity",
    activation_param=0.01,
    channel_dim=1,
    from_output=False,
    global_sums=None,
    training=True,
):
    shared_arguments = weight, bias, residual, activation, activation_param, channel_dim
    dv, xhat = _compute_dv_and_xhat(input, dy, saved, shared_arguments, from_output)
    channels, count = input.shape[channel_dim], unpack_count(saved)
    dx, local_sums = dv, saved[:0]
    if training and global_sums is None:
        (local_sums,) = bn_reduce(input, dy, saved, *shared_arguments, from_output)
        global_sums = local_sums
    if global_sums is not None and count > 0:
        means = (global_sums.double() / count).chunk(2)
        mean_dv, mean_dv_xhat = (along_channels(t, input, channel_dim) for t in means)
        dx = dv - mean_dv - xhat * mean_dv_xhat
    dx = dx * along_channels(weight, input, channel_dim, 1.0)  # the floor applies to the inversion only
    dx = dx * along_channels(saved[channels : 2 * channels], input, channel_dim)
    dresidual = input.new_empty(0) if residual is None else torch.empty_like(residual).copy_(dv)
    return torch.empty_like(input).copy_(dx), dresidual, local_sums


def _unpack_row_statistics(saved, x):
    """Returns the mean and invstd of each row, in a shape that broadcasts to x."""
    return (t.double().reshape(*x.shape[:-1], 1) for t in saved.chunk(2))


def layer_norm_forward(x, weight=None, bias=None, eps=1e-5, output_dtype=None):
    values = x.double()
    mean = values.mean(-1, keepdim=True)
    invstd = torch.rsqrt((values - mean).square().mean(-1, keepdim=True) + eps)
    y = (values - mean) * invstd * (1.0 if weight is None else weight.double())
    y = y + (0.0 if bias is None else bias.double())
    saved = torch.cat([mean.flatten(), invstd.flatten()]).to(accumulation_dtype(x.dtype))
    return y.to(output_dtype or x.dtype).contiguous(), saved


def layer_norm_backward(x, dy, saved, weight=None, parameters=True):
    mean, invstd = _unpack_row_statistics(saved, x)
    xhat, dy = (x.double() - mean) * invstd, dy.double()
    dxhat = dy if weight is None else dy * weight.double()
    mean_product = (dxhat * xhat).mean(-1, keepdim=True)
    dx = invstd * (dxhat - dxhat.mean(-1, keepdim=True) - xhat * mean_product)
    sums = torch.cat([t.reshape(-1, x.shape[-1]).sum(0) for t in (dy, dy * xhat)])
    return dx.to(x.dtype).contiguous(), sums[: None if parameters else 0].to(accumulation_dtype(x.dtype))


def act_forward(x, gate=None, activation="gelu", activation_param=0.0):
    y = apply_activation(x.double(), activation, activation_param)
    return torch.empty_like(x).copy_(y if gate is None else y * gate.double())


def act_backward(x, dy, gate=None, activation="gelu", activation_param=0.0):
    dx, dgate = dy.double() * derivative(x.double(), activation, activation_param), x.new_empty(0)
    if gate is not None:
        dx = dx * gate.double()
        dgate = torch.empty_like(x)
        dgate.copy_(dy.double() * apply_activation(x.double(), activation, activation_param))
    return torch.empty_like(x).copy_(dx), dgate
