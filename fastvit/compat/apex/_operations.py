"""Operations on lists of tensors, by the names and signatures of apex's compiled module `amp_C`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._fused import Tensors, is_flat, laid_as, norms

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

Lists = Sequence[Tensors]


def _float32(tensors: Tensors) -> Tensors:
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def _check(flag: Tensor, tensors: Tensors) -> None:
    if filled := [t for t in tensors if t.numel()]:
        largest = torch.stack([size.float() for size in torch._foreach_norm(filled, float("inf"))])
        flag.masked_fill_(~largest.isfinite().all(), 1)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Writes `scale` times the tensors of the first list into those of the second."""
    values, outputs = tensor_lists
    _check(noop_flag, values)
    torch._foreach_copy_(outputs, torch._foreach_mul(_float32(values), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """Writes `a * x + b * y` of the first two lists into the third; checks x (0), y (1) or both (-1)."""
    x, y, outputs = tensor_lists
    _check(noop_flag, [*x, *y] if arg_to_check == -1 else tensor_lists[arg_to_check])
    values = torch._foreach_mul(_float32(x), a)
    torch._foreach_copy_(outputs, torch._foreach_add(values, torch._foreach_mul(_float32(y), b)))


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The norm `(1,)` of all tensors together in float32; and of each, empty without `per_tensor`."""
    each = torch.stack(norms(tensor_lists[0], dtype=torch.float32))
    total = each.norm().reshape(1)
    noop_flag.masked_fill_(~total.isfinite(), 1)
    return total, each if per_tensor else each.new_empty(0)


multi_tensor_l2norm_mp = multi_tensor_l2norm


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale`, which stay as they are."""
    scaled = list(torch._foreach_mul(_float32(tensor_lists[0]), inv_scale.squeeze()))
    return multi_tensor_l2norm(chunk_size, noop_flag, [scaled], per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the first list times `scale`, which the second list gets."""
    scaled = list(torch._foreach_mul(_float32(tensor_lists[0]), scale))
    torch._foreach_copy_(tensor_lists[1], scaled)
    return multi_tensor_l2norm(chunk_size, noop_flag, [scaled], per_tensor)


def _copy_unless(skip: Tensor, outputs: Tensors, values: Tensors) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(torch.where(skip, output, value))


def _step(first_written: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes the step of an optimizer take tensors of any dtype and strides.

    The step gets float32 or float64 lists, laid out as the parameters, which are the second list. What it
    writes into the lists from `first_written` on is copied to the tensors given.
    """

    def decorate(step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(step)
        @torch.no_grad()
        def operation(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *options: Any) -> None:
            patterns = [p if is_flat(p) else p.contiguous() for p in _float32(tensor_lists[1])]
            lists = [
                [laid_as(pattern, t.to(pattern.dtype)) for t, pattern in zip(tensors, patterns, strict=False)]
                for tensors in tensor_lists
            ]
            step(noop_flag, lists, *options)
            for tensors, values in list(zip(tensor_lists, lists, strict=True))[first_written:]:
                for tensor, value in zip(tensors, values, strict=True):
                    if tensor is not value:
                        tensor.copy_(value)

        return operation

    return decorate


def _adam(
    lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int | Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    **of_scaler: Tensor,
) -> None:
    gradients, values, means, squares = lists
    device = values[0].device
    lr, step = (x.to(device) if isinstance(x, Tensor) else x for x in (lr, step))
    # No correction is one of infinitely many steps, where beta^step is 0.
    count = torch.full((), 0.0 if bias_correction else float("inf"), device=device) + step
    (torch._fused_adamw_ if mode else torch._fused_adam_)(
        values,
        gradients,
        means,
        squares,
        [],
        [count] * len(values),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        **of_scaler,
    )


@_step()
def multi_tensor_adam(noop_flag: Tensor, lists: Lists, *options: Any) -> None:
    """Step of FusedAdam, whatever the flag; lists of gradients, which stay, parameters and both moments.

    Options: lr, beta1, beta2, epsilon, step, mode (1: AdamW), bias_correction, weight_decay.
    """
    _adam(lists, *options)


@_step(0)
def multi_tensor_adam_capturable(noop_flag: Tensor, lists: Lists, *options: Any) -> None:
    """`multi_tensor_adam` with lr and step as tensors, and `inv_scale` after the other options, by which
    gradients are multiplied. Writes nothing if the flag is 1.
    """
    *options, inv_scale = options
    skip = noop_flag.to(lists[1][0].device) == 1
    scale = torch.where(skip, 1.0, inv_scale.to(skip.device)).reciprocal()
    _adam(lists, *options, grad_scale=scale, found_inf=skip.float())


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *options: Any
) -> None:
    """`multi_tensor_adam_capturable` of the fifth list, float32 masters, of which parameters get a copy."""
    gradients, parameters, means, squares, masters = tensor_lists
    multi_tensor_adam_capturable(chunk_size, noop_flag, [gradients, masters, means, squares], *options)
    _copy_unless(noop_flag.to(masters[0].device) == 1, parameters, masters)


@_step()
def multi_tensor_sgd(
    noop_flag: Tensor,
    lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Step of FusedSGD with gradients times `scale`; lists of gradients, which stay, parameters, momentum
    buffers, which the first run sets, and in the end copies of the parameters in half. Writes nothing if the
    flag is set.
    """
    gradients, values, buffers, *copies = lists
    skip = noop_flag.to(values[0].device) != 0
    if scale != 1.0:
        gradients = list(torch._foreach_mul(gradients, scale))
    if weight_decay and wd_after_momentum:
        torch._foreach_mul_(values, torch.where(skip, 1.0, 1.0 - lr * weight_decay).squeeze())
        weight_decay = 0.0
    torch._fused_sgd_(
        values,
        gradients,
        buffers if momentum else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first_run,
        found_inf=skip.float(),
    )
    for outputs in copies:
        _copy_unless(skip, outputs, values)


@_step()
def multi_tensor_lamb(
    noop_flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Step number `step` of FusedLAMB; lists of gradients, which stay, parameters and both moments."""
    gradients, values, means, squares = lists
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    if max_grad_norm:
        divisor = (global_grad_norm / max_grad_norm).clamp_min(1.0).squeeze()
        gradients = list(torch._foreach_div(gradients, divisor.to(values[0].device)))
    if weight_decay and not mode:
        gradients = list(torch._foreach_add(gradients, values, alpha=weight_decay))
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if grad_averaging else 1.0)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
    updates = torch._foreach_sqrt(squares)
    torch._foreach_div_(updates, correction2**0.5)
    torch._foreach_add_(updates, epsilon)
    updates = torch._foreach_div(means, updates)
    torch._foreach_div_(updates, correction1)
    if weight_decay and mode:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    if weight_decay or use_nvlamb:
        weight_norms, update_norms = (torch.stack(norms(tensors)) for tensors in (values, updates))
        moving = (weight_norms != 0) & (update_norms != 0)
        ratios = torch.where(moving, weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, ratios.unbind())
    torch._foreach_add_(values, updates, alpha=-lr)


@torch.no_grad()
def multi_tensor_lamb_mp(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *options: Any) -> None:
    """`multi_tensor_lamb` with tensors for lr, step and max_grad_norm, and after its options `found_inf` and
    `inv_scale`, by which gradients are multiplied; in a fifth list the parameters get a copy in half. Writes
    nothing if the flag or `found_inf` is set.
    """
    *options, found_inf, inv_scale = options
    if noop_flag.any() or found_inf.any():
        return
    gradients = list(torch._foreach_mul(_float32(tensor_lists[0]), inv_scale.squeeze()))
    numbers = [x.item() if isinstance(x, Tensor) else x for x in options]
    multi_tensor_lamb(chunk_size, noop_flag, [gradients, *tensor_lists[1:4]], *numbers)
    for copies in tensor_lists[4:]:
        torch._foreach_copy_(copies, tensor_lists[1])


@_step()
def multi_tensor_novograd(
    noop_flag: Tensor,
    lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    moment_mode: int,
    norm_type: int,
) -> None:
    """Step number `step` of FusedNovoGrad; lists of gradients, which stay, parameters and first moments.
    Averages the norms of the gradients into `grad_norms`.
    """
    gradients, values, means = lists
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = (1.0 - beta2**step) ** 0.5 if bias_correction else 1.0
    power = 2 if norm_type == 2 else 1
    fresh = torch.stack(norms(gradients, norm_type or float("inf")))
    blended = (beta2 * grad_norms**power + (1.0 - beta2) * fresh**power) ** (1 / power)
    divisors = (grad_norms.copy_(blended) / correction2 + epsilon).unbind()
    if moment_mode == 0:
        gradients = list(torch._foreach_div(gradients, divisors))
        if weight_decay:
            torch._foreach_add_(gradients, values, alpha=weight_decay)
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if grad_averaging else 1.0)
    updates = torch._foreach_div(means, correction1)
    if moment_mode:
        torch._foreach_div_(updates, divisors)
        if weight_decay:
            torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)
