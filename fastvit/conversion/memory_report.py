"""`report`: what a training forward keeps for backward, measured, and which tensors these are."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..recompute import SavedMemory, SavedTensorObserver, active_scope, observe_saved_tensors, reason_no_scope
from .budget_hook import find_budget_hooks, freeze_budgets
from .convert_model import ensure_converted
from .copy_runner import CopyRunner
from .nested_values import tensor_leaves
from .scope_hooks import get_scope_hook, is_converted

_SHOWN = 0.005  # smallest share of all bytes that has a line in the table
_NUMBER = re.compile(r"\d+(?=\.)|(?<![^.])\d+$")  # of all parts of a name but the last, unless it is one


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
    """What a training forward keeps for backward. Prints as a table.

    Attributes:
        kept_before: bytes that a forward of the original model keeps, its result included, measured.
        kept_after: bytes that a forward of the converted model keeps, measured.
        tensors: the tensors that the converted model keeps or rebuilds, those of one kind in one row.
        notes: where nothing can be rebuilt, and why.
        converted: whether the model itself is converted, and not only the copy that was measured.
    """

    kept_before: int
    kept_after: int
    tensors: list[TensorReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    converted: bool = True

    @property
    def saved_bytes(self) -> int:
        """`kept_before` minus `kept_after`: below 0 where the converted model keeps more."""
        return self.kept_before - self.kept_after

    def _large_tensors(self) -> list[TensorReport]:
        least = _SHOWN * self.kept_before
        return [row for row in self.tensors if max(row.rebuilt_bytes, row.kept_bytes) >= least]

    def __str__(self) -> str:
        shown = self._large_tensors()
        rows = [
            (
                " & ".join(row.names),
                str(row.count),
                _bytes(row.rebuilt_bytes) if row.rebuilt_bytes else "",
                _bytes(row.kept_bytes) if row.kept_bytes > row.rebuilt_bytes // 100 else "",
                row.reason,
            )
            for row in shown
        ]
        lines = [self.summary(), ""]
        if rows:
            lines += _aligned([("saved by", "count", "rebuilt", "kept", "why"), *rows])
        rest = self.kept_after - sum(row.kept_bytes for row in shown)
        if rest > 0:
            lines.append(f"and {_bytes(rest)} in smaller tensors, the result, compiled code")
        if not self.converted:
            lines.append("the model is not converted yet: fastvit.convert(model) makes it what was measured")
        return "\n".join([*lines, *[f"note: {note}" for note in self.notes]])

    def summary(self) -> str:
        """One line: the bytes that a training forward keeps as converted and as it was."""
        less = self.saved_bytes
        share = abs(less) / self.kept_before if self.kept_before else 0.0
        sign = "less" if less >= 0 else "more"
        return (
            f"a training forward keeps {_bytes(self.kept_after)} instead of {_bytes(self.kept_before)}: "
            f"{_bytes(abs(less))} or {share:.1%} {sign} (measured)"
        )

    def plot(self, path: str | Path) -> None:
        """Draws the kept and the rebuilt bytes to an image file, tensors of one kind in one bar.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            where = "pip install matplotlib, or in fastvit's sources pip install '.[train]'"
            raise ImportError(f"Report.plot needs matplotlib: {where} ({error})") from error

        rows = self._large_tensors()
        kept, rebuilt = [row.kept_bytes / 2**20 for row in rows], [row.rebuilt_bytes / 2**20 for row in rows]
        figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
        axis = figure.subplots()
        axis.barh(range(len(rows)), kept, label="kept", color="#1f77b4")
        axis.barh(range(len(rows)), rebuilt, label="rebuilt", color="#c9d1d9", left=kept)
        labels = [f"{row.count} x {' & '.join(row.names)}" for row in rows]
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.03 * max(map(sum, zip(kept, rebuilt, strict=True)), default=0) or 1)
        axis.set_xlabel("MiB for backward", fontsize=8)
        figure.suptitle(self.summary().replace(": ", "\n"), fontsize=8)  # the axes would cut off a title
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=110)


def report(model: nn.Module, *inputs: object, **kwinputs: object) -> Report:
    """Measures what a training forward keeps for backward, as the model was and as it is converted.

        print(fastvit.report(model, images))

    Two copies of the model run: one reverted, and one converted as `model` is, or by `convert(model)` where
    it is not converted. Each runs twice with copies of the inputs, and the second forward is measured by the
    allocator of torch (`fastvit.memory.live_bytes`). So the bytes are those of all tensors that stay
    allocated while the result is held: saved tensors and the result. Neither the model nor its buffers,
    training flags and hooks change, nor do random states. Forwards that last longer than a few seconds
    are announced on stderr.

    Call it as the model is trained: under the same autocast, with inputs of the same shape and dtype. Where
    the model is in evaluation the copies are set to training. A copy runs without
    DistributedDataParallel, so it has to be the module inside: `report(ddp.module, images)`.

    Args:
        model: converted or not. One more copy of its parameters must fit in memory.
        inputs: positional arguments of its forward.
        kwinputs: keyword arguments of its forward.

    Returns:
        A `Report`, which prints as a table: `str(report)`, `report.summary()`, `report.plot(path)`.

    Raises:
        TypeError: `model` is not a module, or an input is a size and not a tensor.
        ValueError: the model cannot be copied, is wrapped for data parallelism or sharded, or is neither on
            the CPU nor on CUDA.
        RuntimeError: inside `recompute_scope()`.
    """
    runner = CopyRunner("report", model, (inputs, kwinputs))
    kept_before = runner.measure_original_bytes()
    copied = ensure_converted(runner.training_copy())
    if find_budget_hooks(copied):
        for _ in range(2):  # forwards that plan
            with runner.holding_output(copied):
                pass
        freeze_budgets(copied)
    notes: dict[str, None] = {}
    with _observe_modules(copied, notes) as observer:
        # A forward keeps none of these, even if an op saves one.
        existing = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        with runner.holding_output(copied) as arguments:
            held = tensor_leaves((arguments, list(map(vars, copied.modules()))))
            rows = _group_rows(observer.decisions([*existing, *held]))
    if any(module._compiled_call_impl is not None for module in model.modules()):
        notes["measured without Module.compile, which is not copied; pass torch.compile(model)"] = None
    return Report(kept_before, runner.measure_kept_bytes(copied), rows, list(notes), is_converted(model))


@contextlib.contextmanager
def _observe_modules(model: nn.Module, notes: dict[str, None]) -> Iterator[SavedTensorObserver]:
    """Yields an observer that annotates every saved tensor with the module whose forward is running."""
    running = ["the model"]  # inner ones last

    def enter(label: str, module: nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            running.append(label)
            if get_scope_hook(module) is not None and active_scope() is None:
                notes[f"{label}: nothing is rebuilt, because {reason_no_scope()}"] = None

    def leave(*_: object) -> None:
        if not torch.compiler.is_compiling():
            running.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                label = _NUMBER.sub("*", name) or "the model"
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, label)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield hooks.enter_context(observe_saved_tensors(lambda _: running[-1]))


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


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"
