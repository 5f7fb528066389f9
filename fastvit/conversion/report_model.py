"""`report`: measures what a training forward keeps for backward, and which tensors these are."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from functools import partial

from torch import Tensor, nn

from ..fusion import is_fused
from ..recompute import OpSite, Policy, SavedMemory, skip_key
from .budget import make_recording_policy
from .budget_hook import find_budget_hooks, freeze_budgets
from .convert_model import ensure_converted
from .copy_runner import CopyRunner
from .largest_batch import BatchSearch, parse_memory
from .memory_report import Report, TensorReport
from .module_labels import observe_modules
from .nested_values import tensor_leaves
from .plan_search import Plan
from .scope_hooks import add_scope_hooks, change_policies, is_converted, revert
from .step_memory import StepMemory


def report(model: nn.Module, *inputs: object, memory: object = None, **kwinputs: object) -> Report:
    """Measures what a training forward keeps for backward, as the model was and as it is converted.

        print(fastvit.report(model, images))
        print(fastvit.report(model, images, memory="8 GiB"))  # Which batch fits?

    Copies of the model run: one reverted, and one converted as `model` is, or by `convert(model)` if it is
    not converted. Forwards run with copies of the inputs. The first of two forwards fills caches; the
    second is measured by torch's allocator (`fastvit.memory.live_bytes`): the bytes of all tensors that stay
    allocated while the result is held, which are the saved tensors and the result. The peak of a step, which
    is the forward and the backward of its results, is measured too (`fastvit.memory.peak_bytes`), without
    gradients of parameters. Bytes over the step, and the modules that hold the bytes at the peak, are
    computed from what one more forward saves. Neither the model nor its buffers, training flags and hooks
    change, nor do random states. Runs that last longer than a few seconds are announced on stderr.

    Call it as the model is trained: under the same autocast, with inputs of the same shape and dtype. If the
    model is in evaluation mode, the copies are set to training mode. A copy runs without
    DistributedDataParallel, so pass the module that it wraps: `report(ddp.module, images)`.

    With `memory` the report says which batch size fits: as the model was, as it is converted, and with the
    least peak of a step, which `convert(model, budget="least")` plans. A step holds the model, AdamW's state
    (two tensors like each trained parameter), the inputs, activations, and the gradients of parameters that
    exist at the peak. `zero_grad()` must free gradients before the forward; AdamW's own step must fit too.
    The batch size ("batch") is the first dimension of all tensors in the inputs. The bytes of activations are
    assumed to be an affine function of it: steps are measured with the batch, and with half of it (twice if
    the batch is below 4). Memory of the loss and of the data loader is not counted.

    Args:
        model: converted or not. A copy of its parameters must fit in memory beside it.
        inputs: positional arguments of its forward.
        memory: bytes, as an int or a str such as "8 GiB". A tensor is passed to a forward as its `memory`.
        kwinputs: keyword arguments of its forward.

    Returns:
        A `Report`, which prints as a table: `str(report)`, `report.summary()`, `report.plot(path)`.

    Raises:
        TypeError: `model` is not a module, or an input is a size, such as `(8, 3, 32, 32)`.
        ValueError: the model cannot be copied, is wrapped for data parallelism or sharded, or is neither on
            the CPU nor on CUDA; `memory` is not a number of bytes, or inputs have no common batch size.
        RuntimeError: inside `recompute_scope()`.
    """
    if isinstance(memory, Tensor):
        kwinputs, memory = {"memory": memory, **kwinputs}, None
    max_bytes = 0 if memory is None else parse_memory(memory)
    runner = CopyRunner("report", model, (inputs, kwinputs))
    search = BatchSearch(runner, max_bytes) if max_bytes else None
    kept_before, peak_before = runner.measure_original_bytes(), runner.measure_original_peak()
    model_copy = _convert_copy(runner)
    rows, sites, notes = _observe_forward(runner, model_copy)
    kept_after, peak_after = runner.measure_kept_bytes(model_copy), runner.measure_step_peak(model_copy)
    if any(module._compiled_call_impl is not None for module in model.modules()):
        notes.append("measured without Module.compile, which is not copied; pass torch.compile(model)")
    peaks: dict[str, tuple[int, int]] = {}
    if search:
        peaks["as it was"] = _measure_peaks(search, runner, revert(runner.copy_for_training()))
        peaks["as converted"] = _measure_peaks(search, runner, model_copy)
    # From now on the copy recomputes every op that it can. A replay computes, on paper (without a run), the
    # step in which only some sites, op calls in a block, are recomputed.
    change_policies(model_copy, make_recording_policy)
    steps = _record_steps(runner, model_copy)
    plan = steps["least"].find_least_plan(runner.devices[0])
    sites_by_name = {"as it was": frozenset[OpSite](), "as converted": sites, "least": plan.sites}
    timelines = {name: step.replay(sites_by_name[name]) for name, step in steps.items()}
    holders = {name: steps[name].find_holders(sites_by_name[name]) for name in ("as it was", "as converted")}
    return Report(
        kept_before=kept_before,
        kept_after=kept_after,
        tensors=rows,
        notes=notes,
        converted=is_converted(model),
        peak_before=peak_before,
        peak_after=peak_after,
        timelines=timelines,
        peak_holders=holders,
        memory=max_bytes,
        model_bytes=search.model_bytes if search else 0,
        batches=_find_batches(search, runner, model_copy, sites_by_name, plan, peaks) if search else {},
    )


def _observe_forward(
    runner: CopyRunner, model_copy: nn.Module
) -> tuple[list[TensorReport], frozenset[OpSite], list[str]]:
    """Returns rows of the saved tensors of a forward, the sites that are recomputed, and notes."""
    notes: dict[str, None] = {}
    with observe_modules(model_copy, notes) as observer:
        # Tensors that exist before the forward are not its memory. isinstance would run code of lazy proxies.
        existing = [tensor for tensor in gc.get_objects() if issubclass(type(tensor), Tensor)]
        with runner.hold_result(model_copy) as arguments:
            existing += tensor_leaves((arguments, list(map(vars, model_copy.modules()))))
            memory = observer.saved_memory(existing)
            rows = _group_rows(memory)
            sites = frozenset(entry.site for entry in memory if entry.site is not None)
            del memory, existing  # All tensors are free when the result is.
    return rows, sites, list(notes)


def _measure_peaks(search: BatchSearch, runner: CopyRunner, model_copy: nn.Module) -> tuple[int, int]:
    """Returns the peaks of steps with both batch sizes of the search."""
    return search.run_sizes(lambda: runner.measure_step_peak(model_copy, keeps_gradients=True))


def _find_batches(
    search: BatchSearch,
    runner: CopyRunner,
    model_copy: nn.Module,
    sites_by_name: dict[str, frozenset[OpSite]],
    plan: Plan,
    peaks: dict[str, tuple[int, int]],
) -> dict[str, int]:
    """Returns the largest batches that fit. The peak of "least" is measured by a step of `model_copy`.

    Args:
        sites_by_name: the sites that steps with the batch of the inputs recompute.
        plan: the plan with the least peak, for the batch of the inputs.
        peaks: measured peaks of steps with both batches, without "least".
    """
    batches: dict[str, int] = {}
    small, large = search.run_sizes(lambda: _record_steps(runner, model_copy))
    for name, sites in sites_by_name.items():
        steps = small[name], large[name]
        if name == "least":  # It comes last: its search starts from the batch as converted.
            plan = search.find_least_plan(steps, plan, batches["as converted"])
            sites = plan.sites
            change_policies(model_copy, partial(dataclasses.replace, level=plan.level, only_sites=sites))
            peaks = peaks | {name: _measure_peaks(search, runner, model_copy)}
        timelines = steps[0].replay(sites), steps[1].replay(sites)
        batches[name] = search.find_batch(timelines, steps[1].weight_gradients, peaks[name])
    return batches


def _convert_copy(runner: CopyRunner) -> nn.Module:
    """Returns a copy that is converted as the model is, or by default, and whose budgets are planned."""
    model_copy = ensure_converted(runner.copy_for_training())
    if find_budget_hooks(model_copy):
        for _ in range(2):  # Budgets are planned in the first forwards, as in a training.
            with runner.hold_result(model_copy):
                pass
        freeze_budgets(model_copy)
    return model_copy


def _record_steps(runner: CopyRunner, model_copy: nn.Module) -> dict[str, StepMemory]:
    """Returns steps to replay, by name, recorded while copies recompute every op that has a rule for it."""
    step = original = StepMemory(runner.record_step(model_copy, observe_modules(model_copy, {})))
    if is_fused(runner.model):  # Without its fused layers, the original has other ops.
        reverted = add_scope_hooks(revert(runner.copy_for_training()), make_recording_policy(Policy()))
        original = StepMemory(runner.record_step(reverted, observe_modules(reverted, {})))
    return {"as it was": original, "as converted": step, "least": step}


def _group_rows(memory: list[SavedMemory]) -> list[TensorReport]:
    """Groups entries with the same modules and reason into rows, most recomputed bytes first."""
    groups: dict[tuple[tuple[str, ...], str], list[SavedMemory]] = defaultdict(list)
    for entry in memory:
        groups[tuple(sorted({module for module, _ in entry.saved})), entry.reason].append(entry)
    rows = [
        TensorReport(
            names,
            len(entries),
            sum(entry.kept_bytes for entry in entries),
            sum(entry.freed_bytes for entry in entries),
            reason,
            tuple(dict.fromkeys(skip_key(entry.site) for entry in entries if entry.site is not None)),
        )
        for (names, reason), entries in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.recomputed_bytes, -row.kept_bytes, row.names))
