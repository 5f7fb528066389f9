"""apex's compiled module `amp_C` over torch's operations on lists of tensors, on the CPU and on CUDA.

All take `chunk_size`, which has no effect, an int32 flag `(1,)`, which norms, scale and axpby set to 1 for
values that are not finite, and lists of tensors of one device. Arithmetic is float32 for half tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._finder import finish
from .apex._fused_optimizer import (
    TensorList,
    compute_dtype,
    is_non_overlapping_and_dense,
    tensor_norms,
    with_strides_of,
)

Lists = Sequence[TensorList]
Options = dict[str, Any]

finish(__name__)


def _float32(tensors: TensorList) -> TensorList:
    return [t.to(compute_dtype(t)) for t in tensors]


def _check(flag: Tensor, tensors: TensorList) -> None:
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
    each = torch.stack(tensor_norms(tensor_lists[0], dtype=torch.float32))
    total = each.norm().reshape(1)
    noop_flag.masked_fill_(~total.isfinite(), 1)
    return total, each if per_tensor else each.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale`, which stay as they are."""
    scaled = list(torch._foreach_mul(_float32(tensor_lists[0]), inv_scale.squeeze()))
    return multi_tensor_l2norm(chunk_size, noop_flag, [scaled], per_tensor)


def _step(names: str, first_written: int = 1, optional: int = 0) -> Callable[..., Any]:
    """Makes the step of an optimizer take tensors of any dtype and strides, and its options by position.

    The step gets the flag, float32 or float64 lists, laid out as the parameters, which are the second list,
    and the options by their names, the last of which are optional. What it writes into the lists from
    `first_written` on is copied back.
    """

    def decorate(step: Callable[[Tensor, Lists, Options], None]) -> Callable[..., None]:
        @torch.no_grad()
        def operation(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *given: Any) -> None:
            if not len(options) - optional <= len(given) <= len(options):
                raise TypeError(
                    f"amp_C.{step.__name__} takes chunk_size, noop_flag, tensor_lists, {', '.join(options)}; "
                    f"got {len(given)} arguments after the lists"
                )
            values = [
                v if is_non_overlapping_and_dense(v) else v.contiguous() for v in _float32(tensor_lists[1])
            ]
            lists = [
                [with_strides_of(v, t.to(v.dtype)) for v, t in zip(values, tensors, strict=False)]
                for tensors in (tensor_lists[0], values, *tensor_lists[2:])
            ]
            step(noop_flag.to(values[0].device), lists, dict(zip(options, given, strict=False)))
            for tensors, written in list(zip(tensor_lists, lists, strict=True))[first_written:]:
                for tensor, result in zip(tensors, written, strict=True):
                    if tensor is not result:
                        tensor.copy_(result)

        options = vars(operation)["options"] = names.split()
        operation.__name__, operation.__doc__ = step.__name__, step.__doc__
        return operation

    return decorate


_ADAM = "lr beta1 beta2 eps step adam_w_mode bias_correction weight_decay"


def _adam(lists: Lists, options: Options, **of_scaler: Tensor) -> None:
    gradients, values, means, squares = lists
    device = values[0].device
    lr, step = (x.to(device) if isinstance(x, Tensor) else x for x in (options["lr"], options["step"]))
    # No correction is one of infinitely many steps, where beta^step is 0.
    count = torch.full((), 0.0 if options["bias_correction"] else float("inf"), device=device) + step
    fused: Callable[..., None] = torch._fused_adamw_ if options["adam_w_mode"] else torch._fused_adam_
    numbers = {name: options[name] for name in ("beta1", "beta2", "weight_decay", "eps")}
    numbers |= {"lr": lr, "amsgrad": False, "maximize": False}
    fused(values, gradients, means, squares, [], [count] * len(values), **numbers, **of_scaler)


@_step(_ADAM)
def multi_tensor_adam(noop_flag: Tensor, lists: Lists, options: Options) -> None:
    """Step of FusedAdam, whatever the flag; lists of gradients, which stay, parameters and both moments."""
    _adam(lists, options)


@_step(_ADAM + " inv_scale", first_written=0)
def multi_tensor_adam_capturable(noop_flag: Tensor, lists: Lists, options: Options) -> None:
    """`multi_tensor_adam` with gradients times `inv_scale`, which stay so; nothing if the flag is 1."""
    skip = noop_flag == 1
    scale = torch.where(skip, 1.0, options["inv_scale"].to(skip.device)).reciprocal()
    _adam(lists, options, grad_scale=scale, found_inf=skip.float())


