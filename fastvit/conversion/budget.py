"""A budget for the peak of a training step, and the plan that meets it with example inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..recompute import Policy, RecomputeLevel, StepRecord, Value, observe_saved_tensors
from .copy_runner import CopyRunner
from .nested_values import ForwardArguments
from .plan_search import Plan, make_plans
from .scope_hooks import add_scope_hooks
from .timeline import Timeline

# `_find_least` measures a plan for each factor: its peak on paper is at most so many times the least one.
_NEAR_LEAST_FACTORS = 1.05, 1.12, 1.25
_EQUAL_PEAKS_FACTOR = 1.005  # Measured peaks that differ by less count as equal.
_NUM_HOLDERS = 3  # Values that a message names.
GRADIENTS = "gradients of activations and the result"  # The label of the bytes that belong to no value.


class Budget(NamedTuple):
    """The peak that a step may have: a fraction of the original's, or bytes. Both are 0 for "least"."""

    fraction: float
    nbytes: int

    def find_allowed_bytes(self, original_bytes: int) -> int:
        return int(self.fraction * original_bytes) if self.fraction else self.nbytes

    @property
    def is_least(self) -> bool:
        return not self.fraction and not self.nbytes

    def __str__(self) -> str:
        return str(self.fraction or self.nbytes)


class StepPlans:
    """The plans of one step.

    Args:
        record: the record of a forward that recomputed every op with a rule.
        device: the device of the step, on which work is estimated.
    """

    def __init__(self, record: StepRecord, device: torch.device):
        self.record = record
        self.plans = make_plans(record, make_work_estimator(device))

    @property
    def original_peak(self) -> int:
        return self.plans[0].peak_bytes

    def choose_plan(self, allowed_bytes: float) -> Plan | None:
        """Returns the plan with the least work whose peak is allowed; None if no plan has such a peak."""
        return next((plan for plan in self.plans if plan.peak_bytes <= allowed_bytes), None)

    def describe_holders(self, plan: Plan) -> str:
        """Returns a text with the names and bytes of the values that hold most at the peak of a plan."""
        sizes = Counter[str]()
        for interval in Timeline(self.record).find_peak(plan.recomputed_values):
            sizes[_describe_value(interval.value)] += interval.nbytes
        return ", ".join(f"{name}: {nbytes}" for name, nbytes in sizes.most_common(_NUM_HOLDERS))


def _describe_value(value: Value | None) -> str:
    if value is None:
        return GRADIENTS
    return f"{value.name} in {value.site.block or 'the model'}" if value.site else value.name


def apply_plan(policy: Policy, plan: Plan, original: Plan) -> Policy:
    """Returns `policy` with the level and sites of `plan`. The plan `original` recomputes nothing."""
    kept_fraction = plan.kept_bytes / max(original.kept_bytes, 1)
    return dataclasses.replace(policy, level=plan.level, only_sites=plan.sites, kept_fraction=kept_fraction)


def make_recording_policy(policy: Policy) -> Policy:
    """Returns the policy under which a forward recomputes every op with a rule, which a record needs."""
    return dataclasses.replace(policy, level=RecomputeLevel.EVERY_OP, only_sites=None)


def plan_budget(model: nn.Module, policy: Policy, budget: Budget, arguments: ForwardArguments) -> Policy:
    """Returns the policy with the least work that meets `budget`, by a record and measured steps of copies.

    Raises:
        ValueError: no policy meets the budget.
    """
    runner = CopyRunner("convert", model, arguments)
    model_copy = add_scope_hooks(runner.copy_for_training(), make_recording_policy(policy))
    record = runner.record_step(model_copy, observe_saved_tensors(lambda _: None))
    step_plans = StepPlans(record, runner.devices[0])
    plans, original = step_plans.plans, step_plans.plans[0]

    def measure(plan: Plan) -> int:
        return runner.measure_step_peak(add_scope_hooks(model_copy, apply_plan(policy, plan, original)))

    if budget.is_least:
        return apply_plan(policy, _find_least(plans, measure)[0], original)
    measured_original = runner.measure_original_peak()
    allowed = budget.find_allowed_bytes(measured_original)
    if allowed >= measured_original:
        return dataclasses.replace(policy, only_sites=frozenset())
    # Bisection lets a smaller budget take the same plan or a later one, even if peaks are not in order.
    index = bisect_left(
        range(len(step_plans.plans)), True, key=lambda i: measure(step_plans.plans[i]) <= allowed
    )
    if index < len(plans):
        return apply_plan(policy, plans[index], original)
    plan, least_peak = _find_least(plans, measure)
    if least_peak <= allowed:
        return apply_plan(policy, plan, original)
    message = describe_unmet_budget(budget, least_peak, measured_original, policy)
    raise ValueError(f"convert: {message}; at that peak there are {step_plans.describe_holders(plan)} bytes")


