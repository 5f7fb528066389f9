"""`make_plans`: plans of a step with ever smaller peaks, each by the least work that the search finds.

The plans of a step are one list, made without knowing a budget. A budget takes the first plan that meets it,
so a smaller budget never has a larger peak.

A choice is a value that a policy can keep or recompute. The choices of one block form a group. For each
group the search takes sets of choices on the convex hull of freed bytes over work, from the empty set to the
whole block; an op that several values need counts once. The next plan takes the set that frees most for its
work at the peak. At the end single values are kept or recomputed, as long as the peak falls.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..recompute import OpSite, RecomputeLevel, StepRecord, Value
from .timeline import Timeline

_MAX_CHOICES = 40  # Choices in a group; the time to find sets grows with the square.
_MAX_PEAK_STEP = 0.01  # Wider gaps between neighbouring peaks get plans; a fraction of the largest peak.
_MAX_VALUE_CHANGES = 64  # Calls of `change_one_value`; each one replays a step per choice at the peak.
_MAX_VALUE_VISITS = 3_000_000  # Values in all replays together, which take about two seconds per million.
_MAX_SEGMENTS = 64  # Segments of a forward without blocks.
EstimateWork = Callable[[Value], float]


class Plan(NamedTuple):
    """The values that a step recomputes, its peak, the bytes kept after the forward, and the extra work."""

    recomputed_values: frozenset[Value]
    peak_bytes: int
    kept_bytes: int
    work: float
    level: RecomputeLevel

    @property
    def sites(self) -> frozenset[OpSite]:
        return frozenset(value.site for value in self.recomputed_values if value.site is not None)


class _ValueSet(NamedTuple):
    """Choices of a group, the bytes that a step frees if they are recomputed, and the work of that."""

    work: float
    freed_bytes: int
    values: frozenset[Value]


def make_plans(record: StepRecord, estimate_work: EstimateWork) -> list[Plan]:
    """Returns plans with ever smaller peaks and ever more work, the first one without recomputed values.

    Args:
        record: the record of a forward that recomputed every op with a rule.
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
    """Returns the plans for which every plan of less work has a larger peak."""
    best_plans: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.work, plan.peak_bytes)):
        if not best_plans or plan.peak_bytes < best_plans[-1].peak_bytes:
            best_plans.append(plan)
    return best_plans