@_step("weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale")
def multi_tensor_sgd(noop_flag: Tensor, lists: Lists, options: Options) -> None:
    """Step of FusedSGD with gradients times `scale`; lists of gradients, which stay, parameters, momentum
    buffers, which the first run sets, and in the end copies of the parameters in half. Writes nothing if the
    flag is set.
    """
    gradients, values, buffers, *copies = lists
    skip, decay, lr = noop_flag != 0, options["weight_decay"], options["lr"]
    if options["scale"] != 1.0:
        gradients = list(torch._foreach_mul(gradients, options["scale"]))
    if decay and options["wd_after_momentum"]:
        torch._foreach_mul_(values, (1.0 - lr * decay * (~skip).to(values[0].dtype)).squeeze())
        decay = 0.0
    numbers = {name: options[name] for name in ("momentum", "dampening", "lr", "nesterov")}
    numbers |= {"weight_decay": decay, "is_first_step": options["first_run"], "maximize": False}
    buffers = buffers if options["momentum"] else []
    torch._fused_sgd_(values, gradients, buffers, **numbers, found_inf=skip.float())
    for output, value in zip(*copies, values, strict=True) if copies else ():
        output.copy_(torch.where(skip, output, value))


_BETAS = "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging"


def _start(options: Options) -> tuple[float, ...]:
    """Both corrections of the bias, and the weights of the old moments and of a new first moment."""
    beta1, beta2, step = options["beta1"], options["beta2"], options["step"]
    corrections = (1.0 - beta1**step, 1.0 - beta2**step) if options["bias_correction"] else (1.0, 1.0)
    return *corrections, beta1, beta2, 1.0 - beta1 if options["grad_averaging"] else 1.0


@_step(_BETAS + " adam_w_mode global_grad_norm max_grad_norm use_nvlamb", optional=1)
def multi_tensor_lamb(noop_flag: Tensor, lists: Lists, options: Options) -> None:
    """Step of FusedLAMB; lists of gradients, which stay, parameters and both moments."""
    gradients, values, means, squares = lists
    correction1, correction2, beta1, beta2, share = _start(options)
    decay, decoupled, largest = options["weight_decay"], options["adam_w_mode"], options["max_grad_norm"]
    if largest:
        divisor = (options["global_grad_norm"] / largest).clamp_min(1.0).squeeze()
        gradients = list(torch._foreach_div(gradients, divisor.to(noop_flag.device)))
    if decay and not decoupled:
        gradients = list(torch._foreach_add(gradients, values, alpha=decay))
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=share)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
    updates = torch._foreach_sqrt(squares)
    torch._foreach_div_(updates, correction2**0.5)
    torch._foreach_add_(updates, options["eps"])
    updates = torch._foreach_div(means, updates)
    torch._foreach_div_(updates, correction1)
    if decay and decoupled:
        torch._foreach_add_(updates, values, alpha=decay)
    if decay or options.get("use_nvlamb"):
        weight_norms, update_norms = (torch.stack(tensor_norms(tensors)) for tensors in (values, updates))
        moving = (weight_norms != 0) & (update_norms != 0)
        ratios = torch.where(moving, weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, ratios.unbind())
    torch._foreach_add_(values, updates, alpha=-options["lr"])


@_step("grad_norms " + _BETAS + " moment_mode norm_type")
def multi_tensor_novograd(noop_flag: Tensor, lists: Lists, options: Options) -> None:
    """Step of FusedNovoGrad; lists of gradients, which stay, parameters and first moments. Averages the norms
    of the gradients into `grad_norms`.
    """
    gradients, values, means = lists
    correction1, correction2, beta1, beta2, share = _start(options)
    decay, average = options["weight_decay"], options["grad_norms"]
    power = 2 if options["norm_type"] == 2 else 1
    fresh = torch.stack(tensor_norms(gradients, options["norm_type"] or float("inf")))
    average.copy_((beta2 * average**power + (1.0 - beta2) * fresh**power) ** (1 / power))
    divisors = (average / correction2**0.5 + options["eps"]).unbind()
    if inside := options["moment_mode"] == 0:
        gradients = list(torch._foreach_div(gradients, divisors))
        if decay:
            torch._foreach_add_(gradients, values, alpha=decay)
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=share)
    updates = torch._foreach_div(means, correction1)
    if not inside:
        torch._foreach_div_(updates, divisors)
        if decay:
            torch._foreach_add_(updates, values, alpha=decay)
    torch._foreach_add_(values, updates, alpha=-options["lr"])
