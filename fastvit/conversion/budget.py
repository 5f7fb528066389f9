"""Chooses which tensors to recompute, so that a training forward keeps no more than given bytes.

A site is an op in a block. Sites are ordered by the bytes that they free for their work: the bytes that
recomputing moves, and the operations of matrix products. The numbers come from a forward that recomputes
every site. With example inputs the number of sites is found by bisection over measured forwards, because
sites are not independent: two may save views of one storage. Without them it is summed up from what a step
saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..recompute import OpSite, Policy, RecomputeLevel, SavedMemory, observe_saved_tensors
from .copy_runner import CopyRunner
from .nested_values import Arguments
from .scope_hooks import add_scope_hooks

# Operations of a matrix product in the time of moving a byte: 10 to 20 in fp32 on CPUs and GPUs, 200 in half
# precision on a GPU.
_OPERATIONS_A_BYTE = 16


class Budget(NamedTuple):
    """What may be kept: a fraction of the bytes that the original keeps, or, where that is 0, bytes."""

    fraction: float
    nbytes: int

    def allowed_bytes(self, original_bytes: int) -> int:
        return int(self.fraction * original_bytes) if self.fraction else self.nbytes

    def __str__(self) -> str:
        return str(self.fraction or self.nbytes)


class SiteCost(NamedTuple):
    """What recomputing the results of a site frees, and its work in bytes moved, products in their time."""

    freed_bytes: int = 0
    work: int = 0
    has_products: bool = False


def sum_site_costs(decisions: Iterable[SavedMemory]) -> dict[OpSite, SiteCost]:
    """Returns the sites of what a forward recomputes, in its order."""
    costs: dict[OpSite, SiteCost] = {}
    for one in decisions:
        if one.site is not None:
            before = costs.get(one.site, SiteCost())
            costs[one.site] = SiteCost(
                before.freed_bytes + one.freed,
                before.work + one.moved + one.flops // _OPERATIONS_A_BYTE,
                before.has_products or one.flops > 0,
            )
    return costs


def order_sites(costs: dict[OpSite, SiteCost], level: int, chosen: Iterable[OpSite] = ()) -> list[OpSite]:
    """Returns the sites of a forward at `level` in the order in which a budget takes them.

    Args:
        costs: of these sites, in the order of the forward.
        level: above all others ACROSS_BLOCKS adds the outputs of blocks.
        chosen: the order of the sites of the level below. These come first.
    """
    # EVERY_OP keeps block inputs and outputs, so sites of block outputs that a lower level recomputed are
    # dropped here.
    first = [site for site in chosen if site in costs or level == RecomputeLevel.ACROSS_BLOCKS]
    added = [site for site in costs if site not in set(first)]
    if level == RecomputeLevel.ACROSS_BLOCKS:
        # Every second one first: the backward makes all between two kept ones at once.
        return [*first, *added[1::2], *added[::2]]

    def rank(site: OpSite) -> tuple[bool, float]:
        return costs[site].has_products, -costs[site].freed_bytes / max(costs[site].work, 1)

    return first + sorted(added, key=rank)


def plan_budget(model: nn.Module, policy: Policy, budget: Budget, arguments: Arguments) -> Policy:
    """Returns the policy with the fewest sites that meets `budget`, measured with copies of the model.

    Raises:
        ValueError: none meets it.
    """
    runner = CopyRunner("convert", model, arguments)
    original = least = runner.measure_original_bytes()
    allowed = budget.allowed_bytes(original)
    if allowed >= original:
        return dataclasses.replace(policy, sites=frozenset())
    copied = runner.training_copy()

    def choose_first(count: int) -> Policy:
        return dataclasses.replace(policy, sites=frozenset(sites[:count]), share=allowed / original)

    def is_met_by_first(count: int) -> bool:
        add_scope_hooks(copied, choose_first(count))
        return runner.measure_kept_bytes(copied) <= allowed

    sites: list[OpSite] = []
    # The levels are tried in the order of their cost: matmuls take ten times the arithmetic, and recomputing
    # several blocks from one input raises the peak in backward.
    for level in RecomputeLevel:
        policy = dataclasses.replace(policy, level=level, sites=None)
        add_scope_hooks(copied, policy)
        with observe_saved_tensors(lambda _: None) as observer, runner.holding_output(copied):
            costs = sum_site_costs(observer.decisions())
        sites = order_sites(costs, level, sites)
        least = min(least, runner.measure_kept_bytes(copied))
        if least <= allowed:
            return choose_first(bisect_left(range(len(sites)), True, key=is_met_by_first))
    raise ValueError(f"convert: {describe_least(budget, least, original, policy)}")


def describe_least(budget: Budget, least: int, original: int, policy: Policy) -> str:
    """Returns what to say of a budget that cannot be met."""
    fraction = least / (original or 1)
    has_casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and not policy.weight_casts
    return (
        f"a budget of {budget} cannot be met; the least is {least} bytes, {fraction:.3f} of the {original} "
        f"that the original keeps; pass budget='least' or a budget above {fraction:.3f}"
        + ("; weight_casts=True frees copies of weights too" if has_casts else "")
    )


def parse_budget(budget: object) -> Budget:
    """Returns the share or the bytes that a budget says.

    Raises:
        ValueError: it is neither.
    """
    found = re.fullmatch(r"\s*([0-9.e+-]+)\s*([KMGT]i?B)?\s*", str(budget))
    with contextlib.suppress(ValueError):
        number = float(found[1]) if found and not isinstance(budget, bool) else math.nan
        if found and found[2]:
            number *= (1024 if "i" in found[2] else 1000) ** ("KMGT".index(found[2][0]) + 1)
            number //= 1
        elif 0 < number <= 1:
            return Budget(number, 0)
        elif not str(budget).strip().isdecimal():  # 2.0 is neither a share nor a number of bytes
            number = math.nan
        if number > 1:
            return Budget(0.0, int(number))
    raise ValueError(
        "convert: budget must be a share above 0 and at most 1, or bytes as an int or as '2 GiB', or "
        f"'least', got {budget!r}"
    )
