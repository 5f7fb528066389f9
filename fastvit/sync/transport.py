"""A `Transport` gives a layer its moments and sums, of this process alone or over a process group."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .._deprecation import RenamedAttribute
from .backend import ExchangeOp
from .custom_op import merge_over_ranks
from .statistics_group import LayerKey, get_statistics_group


class Transport(Protocol):
    """The source of a layer's statistics: one process, or a group.

    compute_moments: returns the moments of x over all ranks, `(2C + 2,)`, and a tag for the backward: a small
        CPU tensor, which a compiler saves like any other; None with one rank.
    compute_sums: returns `reduce(exchange)`: this rank's sums and those of all ranks, `(2, 2C)`; one row with
        one rank.

    After a failed exchange between CPUs this call raises. Between GPUs the results are NaN, the count
    included, and the next call raises. The running statistics and parameters are not written in either case.
    """

    def compute_moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None]: ...

    def compute_sums(self, reduce: ExchangeOp, tag: Tensor | None) -> Tensor: ...


class LocalTransport:
    """Statistics of this process alone. There is no exchange, so a layer may use the local ops."""

    moments, sums = RenamedAttribute("compute_moments"), RenamedAttribute("compute_sums")

    def compute_moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, None]:
        return ops.bn_stats(x, channel_dim), None

    def compute_sums(self, reduce: ExchangeOp, tag: Tensor | None) -> Tensor:
        return reduce(None)


LOCAL_TRANSPORT = LocalTransport()


class GroupTransport:
    """Statistics over a process group, for one layer."""

    moments, sums = RenamedAttribute("compute_moments"), RenamedAttribute("compute_sums")

    def __init__(self, process_group: "dist.ProcessGroup", layer: LayerKey):
        self._process_group, self._layer_key = process_group, layer

    def compute_moments(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self._merge_in_traced_code(ops.bn_stats(x, channel_dim), None)
        self._statistics_group = get_statistics_group(self._process_group, x.device)
        return self._statistics_group.compute_moments(self._layer_key, x, channel_dim)

    def compute_sums(self, reduce: ExchangeOp, tag: Tensor | None) -> Tensor:
        assert tag is not None  # compute_moments returned a tag.
        if torch.compiler.is_compiling():
            return self._merge_in_traced_code(reduce(None), tag)[0]
        return self._statistics_group.compute_sums(reduce, tag)

    def _merge_in_traced_code(self, numbers: Tensor, tag: Tensor | None) -> tuple[Tensor, Tensor]:
        op, layer_id, momentum = self._layer_key
        return merge_over_ranks(numbers, tag, self._process_group.group_name, op, layer_id, momentum)


def default_group(process_group: "dist.ProcessGroup | None") -> "dist.ProcessGroup | None":
    """Returns `process_group`, or the default group for None; None if there is no default group."""
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group


def get_transport(process_group: "dist.ProcessGroup", layer: LayerKey) -> Transport:
    """Returns the transport of a layer over a process group.

    Raises:
        ValueError: this process is not in the group.
        RuntimeError: the group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(f"{layer.op}: process_group was destroyed; a group that exists, or None, expected")
    if process_group is not dist.GroupMember.NON_GROUP_MEMBER and process_group.size() == 1:
        return LOCAL_TRANSPORT
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            f"{layer.op}: process_group does not contain this rank "
            f"(global rank {dist.get_rank()}); a group that does, or None, expected"
        )
    return GroupTransport(process_group, layer)
