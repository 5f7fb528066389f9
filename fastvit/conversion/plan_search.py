"""`make_plans`: plans of a step with ever smaller peaks, each by the least work that the search finds.

The plans of a step are one list, made without knowing a budget. A budget takes the first plan that meets it,
so a smaller budget never has a larger peak.

Values that a block makes are chosen together: sets of them lie on the convex hull of the bytes that they
free over the work of recomputing them, in which an op that several need counts once. The whole block is
one of the sets. The next plan takes the set that frees most for its work at the peak. At the end single
values are kept or recomputed instead, as long as the peak falls.
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

_MAX_CHOICES = 40  # in a group; the time to find its sets grows with the square
_MAX_PEAK_STEP = 0.01  # between the peaks of neighbours, as a fraction of the largest peak
_MAX_VALUE_CHANGES = 64
_MAX_VALUE_VISITS = 3_000_000  # in replays, which take about two seconds per million
_MAX_SEGMENTS = 64  # in a forward without blocks
EstimateWork = Callable[[Value], float]


class Plan(NamedTuple):
    """What a step recomputes, its peak, the bytes that it keeps after the forward, and its extra work."""

    recomputed_values: frozenset[Value]
    peak_bytes: int
    kept_bytes: int
    work: float
    level: RecomputeLevel

    @property
    def sites(self) -> frozenset[OpSite]:
        return frozenset(value.site for value in self.recomputed_values if value.site is not None)


class _ValueSet(NamedTuple):
    """Values of a group, the bytes that a step does not keep, and the work of making them."""

    work: float
    freed_bytes: int
    values: frozenset[Value]


def make_plans(record: StepRecord, estimate_work: EstimateWork) -> list[Plan]:
    """Returns plans with ever smaller peaks and ever more work, the first one without recomputed values.

    Args:
        estimate_work: returns the work of making a value from what its op reads.
    """
    search = _PlanSearch(record, estimate_work)
    while search.take_next_set():
        pass
    search.try_segments()
    for _ in range(_MAX_VALUE_CHANGES):
        if not search.change_one_value():
            break
    search.mix_neighbours()
    return _drop_dominated(search.plans)


def _drop_dominated(plans: list[Plan]) -> list[Plan]:
    """Returns the plans that are best for their work: every plan of less work has a larger peak."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.work, plan.peak_bytes)):
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    return kept


class _PlanSearch:
    """Searches plans; `plans` has those that were found."""

    def __init__(self, record: StepRecord, estimate_work: EstimateWork):
        self._record, self._estimate_work = record, estimate_work
        self._timeline = Timeline(record)
        self._replays_left = _MAX_VALUE_VISITS // max(len(record.values), 1)
        self._groups = _group_choices(record)
        self._sets = [_find_sets(*group, estimate_work) for group in self._groups]
        self._chosen_sets = [sets[0] for sets in self._sets]  # one for each group
        self.plans: list[Plan] = []
        self._take_plan(frozenset())

    def _add_plan(self, recomputed: frozenset[Value]) -> tuple[list[int], int]:
        """Adds a plan. Returns the bytes in each slot, and the peak."""
        self._replays_left -= 1
        intervals, run = self._timeline.find_intervals(recomputed)
        memory, kept = self._timeline.sum_bytes(intervals), self._timeline.count_kept_bytes(intervals)
        is_cheap = all(value.level == RecomputeLevel.CHEAP for value in run)
        level = RecomputeLevel.CHEAP if is_cheap else RecomputeLevel.EVERY_OP
        self.plans.append(Plan(recomputed, max(memory), kept, sum(map(self._estimate_work, run)), level))
        return memory, self.plans[-1].peak_bytes

    def _replay(self, recomputed: frozenset[Value]) -> list[int]:
        self._replays_left -= 1
        return self._timeline.replay(recomputed)

    def _take_plan(self, recomputed: frozenset[Value]) -> None:
        self._recomputed = recomputed
        self._memory, self._peak = self._add_plan(recomputed)

    def take_next_set(self) -> bool:
        """Takes the larger set of a group that frees most for its work at the peak, if there is one."""
        slot = self._memory.index(self._peak)
        choices: list[tuple[float, int, int]] = []
        if self._replays_left < 0:
            return False
        for number, (sets, now) in enumerate(zip(self._sets, self._chosen_sets, strict=True)):
            if any(one.created <= slot <= self._timeline.last_slot(one) for one in sets[-1].values):
                larger = ((index, one) for index, one in enumerate(sets) if one.freed_bytes > now.freed_bytes)
                choices += [
                    (-(one.freed_bytes - now.freed_bytes) / max(one.work - now.work, 1), index, number)
                    for index, one in larger
                ]
        for _, index, number in sorted(choices):
            chosen = self._sets[number][index]
            recomputed = (self._recomputed - self._chosen_sets[number].values) | chosen.values
            memory = self._replay(recomputed)
            if memory[slot] < self._peak and max(memory) <= self._peak:
                self._chosen_sets[number] = chosen
                self._take_plan(recomputed)
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
                recomputed = self._find_values_inside_segments(ends[stride - 1 :: stride])
                if max(self._replay(recomputed)) < self._peak:
                    self._take_plan(recomputed)

    def _find_values_inside_segments(self, ends: Sequence[int]) -> frozenset[Value]:
        """Returns the choices that no segment after their own reads."""
        return frozenset(
            value
            for value in self._record.values
            if value.is_choice and bisect_left(ends, value.created) == bisect_left(ends, value.uses[-1])
        )

    def change_one_value(self) -> bool:
        """Keeps or recomputes the value by which the peak falls most. Returns whether the peak falls."""
        if self._replays_left < 0:
            return False
        values = {one.value for one in self._timeline.find_peak(self._recomputed)}
        choices = [value for value in values if value is not None and value.is_choice]
        changes = {value: self._recomputed ^ {value} for value in sorted(choices, key=_get_created)}
        peaks = {value: max(self._replay(other)) for value, other in changes.items()}
        best = min(peaks, key=peaks.__getitem__, default=None)
        if best is None or peaks[best] >= self._peak:
            return False
        self._take_plan(changes[best])
        return True

    def mix_neighbours(self) -> None:
        """Adds plans between two with distant peaks: some groups as in one, the rest as in the other."""
        plans = _drop_dominated(self.plans)
        for before, after in itertools.pairwise(plans):
            if before.peak_bytes - after.peak_bytes > _MAX_PEAK_STEP * plans[0].peak_bytes:
                mixed = before.recomputed_values
                for choices, _ in self._groups if self._replays_left > 0 else ():
                    mixed = (mixed - choices) | (after.recomputed_values & choices)
                    self._add_plan(mixed)


