"""`StepMemory`: the bytes that a training step holds over time, on paper, and who holds the peak."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..recompute import OpSite, SavedTensorObserver, StepRecord, Value, record_step
from .budget import GRADIENTS, StepPlans
from .copy_runner import CopyRunner
from .module_labels import label_module
from .nested_values import tensor_leaves
from .plan_chain import Plan
from .timeline import Timeline


class StepMemory:
    """A training step on paper, for any choice of what is recomputed.

    Args:
        record: of a forward that recomputes all that can be, whose observer annotates labels of modules.
        weight_gradients: bytes of the gradients of parameters in each slot, if there are none before.
    """

    def __init__(self, record: StepRecord, weight_gradients: list[int]):
        self.record, self.weight_gradients = record, weight_gradients
        self._timeline = Timeline(record)

    def _find_values(self, sites: Collection[OpSite]) -> frozenset[Value]:
        return frozenset(one for one in self.record.values if one.uses and one.site in sites)

    def replay(self, sites: Collection[OpSite]) -> list[int]:
        """Returns the bytes in each slot: a third of them is the forward."""
        return self._timeline.replay(self._find_values(sites))[0]

    def find_holders(self, sites: Collection[OpSite]) -> list[tuple[str, int]]:
        """Returns the labels of the modules that hold bytes at the peak, the most bytes first."""
        memory = self.replay(sites)
        slot, sizes = memory.index(max(memory)), Counter[str]()
        for nbytes, first, last, value in self._timeline.find_intervals(self._find_values(sites))[0]:
            if value is not None and first <= slot <= last:
                sizes[_get_label(value)] += nbytes
        sizes[GRADIENTS] = memory[slot] - sizes.total()
        return [(label, nbytes) for label, nbytes in sizes.most_common() if nbytes > 0]

    def find_least_plan(self, device: torch.device) -> Plan:
        """Returns the plan with the least peak."""
        return StepPlans(self.record, device).plans[-1]


def _get_label(value: Value) -> str:
    if value.owner is not None:
        return value.owner
    return label_module(value.site.block if value.site is not None else "")


def record_step_memory(
    runner: CopyRunner, model: nn.Module, observing: AbstractContextManager[SavedTensorObserver]
) -> StepMemory:
    """Returns the memory of a step of `model`, whose scopes recompute all that can be.

    Args:
        runner: whose inputs the forward takes.
        model: a copy.
        observing: observes saved tensors, and annotates labels of modules.
    """
    with observing as observer, runner.preserving_random_state():
        arguments = runner.copy_inputs()
        results = tensor_leaves(runner.run_forward(model, arguments))
        besides = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
        record = record_step(observer, results, besides)
        gradients = _sum_weight_gradients(
            results, set(model.parameters()), observer.first_time, record.length
        )
        torch.clear_autocast_cache()
    return StepMemory(record, gradients)


def _sum_weight_gradients(
    results: Iterable[Tensor], parameters: Collection[Tensor], first_time: int, length: int
) -> list[int]:
    """Returns the bytes of the gradients of `parameters` that exist in each slot of a step."""
    made: dict[Tensor, int] = {}  # the first slot in which the gradient of a parameter exists
    waiting = [one.grad_fn for one in results if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        # The backward runs the nodes in the opposite order, in two slots each. In the second slot of a node
        # the record has what the node makes.
        slot = 3 * length - 2 * (node._sequence_nr() - first_time)
        for after, _ in node.next_functions:
            variable = getattr(after, "variable", None)
            if isinstance(variable, Tensor) and variable in parameters:
                slot = min(max(slot, length), 3 * length - 1)
                made[variable] = min(made.get(variable, slot), slot)
            elif after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    changes = [0] * (3 * length)
    for parameter, slot in made.items():
        changes[slot] += parameter.nbytes
    return list(accumulate(changes))


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
            moved=extrapolate(before.moved, after.moved),
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
