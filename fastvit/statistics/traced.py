"""Exchanges as ops that torch.compile does not look into.

At run time a group does there what it does in eager mode, so ranks that compile and ranks that
do not can meet.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import check_devices
from .exchange import Tag
from .group import Layer, statistics_of


@torch.library.custom_op("fastvit::gather_moments", mutates_args=())
def gather_moments(
    moments: Tensor, group: str, world_size: int, op: str, number: int, momentum: float | None
) -> tuple[Tensor, Tensor]:
    shared = statistics_of(dist.distributed_c10d._resolve_process_group(group), moments.device)
    rows, tag = shared.gather(Layer(op, number, momentum), moments)
    return rows, torch.tensor(tag, device="cpu")


@gather_moments.register_fake
def _(moments, group, world_size, op, number, momentum):
    ticket = torch.empty(2, dtype=torch.int64, device="cpu")
    return moments.new_empty(world_size, moments.shape[0]), ticket


@torch.library.custom_op("fastvit::sum_over_ranks", mutates_args=())
def sum_over_ranks(sums: Tensor, ticket: Tensor, group: str) -> Tensor:
    shared = statistics_of(dist.distributed_c10d._resolve_process_group(group), sums.device)
    return shared.start_sum(sums, Tag(*ticket.tolist())).wait()


@sum_over_ranks.register_fake
def _(sums, ticket, group):
    check_devices("sum_over_ranks", {"sums": sums, "ticket": ticket}, on_cpu=("ticket",))
    return torch.empty_like(sums)
