"""`report`: what a training forward keeps for backward, measured, and which tensors these are."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from ..fusion import is_fused
from ..recompute import (
    OpSite,
    Policy,
    SavedMemory,
)
from .budget import recording_policy
from .budget_hook import find_budget_hooks, freeze_budgets
from .convert_model import ensure_converted
from .copy_runner import CopyRunner
from .largest_batch import BatchSearch, parse_memory
from .module_labels import observe_modules
from .nested_values import tensor_leaves
from .report_pictures import Bar, draw_timelines, format_bytes, plot_report
from .scope_hooks import add_scope_hooks, change_policies, is_converted, revert
from .step_memory import StepMemory

_SHOWN = 0.005  # smallest share of all bytes that has a line in the table
_NUM_HOLDERS = 4  # modules that a line names at a peak
_FAR = 0.1  # share of the measured peak by which the peak on paper may differ without a line


@dataclass(frozen=True)
class TensorReport:
    """Saved tensors of one kind, over all blocks.

    Attributes:
        names: the modules whose forward saved one of them; a number that changes from block to block is `*`.
        count: the number of tensors.
        kept_bytes: bytes of them that stay in memory until backward.
        rebuilt_bytes: bytes of them that are rebuilt instead.
        reason: the ops that rebuild them, or why they are kept.
    """

    names: tuple[str, ...]
    count: int
    kept_bytes: int
    rebuilt_bytes: int
    reason: str


@dataclass(frozen=True)
class Report:
    """What a training forward keeps for backward, and what a step holds at most. Prints as a table.

    Bytes of a step are those of activations and their gradients: what a forward and the backward of its
    results allocate. The gradients of parameters are not counted, nor is a loss that the model does not
    return.

    Attributes:
        kept_before: bytes that a forward of the original model keeps, its result included, measured.
        kept_after: bytes that a forward of the converted model keeps, measured.
        tensors: the tensors that the converted model keeps or rebuilds, those of one kind in one row.
        notes: where nothing can be rebuilt, and why.
        converted: whether the model itself is converted, and not only the copy that was measured.
        peak_before: the most bytes that a step of the original model holds at a time, measured.
        peak_after: the most bytes that a step of the converted model holds at a time, measured.
        timelines: bytes over a step, on paper, "as it was", "as converted", and "least": with the least peak
            that was found. The first third of a list is the forward, the rest is the backward.
        peak_holders: for "as it was" and "as converted" the modules that hold bytes at the peak of the
            timeline, the most bytes first. A number that changes from block to block is `*`.
        memory: bytes for which a batch was searched; 0 if none were given.
        model_bytes: of the model and two tensors like each trained parameter, which are AdamW's state; 0
            without `memory`.
        batches: for each timeline the largest batch whose training step with AdamW fits in `memory`; 0 if
            none fits. Empty without `memory`.
    """

    kept_before: int
    kept_after: int
    tensors: list[TensorReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    converted: bool = True
    peak_before: int = 0
    peak_after: int = 0
    timelines: dict[str, list[int]] = field(default_factory=dict)
    peak_holders: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    memory: int = 0
    model_bytes: int = 0
    batches: dict[str, int] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """`kept_before` minus `kept_after`: below 0 where the converted model keeps more."""
        return self.kept_before - self.kept_after

    def _large_tensors(self) -> list[TensorReport]:
        least = _SHOWN * self.kept_before
        return [row for row in self.tensors if max(row.rebuilt_bytes, row.kept_bytes) >= least]

    def __str__(self) -> str:
        lines = [self.summary(), *self._describe_batches(), "", *self._describe_tensors()]
        if self.timelines:
            lines += ["", *draw_timelines(self.timelines), *self._describe_peaks()]
        if not self.converted:
            lines.append("the model is not converted yet: fastvit.convert(model) makes it what was measured")
        return "\n".join([*lines, *[f"note: {note}" for note in self.notes]])

    def _describe_tensors(self) -> list[str]:
        shown = self._large_tensors()
        rows = [
            (
                " & ".join(row.names),
                str(row.count),
                format_bytes(row.rebuilt_bytes) if row.rebuilt_bytes else "",
                format_bytes(row.kept_bytes) if row.kept_bytes > row.rebuilt_bytes // 100 else "",
                row.reason,
            )
            for row in shown
        ]
        lines = _aligned([("saved by", "count", "rebuilt", "kept", "why"), *rows]) if rows else []
        rest = self.kept_after - sum(row.kept_bytes for row in shown)
        if rest > 0:
            lines.append(f"and {format_bytes(rest)} in smaller tensors, the result, compiled code")
        return lines

    def _describe_peaks(self) -> list[str]:
        lines = []
        for name, holders in self.peak_holders.items():
            shown = ", ".join(f"{label} {format_bytes(nbytes)}" for label, nbytes in holders[:_NUM_HOLDERS])
            lines.append(f"at the peak {name}: {shown}")
        on_paper = max(self.timelines["as it was"])
        if abs(on_paper - self.peak_before) > _FAR * self.peak_before:
            lines.append(
                f"on paper the peak as it was is {format_bytes(on_paper)}, measured it is "
                f"{format_bytes(self.peak_before)}: what compiled, scripted and checkpointed parts, and "
                "single ops, allocate for a while is not on paper"
            )
        return lines

    def _describe_batches(self) -> list[str]:
        if not self.batches:
            return []
        found = ", ".join(f"{count or 'none'} {name}" for name, count in self.batches.items())
        return [
            f"the largest batch for a step with AdamW in {format_bytes(self.memory)}: {found} "
            f"(the model and two tensors like each trained parameter, AdamW's state, take "
            f"{format_bytes(self.model_bytes)})"
        ]

    def summary(self) -> str:
        """One line: the bytes that a training forward keeps as converted and as it was, and the peaks."""
        less = self.saved_bytes
        share = abs(less) / self.kept_before if self.kept_before else 0.0
        sign = "less" if less >= 0 else "more"
        line = (
            f"a training forward keeps {format_bytes(self.kept_after)} instead of "
            f"{format_bytes(self.kept_before)}: {format_bytes(abs(less))} or {share:.1%} {sign} (measured)"
        )
        if self.peak_before:
            peaks = f"{format_bytes(self.peak_after)} instead of {format_bytes(self.peak_before)}"
            line += f"; the peak of a step is {peaks} (measured)"
        return line

    def plot(self, path: str | Path) -> None:
        """Draws two panels to an image file.

        The first one has the bytes over a step for each of `timelines`, the second one the kept and the
        rebuilt bytes, tensors of one kind in one bar.

        Raises:
            ImportError: matplotlib is not installed.
        """
        bars = [
            Bar(f"{row.count} x {' & '.join(row.names)}", row.kept_bytes, row.rebuilt_bytes)
            for row in self._large_tensors()
        ]
        title = self.summary().replace(": ", "\n").replace("; ", "\n")
        plot_report(path, title, self.timelines, bars)


def report(model: nn.Module, *inputs: object, memory: object = None, **kwinputs: object) -> Report:
    """Measures what a training forward keeps for backward, as the model was and as it is converted.

        print(fastvit.report(model, images))
        print(fastvit.report(model, images, memory="8 GiB"))  # which batch fits

    Two copies of the model run: one reverted, and one converted as `model` is, or by `convert(model)` where
    it is not converted. Forwards run with copies of the inputs, and the second one is measured by the
    allocator of torch (`fastvit.memory.live_bytes`). So the bytes are those of all tensors that stay
    allocated while the result is held: saved tensors and the result. The peak of a step, forward and backward
    of the results, is measured too (`fastvit.memory.peak_bytes`), without gradients of parameters. Bytes over
    the step, and who holds the peak, are computed from what one more forward saves. Neither the model nor its
    buffers, training flags and hooks change, nor do random states. Runs that last longer than a few seconds
    are announced on stderr.

    Call it as the model is trained: under the same autocast, with inputs of the same shape and dtype. Where
    the model is in evaluation the copies are set to training. A copy runs without
    DistributedDataParallel, so it has to be the module inside: `report(ddp.module, images)`.

    With `memory` it says which batch fits: as the model was, as it is converted, and with the least peak,
    which a budget of `convert` may ask for. A step holds the model, AdamW's state (two tensors like each
    trained parameter), the inputs, activations, and those gradients of parameters that exist when it holds
    most, where `zero_grad()` frees them before the forward; AdamW's own step must fit too. The bytes of
    activations are taken for an affine function of the batch, which the first dimension of all tensors in the
    inputs is: steps are measured with it and with half of it, or, below a batch of 4, twice of it. What the
    loss and the data loader hold is not known.

    Args:
        model: converted or not. One more copy of its parameters must fit in memory.
        inputs: positional arguments of its forward.
        memory: bytes, as an int or a str such as "8 GiB". A tensor is an argument of the forward.
        kwinputs: keyword arguments of its forward.

    Returns:
        A `Report`, which prints as a table: `str(report)`, `report.summary()`, `report.plot(path)`.

    Raises:
        TypeError: `model` is not a module, or an input is a size and not a tensor.
        ValueError: the model cannot be copied, is wrapped for data parallelism or sharded, or is neither on
            the CPU nor on CUDA; `memory` says no bytes, or there is no batch in the inputs for it.
        RuntimeError: inside `recompute_scope()`.
    """
    if isinstance(memory, Tensor):
        kwinputs, memory = {"memory": memory, **kwinputs}, None
    allowed = 0 if memory is None else parse_memory(memory)
    runner = CopyRunner("report", model, (inputs, kwinputs))
    search = BatchSearch(runner, allowed) if allowed else None
    kept_before, peak_before = runner.measure_original_bytes(), runner.measure_original_peak()
    copied = _convert_copy(runner)
    notes: dict[str, None] = {}
    with observe_modules(copied, notes) as observer:
        # A forward keeps none of these, even if an op saves one.
        existing = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        with runner.holding_output(copied) as arguments:
            held = tensor_leaves((arguments, list(map(vars, copied.modules()))))
            decisions = observer.decisions([*existing, *held])
            rows = _group_rows(decisions)
            sites = frozenset(one.site for one in decisions if one.site is not None)
            del decisions, existing, held
    kept_after, peak_after = runner.measure_kept_bytes(copied), runner.measure_step_peak(copied)
    if any(module._compiled_call_impl is not None for module in model.modules()):
        notes["measured without Module.compile, which is not copied; pass torch.compile(model)"] = None
    peaks = {}
    if search:
        original = revert(runner.training_copy())
        peaks = {"as it was": search.run_sizes(lambda: runner.measure_step_peak(original))}
        del original
        peaks["as converted"] = search.run_sizes(lambda: runner.measure_step_peak(copied))
    change_policies(copied, recording_policy)
    steps = _record_steps(runner, copied)
    plan = steps["least"].find_least_plan(runner.devices[0])
    chosen = {"as it was": frozenset[OpSite](), "as converted": sites, "least": plan.sites}
    timelines = {name: step.replay(chosen[name]) for name, step in steps.items()}
    holders = {name: steps[name].find_holders(chosen[name]) for name in ("as it was", "as converted")}
    batches: dict[str, int] = {}
    if search:
        few, many = search.run_sizes(lambda: _record_steps(runner, copied))
        for name in steps:
            pair = few[name], many[name]
            if name == "least":
                plan = search.find_least_plan(pair, plan, batches["as converted"])
                chosen[name] = plan.sites
                change_policies(copied, partial(dataclasses.replace, level=plan.level, sites=plan.sites))
                peaks[name] = search.run_sizes(lambda: runner.measure_step_peak(copied))
            lines = few[name].replay(chosen[name]), many[name].replay(chosen[name])
            batches[name] = search.find_batch(peaks[name], lines, many[name].weight_gradients)
    return Report(
        kept_before,
        kept_after,
        rows,
        list(notes),
        is_converted(model),
        peak_before,
        peak_after,
        timelines,
        holders,
        allowed,
        search.model_bytes if search else 0,
        batches,
    )


def _convert_copy(runner: CopyRunner) -> nn.Module:
    """Returns a copy that is converted as the model is, or by default, and whose budgets are planned."""
    copied = ensure_converted(runner.training_copy())
    if find_budget_hooks(copied):
        for _ in range(2):  # forwards that plan
            with runner.holding_output(copied):
                pass
        freeze_budgets(copied)
    return copied


def _record_steps(runner: CopyRunner, copied: nn.Module) -> dict[str, StepMemory]:
    """Returns steps on paper: of the original model and, twice, of a copy that recomputes all that can be."""
    step = original = StepMemory(runner.record_step(copied, observe_modules(copied, {})))
    if is_fused(runner.model):
        reverted = add_scope_hooks(revert(runner.training_copy()), recording_policy(Policy()))
        original = StepMemory(runner.record_step(reverted, observe_modules(reverted, {})))
    return {"as it was": original, "as converted": step, "least": step}


def _group_rows(decisions: list[SavedMemory]) -> list[TensorReport]:
    """Groups entries with the same modules and reason into rows, largest first."""
    groups: dict[tuple[tuple[str, ...], str], list[SavedMemory]] = defaultdict(list)
    for one in decisions:
        groups[tuple(sorted({module for module, _ in one.saved})), one.reason].append(one)
    rows = [
        TensorReport(names, len(each), sum(one.kept for one in each), sum(one.freed for one in each), reason)
        for (names, reason), each in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.rebuilt_bytes, -row.kept_bytes, row.names))


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
