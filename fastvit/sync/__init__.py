"""Shares statistics between ranks.

A layer takes its moments and sums from a `Transport`. `Local` is one process. `Shared` merges them over the
ranks of a process group. A group chooses one backend for all its layers: `SharedMemory` between the processes
of one host, `CudaIpc` between its GPUs, or `Collective`, one collective of torch.distributed in each
direction. When a rank is in another layer, dies or does not arrive, all others raise:
on CPUs before anything is written; on GPUs, which the host does not wait for, at the next call.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .custom_op import share
from .group import LayerKey, available_backends, check, describe_groups, group_of
from .rendezvous import rendezvous
from .transport import LOCAL, Local, Reduce, Transport

__all__ = [
    "LOCAL",
    "LayerKey",
    "Local",
    "Shared",
    "Transport",
    "available_backends",
    "check",
    "default_group",
    "describe_groups",
    "rendezvous",
    "transport_for",
]


class Shared:
    """Statistics over a process group, for one layer."""

    def __init__(self, process_group: "dist.ProcessGroup", layer: LayerKey):
        self._process_group, self._layer = process_group, layer

    def moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self._traced(ops.bn_stats(x, channel_dim), None)
        self._group = group_of(self._process_group, x.device)
        return self._group.moments(self._layer, x, channel_dim)

    def sums(self, reduce: Reduce, tag: Tensor | None) -> Tensor:
        assert tag is not None  # moments returned one
        if torch.compiler.is_compiling():
            return self._traced(reduce(None), tag)[0]
        return self._group.sums(reduce, tag)

    def _traced(self, numbers: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
        layer = self._layer
        return share(numbers, tag, self._process_group.group_name, layer.op, layer.number, layer.momentum)


def default_group(process_group: "dist.ProcessGroup | None") -> "dist.ProcessGroup | None":
    """`process_group`, or where it is None the default group; None where there is none."""
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group


def transport_for(process_group: "dist.ProcessGroup", layer: LayerKey) -> Transport:
    """The transport of a process group.

    Raises:
        ValueError: this process is not in the group.
        RuntimeError: the group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("process_group was destroyed; a group that exists, or None, expected")
    if process_group is not dist.GroupMember.NON_GROUP_MEMBER and process_group.size() == 1:
        return LOCAL
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            "process_group does not contain this rank "
            f"(global rank {dist.get_rank()}); a group that does, or None, expected"
        )
    return Shared(process_group, layer)
