"""Process groups of the synchronised layers, with mapillary's names."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

_groups: WeakKeyDictionary = WeakKeyDictionary()


def active_group(active: bool) -> dist.ProcessGroup | None:
    """The group of the ranks that passed True, or None. Every rank calls it; each group is made once."""
    world = dist.group.WORLD
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, bool(active))
    ranks = tuple(rank for rank, flag in enumerate(flags) if flag)
    if not ranks or len(ranks) == len(flags):
        return world if ranks else None
    known = _groups.setdefault(world, {})
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks))
    return known[ranks]


def set_active_group(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Calls `set_group(group)` of every layer in `module` that has it."""
    for layer in module.modules():
        set_group = getattr(layer, "set_group", None)
        if callable(set_group):
            set_group(group)
