"""Who shares a layer's statistics, and how: the one place where ranks talk to each other.

A layer takes its moments and sums from a `Transport`. `Local` is for one rank. `Shared` has them merged
over the ranks of a group, which has chosen one way for all its layers: `SharedMemory` between the processes
of one host, `CudaIpc` between its GPUs, `SymmMem` where that was asked for, or `Collective`, one packed
all_gather and one all_reduce of torch.distributed. Ranks that are in different layers, that died or do not
come are an error on every other rank: on CPUs before anything is written; on GPUs, which the host does not
wait for, at the next call.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .compiled import share
from .group import LayerKey, check, group_of, possible, taken
from .transport import Local, Reduce, Transport

__all__ = ["LayerKey", "Local", "Shared", "Transport", "check", "over", "possible", "taken"]


class Shared:
    """Statistics over a process group, for one layer."""

    def __init__(self, group: "dist.ProcessGroup", layer: LayerKey):
        self._group, self._layer = group, layer
        self.world_size = dist.get_world_size(group)

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self._traced(ops.bn_stats(x, channel_dim), None)
        self._device = x.device
        return group_of(self._group, x.device).moments(self._layer, x, channel_dim)

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor:
        assert tag is not None  # moments gave one
        if torch.compiler.is_compiling():
            return self._traced(reduce(None), tag)[0]
        return group_of(self._group, self._device).sums(reduce, tag)

    def check(self) -> None:
        check()

    def close(self) -> None:
        """The group is torch.distributed's to destroy."""

    def _traced(self, numbers: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
        layer = self._layer
        return share(numbers, tag, self._group.group_name, layer.op, layer.number, layer.momentum)


def over(group: "dist.ProcessGroup | None", layer: LayerKey) -> Transport:
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
    shared = dist.group.WORLD if group is None else group
    assert shared is not None
    return Shared(shared, layer)
