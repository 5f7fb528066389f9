"""Who shares a layer's statistics, and how: the one place where ranks talk to each other.

A layer's forward takes its packed moments from `moments`, its backward hands the packed local sums to
`start_sum`. `Local` has nobody to ask. `Shared` exchanges them with the ranks of a group, which has chosen
one way for all its layers: `SharedMemory` between the processes of one host, `CudaIpc` between its GPUs,
`SymmMem` where that was asked for, or `Collective`, one packed all_gather and one all_reduce of
torch.distributed. Ranks that are in different layers, that died or do not come are an error on every other
rank: on CPUs before anything is written; on GPUs, which the host does not wait for, at the next call.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .exchange import PendingSum, Tag
from .group import Layer, check, possible, statistics_of, taken
from .traced import gather_moments, sum_over_ranks

__all__ = ["Layer", "Local", "Shared", "check", "over", "possible", "taken"]


class Local:
    """Statistics of this process alone: nothing to exchange, so a layer may take the local ops."""

    world_size = 1

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, None, None]:
        return ops.bn_stats(x, channel_dim), None, None

    def gather(self, moments: Tensor) -> tuple[Tensor, None]:
        return moments, None


class Shared:
    """Statistics over a process group, for one layer."""

    def __init__(self, group: "dist.ProcessGroup", layer: Layer):
        self._group, self._layer = group, layer
        self.world_size = dist.get_world_size(group)

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None, "Tag | Tensor"]:
        """What the forward op of a layer takes: moments and `exchange`; and a ticket for the backward.

        With an exchange the moments are this rank's, sent by the op that made them; without, all ranks'.
        """
        if not torch.compiler.is_compiling():
            shared = statistics_of(self._group, x.device)
            if (begun := shared.begin(self._layer, x, channel_dim)) is not None:
                exchange, ticket = begun
                return ops.bn_stats(x, channel_dim, exchange), exchange, ticket
        moments, ticket = self.gather(ops.bn_stats(x, channel_dim))
        return moments, None, ticket

    def exchange(self, x: Tensor, ticket: "Tag | Tensor") -> Tensor | None:
        """What the reducing op of a layer takes to send its sums, and then its backward op to await them."""
        if torch.compiler.is_compiling():
            return None
        return statistics_of(self._group, x.device).begin_sum(ticket)

    def gather(self, moments: Tensor) -> tuple[Tensor, "Tag | Tensor"]:
        """The moments of all ranks, `(world_size, 2C + 2)` in rank order, and a ticket for `start_sum`: a
        tensor where a compiler traces."""
        if torch.compiler.is_compiling():
            name, layer = self._group.group_name, self._layer
            return gather_moments(moments, name, self.world_size, layer.op, layer.number, layer.momentum)
        return statistics_of(self._group, moments.device).gather(self._layer, moments)

    def start_sum(self, sums: Tensor, ticket: "Tag | Tensor", exchange: Tensor | None = None) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks; `wait()` of what is returned gives the total.

        The argument stays local. `ticket` is that of the forward. Sums that an op has sent by an `exchange`
        are added up by the op that awaits them, which takes the local ones.
        """
        if exchange is not None:
            return PendingSum(lambda: sums)
        if torch.compiler.is_compiling():  # which schedules for itself
            total = sum_over_ranks(sums, ticket, self._group.group_name)
            return PendingSum(lambda: total)
        return statistics_of(self._group, sums.device).start_sum(sums, ticket)


def over(group: "dist.ProcessGroup | None", layer: Layer) -> "Local | Shared":
    """The statistics of a process group; None is the default group, or this process alone without one.

    Raises ValueError when this process is not in the group, RuntimeError when the group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise RuntimeError("process_group was destroyed; a group that exists, or None, expected")
        return Local()
    if dist.get_rank(group) < 0:
        raise ValueError(
            "process_group does not contain this rank "
            f"(global rank {dist.get_rank()}); a group that does, or None, expected"
        )
    if dist.get_world_size(group) == 1:
        return Local()
    return Shared(dist.group.WORLD if group is None else group, layer)
