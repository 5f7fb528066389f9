"""Chooses which tensors to rebuild, so that a training forward keeps no more than given bytes.

A site is an op in a block. Sites are ordered by the bytes that they free for their work: the bytes that
rebuilding moves, and the operations of matrix products. The numbers come from a forward that rebuilds every
site. The number of sites is found by bisection over measured forwards, because sites are not independent: two
may save views of one storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from ..recompute import OpSite, Policy, RecomputeLevel, observe_saved_tensors
from .copy_runner import Arguments, CopyRunner

__all__ = ["Budget", "parse_budget", "plan_budget"]

# Operations of a matrix product in the time of moving a byte: 10 to 20 in fp32 on CPUs and GPUs, 200 in half
# precision on a GPU.
_OPERATIONS_A_BYTE = 16
Budget = tuple[float, int]  # a share of the original's bytes, or 0, and then bytes


def plan_budget(
    model: nn.Module,
    policy: Policy,
    budget: Budget,
    arguments: Arguments,
    revert: Callable[[nn.Module], nn.Module],
    apply: Callable[[nn.Module, Policy], object],
) -> Policy:
    """The policy with the fewest sites that meets `budget`.

    Args:
        revert: makes a copy the original.
        apply: converts a copy.

    Raises:
        ValueError: none meets it.
    """
    share, allowed = budget
    trial = CopyRunner("convert", model, arguments)
    before = trial.measure_original_bytes(revert)
    if share:
        allowed = int(share * before)
    if allowed >= before:
        return dataclasses.replace(policy, sites=frozenset())
    copied = trial.training_copy()

    def kept(policy: Policy) -> int:
        apply(copied, policy)
        return trial.kept_bytes(copied)

    def first(count: int) -> Policy:
        return dataclasses.replace(policy, sites=frozenset(sites[:count]), share=allowed / before)

    sites: list[OpSite] = []
    least = before
    # Products take an order of magnitude more arithmetic. Several blocks that are made from one input need
    # more memory in backward.
    for level in (
        RecomputeLevel.CHEAP,
        RecomputeLevel.MATMULS,
        RecomputeLevel.EVERY_OP,
        RecomputeLevel.ACROSS_BLOCKS,
    ):
        policy = dataclasses.replace(policy, level=level, sites=None)
        apply(copied, policy)
        found = _sites(trial, copied)
        new = [site for site in found if site not in sites]
        if (
            level == RecomputeLevel.ACROSS_BLOCKS
        ):  # every second one first: the backward makes all between two kept ones at once
            new = [*new[1::2], *new[::2]]
        else:
            new.sort(key=found.__getitem__, reverse=True)
            sites = [site for site in sites if site in found]  # deep, not those of blocks' outputs
        cheaper, sites = len(sites), sites + new
        least = min(least, kept(policy))
        if least <= allowed:
            enough = bisect_left(
                range(len(sites)), True, lo=cheaper, key=lambda count: kept(first(count)) <= allowed
            )
            return first(enough)
    casts = any(torch.is_autocast_enabled(device.type) for device in trial.devices)
    raise ValueError(
        f"convert: a budget of {share or allowed} cannot be met; the least is {least} bytes, "
        f"{least / before:.3f} of the {before} that the original keeps"
        + ("; weight_casts=True frees copies of weights too" if casts and not policy.weight_casts else "")
    )


def parse_budget(budget: object) -> Budget:
    """The share or the bytes that a budget says.

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
            return number, 0
        elif not str(budget).strip().isdecimal():  # 2.0 is neither a share nor a number of bytes
            number = math.nan
        if number > 1:
            return 0.0, int(number)
    raise ValueError(
        "budget must be a share above 0 and at most 1, or bytes as an int or as '2 GiB', or 'least', "
        f"got {budget!r}"
    )


def _sites(trial: CopyRunner, model: nn.Module) -> dict[OpSite, float]:
    """The sites of what a forward rebuilds, in its order, and the bytes that each frees for its work."""
    freed: Counter[OpSite] = Counter()
    work: Counter[OpSite] = Counter()  # bytes that rebuilding moves, and matrix products in their time
    with observe_saved_tensors(lambda _: None) as watcher, trial.held(model):
        for one in watcher.decisions():
            if one.site is not None:
                freed[one.site] += one.freed
                work[one.site] += one.moved + one.flops // _OPERATIONS_A_BYTE
    return {site: freed[site] / work[site] for site in freed}
