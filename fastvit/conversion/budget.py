"""Chooses which tensors to rebuild, so that a training forward keeps no more than a given share.

A site is an op in a block. Sites are ordered by the bytes that they free per byte that rebuilding moves,
since memory bounds these ops, and per operation of matrix products; the numbers are read from the graph of a
training forward that rebuilds every site. The number of sites is found by bisection over measured forwards,
because sites are not independent: two may save views of one storage.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import nn

from ..recompute import Policy
from ..recompute.policy import Site
from .calls import Arguments
from .measure import kept_bytes, op_name, rebuilt_values
from .rebuilding import RebuiltBlock
from .runtime import ConvertedRoot


def apply_budget(model: nn.Module, arguments: Arguments, budget: float, before: int, policy: Policy) -> str:
    """Sets the sites that `model`, converted with `policy`, rebuilds; returns a line for the report.

    Args:
        before: bytes that a training forward of the original keeps.
    """
    fewest = 0
    sites: list[Site] = []
    for products in (False, True):  # products last: they take an order of magnitude more arithmetic
        policy = dataclasses.replace(policy, products=products)
        fewest = len(sites)
        everything, found = _sites(model, arguments, policy)
        sites += [site for site in found if site not in sites]
        if everything <= budget * before:
            break
    else:
        return (
            f"a budget of {budget:.0%} is not met: all that can be rebuilt leaves {everything / before:.1%}"
        )
    enough = len(sites)
    while fewest < enough:
        middle = (fewest + enough) // 2
        _restrict(model, dataclasses.replace(policy, sites=frozenset(sites[:middle])))
        kept, _ = kept_bytes(model, arguments)
        if kept > budget * before:
            fewest = middle + 1
        else:
            enough = middle
    _restrict(model, dataclasses.replace(policy, sites=frozenset(sites[:enough])))
    return f"a budget of {budget:.0%} takes {_described(sites[:enough], sites)}"


def _sites(model: nn.Module, arguments: Arguments, policy: Policy) -> tuple[int, list[Site]]:
    """The bytes that a forward keeps with `policy`, and its sites: most bytes for their work first."""
    freed: Counter[Site | None] = Counter()
    work: Counter[Site | None] = Counter()

    def look(result: object) -> None:
        for value in rebuilt_values(result, model):
            freed[value.site] += value.nbytes
            work[value.site] += value.moved + value.flops

    _restrict(model, policy)
    kept, _ = kept_bytes(model, arguments, look)
    return kept, sorted(freed, key=lambda site: -freed[site] / work[site])


def _restrict(model: nn.Module, policy: Policy) -> None:
    for module in model.modules():
        if isinstance(module, RebuiltBlock):
            module._policy = policy
        elif isinstance(module, ConvertedRoot):
            module._proof.policy = policy


def _described(chosen: list[Site], sites: list[Site]) -> str:
    """The chosen ops, each with the number of blocks that rebuild it and of blocks that have it."""
    some, all_ = (Counter(op_name(op) for _, op in which) for which in (chosen, sites))
    parts = [f"{op} in {count} of {all_[op]} blocks" for op, count in some.items()]
    return ", ".join(parts) or "nothing: fused layers alone meet it"
