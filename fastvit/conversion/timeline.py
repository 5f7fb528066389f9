"""A training step on paper: the bytes that it holds at each time, for a choice of what is recomputed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate

from ..recompute.step_record import StepRecord, Value


class Timeline:
    """Replays a step.

    The forward has a slot a node, and the backward two: in the first one a node unpacks what it saved.
    """

    def __init__(self, record: StepRecord):
        self.record = record
        self.length = 3 * record.length
        self._last = 2 * record.length - 1
        self._base = [0] * (self.length + 1)
        for nbytes, first, last in record.gradients:
            self._add(self._base, nbytes, self._runs(first), self._runs(last))
        self._add(self._base, record.result_bytes, record.length - 1, self.length - 1)

    def _unpacks(self, time: int) -> int:
        """Returns the slot in which the node unpacks that runs at `time`."""
        return time if time < self.record.length else 2 * time - self.record.length

    def _runs(self, time: int) -> int:
        return time if time < self.record.length else 2 * time - self.record.length + 1

    def last_slot(self, value: Value) -> int:
        """Returns until when a value is kept that stays."""
        return self._runs(self._last - value.uses[0])

    @staticmethod
    def _add(changes: list[int], nbytes: int, first: int, last: int) -> None:
        changes[first] += nbytes
        changes[last + 1] -= nbytes

    def find_intervals(
        self, gone: Collection[Value]
    ) -> tuple[list[tuple[int, int, int, Value]], list[Value]]:
        """Returns when memory is held and by which value; and the values whose ops run again."""
        record, end = self.record, self._last
        needs: dict[Value, list[int]] = {}
        found, run = [], []
        rebuilt: dict[int, list[tuple[Value, int]]] = {}  # by time, the last first, and until when it is held
        last_needs: dict[Value, int] = {}
        for value in reversed(record.values):
            uses = value.uses
            if value not in gone and uses:
                found.append((value.nbytes, value.created, self._runs(end - uses[0]), value))
                continue
            times = [end - use for use in uses] + needs.get(value, [])
            if not times:
                continue
            first, last = min(times), max(times)
            if uses:  # until the block ends
                index = bisect_right(record.plans, uses[-1])
                found.append(
                    (
                        value.nbytes,
                        value.created,
                        record.plans[index] if index < len(record.plans) else record.length,
                        value,
                    )
                )
            run.append(value)
            if value.kept_bytes:
                found.append((value.kept_bytes, value.created, self._runs(last), value))
                found += [(value.nbytes, self._unpacks(time), self._runs(time), value) for time in times]
                continue
            if uses or last > first:
                found.append((value.nbytes, self._unpacks(first), self._runs(last), value))
            rebuilt.setdefault(first, []).append((value, bool(uses) or last > first))
            for operand in value.operands:
                needs.setdefault(operand, []).append(first)
        for time, every in rebuilt.items():
            if len(every) < 2:
                continue
            held = peak = 0
            stays = sum(value.nbytes for value, remains in every if remains)
            left = {
                value: sum(value in one.operands for one, _ in every)
                for value, remains in every
                if not remains
            }
            for value, remains in reversed(every):
                held += value.nbytes
                peak = max(peak, held)
                for operand in value.operands:
                    if operand in left:
                        left[operand] -= 1
                        if not left[operand]:
                            held -= operand.nbytes
            if peak > stays:
                found.append((peak - stays, self._unpacks(time), self._unpacks(time), every[0][0]))
        return found, run

    def replay(self, gone: Collection[Value]) -> tuple[list[int], list[Value]]:
        changes = self._base.copy()
        intervals, run = self.find_intervals(gone)
        for nbytes, first, last, _ in intervals:
            self._add(changes, nbytes, first, last)
        return list(accumulate(changes[:-1])), run
