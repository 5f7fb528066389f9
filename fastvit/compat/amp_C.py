"""apex's compiled module `amp_C`, which uses torch's operations on lists of tensors, on the CPU and on CUDA.

Each function takes `chunk_size`, an int32 flag `(1,)` and lists of tensors of one device. `chunk_size` has no
effect. Norms, scale and axpby set the flag to 1 for values that are not finite. Half tensors are computed in
float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._import_hook import set_up_package
from .apex._fused_optimizer import (
    TensorList,
    compute_dtype,
    is_non_overlapping_and_dense,
    tensor_norms,
    with_strides_of,
)

TensorLists = Sequence[TensorList]
Options = dict[str, Any]

set_up_package(__name__)


def _to_compute_dtype(tensors: TensorList) -> TensorList:
    return [t.to(compute_dtype(t)) for t in tensors]


def _flag_non_finite(flag: Tensor, tensors: TensorList) -> None:
    """Sets `flag` to 1 if a tensor has a value that is not finite."""
    if non_empty := [t for t in tensors if t.numel()]:
        max_norms = torch.stack([norm.float() for norm in torch._foreach_norm(non_empty, float("inf"))])
        flag.masked_fill_(~max_norms.isfinite().all(), 1)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Writes `scale` times the tensors of the first list into those of the second."""
    values, outputs = tensor_lists
    _flag_non_finite(noop_flag, values)
    torch._foreach_copy_(outputs, torch._foreach_mul(_to_compute_dtype(values), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """Writes `a * x + b * y` of the first two lists into the third.

    `arg_to_check` is 0 to check x for values that are not finite, 1 for y, and -1 to check x and y.
    """
    x, y, outputs = tensor_lists
    _flag_non_finite(noop_flag, [*x, *y] if arg_to_check == -1 else tensor_lists[arg_to_check])
    values = torch._foreach_mul(_to_compute_dtype(x), a)
    torch._foreach_copy_(outputs, torch._foreach_add(values, torch._foreach_mul(_to_compute_dtype(y), b)))


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Returns the norm `(1,)` of all tensors together and the norms `(n,)` of the n tensors, in float32.

    Without `per_tensor` the second result is empty.
    """
    norms = torch.stack(tensor_norms(tensor_lists[0], dtype=torch.float32))
    total_norm = norms.norm().reshape(1)
    noop_flag.masked_fill_(~total_norm.isfinite(), 1)
    return total_norm, norms if per_tensor else norms.new_empty(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns `multi_tensor_l2norm` of the tensors times `inv_scale`. The tensors do not change."""
    scaled = list(torch._foreach_mul(_to_compute_dtype(tensor_lists[0]), inv_scale.squeeze()))
    return multi_tensor_l2norm(chunk_size, noop_flag, [scaled], per_tensor)


def _wrap_step(option_names: str, first_written_list: int = 1, num_optional: int = 0) -> Callable[..., Any]:
    """Returns a decorator for the step of an optimizer, which makes it a function of amp_C.

    That function takes tensors of any dtype and strides, and its options by position. The last `num_optional`
    options may be left out. The decorated step gets the flag, the lists in float32 or float64, and a dict of
    the options. Its lists have the strides of the parameters, which are the second list. The lists from
    index `first_written_list` on are copied back after the step.
    """

    def decorate(step: Callable[[Tensor, TensorLists, Options], None]) -> Callable[..., None]:
        @torch.no_grad()
        def operation(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *arguments: Any) -> None:
            if not len(valid_names) - num_optional <= len(arguments) <= len(valid_names):
                raise TypeError(
                    f"amp_C.{step.__name__} takes chunk_size, noop_flag, tensor_lists, "
                    f"{', '.join(valid_names)}; got {len(arguments)} arguments after the lists"
                )
            parameters = _to_compute_dtype(tensor_lists[1])
            values = [v if is_non_overlapping_and_dense(v) else v.contiguous() for v in parameters]
            lists = [
                [with_strides_of(v, t.to(v.dtype)) for v, t in zip(values, tensors, strict=False)]
                for tensors in (tensor_lists[0], values, *tensor_lists[2:])
            ]
            step(noop_flag.to(values[0].device), lists, dict(zip(valid_names, arguments, strict=False)))
            for tensors, results in list(zip(tensor_lists, lists, strict=True))[first_written_list:]:
                for tensor, result in zip(tensors, results, strict=True):
                    if tensor is not result:
                        tensor.copy_(result)

        valid_names = vars(operation)["options"] = option_names.split()
        operation.__name__, operation.__doc__ = step.__name__, step.__doc__
        return operation

    return decorate


_ADAM_OPTIONS = "lr beta1 beta2 eps step adam_w_mode bias_correction weight_decay"


def _step_fused_adam(lists: TensorLists, options: Options, **scaler_tensors: Tensor) -> None:
    """Steps `lists`; `scaler_tensors` are the arguments `grad_scale` and `found_inf` of torch's op."""
    gradients, values, exp_avgs, exp_avg_sqs = lists
    device = values[0].device
    lr, step = (x.to(device) if isinstance(x, Tensor) else x for x in (options["lr"], options["step"]))
    # Without bias correction the step count is infinite, so that beta^step is 0.
    step_count = torch.full((), 0.0 if options["bias_correction"] else float("inf"), device=device) + step
    fused: Callable[..., None] = torch._fused_adamw_ if options["adam_w_mode"] else torch._fused_adam_
    fused_options = {name: options[name] for name in ("beta1", "beta2", "weight_decay", "eps")}
    fused_options |= {"lr": lr, "amsgrad": False, "maximize": False}
    fused(
        values,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step_count] * len(values),
        **fused_options,
        **scaler_tensors,
    )


@_wrap_step(_ADAM_OPTIONS)
def multi_tensor_adam(noop_flag: Tensor, lists: TensorLists, options: Options) -> None:
    """Does a step of FusedAdam. The flag has no effect.

    The lists are gradients, which do not change, parameters, and both moments.
    """
    _step_fused_adam(lists, options)


@_wrap_step(_ADAM_OPTIONS + " inv_scale", first_written_list=0)
def multi_tensor_adam_capturable(noop_flag: Tensor, lists: TensorLists, options: Options) -> None:
    """Does `multi_tensor_adam` with gradients times `inv_scale`, which are written back.

    If the flag is 1, nothing is written.
    """
    is_skipped = noop_flag == 1
    scale = torch.where(is_skipped, 1.0, options["inv_scale"].to(is_skipped.device)).reciprocal()
    _step_fused_adam(lists, options, grad_scale=scale, found_inf=is_skipped.float())


@_wrap_step("weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale")
def multi_tensor_sgd(noop_flag: Tensor, lists: TensorLists, options: Options) -> None:
    """Does a step of FusedSGD with gradients times `scale`. If the flag is set, nothing is written.

    The lists are gradients, which do not change, parameters, momentum buffers, and optionally copies of the
    parameters in half precision. The first run sets the momentum buffers.
    """
    gradients, values, buffers, *copies = lists
    is_skipped, decay, lr = noop_flag != 0, options["weight_decay"], options["lr"]
    if options["scale"] != 1.0:
        gradients = list(torch._foreach_mul(gradients, options["scale"]))
    if decay and options["wd_after_momentum"]:
        torch._foreach_mul_(values, (1.0 - lr * decay * (~is_skipped).to(values[0].dtype)).squeeze())
        decay = 0.0
    fused_options = {name: options[name] for name in ("momentum", "dampening", "lr", "nesterov")}
    fused_options |= {"weight_decay": decay, "is_first_step": options["first_run"], "maximize": False}
    buffers = buffers if options["momentum"] else []
    torch._fused_sgd_(values, gradients, buffers, **fused_options, found_inf=is_skipped.float())
    for output, value in zip(*copies, values, strict=True) if copies else ():
        output.copy_(torch.where(is_skipped, output, value))


_MOMENT_OPTIONS = "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging"


def _compute_moment_factors(options: Options) -> tuple[float, ...]:
    """Returns the bias correction of each moment, beta1, beta2, and the gradient's weight in the first."""
    beta1, beta2, step = options["beta1"], options["beta2"], options["step"]
    corrections = (1.0 - beta1**step, 1.0 - beta2**step) if options["bias_correction"] else (1.0, 1.0)
    return *corrections, beta1, beta2, 1.0 - beta1 if options["grad_averaging"] else 1.0


@_wrap_step(_MOMENT_OPTIONS + " adam_w_mode global_grad_norm max_grad_norm use_nvlamb", num_optional=1)
def multi_tensor_lamb(noop_flag: Tensor, lists: TensorLists, options: Options) -> None:
    """Does a step of FusedLAMB. The lists are gradients, which do not change, parameters and both moments."""
    gradients, values, exp_avgs, exp_avg_sqs = lists
    correction1, correction2, beta1, beta2, gradient_weight = _compute_moment_factors(options)
    decay, is_decoupled, max_norm = options["weight_decay"], options["adam_w_mode"], options["max_grad_norm"]
    if max_norm:
        divisor = (options["global_grad_norm"] / max_norm).clamp_min(1.0).squeeze()
        gradients = list(torch._foreach_div(gradients, divisor.to(noop_flag.device)))
    if decay and not is_decoupled:
        gradients = list(torch._foreach_add(gradients, values, alpha=decay))
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, gradients, alpha=gradient_weight)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1.0 - beta2)
    updates = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(updates, correction2**0.5)
    torch._foreach_add_(updates, options["eps"])
    updates = torch._foreach_div(exp_avgs, updates)
    torch._foreach_div_(updates, correction1)
    if decay and is_decoupled:
        torch._foreach_add_(updates, values, alpha=decay)
    if decay or options.get("use_nvlamb"):
        weight_norms, update_norms = (torch.stack(tensor_norms(tensors)) for tensors in (values, updates))
        has_norms = (weight_norms != 0) & (update_norms != 0)
        ratios = torch.where(has_norms, weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, ratios.unbind())
    torch._foreach_add_(values, updates, alpha=-options["lr"])


