"""An exchange as a custom op, which torch.compile does not trace into.

At run time the op does the same as a layer in eager mode, so compiled ranks can exchange with eager ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .statistics_group import LayerKey, get_statistics_group

# Exported programs and compiled caches contain the op's name and its arguments' names, so these must not
# change: `number` is the layer_id.
_OP_NAME = "fastvit::share"
_SCHEMA = (
    "(Tensor numbers, Tensor? tag, str process_group, str op, SymInt number, float? momentum)"
    " -> (Tensor, Tensor)"
)


@torch.library.custom_op(_OP_NAME, mutates_args=(), schema=_SCHEMA)
def merge_over_ranks(
    numbers: Tensor, tag: Tensor | None, group_name: str, op: str, layer_id: int, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """Merges moments if `tag` is None, or else sums.

    Args:
        numbers: this rank's moments, `(2C + 2,)`, or sums, `(1, 2C)`.
        tag: the tag of the forward, for sums; None for moments.

    Returns:
        For moments, the moments of all ranks, `(2C + 2,)`, and their new tag. For sums, the sums of this rank
        and those of all ranks, `(2, 2C)`, and a copy of `tag`.
    """
    process_group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    statistics_group = get_statistics_group(process_group, numbers.device)
    if tag is None:
        return statistics_group.merge_moments(LayerKey(op, layer_id, momentum), numbers)
    return statistics_group.merge_sums(numbers, tag), tag.clone()


@merge_over_ranks.register_fake
def _(numbers, tag, group_name, op, layer_id, momentum):
    merged = torch.empty_like(numbers) if tag is None else numbers.new_empty(2, numbers.shape[1])
    return merged, torch.empty(2, dtype=torch.int64, device="cpu")
