"""Which tensors are rebuilt so that a training forward keeps no more than a share of what it kept.

The cheapest: those that free most bytes for the arithmetic of making them again. They are chosen by block and
op, since the same op in another block is as cheap. Bytes and arithmetic are read from the graph of one
training forward that rebuilds all it can; how many sites the budget takes is found by measuring, since what
one site frees depends on the others (two may keep views of the same memory).
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import nn

from ..recompute import Policy
from ..recompute.policy import Site
from ..recompute.values import Value
from .accounts import op_name, rebuilt
from .calls import Arguments
from .rebuilding import RebuiltBlock
from .runtime import ConvertedRoot
from .sizes import kept_bytes


def keep_to(model: nn.Module, arguments: Arguments, budget: float, before: int, policy: Policy) -> str:
    """Restricts what `model`, converted with `policy`, rebuilds; returns what was chosen, for the report."""
    fewest = 0
    sites: list[Site] = []
    for products in (False, True):  # which come last: they take an order more arithmetic
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
    """What a forward keeps with `policy`, and what it rebuilds: most bytes for its arithmetic first."""
    saved: Counter[Site | None] = Counter()
    work: Counter[Site | None] = Counter()

    def look(result: object) -> None:
        for value in rebuilt(result, model):
            saved[value.site] += value.nbytes
            work[value.site] += _arithmetic(value, value.nbytes)

    _restrict(model, policy)
    kept, _ = kept_bytes(model, arguments, look)
    return kept, sorted(saved, key=lambda site: -saved[site] / work[site])  # alike in their order


def _arithmetic(value: Value, nbytes: int) -> int:
    """Operations, up to a constant, that rebuild `value` from what somebody has saved, kept or rebuilt
    itself; what nobody has saved on the way is taken to be of its size.
    """
    todo, total = [value], 0
    while todo:
        value = todo.pop()
        total += value.flops * nbytes
        for argument in value.arguments:
            source = getattr(argument, "value", argument)  # of a view
            if isinstance(source, Value) and source.site is None and source.kept() is None:
                todo.append(source)
    return total


def _restrict(model: nn.Module, policy: Policy) -> None:
    for module in model.modules():
        if isinstance(module, RebuiltBlock):
            module._policy = policy
        elif isinstance(module, ConvertedRoot):
            module._proof.policy = policy


def _described(chosen: list[Site], sites: list[Site]) -> str:
    """Ops, and in how many of the blocks that have them."""
    some, all_ = (Counter(op_name(op) for _, op in which) for which in (chosen, sites))
    parts = [f"{op} in {count} of {all_[op]} blocks" for op, count in some.items()]
    return ", ".join(parts) or "nothing: fused layers meet it"