def _find_least(plans: list[Plan], measure: Callable[[Plan], int]) -> tuple[Plan, int]:
    """Returns the plan with the least measured peak, and that peak; of equal ones, that of least work.

    Near the least peak, peaks on paper differ from measured ones as much as from one another.
    """
    candidates = [
        next(plan for plan in plans if plan.peak_bytes <= factor * plans[-1].peak_bytes)
        for factor in (1, *_NEAR_LEAST_FACTORS)
    ]
    measured_plans = {plan.work: (plan, measure(plan)) for plan in candidates}
    max_peak = _EQUAL_PEAKS_FACTOR * min(peak for _, peak in measured_plans.values())
    return next((plan, peak) for _, (plan, peak) in sorted(measured_plans.items()) if peak <= max_peak)


def describe_unmet_budget(budget: Budget, least_peak: int, original_peak: int, policy: Policy) -> str:
    """Returns a message: the budget that cannot be met, the least peak, and the option to pass."""
    fraction = math.ceil(1000 * least_peak / max(original_peak, 1)) / 1000
    has_casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and not policy.weight_casts
    return (
        f"a budget of {budget} cannot be met; the least peak of a step is {least_peak} bytes, {fraction:.3f} "
        f"of the original's {original_peak}; pass budget='least' or a budget of at least {fraction:.3f}"
        + ("; recompute_weight_casts=True frees copies of weights too" if has_casts else "")
    )


def make_work_estimator(device: torch.device) -> Callable[[Value], float]:
    """Returns a function that estimates the work of an op in bytes.

    The work is the bytes that the op moves. Its flops count as the bytes that memory moves in the same time.
    """

    def estimate_work(value: Value) -> float:
        if not value.flops:
            return float(value.bytes_moved)
        return value.bytes_moved + value.flops / measure_flops_per_byte(device, value.dtype or torch.float32)

    return estimate_work


@functools.cache
def measure_flops_per_byte(device: torch.device, dtype: torch.dtype) -> float:
    """Measures how many flops of a matmul take as long as the move of one byte.

    The result is a power of two, so that it is the same in each run: 8 to 32 in fp32, up to 512 in half
    precision on a GPU, 1 and less in half precision on a CPU without instructions for half precision.
    """
    size = 512 if device.type == "cpu" else 4096
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    with torch.no_grad(), torch._C._DisableAutocast():
        matrix, memory = torch.ones(size, size, **options), torch.ones(size, 8 * size, **options)
        seconds_per_flop = _measure_seconds(lambda: matrix @ matrix, device) / (2 * size**3)
        seconds_per_byte = _measure_seconds(lambda: memory + memory, device) / (2 * memory.nbytes)
    exponent = round(math.log2(seconds_per_byte / seconds_per_flop))
    return 2.0 ** min(max(exponent, -3), 9)  # Between 1/8 and 512, in case a measurement is far off.


def _measure_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of five calls of `function`, after one call that warms up."""

    def time_call() -> float:
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    time_call()
    return min(time_call() for _ in range(5))


def parse_bytes(text: object) -> int | None:
    """Returns a number of bytes: an int above 1, or a str such as "2 GiB"; None for anything else."""
    match = re.fullmatch(r"\s*([0-9.e+-]+)\s*([KMGT]i?B)?\s*", str(text))
    with contextlib.suppress(ValueError, OverflowError):
        number = float(match[1]) if match and not isinstance(text, bool) else math.nan
        if match and match[2]:
            number *= (1024 if "i" in match[2] else 1000) ** ("KMGT".index(match[2][0]) + 1)
        elif not str(text).strip().isdecimal():  # A str such as "2.0" is no number of bytes.
            return None
        if number > 1:
            return int(number)
    return None


def parse_budget(budget: object) -> Budget:
    """Returns the `Budget` of a fraction, of bytes, or of "least".

    Raises:
        ValueError: `budget` is none of these.
    """
    if isinstance(budget, str) and budget == "least":
        return Budget(0.0, 0)
    if (nbytes := parse_bytes(budget)) is not None:
        return Budget(0.0, nbytes)
    with contextlib.suppress(ValueError, TypeError):
        number = math.nan if isinstance(budget, bool) else float(str(budget))
        if 0 < number <= 1:
            return Budget(number, 0)
    raise ValueError(
        "convert: budget must be a fraction above 0 and at most 1, or bytes as an int or as '2 GiB', or "
        f"'least', got {budget!r}"
    )
