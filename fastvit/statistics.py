"""Who shares a layer's statistics, and how: the one place where ranks talk to each other.

A layer's forward hands its packed moments to `gather`, its backward the packed local sums to `start_sum`.
`Local` gives them back; `Collective` makes one packed all_gather and one all_reduce of them. All collectives
are called as attributes of `torch.distributed`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Local:
    """Statistics of this process alone."""

    world_size = 1

    def gather(self, moments: Tensor) -> Tensor:
        return moments

    def start_sum(self, sums: Tensor) -> "PendingSum":
        return PendingSum(sums, None)


class Collective:
    """Statistics over a process group, by torch.distributed; gloo and NCCL alike.

    A rank that dies or never calls makes the others raise within the group's timeout.
    """

    def __init__(self, group: "dist.ProcessGroup | None"):
        self.group = group
        self.world_size = dist.get_world_size(group)

    def gather(self, moments: Tensor) -> Tensor:
        """The moments of all ranks, `(world_size, 2C + 2)`, in rank order."""
        rows = moments.new_empty(self.world_size * moments.numel())
        getattr(dist, ALL_GATHER)(rows, moments, group=self.group)
        return rows.view(self.world_size, -1)

    def start_sum(self, sums: Tensor) -> "PendingSum":
        """Starts adding up `sums`, `(2C,)`, over ranks; the argument itself stays local."""
        total = sums.clone()
        if torch.compiler.is_compiling():  # dynamo refuses async_op
            dist.all_reduce(total, group=self.group)
            return PendingSum(total, None)
        return PendingSum(total, dist.all_reduce(total, group=self.group, async_op=True))


class PendingSum:
    """A sum over ranks that may still be under way."""

    def __init__(self, total: Tensor, work: "dist.Work | None"):
        self.total = total
        self.work = work

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.total


def over(group: "dist.ProcessGroup | None" = None) -> "Local | Collective":
    """The statistics of a process group; None is the default group, or this process alone without one.

    Raises ValueError when this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Local()
    if dist.get_rank(group) < 0:
        raise ValueError(
            "process_group does not contain this rank "
            f"(global rank {dist.get_rank()}); a group that does, or None, expected"
        )
    return Collective(group) if dist.get_world_size(group) > 1 else Local()
