"""`make_plans`: what a step recomputes for ever smaller peaks, each time by the least work that it finds.

The plans of a step are one list, made without knowing a budget. A budget takes the first plan that meets it,
so a smaller budget never has a larger peak.

Values that a block makes are chosen together: sets of them lie on the convex hull of the bytes that they
free over the work of making them again, of which an op that several need is paid once. The whole block is
one of the sets. The set that frees most for its work, where the peak is, is the next plan's. At the end
single values change sides, as long as the peak falls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import NamedTuple

from ..recompute import OpSite, RecomputeLevel
from ..recompute.step_record import StepRecord, Value
from .timeline import Timeline

_MAX_SITES = 40  # of a group; the sets of a group take time with the square of it
_MAX_CHANGES = 64  # of single values
Price = Callable[[Value], float]


class Plan(NamedTuple):
    """What a step recomputes, its peak, the bytes that it keeps after the forward, and its extra work."""

    recomputed: frozenset[Value]
    peak: int
    kept: int
    work: float
    level: RecomputeLevel

    @property
    def sites(self) -> frozenset[OpSite]:
        return frozenset(value.site for value in self.recomputed if value.site is not None)


class _ValueSet(NamedTuple):
    """Values of a group, the bytes that a step does not keep, and the work of making them."""

    work: float
    freed: int
    values: frozenset[Value]


def make_plans(record: StepRecord, price: Price) -> list[Plan]:
    """Returns plans with ever smaller peaks and ever more work, the first one without recomputed values.

    Args:
        price: the work of making a value from what its op reads.
    """
    search = _Search(record, price)
    while search.take_next_set():
        pass
    search.try_whole_blocks()
    for _ in range(_MAX_CHANGES):
        if not search.change_one_value():
            break
    return _drop_dominated(search.plans)


def _drop_dominated(plans: list[Plan]) -> list[Plan]:
    """Returns the plans for which there is none with as small a peak for less work."""
    kept: list[Plan] = []
    for plan in reversed(plans):
        if not kept or plan.work < kept[-1].work:
            kept.append(plan)
    if kept[-1] is not plans[0]:
        kept.append(plans[0])
    return kept[::-1]


class _Search:
    """The search for plans."""

    def __init__(self, record: StepRecord, price: Price):
        self._record, self._price = record, price
        self._timeline = Timeline(record)
        self._groups = _group_values(record, price)
        self._indices = [0] * len(self._groups)  # of the set that each group has
        self.plans: list[Plan] = []
        self._take(frozenset())

    def _take(self, recomputed: frozenset[Value]) -> None:
        self._recomputed = recomputed
        self._memory, self._run = self._timeline.replay(recomputed)
        self._peak = max(self._memory)
        if not self.plans or self._peak < self.plans[-1].peak:
            level = max((value.level for value in self._run), default=RecomputeLevel.CHEAP)
            kept, work = self._memory[self._record.length - 1], sum(map(self._price, self._run))
            level = RecomputeLevel.CHEAP if level == RecomputeLevel.CHEAP else RecomputeLevel.EVERY_OP
            self.plans.append(Plan(recomputed, self._peak, kept, work, level))

    def take_next_set(self) -> bool:
        """Takes the larger set of a group that frees most for its work at the peak, if there is one."""
        slot = self._memory.index(self._peak)
        choices = []
        for number, sets in enumerate(self._groups):
            now = sets[self._indices[number]]
            if any(one.created <= slot <= self._timeline.last_slot(one) for one in sets[-1].values):
                for index in range(self._indices[number] + 1, len(sets)):
                    after = sets[index]
                    slope = (after.freed - now.freed) / max(after.work - now.work, 1)
                    choices.append((-slope, index, number))
        for _, index, number in sorted(choices):
            sets = self._groups[number]
            recomputed = (self._recomputed - sets[-1].values) | sets[index].values
            memory, _ = self._timeline.replay(recomputed)
            if memory[slot] < self._peak and max(memory) <= self._peak:
                self._indices[number] = index
                self._take(recomputed)
                return True
        return False

    def try_whole_blocks(self) -> None:
        """Recomputes all but what goes into blocks and comes out of them, if that has a smaller peak."""
        values = self._record.values
        inside = frozenset(value for value in values if value.is_choice and not value.is_block_io)
        if max(self._timeline.replay(inside)[0]) < self._peak:
            self._take(inside)

    def change_one_value(self) -> bool:
        """Keeps or recomputes one value more, so that the peak falls most. Returns whether it does."""
        slot = self._memory.index(self._peak)
        there = {
            one.value
            for one in self._timeline.find_intervals(self._recomputed)[0]
            if one.first <= slot <= one.last and one.value is not None and one.value.is_choice
        }
        found = [
            (max(self._timeline.replay(other)[0]), value.created, other)
            for value in there
            for other in [self._recomputed ^ {value}]
        ]
        peak, _, recomputed = min(found, default=(self._peak, 0, self._recomputed), key=lambda one: one[:2])
        if peak >= self._peak:
            return False
        self._take(recomputed)
        return True


def _group_values(record: StepRecord, price: Price) -> list[list[_ValueSet]]:
    """Returns the sets of each group, from none of its values to all."""
    grouped: dict[int, list[Value]] = {}
    for value in record.values:
        grouped.setdefault(bisect_left(record.plans, value.created), []).append(value)
    groups = []
    for values in grouped.values():
        prices = {value: price(value) for value in values}
        choices = [value for value in values if value.is_choice]
        for start in range(0, len(choices), _MAX_SITES):
            groups.append(_find_sets(choices[start : start + _MAX_SITES], prices))
    return groups


def _find_sets(choices: list[Value], prices: dict[Value, float]) -> list[_ValueSet]:
    """Returns sets of `choices` on the convex hull of freed bytes over work.

    They come from two searches: one adds the value that frees most for its work, the other one begins with
    all and keeps the value that takes most work for its bytes.
    """

    def make_set(values: Collection[Value]) -> _ValueSet:
        freed = sum(value.nbytes - value.mask_bytes for value in values)
        return _ValueSet(_sum_work(values, prices), freed, frozenset(values))

    found = [make_set(())]
    while left := [one for one in choices if one not in found[-1].values]:
        now = found[-1]
        larger = [make_set((*now.values, one)) for one in left]
        found.append(max(larger, key=lambda one: (one.freed - now.freed) / max(one.work - now.work, 1)))
    now = everything = found[-1]
    while now.values:
        smaller = [make_set(now.values - {one}) for one in choices if one in now.values]
        work, freed = now.work, now.freed
        slopes = [(work - one.work) / max(freed - one.freed, 1) for one in smaller]
        now = smaller[slopes.index(max(slopes))]
        found.append(now)
    hull = _find_hull(found)
    return hull if hull[-1].values == everything.values else [*hull, everything]


def _sum_work(values: Collection[Value], prices: dict[Value, float]) -> float:
    """Returns the work of making `values` from what the block keeps. Each op is paid once."""
    waiting, seen, work = list(values), set(values), 0.0
    while waiting:
        value = waiting.pop()
        work += prices[value]
        for operand in value.operands:
            if operand in prices and operand not in seen and not operand.uses:
                seen.add(operand)
                waiting.append(operand)
    return work


def _find_hull(sets: list[_ValueSet]) -> list[_ValueSet]:
    """Returns the sets on the upper convex hull of freed bytes over work."""
    hull: list[_ValueSet] = []
    for one in sorted(sets, key=lambda one: (one.work, -one.freed)):
        if hull and one.freed <= hull[-1].freed:
            continue
        while len(hull) > 1 and (hull[-1].freed - hull[-2].freed) * (one.work - hull[-2].work) <= (
            one.freed - hull[-2].freed
        ) * (hull[-1].work - hull[-2].work):
            hull.pop()
        hull.append(one)
    return hull
