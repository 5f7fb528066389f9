"""mapillary's functions: fastvit's with `|weight| + eps`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastvit import functional


def inplace_abn(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`fastvit.functional.inplace_abn` with `|weight| + eps`; overwrites x."""
    return functional.inplace_abn(x, *arguments, **options, abs_weight=True)


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
