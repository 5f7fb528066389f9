"""`make_plans`: what a step recomputes for ever smaller peaks, each time by the least work that it finds.

The plans of a step are one list, made without knowing a budget. A budget takes the first plan that meets it,
so a smaller budget never has a larger peak.

Values that a block makes are chosen together: sets of them lie on the convex hull of the bytes that they
free over the work of making them again, of which an op that several need is paid once. The whole block is
one of the sets. The set that frees most for its work, where the peak is, is the next plan's. At the end
single values change sides, as long as the peak falls.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..recompute import OpSite, RecomputeLevel, StepRecord, Value
from .timeline import Timeline

_MAX_CHOICES = 40  # of a group; to find its sets takes time with the square of it
_MAX_STEP = 0.01  # between the peaks of neighbours, as a share of the largest one
_MAX_CHANGES = 64  # of single values
_MAX_VISITS = 3_000_000  # of values in replays, which take about two seconds per million
_MAX_SEGMENTS = 64  # of a forward without blocks
EstimateWork = Callable[[Value], float]


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


def make_plans(record: StepRecord, price: EstimateWork) -> list[Plan]:
    """Returns plans with ever smaller peaks and ever more work, the first one without recomputed values.

    Args:
        price: the work of making a value from what its op reads.
    """
    search = _PlanSearch(record, price)
    while search.take_next_set():
        pass
    search.try_segments()
    for _ in range(_MAX_CHANGES):
        if not search.change_one_value():
            break
    search.mix_neighbours()
    return _drop_dominated(search.plans)


def _drop_dominated(plans: list[Plan]) -> list[Plan]:
    """Returns the plans than which no other one has as small a peak for as little work, by their peaks."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.work, plan.peak)):
        if not kept or plan.peak < kept[-1].peak:
            kept.append(plan)
    return kept


