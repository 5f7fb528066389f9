"""`StepMemory`: the bytes that a training step holds over time, on paper, and who holds the peak."""

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
        weight_gradients: bytes of the gradients of parameters in each slot, if there are none before.
    """

    def __init__(self, record: StepRecord):
        self.record, self._timeline = record, Timeline(record)
        self.weight_gradients = self._timeline.sum_weight_gradients()

    def _find_values(self, sites: Collection[OpSite]) -> frozenset[Value]:
        return frozenset(one for one in self.record.values if one.uses and one.site in sites)

    def replay(self, sites: Collection[OpSite]) -> list[int]:
        """Returns the bytes in each slot: a third of them is the forward."""
        return self._timeline.replay(self._find_values(sites))

    def find_holders(self, sites: Collection[OpSite]) -> list[tuple[str, int]]:
        """Returns the labels of the modules that hold bytes at the peak, the most bytes first."""
        sizes = Counter[str]()
        for one in self._timeline.find_peak(self._find_values(sites)):
            sizes[GRADIENTS if one.value is None else _get_label(one.value)] += one.nbytes
        return [(label, nbytes) for label, nbytes in sizes.most_common() if nbytes > 0]

    def find_least_plan(self, device: torch.device) -> Plan:
        """Returns the plan with the least peak."""
        return StepPlans(self.record, device).plans[-1]


def _get_label(value: Value) -> str:
    if value.owner is not None:
        return value.owner
    return make_module_label(value.site.block if value.site is not None else "")


def extrapolate_record(small: StepRecord, large: StepRecord, steps: float) -> StepRecord:
    """Returns the record of a step with another batch, whose bytes are affine functions of the batch.

    Args:
        small: of the step with a batch.
        large: of the step with a larger batch.
        steps: distance from the larger batch, in differences of the two batches.
    """

    def extrapolate(low: float, high: float) -> int:
        return max(round(high + (high - low) * steps), 0)

    # Another batch may be so small that other tensors are recorded.
    has_same_values = len(small.values) == len(large.values) and len(small.gradients) == len(large.gradients)
    copies = {
        after: dataclasses.replace(
            after,
            nbytes=extrapolate(before.nbytes, after.nbytes),
            mask_bytes=extrapolate(before.mask_bytes, after.mask_bytes),
            bytes_moved=extrapolate(before.bytes_moved, after.bytes_moved),
            flops=extrapolate(before.flops, after.flops),
        )
        for before, after in zip(small.values if has_same_values else large.values, large.values, strict=True)
    }
    for value in copies.values():
        value.operands = [copies[operand] for operand in value.operands]
    gradients = [
        after._replace(nbytes=extrapolate(before.nbytes, after.nbytes))
        for before, after in zip(
            small.gradients if has_same_values else large.gradients, large.gradients, strict=True
        )
    ]
    result_bytes = extrapolate(small.result_bytes, large.result_bytes)
    return dataclasses.replace(
        large, values=list(copies.values()), gradients=gradients, result_bytes=result_bytes
    )
