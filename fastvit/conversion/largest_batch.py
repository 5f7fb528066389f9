"""Finds the largest batch whose training step fits in `memory`, by measured steps with two batches.

A batch is a batch size. "On paper" means: in a replay of the recorded step, without running it.
"""

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

_MIN_BATCH = 4  # The inputs' batch is halved for the second measured step; a smaller one is doubled.
_MAX_BATCH = 2**40  # It ends the search for a model whose bytes do not depend on the batch.
_MAX_PLANS = 3  # Each plan is made for the largest batch that the plan before can fit.

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
    activations, and the gradients of parameters that the backward has made so far. Steps are recorded with
    two batches and replayed. In each slot, a moment of the replay, the bytes are an affine function of the
    batch. Their peak is not: another batch may have it in another slot. Memory that an op holds while it
    runs, such as the workspace of a convolution, is not on paper. It may make the peak of small batches in a
    slot where a large batch has none. A peak is therefore the one on paper, or the one on the line through
    both measured peaks, whichever is larger.

    Args:
        runner: the runner of the model, with a batch of inputs.
        memory: the bytes that a step may hold.

    Attributes:
        sizes: the two batches of the measured steps, the smaller one first.
        model_bytes: bytes of the model and of AdamW's state.

    Raises:
        ValueError: the inputs have no batch in common.
    """

    def __init__(self, runner: CopyRunner, memory: int):
        self.memory = memory
        self._runner = runner
        self._batch = _get_common_batch(runner)
        large = self._batch if self._batch >= _MIN_BATCH else 2 * self._batch
        self.sizes = large // 2, large
        trained_nbytes = [weight.nbytes for weight in runner.model.parameters() if weight.requires_grad]
        self._gradient_bytes = sum(trained_nbytes)
        self.model_bytes = _sum_bytes([*runner.model.parameters(), *runner.model.buffers()])
        self.model_bytes += 2 * sum(trained_nbytes)
        self._input_bytes = _sum_bytes(tensor_leaves(runner.arguments)) / self._batch
        # AdamW allocates roots of a state: on a GPU of all parameters at once, else a root and its quotient.
        is_gpu = any(device.type == "cuda" for device in runner.devices)
        self._optimizer_bytes = sum(trained_nbytes) if is_gpu else 2 * max(trained_nbytes, default=0)

    def run_sizes(self, function: Callable[[], Result]) -> tuple[Result, Result]:
        """Calls `function` once for each of `sizes`, with the inputs of the runner cut or repeated."""
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
        self,
        timelines: tuple[list[int], list[int]],
        gradients: list[int],
        peaks: tuple[int, int] | None = None,
    ) -> int:
        """Returns the largest batch that fits; 0 if no batch fits.

        Args:
            timelines: bytes in each slot of steps with the two batches, on paper.
            gradients: bytes of the gradients of parameters in each slot of the second step.
            peaks: measured peaks of these steps, with the gradients; None: those on paper.
        """
        small, large = self.sizes
        slots = list(zip(*self._align(timelines), gradients, strict=True))

        def find_paper_peak(batch: int) -> float:
            distance = (batch - large) / (large - small)
            return max(
                large_bytes + (large_bytes - small_bytes) * distance + gradient_bytes
                for small_bytes, large_bytes, gradient_bytes in slots
            )

        paper_peaks = find_paper_peak(small), find_paper_peak(large)
        small_peak, large_peak = peaks or paper_peaks
        large_excess = large_peak - paper_peaks[1]
        small_excess = min(0, small_peak - paper_peaks[0])  # of compiled code, not of a workspace

        def find_backward_peak(batch: int) -> float:
            distance = (batch - large) / (large - small)
            if large_excess < 0:  # Compiled code holds less than the ops of the record.
                return find_paper_peak(batch) + large_excess + (large_excess - small_excess) * distance
            return max(find_paper_peak(batch), large_peak + (large_peak - small_peak) * distance)

        def count_bytes(batch: int) -> int:
            optimizer_peak = self._gradient_bytes + self._optimizer_bytes  # Activations are free by then.
            step_bytes = max(find_backward_peak(batch), optimizer_peak)
            return math.ceil(self.model_bytes + self._input_bytes * batch + step_bytes)

        limit = 1
        while limit < _MAX_BATCH and count_bytes(limit) <= self.memory:
            limit *= 2
        return bisect_right(range(1, limit), self.memory, key=count_bytes)

    def find_least_plan(self, steps: tuple[StepMemory, StepMemory], plan: Plan, batch: int) -> Plan:
        """Returns the plan, a choice of op calls to recompute, that fits the largest batch on paper.

        Args:
            steps: the recorded steps with the two batches.
            plan: the plan with the least peak for the batch of the inputs. A larger batch may have another.
            batch: a batch that fits as the model is converted. Plans are made for this batch or larger ones.
        """
        (small, large), best = self.sizes, self._find_batch_on_paper(steps, plan)
        for _ in range(_MAX_PLANS):
            distance = (max(batch, best) - large) / (large - small)
            record = extrapolate_record(steps[0].record, steps[1].record, distance)
            next_plan = StepMemory(record).find_least_plan(self._runner.devices[0])
            next_best = self._find_batch_on_paper(steps, next_plan)
            if next_best <= best:
                break
            best, plan = next_best, next_plan
        return plan

    def _find_batch_on_paper(self, steps: tuple[StepMemory, StepMemory], plan: Plan) -> int:
        small, large = (step.replay(plan.sites) for step in steps)
        return self.find_batch((small, large), steps[1].weight_gradients)

    def _align(self, timelines: tuple[list[int], list[int]]) -> tuple[list[float], list[int]]:
        """Returns timelines of equal length. If other ops ran, the second one, scaled, replaces the first."""
        small_timeline, large_timeline = timelines
        if len(small_timeline) == len(large_timeline):
            return list(map(float, small_timeline)), large_timeline
        small, large = self.sizes
        return [nbytes * small / large for nbytes in large_timeline], large_timeline


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _get_common_batch(runner: CopyRunner) -> int:
    """Returns the first dimension that all tensors of the inputs share, without tensors of no dimension."""
    sizes = {tensor.shape[0] for tensor in tensor_leaves(runner.arguments) if tensor.dim()}
    if len(sizes) == 1 and (batch := sizes.pop()):
        return batch
    shapes = [
        f"{name}: {', '.join(str(tuple(tensor.shape)) for tensor in tensor_leaves(value))}"
        for name, value in name_arguments(runner.model, runner.arguments)
        if tensor_leaves(value)
    ]
    raise ValueError(
        "report: memory= needs tensors among the inputs whose first dimension is the batch, the same in all, "
        f"got {'; '.join(shapes) or 'none'}; pass the others as attributes of the model"
    )


def _resize_tensor(tensor: Tensor, batch: int, size: int) -> Tensor:
    """Copies a tensor. If the tensor has dimensions, the first one becomes `size` instead of `batch`."""
    resized = tensor.detach()
    if tensor.dim():
        resized = torch.cat([resized] * math.ceil(size / batch))[:size]
    return resized.clone().requires_grad_(tensor.requires_grad)
