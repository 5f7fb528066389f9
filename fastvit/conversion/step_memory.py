"""`StepMemory`: the bytes that a training step holds over time, on paper, and the holders of the peak."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection

import torch

from ..recompute import OpSite, StepRecord, Value
from .budget import GRADIENTS, StepPlans
from .module_labels import make_module_label
from .plan_search import Plan
from .timeline import Timeline


class StepMemory:
    """Replays a training step on paper, for any choice of recomputed sites.

    Args:
        record: the record of a forward that recomputes every op with a rule, whose observer annotates labels
            of modules.

    Attributes:
        weight_gradients: bytes of the gradients of parameters in each slot, if none exist before the step.
    """

    def __init__(self, record: StepRecord):
        self.record, self._timeline = record, Timeline(record)
        self.weight_gradients = self._timeline.sum_weight_gradients()

    def _find_values(self, sites: Collection[OpSite]) -> frozenset[Value]:
        return frozenset(value for value in self.record.values if value.uses and value.site in sites)

    def replay(self, sites: Collection[OpSite]) -> list[int]:
        """Returns the bytes in each slot of the step. The first third of the slots is the forward."""
        return self._timeline.replay(self._find_values(sites))

    def find_holders(self, sites: Collection[OpSite]) -> list[tuple[str, int]]:
        """Returns the labels of the modules that hold bytes at the peak, the most bytes first."""
        sizes = Counter[str]()
        for interval in self._timeline.find_peak(self._find_values(sites)):
            label = GRADIENTS if interval.value is None else _get_label(interval.value)
            sizes[label] += interval.nbytes
        return [(label, nbytes) for label, nbytes in sizes.most_common() if nbytes > 0]

    def find_least_plan(self, device: torch.device) -> Plan:
        """Returns the plan with the least peak."""
        return StepPlans(self.record, device).plans[-1]


def _get_label(value: Value) -> str:
    if value.owner is not None:
        return value.owner
    return make_module_label(value.site.block if value.site is not None else "")


def extrapolate_record(small: StepRecord, large: StepRecord, distance: float) -> StepRecord:
    """Returns the record of a step with another batch, whose bytes are affine functions of the batch.

    Args:
        small: the record of a step with a batch.
        large: the record of a step with a larger batch.
        distance: the distance from the larger batch, divided by the difference of the two batches.
    """

    def extrapolate(low: float, high: float) -> int:
        return max(round(high + (high - low) * distance), 0)

    # With the smaller batch other tensors may be recorded, from which nothing is extrapolated.
    has_same_values = len(small.values) == len(large.values) and len(small.gradients) == len(large.gradients)
    if not has_same_values:
        small = dataclasses.replace(small, values=large.values, gradients=large.gradients)
    copies = {
        high: dataclasses.replace(
            high,
            nbytes=extrapolate(low.nbytes, high.nbytes),
            mask_bytes=extrapolate(low.mask_bytes, high.mask_bytes),
            bytes_moved=extrapolate(low.bytes_moved, high.bytes_moved),
            flops=extrapolate(low.flops, high.flops),
        )
        for low, high in zip(small.values, large.values, strict=True)
    }
    for value in copies.values():
        value.operands = [copies[operand] for operand in value.operands]
    gradients = [
        high._replace(nbytes=extrapolate(low.nbytes, high.nbytes))
        for low, high in zip(small.gradients, large.gradients, strict=True)
    ]
    result_bytes = extrapolate(small.result_bytes, large.result_bytes)
    return dataclasses.replace(
        large, values=list(copies.values()), gradients=gradients, result_bytes=result_bytes
    )
