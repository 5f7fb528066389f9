"""An exchange as a custom op, which torch.compile does not trace into.

At run time the op does the same as eager mode, so ranks that compile can exchange with ranks that do not.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .group import LayerKey, group_of


@torch.library.custom_op("fastvit::share", mutates_args=())
def share(
    numbers: Tensor, tag: Tensor | None, process_group: str, op: str, number: int, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """Shares moments, or sums where `tag` is given.

    Args:
        numbers: this rank's moments, `(2C + 2,)`, or sums, `(1, 2C)`.
        tag: of the forward, for sums; None for moments.

    Returns:
        The group's moments and their tag; or this rank's and the group's sums, `(2, 2C)`, and the tag.
    """
    resolved = dist.distributed_c10d._resolve_process_group(process_group)  # type: ignore[arg-type]
    shared = group_of(resolved, numbers.device)
    if tag is None:
        return shared.share_moments(LayerKey(op, number, momentum), numbers)
    return shared.share_sums(numbers, tag), tag.clone()


@share.register_fake
def _(numbers, tag, process_group, op, number, momentum):
    like = torch.empty_like(numbers) if tag is None else numbers.new_empty(2, numbers.shape[1])
    return like, torch.empty(2, dtype=torch.int64, device="cpu")
