"""`Timeline`: replays a training step on paper, for any choice of recomputed values."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import NamedTuple

from ..recompute import StepRecord, Value


class Interval(NamedTuple):
    """Bytes of a value, or of a gradient (None), and the first and last slot in which a step holds them."""

    nbytes: int
    first: int
    last: int
    value: Value | None


class Timeline:
    """Computes the bytes that a step holds in each slot of time.

    A node of autograd's graph has one slot in the forward, and two in the backward: in the first it unpacks
    saved tensors, which recomputes them, and in the second it makes gradients. A record
    counts times in nodes.
    """

    def __init__(self, record: StepRecord):
        self.record = record
        self.num_slots = 3 * record.length
        self._last_time = 2 * record.length - 1
        self._gradients = [
            Interval(gradient.nbytes, self._run_slot(gradient.first), self._run_slot(gradient.last), None)
            for gradient in record.gradients
        ]
        self._gradients.append(Interval(record.result_bytes, record.length - 1, self.num_slots - 1, None))

    def _unpack_slot(self, time: int) -> int:
        """Returns the first slot of a time."""
        return time if time < self.record.length else 2 * time - self.record.length

    def _run_slot(self, time: int) -> int:
        """Returns the last slot of a time."""
        return self._unpack_slot(time) + (time >= self.record.length)

    def last_slot(self, value: Value) -> int:
        """Returns the last slot in which a step holds a value that is kept."""
        return self._run_slot(self._last_time - value.uses[0])

    def count_kept_bytes(self, intervals: Iterable[Interval]) -> int:
        """Returns the bytes that a step holds between its forward and its backward."""
        backward_slot = self.record.length
        return sum(one.nbytes for one in intervals if one.first < backward_slot <= one.last)

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
        """Returns the intervals that a step holds in the first slot with the most bytes."""
        intervals, _ = self.find_intervals(recomputed)
        memory = self.sum_bytes(intervals)
        slot = memory.index(max(memory))
        return [one for one in intervals if one.first <= slot <= one.last]

    def sum_weight_gradients(self) -> list[int]:
        """Returns the bytes of the gradients of parameters in each slot.

        The slot in which a node makes the gradient is left out: `record.gradients` counts it there.
        """
        last = self.num_slots - 1
        slots = (
            (one.nbytes, min(self._run_slot(one.first) + 1, last)) for one in self.record.weight_gradients
        )
        return self.sum_bytes(Interval(nbytes, slot, last, None) for nbytes, slot in slots)

    def find_intervals(self, recomputed: Collection[Value]) -> tuple[list[Interval], list[Value]]:
        """Returns the intervals of a step, and the values whose ops run again.

        Args:
            recomputed: the choices that are not kept.
        """
        intervals, rerun = self._gradients.copy(), []
        read_times: dict[Value, list[int]] = defaultdict(list)  # When recipes of other values read the value.
        # Values that the forward made last come first.
        recomputed_at: dict[int, list[Value]] = defaultdict(list)
        long_lived: set[Value] = set()  # Recomputed values that are held beyond the unpacking.
        for value in reversed(self.record.values):
            if value.uses and value not in recomputed:
                intervals.append(Interval(value.nbytes, value.created, self.last_slot(value), value))
                continue
            times = [self._last_time - use for use in value.uses] + read_times[value]
            if not times:
                continue
            rerun.append(value)
            if value.uses:
                intervals.append(Interval(value.nbytes, value.created, self._find_drop_slot(value), value))
            if value.mask_bytes:
                intervals.append(Interval(value.mask_bytes, value.created, self.last_slot(value), value))
                intervals += [
                    Interval(value.nbytes, self._unpack_slot(time), self._run_slot(time), value)
                    for time in times
                ]
                continue
            first, last = min(times), max(times)
            if value.pinned_bytes:
                intervals.append(Interval(value.pinned_bytes, value.created, self._run_slot(last), value))
            recomputed_at[first].append(value)
            if value.uses or last > first:
                long_lived.add(value)
                intervals.append(
                    Interval(value.nbytes, self._unpack_slot(first), self._run_slot(last), value)
                )
            for operand in value.operands:
                read_times[operand].append(first)
        for time, values in recomputed_at.items():
            if (nbytes := _count_temporary_bytes(values, long_lived)) > 0:
                slot = self._unpack_slot(time)
                intervals.append(Interval(nbytes, slot, slot, values[0]))
        return intervals, rerun

    def _find_drop_slot(self, value: Value) -> int:
        """Returns the slot in which a scope drops a value."""
        plans = self.record.plans
        index = bisect_left(plans, value.uses[0])
        return plans[index] if index < len(plans) else self.record.length - 1


def _count_temporary_bytes(values: list[Value], long_lived: Collection[Value]) -> int:
    """Returns the peak bytes of making `values` in reverse, without the bytes of long-lived ones."""
    if len(values) == 1:
        return 0
    current_bytes = peak_bytes = 0
    num_readers: dict[Value, int] = defaultdict(int)
    for value in values:
        for operand in value.operands:
            num_readers[operand] += 1
    recomputed = set(values)
    for value in reversed(values):
        current_bytes += value.nbytes
        peak_bytes = max(peak_bytes, current_bytes)
        for operand in value.operands:
            num_readers[operand] -= 1
            if not num_readers[operand] and operand in recomputed and operand not in long_lived:
                current_bytes -= operand.nbytes
    return peak_bytes - sum(value.nbytes for value in values if value in long_lived)
