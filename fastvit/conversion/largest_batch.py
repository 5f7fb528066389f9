"""The largest batch whose training step fits in given memory, by measured steps with two batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from .budget import parse_bytes
from .copy_runner import CopyRunner
from .nested_values import copy_arguments, name_arguments, tensor_leaves
from .plan_search import Plan
from .step_memory import StepMemory, extrapolate_record

_MIN_BATCH = 4  # a smaller batch is measured and doubled, and a larger one is measured and halved
_MAX_BATCH = 2**40
_MAX_PLANS = 3  # each plan is for the batch that fits by the plan before
_MAX_DIFFERENCE = 0.1  # fraction of a measured peak by which the peak on paper may differ

Result = TypeVar("Result")


def parse_memory(memory: object) -> int:
    """Returns the bytes of an int or a str such as "8 GiB".

    Raises:
        ValueError: `memory` is neither.
    """
    if (nbytes := parse_bytes(memory)) is not None:
        return nbytes
    raise ValueError(f"report: memory must be bytes, as an int or as '8 GiB', got {memory!r}")


class BatchSearch:
    """Searches the largest batch of a training step with AdamW.

    A step holds the model, two tensors like each trained parameter, which are AdamW's state, the inputs, the
    activations, and the gradients of parameters that the backward has made so far. In each slot of a step on
    paper the bytes are an affine function of the batch, known from records with two batches; so which slot
    holds most depends on the batch. A measured step says by which factor the peak differs from that on paper.
    If it differs much, as with compiled or checkpointed code, the measured peak is taken for affine.

    Args:
        runner: of the model, with a batch as it is trained.
        memory: bytes that a step may hold.

    Raises:
        ValueError: the inputs have no batch in common.
    """

    def __init__(self, runner: CopyRunner, memory: int):
        self.memory = memory
        self._runner = runner
        self._batch = _find_batch(runner)
        large = self._batch if self._batch >= _MIN_BATCH else 2 * self._batch
        self.sizes = large // 2, large
        trained = [one.nbytes for one in runner.model.parameters() if one.requires_grad]
        self._gradient_bytes = sum(trained)
        self.model_bytes = _sum_bytes([*runner.model.parameters(), *runner.model.buffers()])
        self.model_bytes += 2 * sum(trained)
        self._input_bytes = _sum_bytes(tensor_leaves(runner.arguments)) / self._batch
        # AdamW takes the root of one of its tensors: of all parameters at once on a GPU, and else of each.
        is_gpu = any(device.type == "cuda" for device in runner.devices)
        self._optimizer_bytes = sum(trained) if is_gpu else 2 * max(trained, default=0)

    def run_sizes(self, function: Callable[[], Result]) -> tuple[Result, Result]:
        """Calls `function` with either batch: the runner has a part of the inputs, or the inputs repeated."""
        small, large = (self._run_size(function, size) for size in self.sizes)
        return small, large

    def _run_size(self, function: Callable[[], Result], size: int) -> Result:
        runner, arguments = self._runner, self._runner.arguments
        resize = partial(_resize_tensor, batch=self._batch, size=size)
        runner.arguments = copy_arguments(runner.caller, runner.model, arguments, resize)
        try:
            return function()
        except Exception as error:
            if size == self._batch:
                raise
            raise ValueError(
                f"report: memory= takes the first dimension of the inputs, {self._batch}, as the batch, and "
                f"with {size} in place of it the model raised {type(error).__name__}: {error}; pass inputs "
                "whose first dimension is the batch, or call report without memory="
            ) from error
        finally:
            runner.arguments = arguments

    def find_batch(
        self, peaks: tuple[int, int], timelines: tuple[list[int], list[int]], gradients: list[int]
    ) -> int:
        """Returns the largest batch that fits; 0 if none does.

        Args:
            peaks: of steps with either batch, measured.
            timelines: of these steps, on paper.
            gradients: bytes of the gradients of parameters in each slot of the second one.
        """
        (small, large), slots = self.sizes, list(zip(*self._align(timelines), gradients, strict=True))
        low_excess, high_excess = (
            peak - max(timeline) for peak, timeline in zip(peaks, timelines, strict=True)
        )
        is_exact = abs(high_excess) < _MAX_DIFFERENCE * peaks[1]
        excess_fraction = high_excess / max(*timelines[1], 1)

        def count_bytes(batch: int) -> int:
            steps = (batch - large) / (large - small)
            on_paper = max(high + (high - low) * steps + more for low, high, more in slots)
            excess = (
                on_paper * excess_fraction if is_exact else high_excess + (high_excess - low_excess) * steps
            )
            most = max(on_paper + excess, self._gradient_bytes + self._optimizer_bytes)
            return math.ceil(self.model_bytes + self._input_bytes * batch + most)

        limit = 1
        while limit < _MAX_BATCH and count_bytes(limit) <= self.memory:
            limit *= 2
        return bisect_right(range(1, limit), self.memory, key=count_bytes)

    def find_least_plan(self, steps: tuple[StepMemory, StepMemory], plan: Plan, batch: int) -> Plan:
        """Returns the plan by which the largest batch fits, on paper.

        Args:
            steps: with either batch.
            plan: with the least peak for the batch of the inputs. For a larger one others have less.
            batch: that fits by another plan.
        """
        (small, large), best = self.sizes, self._find_on_paper(steps, plan)
        for _ in range(_MAX_PLANS):
            distance = (max(batch, best) - large) / (large - small)
            record = extrapolate_record(steps[0].record, steps[1].record, distance)
            other = StepMemory(record).find_least_plan(self._runner.devices[0])
            found = self._find_on_paper(steps, other)
            if found <= best:
                break
            best, plan = found, other
        return plan

    def _find_on_paper(self, steps: tuple[StepMemory, StepMemory], plan: Plan) -> int:
        few, many = (step.replay(plan.sites) for step in steps)
        return self.find_batch((max(few), max(many)), (few, many), steps[1].weight_gradients)

    def _align(self, timelines: tuple[list[int], list[int]]) -> tuple[list[float], list[int]]:
        """Returns timelines with the same slots, also if the model runs other ops with another batch."""
        few, many = timelines
        if len(few) == len(many):
            return [float(one) for one in few], many
        small, large = self.sizes
        return [one * small / large for one in many], many


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in {id(one): one for one in tensors}.values())


def _find_batch(runner: CopyRunner) -> int:
    """Returns the first dimension that all tensors of the inputs share; numbers are left out."""
    sizes = {one.shape[0] for one in tensor_leaves(runner.arguments) if one.dim()}
    if len(sizes) == 1 and (batch := sizes.pop()):
        return batch
    shapes = [
        f"{name}: {', '.join(str(tuple(one.shape)) for one in tensor_leaves(value))}"
        for name, value in name_arguments(runner.model, runner.arguments)
        if tensor_leaves(value)
    ]
    raise ValueError(
        "report: memory= needs tensors among the inputs whose first dimension is the batch, the same in all, "
        f"got {'; '.join(shapes) or 'none'}; pass the others in a module that holds them"
    )


def _resize_tensor(tensor: Tensor, batch: int, size: int) -> Tensor:
    """Copies a tensor; of one with dimensions the first one becomes `size` instead of `batch`."""
    resized = tensor.detach()
    if tensor.dim():
        resized = torch.cat([resized] * -(-size // batch))[:size]
    return resized.clone().requires_grad_(tensor.requires_grad)
