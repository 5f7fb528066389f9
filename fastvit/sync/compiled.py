"""Sharing as an op that torch.compile does not look into.

At run time a group does there what it does in eager mode, so ranks that compile and ranks that do not can
meet.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import check_devices
from .group import LayerKey, group_of


@torch.library.custom_op("fastvit::share", mutates_args=())
def share(
    numbers: Tensor, tag: Tensor | None, group: str, op: str, number: int, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """Without a tag `numbers` are moments, `(2C + 2,)`: the group's, and their tag. With that of the forward
    they are sums, `(1, 2C)`: these, and the group's.
    """
    resolved = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a name of its own
    shared = group_of(resolved, numbers.device)
    if tag is None:
        return shared.share_moments(LayerKey(op, number, momentum), numbers)
    return shared.share_sums(numbers, tag), tag.clone()


@share.register_fake
def _(numbers, tag, group, op, number, momentum):
    if tag is not None:
        check_devices("share", {"numbers": numbers, "tag": tag}, on_cpu=("tag",))
    like = torch.empty_like(numbers) if tag is None else numbers.new_empty(2, numbers.shape[1])
    return like, torch.empty(2, dtype=torch.int64, device="cpu")
