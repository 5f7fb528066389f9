"""`Timeline`: a training step on paper, with the bytes that it holds at each time by what is recomputed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import NamedTuple

from ..recompute import StepRecord, Value


class Interval(NamedTuple):
    """Memory, and the first and last slot in which a step holds it; of a value, or of a gradient: None."""

    nbytes: int
    first: int
    last: int
    value: Value | None


class Timeline:
    """Replays a step.

    A node of the forward has one slot. In the backward a node has two: in the first one it unpacks what it
    saved, which recomputes, and in the second one it makes gradients.
    """

    def __init__(self, record: StepRecord):
        self.record = record
        self.num_slots = 3 * record.length
        self._last_time = 2 * record.length - 1
        self._gradients = [
            Interval(one.nbytes, self._run_slot(one.first), self._run_slot(one.last), None)
            for one in record.gradients
        ]
        self._gradients.append(Interval(record.result_bytes, record.length - 1, self.num_slots - 1, None))

    def _unpack_slot(self, time: int) -> int:
        return time if time < self.record.length else 2 * time - self.record.length

    def _run_slot(self, time: int) -> int:
        return self._unpack_slot(time) + (time >= self.record.length)

    def last_slot(self, value: Value) -> int:
        """Returns until when a saved value is held that is kept."""
        return self._run_slot(self._last_time - value.uses[0])

    def count_kept_bytes(self, intervals: Iterable[Interval]) -> int:
        """Returns the bytes that a step holds between its forward and its backward."""
        now = self.record.length
        return sum(one.nbytes for one in intervals if one.first < now <= one.last)

    def replay(self, recomputed: Collection[Value]) -> list[int]:
        """Returns the bytes in each slot."""
        return self.sum_bytes(self.find_intervals(recomputed)[0])

    def sum_bytes(self, intervals: Iterable[Interval]) -> list[int]:
        """Returns the bytes of `intervals` in each slot."""
        changes = [0] * (self.num_slots + 1)
        for nbytes, first, last, _ in intervals:
            changes[first] += nbytes
            changes[last + 1] -= nbytes
        return list(accumulate(changes[:-1]))

    def find_peak(self, recomputed: Collection[Value]) -> list[Interval]:
        """Returns what a step holds in the first slot with the most bytes."""
        intervals, _ = self.find_intervals(recomputed)
        memory = self.sum_bytes(intervals)
        slot = memory.index(max(memory))
        return [one for one in intervals if one.first <= slot <= one.last]

    def sum_weight_gradients(self) -> list[int]:
        """Returns the bytes of the gradients of parameters in each slot.

        In the slot in which a node makes one it is among the gradients of the record.
        """
        last = self.num_slots - 1
        slots = (
            (one.nbytes, min(self._run_slot(one.first) + 1, last)) for one in self.record.weight_gradients
        )
        return self.sum_bytes(Interval(nbytes, slot, last, None) for nbytes, slot in slots)

    def find_intervals(self, recomputed: Collection[Value]) -> tuple[list[Interval], list[Value]]:
        """Returns what a step holds, and the values whose ops run again.

        Args:
            recomputed: values that are choices, and are not kept.
        """
        found, run = self._gradients.copy(), []
        needs: dict[Value, list[int]] = defaultdict(list)  # when recipes of other values read a value
        remade: dict[int, list[Value]] = defaultdict(list)  # by the time, the last one of the forward first
        stays: set[Value] = set()  # recomputed values that are held beyond the unpacking
        for value in reversed(self.record.values):
            if value.uses and value not in recomputed:
                found.append(Interval(value.nbytes, value.created, self.last_slot(value), value))
                continue
            times = [self._last_time - use for use in value.uses] + needs[value]
            if not times:
                continue
            run.append(value)
            if value.uses:
                found.append(Interval(value.nbytes, value.created, self._find_plan(value), value))
            if value.mask_bytes:
                found.append(Interval(value.mask_bytes, value.created, self.last_slot(value), value))
                found += [
                    Interval(value.nbytes, self._unpack_slot(time), self._run_slot(time), value)
                    for time in times
                ]
                continue
            first, last = min(times), max(times)
            if value.pinned_bytes:
                found.append(Interval(value.pinned_bytes, value.created, self._run_slot(last), value))
            remade[first].append(value)
            if value.uses or last > first:
                stays.add(value)
                found.append(Interval(value.nbytes, self._unpack_slot(first), self._run_slot(last), value))
            for operand in value.operands:
                needs[operand].append(first)
        for time, values in remade.items():
            if (nbytes := _count_temporary_bytes(values, stays)) > 0:
                slot = self._unpack_slot(time)
                found.append(Interval(nbytes, slot, slot, values[0]))
        return found, run

    def _find_plan(self, value: Value) -> int:
        """Returns when a scope drops a value."""
        plans = self.record.plans
        index = bisect_left(plans, value.uses[0])
        return plans[index] if index < len(plans) else self.record.length - 1


def _count_temporary_bytes(values: list[Value], stays: Collection[Value]) -> int:
    """Returns the peak of making `values`, the last one first, above the bytes of those that stay."""
    if len(values) == 1:
        return 0
    held = peak = 0
    num_readers: dict[Value, int] = defaultdict(int)
    for value in values:
        for operand in value.operands:
            num_readers[operand] += 1
    made = set(values)
    for value in reversed(values):
        held += value.nbytes
        peak = max(peak, held)
        for operand in value.operands:
            num_readers[operand] -= 1
            if not num_readers[operand] and operand in made and operand not in stays:
                held -= operand.nbytes
    return peak - sum(value.nbytes for value in values if value in stays)
