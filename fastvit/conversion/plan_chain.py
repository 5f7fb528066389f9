"""Plans for ever smaller peaks of a step: which sites to recompute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..recompute import OpSite, RecomputeLevel
from ..recompute.step_record import StepRecord, Value
from .timeline import Timeline

_MAX_GROUP = 40  # sites


@dataclass(frozen=True)
class Plan:
    """What is recomputed; the peak and the kept bytes of a step, and the work of recomputing."""

    gone: frozenset[Value]
    peak: int
    kept: int
    work: float

    @property
    def sites(self) -> frozenset[OpSite]:
        return frozenset(value.site for value in self.gone if value.site is not None)


Price = Callable[[Value], float]


class _Group:
    """The sites of a block, and sets of them on the convex hull of freed bytes against work."""

    def __init__(self, values: list[Value], sites: list[Value], price: Price):
        self.sites = sites
        self.index = 0
        self.sets: list[tuple[float, float, frozenset[Value]]] = []
        members = set(values)
        prices = {value: price(value) for value in values}

        def work(chosen: Collection[Value]) -> float:
            total, waiting, seen = 0.0, list(chosen), set(chosen)
            while waiting:
                value = waiting.pop()
                total += prices[value]
                for operand in value.operands:
                    if operand in members and operand not in seen and not operand.uses:
                        seen.add(operand)
                        waiting.append(operand)
            return total

        def freed(chosen: Collection[Value]) -> int:
            return sum(value.nbytes - value.kept_bytes for value in chosen)

        points: list[tuple[float, int, frozenset[Value]]] = []
        chosen: set[Value] = set()
        points.append((0.0, 0, frozenset()))
        while len(chosen) < len(sites):
            now = work(chosen)
            best = max(
                (one for one in sites if one not in chosen),
                key=lambda one: (one.nbytes - one.kept_bytes) / (work(chosen | {one}) - now + 1),
            )
            chosen = chosen | {best}
            points.append((work(chosen), freed(chosen), frozenset(chosen)))
        while chosen:
            now = work(chosen)
            best = max(
                chosen, key=lambda one: (now - work(chosen - {one}) + 1) / (one.nbytes - one.kept_bytes + 1)
            )
            chosen = chosen - {best}
            points.append((work(chosen), freed(chosen), frozenset(chosen)))
        self.sets = _hull(points)


def _hull(points):
    """Returns the upper hull of bytes over work."""
    points = sorted(points, key=lambda p: (p[0], -p[1]))
    hull = []
    for point in points:
        if hull and point[1] <= hull[-1][1]:
            continue
        while len(hull) >= 2 and (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-2][0]) <= (
            point[1] - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append(point)
    return hull


def _make_groups(record: StepRecord, price: Price) -> list[_Group]:
    grouped: dict[int, list[Value]] = {}
    for value in record.values:
        grouped.setdefault(bisect_left(record.plans, value.created), []).append(value)
    groups, known = [], {}
    for values in grouped.values():
        sites = [value for value in values if value.site is not None and value.uses]
        for start in range(0, len(sites), _MAX_GROUP):
            groups.append(_Group(values, sites[start : start + _MAX_GROUP], price))
    return groups


def make_plans(record: StepRecord, price: Price) -> list[Plan]:
    """Returns plans with ever smaller peaks, the first one without sites."""
    timeline = Timeline(record)
    groups = _make_groups(record, price)
    gone: frozenset[Value] = frozenset()
    memory, run = timeline.replay(gone)
    plans: list[Plan] = []
    moved = True
    while moved:
        peak = max(memory)
        if not plans or peak < plans[-1].peak:
            plans.append(Plan(gone, peak, memory[record.length - 1], sum(map(price, run))))
        at = memory.index(peak)
        candidates = []
        for group in groups:
            if not any(one.created <= at <= timeline.last_slot(one) for one in group.sites):
                continue
            here = group.sets[group.index]
            for index in range(group.index + 1, len(group.sets)):
                there = group.sets[index]
                candidates.append((-(there[1] - here[1]) / (there[0] - here[0] + 1), index, group, there[2]))
        moved = False
        for _, index, group, chosen in sorted(candidates, key=lambda c: c[:2]):
            other = (gone - frozenset(group.sites)) | chosen
            after, run_after = timeline.replay(other)
            if after[at] < peak and max(after) <= peak:
                gone, memory, run, moved = other, after, run_after, True
                group.index = index
                break
        if not moved:
            best = None
            for value in record.values:
                if value.site is None or not value.uses:
                    continue
                other = gone ^ {value}
                after, run_after = timeline.replay(other)
                if max(after) < peak:
                    gain = (peak - max(after),)
                    if best is None or gain > best[0]:
                        best = gain, other, after, run_after
            if best is not None:
                _, gone, memory, run = best
                moved = True
    return plans
