"""apex's compiled module `amp_C` over torch's operations on lists of tensors, on the CPU and on CUDA.

All take `chunk_size`, which has no effect, an int32 flag `(1,)`, which is set to 1 for values that are not
finite, and lists of tensors of one device. Arithmetic is float32 for half tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._finder import finish
from .apex._fused import norms
from .apex.optimizers.fused_lamb import lamb_

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_lamb", "multi_tensor_scale"]

Lists = Sequence[list[Tensor]]

finish(__name__)


def _float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def _check(flag: Tensor, tensors: list[Tensor]) -> None:
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


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
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
    gradients, parameters, means, squares = tensor_lists
    values = _float32(parameters)
    divisor = (global_grad_norm / max_grad_norm).clamp_min(1.0).squeeze() if max_grad_norm else None
    group = {"step": step, "lr": lr, "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}
    group |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
    lamb_(values, _float32(gradients), means, squares, divisor, group, mode == 1, bool(use_nvlamb))
    torch._foreach_copy_(parameters, values)
