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
    x: Tensor, *arguments: Any, group: dist.ProcessGroup | None = None, **options: Any
) -> Tensor:
    """`inplace_abn` with statistics over the ranks of `group` (None: all), by name or as 11th argument."""
    if len(arguments) == 10:
        *arguments, group = arguments  # type: ignore[assignment]
    return functional.inplace_abn_sync(x, *arguments, process_group=group, **options, abs_weight=True)