@_wrap_step("grad_norms " + _MOMENT_OPTIONS + " moment_mode norm_type")
def multi_tensor_novograd(noop_flag: Tensor, lists: TensorLists, options: Options) -> None:
    """Does a step of FusedNovoGrad, and averages the norms of the gradients into `grad_norms`.

    The lists are gradients, which do not change, parameters and first moments.
    """
    gradients, values, exp_avgs = lists
    correction1, correction2, beta1, beta2, gradient_weight = _compute_moment_factors(options)
    decay, average_norms = options["weight_decay"], options["grad_norms"]
    # Squares of 2-norms are averaged, but largest values as they are.
    power = 2 if options["norm_type"] == 2 else 1
    new_norms = torch.stack(tensor_norms(gradients, options["norm_type"] or float("inf")))
    average_norms.copy_((beta2 * average_norms**power + (1.0 - beta2) * new_norms**power) ** (1 / power))
    divisors = (average_norms / correction2**0.5 + options["eps"]).unbind()
    if is_normalized_first := options["moment_mode"] == 0:
        gradients = list(torch._foreach_div(gradients, divisors))
        if decay:
            torch._foreach_add_(gradients, values, alpha=decay)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, gradients, alpha=gradient_weight)
    updates = torch._foreach_div(exp_avgs, correction1)
    if not is_normalized_first:
        torch._foreach_div_(updates, divisors)
        if decay:
            torch._foreach_add_(updates, values, alpha=decay)
    torch._foreach_add_(values, updates, alpha=-options["lr"])