def _get_created(value: Value) -> int:
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


def _find_sets(group: frozenset[Value], block: list[Value], estimate_work: EstimateWork) -> list[_ValueSet]:
    """Returns sets of a group on the convex hull of freed bytes over work, from none to all.

    Sets without what later blocks read are on a hull of their own: with them a block is made from its input.
    """
    work_by_value = {value: estimate_work(value) for value in block}
    choices = sorted(group, key=_get_created)
    end = max((value.created for value in block), default=0)
    inside = [value for value in choices if value.uses[-1] <= end]
    found = {one.values: one for part in (inside, choices) for one in _search_sets(part, work_by_value)}
    return sorted(found.values(), key=lambda one: (one.freed_bytes, one.work))


def _search_sets(choices: list[Value], work_by_value: dict[Value, float]) -> list[_ValueSet]:
    """Returns sets of `choices` on the convex hull of freed bytes over work, and the set of all.

    They come from two searches: one adds the value that frees most for its work, the other one begins with
    all and keeps the value that takes most work for its bytes.
    """

    def make_set(values: Collection[Value]) -> _ValueSet:
        freed = sum(value.nbytes - value.mask_bytes - value.pinned_bytes for value in values)
        return _ValueSet(_sum_work(values, work_by_value), freed, frozenset(values))

    found = [make_set(())]
    while left := [one for one in choices if one not in found[-1].values]:
        now = found[-1]
        larger = [make_set((*now.values, one)) for one in left]
        found.append(
            max(larger, key=lambda one: (one.freed_bytes - now.freed_bytes) / max(one.work - now.work, 1))
        )
    now = everything = found[-1]
    while now.values:
        smaller = [make_set(now.values - {one}) for one in choices if one in now.values]
        slopes = [(now.work - one.work) / max(now.freed_bytes - one.freed_bytes, 1) for one in smaller]
        now = smaller[slopes.index(max(slopes))]
        found.append(now)
    return [*_find_hull(found), everything]


def _sum_work(values: Collection[Value], work_by_value: dict[Value, float]) -> float:
    """Returns the work of making `values` from what the block keeps. Each op counts once."""
    pending, seen, work = list(values), set(values), 0.0
    while pending:
        value = pending.pop()
        work += work_by_value[value]
        for operand in value.operands:
            if operand in work_by_value and operand not in seen and not operand.uses:
                seen.add(operand)
                pending.append(operand)
    return work


def _find_hull(sets: list[_ValueSet]) -> list[_ValueSet]:
    """Returns the sets on the upper convex hull of freed bytes over work."""
    hull: list[_ValueSet] = []
    for one in sorted(sets, key=lambda one: (one.work, -one.freed_bytes)):
        if hull and one.freed_bytes <= hull[-1].freed_bytes:
            continue
        while len(hull) > 1 and (hull[-1].freed_bytes - hull[-2].freed_bytes) * (
            one.work - hull[-2].work
        ) <= (one.freed_bytes - hull[-2].freed_bytes) * (hull[-1].work - hull[-2].work):
            hull.pop()
        hull.append(one)
    return hull
