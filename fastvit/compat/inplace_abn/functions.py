"""mapillary's functions: fastvit's with `|weight| + eps`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from fastvit import functional

__all__ = ["inplace_abn", "inplace_abn_sync"]


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> Tensor:
    """`fastvit.functional.inplace_abn` with `|weight| + eps`; overwrites x."""
    return functional.inplace_abn(
        x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
        abs_weight=True,
    )  # fmt: skip


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`inplace_abn` with statistics over the ranks of `group` (None: all)."""
    return functional.inplace_abn_sync(
        x, weight, bias, running_mean, running_var, training, momentum, eps, activation, activation_param,
        process_group=group, abs_weight=True,
    )  # fmt: skip