class _PlanSearch:
    """Searches plans from a current one. `plans` has all plans that were found."""

    def __init__(self, record: StepRecord, estimate_work: EstimateWork):
        self._record, self._estimate_work = record, estimate_work
        self._timeline = Timeline(record)
        self._num_replays_left = _MAX_VALUE_VISITS // max(len(record.values), 1)
        self._groups = _group_choices(record)
        self._sets_by_group = [_find_sets(*group, estimate_work) for group in self._groups]
        self._current_sets = [sets[0] for sets in self._sets_by_group]  # One for each group.
        self.plans: list[Plan] = []
        self._take_plan(frozenset())

    def _add_plan(self, recomputed: frozenset[Value]) -> tuple[list[int], int]:
        """Adds a plan. Returns the bytes in each slot of time, and the peak."""
        self._num_replays_left -= 1
        intervals, rerun = self._timeline.find_intervals(recomputed)
        memory, kept = self._timeline.sum_bytes(intervals), self._timeline.count_kept_bytes(intervals)
        is_cheap = all(value.level == RecomputeLevel.CHEAP for value in rerun)
        level = RecomputeLevel.CHEAP if is_cheap else RecomputeLevel.EVERY_OP
        self.plans.append(Plan(recomputed, max(memory), kept, sum(map(self._estimate_work, rerun)), level))
        return memory, self.plans[-1].peak_bytes

    def _replay(self, recomputed: frozenset[Value]) -> list[int]:
        self._num_replays_left -= 1
        return self._timeline.replay(recomputed)

    def _take_plan(self, recomputed: frozenset[Value]) -> None:
        """Adds a plan, and makes it the current one."""
        self._recomputed = recomputed
        self._memory, self._peak = self._add_plan(recomputed)

    def take_next_set(self) -> bool:
        """Takes the larger set that frees most for its work at the peak. Returns whether there is one."""
        slot = self._memory.index(self._peak)
        candidates: list[tuple[float, int, int]] = []  # Bytes per work, negated; indices of set and group.
        if self._num_replays_left < 0:
            return False
        for group, (sets, current) in enumerate(zip(self._sets_by_group, self._current_sets, strict=True)):
            if any(value.created <= slot <= self._timeline.last_slot(value) for value in sets[-1].values):
                candidates += [
                    (-_get_bytes_per_work(current, larger), index, group)
                    for index, larger in enumerate(sets)
                    if larger.freed_bytes > current.freed_bytes
                ]
        for _, index, group in sorted(candidates):
            next_set = self._sets_by_group[group][index]
            recomputed = (self._recomputed - self._current_sets[group].values) | next_set.values
            memory = self._replay(recomputed)
            if memory[slot] < self._peak and max(memory) <= self._peak:
                self._current_sets[group] = next_set
                self._take_plan(recomputed)
                return True
        return False

    def try_segments(self) -> None:
        """Keeps only the values that later segments of the forward read, if the peak is smaller then.

        A segment is a number of blocks, or a part of a forward that has no blocks. For n blocks of one size
        the peak is least with about sqrt(n) blocks in a segment (arXiv:1604.06174).
        """
        length = self._record.length
        for ends in (sorted(set(self._record.plans)), range(0, length, max(1, length // _MAX_SEGMENTS))):
            for stride in range(1, 2 * math.isqrt(len(ends)) + 2):
                recomputed = self._find_values_inside_segments(ends[stride - 1 :: stride])
                if max(self._replay(recomputed)) < self._peak:
                    self._take_plan(recomputed)

    def _find_values_inside_segments(self, ends: Sequence[int]) -> frozenset[Value]:
        """Returns the choices that are read in the segment that made them, and in no later one."""
        return frozenset(
            value
            for value in self._record.values
            if value.is_choice and bisect_left(ends, value.created) == bisect_left(ends, value.uses[-1])
        )

    def change_one_value(self) -> bool:
        """Keeps or recomputes one value, by which the peak falls most. Returns whether the peak falls."""
        if self._num_replays_left < 0:
            return False
        values = {interval.value for interval in self._timeline.find_peak(self._recomputed)}
        choices = [value for value in values if value is not None and value.is_choice]
        changes = {value: self._recomputed ^ {value} for value in sorted(choices, key=_get_created)}
        peaks = {value: max(self._replay(recomputed)) for value, recomputed in changes.items()}
        best = min(peaks, key=peaks.__getitem__, default=None)
        if best is None or peaks[best] >= self._peak:
            return False
        self._take_plan(changes[best])
        return True

    def mix_neighbours(self) -> None:
        """Adds plans between distant neighbours, with ever more groups as in the plan of more work."""
        plans = _drop_dominated(self.plans)
        for cheaper, smaller in itertools.pairwise(plans):
            if cheaper.peak_bytes - smaller.peak_bytes > _MAX_PEAK_STEP * plans[0].peak_bytes:
                mixed = cheaper.recomputed_values
                for choices, _ in self._groups if self._num_replays_left > 0 else ():
                    mixed = (mixed - choices) | (smaller.recomputed_values & choices)
                    self._add_plan(mixed)


def _get_bytes_per_work(smaller: _ValueSet, larger: _ValueSet) -> float:
    """Returns the bytes that the larger set frees beyond the smaller one, per unit of its additional work."""
    return (larger.freed_bytes - smaller.freed_bytes) / max(larger.work - smaller.work, 1)


def _get_created(value: Value) -> int:
    return value.created


def _group_choices(record: StepRecord) -> list[tuple[frozenset[Value], list[Value]]]:
    """Returns groups of choices of one block, each with all values of the block."""
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

    Sets of values that no later block reads have a hull of their own: they need only the block's input.
    """
    work_by_value = {value: estimate_work(value) for value in block}
    choices = sorted(group, key=_get_created)
    end = max((value.created for value in block), default=0)
    local_choices = [value for value in choices if value.uses[-1] <= end]
    sets = [*_search_sets(local_choices, work_by_value), *_search_sets(choices, work_by_value)]
    distinct_sets = {value_set.values: value_set for value_set in sets}
    return sorted(distinct_sets.values(), key=lambda value_set: (value_set.freed_bytes, value_set.work))


def _search_sets(choices: list[Value], work_by_value: dict[Value, float]) -> list[_ValueSet]:
    """Returns sets of `choices` on the convex hull of freed bytes over work, and the set of all.

    Two greedy searches find the sets. One begins with none, and adds the value that frees most for its work.
    The other one begins with all, and drops the value that takes most work for its bytes.
    """

    def make_set(values: Collection[Value]) -> _ValueSet:
        freed = sum(value.nbytes - value.mask_bytes - value.pinned_bytes for value in values)
        return _ValueSet(_sum_work(values, work_by_value), freed, frozenset(values))

    sets = [make_set(())]
    while kept_choices := [value for value in choices if value not in sets[-1].values]:
        larger_sets = [make_set((*sets[-1].values, value)) for value in kept_choices]
        sets.append(max(larger_sets, key=functools.partial(_get_bytes_per_work, sets[-1])))
    current = full_set = sets[-1]
    while current.values:
        smaller_sets = [make_set(current.values - {value}) for value in choices if value in current.values]
        slopes = [
            (current.work - smaller.work) / max(current.freed_bytes - smaller.freed_bytes, 1)
            for smaller in smaller_sets
        ]
        current = smaller_sets[slopes.index(max(slopes))]
        sets.append(current)
    return [*_find_hull(sets), full_set]


def _sum_work(values: Collection[Value], work_by_value: dict[Value, float]) -> float:
    """Returns the work of making `values` from the tensors that the block keeps. Each op counts once."""
    pending, visited, work = list(values), set(values), 0.0
    while pending:
        value = pending.pop()
        work += work_by_value[value]
        for operand in value.operands:
            if operand in work_by_value and operand not in visited and not operand.uses:
                visited.add(operand)
                pending.append(operand)
    return work


def _find_hull(sets: list[_ValueSet]) -> list[_ValueSet]:
    """Returns the sets on the upper convex hull of freed bytes over work."""
    hull: list[_ValueSet] = []
    for point in sorted(sets, key=lambda point: (point.work, -point.freed_bytes)):
        if hull and point.freed_bytes <= hull[-1].freed_bytes:
            continue
        while len(hull) > 1 and (hull[-1].freed_bytes - hull[-2].freed_bytes) * (
            point.work - hull[-2].work
        ) <= (point.freed_bytes - hull[-2].freed_bytes) * (hull[-1].work - hull[-2].work):
            hull.pop()
        hull.append(point)
    return hull