class _PlanSearch:
    """The search for plans."""

    def __init__(self, record: StepRecord, price: EstimateWork):
        self._record, self._price = record, price
        self._timeline = Timeline(record)
        self._replays_left = _MAX_VISITS // max(len(record.values), 1)
        self._groups = _group_choices(record)
        self._sets = [_find_sets(*one, price) for one in self._groups]
        self._taken = [sets[0] for sets in self._sets]  # by each group
        self.plans: list[Plan] = []
        self._take(frozenset())

    def _add_plan(self, recomputed: frozenset[Value]) -> tuple[list[int], int]:
        """Adds a plan. Returns the bytes in each slot, and the peak."""
        self._replays_left -= 1
        intervals, run = self._timeline.find_intervals(recomputed)
        memory, kept = self._timeline.sum_bytes(intervals), self._timeline.count_kept_bytes(intervals)
        is_cheap = all(value.level == RecomputeLevel.CHEAP for value in run)
        level = RecomputeLevel.CHEAP if is_cheap else RecomputeLevel.EVERY_OP
        self.plans.append(Plan(recomputed, max(memory), kept, sum(map(self._price, run)), level))
        return memory, self.plans[-1].peak

    def _replay(self, recomputed: frozenset[Value]) -> list[int]:
        self._replays_left -= 1
        return self._timeline.replay(recomputed)

    def _take(self, recomputed: frozenset[Value]) -> None:
        self._recomputed = recomputed
        self._memory, self._peak = self._add_plan(recomputed)

    def take_next_set(self) -> bool:
        """Takes the larger set of a group that frees most for its work at the peak, if there is one."""
        slot = self._memory.index(self._peak)
        choices: list[tuple[float, int, int]] = []
        if self._replays_left < 0:
            return False
        for number, (sets, now) in enumerate(zip(self._sets, self._taken, strict=True)):
            if any(one.created <= slot <= self._timeline.last_slot(one) for one in sets[-1].values):
                larger = ((index, one) for index, one in enumerate(sets) if one.freed > now.freed)
                choices += [
                    (-(one.freed - now.freed) / max(one.work - now.work, 1), index, number)
                    for index, one in larger
                ]
        for _, index, number in sorted(choices):
            chosen = self._sets[number][index]
            recomputed = (self._recomputed - self._taken[number].values) | chosen.values
            memory = self._replay(recomputed)
            if memory[slot] < self._peak and max(memory) <= self._peak:
                self._taken[number] = chosen
                self._take(recomputed)
                return True
        return False

    def try_segments(self) -> None:
        """Keeps only what goes from one segment of the forward to a later one, where that has a smaller peak.

        Segments are so many blocks, or parts of a forward that has no blocks. For n blocks of one size the
        peak is least with about sqrt(n) of them in a segment (arXiv:1604.06174).
        """
        length = self._record.length
        for ends in (sorted(set(self._record.plans)), range(0, length, max(1, length // _MAX_SEGMENTS))):
            for stride in range(1, 2 * math.isqrt(len(ends)) + 2):
                recomputed = self._find_inside(ends[stride - 1 :: stride])
                if max(self._replay(recomputed)) < self._peak:
                    self._take(recomputed)

    def _find_inside(self, ends: Sequence[int]) -> frozenset[Value]:
        """Returns the choices that no segment after their own reads."""
        return frozenset(
            value
            for value in self._record.values
            if value.is_choice and bisect_left(ends, value.created) == bisect_left(ends, value.uses[-1])
        )

    def change_one_value(self) -> bool:
        """Keeps or recomputes one value more, so that the peak falls most. Returns whether it does."""
        if self._replays_left < 0:
            return False
        values = {one.value for one in self._timeline.find_peak(self._recomputed)}
        there = [value for value in values if value is not None and value.is_choice]
        changes = {value: self._recomputed ^ {value} for value in sorted(there, key=_created)}
        peaks = {value: max(self._replay(other)) for value, other in changes.items()}
        best = min(peaks, key=peaks.__getitem__, default=None)
        if best is None or peaks[best] >= self._peak:
            return False
        self._take(changes[best])
        return True

    def mix_neighbours(self) -> None:
        """Adds plans between two with distant peaks: some groups as in one, the rest as in the other."""
        plans = _drop_dominated(self.plans)
        for before, after in itertools.pairwise(plans):
            if before.peak - after.peak > _MAX_STEP * plans[0].peak:
                mixed = before.recomputed
                for choices, _ in self._groups if self._replays_left > 0 else ():
                    mixed = (mixed - choices) | (after.recomputed & choices)
                    self._add_plan(mixed)


def _created(value: Value) -> int:
    return value.created


def _group_choices(record: StepRecord) -> list[tuple[frozenset[Value], list[Value]]]:
    """Returns groups of choices that one block has made, each with all values of the block."""
    blocks: dict[int, list[Value]] = defaultdict(list)
    for value in record.values:
        blocks[bisect_left(record.plans, value.created)].append(value)
    groups = []
    for values in blocks.values():
        choices = [value for value in values if value.is_choice]
        for start in range(0, len(choices), _MAX_CHOICES):
            groups.append((frozenset(choices[start : start + _MAX_CHOICES]), values))
    return groups


def _find_sets(group: frozenset[Value], block: list[Value], price: EstimateWork) -> list[_ValueSet]:
    """Returns sets of a group on the convex hull of freed bytes over work, from none to all.

    Sets without what later blocks read are on a hull of their own: with them a block is made from its input.
    """
    prices = {value: price(value) for value in block}
    choices = sorted(group, key=_created)
    end = max((value.created for value in block), default=0)
    inside = [value for value in choices if value.uses[-1] <= end]
    found = {one.values: one for part in (inside, choices) for one in _search_sets(part, prices)}
    return sorted(found.values(), key=lambda one: (one.freed, one.work))


def _search_sets(choices: list[Value], prices: dict[Value, float]) -> list[_ValueSet]:
    """Returns sets of `choices` on the convex hull of freed bytes over work, and the set of all.

    They come from two searches: one adds the value that frees most for its work, the other one begins with
    all and keeps the value that takes most work for its bytes.
    """

    def make_set(values: Collection[Value]) -> _ValueSet:
        freed = sum(value.nbytes - value.mask_bytes - value.pinned_bytes for value in values)
        return _ValueSet(_sum_work(values, prices), freed, frozenset(values))

    found = [make_set(())]
    while left := [one for one in choices if one not in found[-1].values]:
        now = found[-1]
        larger = [make_set((*now.values, one)) for one in left]
        found.append(max(larger, key=lambda one: (one.freed - now.freed) / max(one.work - now.work, 1)))
    now = everything = found[-1]
    while now.values:
        smaller = [make_set(now.values - {one}) for one in choices if one in now.values]
        slopes = [(now.work - one.work) / max(now.freed - one.freed, 1) for one in smaller]
        now = smaller[slopes.index(max(slopes))]
        found.append(now)
    return [*_find_hull(found), everything]


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
