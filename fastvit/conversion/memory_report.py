"""`Report`, the result of `report`: what a training forward keeps for backward, as numbers and as a table.

"On paper" means: in a replay of the recorded step, without running it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._deprecation import RenamedAttribute, renamed_state
from .report_pictures import Bar, draw_timelines, format_bytes, plot_report

_MIN_SHOWN_FRACTION = 0.005  # A row of the table has at least this fraction of `kept_before`.
_MAX_HOLDERS = 4  # A line "at the peak ..." names at most so many modules.
_MAX_DIFFERENCE_FRACTION = 0.1  # of the measured peak; if the peak on paper differs more, a line says so


@dataclass(frozen=True)
class TensorReport:
    """Saved tensors of one kind, over all blocks.

    Attributes:
        names: the modules whose forwards saved the tensors; `*` stands for the number of a block in a name.
        count: the number of tensors.
        kept_bytes: bytes of the tensors that stay in memory until backward.
        recomputed_bytes: bytes of the tensors that are recomputed instead.
        reason: the ops that recompute the tensors, or why the tensors are kept.
        skip: pairs of a block's name and an op's name; `convert(model, skip=row.skip)` keeps the tensors.
            Empty if the tensors are kept.
    """

    names: tuple[str, ...]
    count: int
    kept_bytes: int
    recomputed_bytes: int
    reason: str
    skip: tuple[tuple[str, str], ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads pickles with the older name of a field."""
        self.__dict__.update(renamed_state(state, rebuilt_bytes="recomputed_bytes"))

    rebuilt_bytes = RenamedAttribute("recomputed_bytes")


@dataclass(frozen=True)
class Report:
    """The bytes that a training forward keeps for backward, and the peak of a step. Prints as a table.

    A step is a forward, and the backward that starts from its results. The bytes of a step are those of
    activations and their gradients. Not counted are the gradients of parameters, and a loss that the model
    does not return.

    Attributes:
        kept_before: bytes that a forward of the original model keeps, its result included, measured.
        kept_after: bytes that a forward of the converted model keeps, measured.
        tensors: the tensors that the converted model keeps or recomputes, a row for each kind.
        notes: modules in which nothing can be recomputed, and why.
        converted: whether the model itself is converted, and not only the copy that was measured.
        peak_before: the most bytes that a step of the original model holds at a time, measured.
        peak_after: the most bytes that a step of the converted model holds at a time, measured.
        timelines: bytes over a step, in a replay of the recorded step, "as it was", "as converted", and
            "least", with the least peak found. An op has one entry in the forward, the first third of a list,
            and two in the backward: first saved tensors are recomputed, then gradients are made.
        peak_holders: for "as it was" and "as converted" the modules that hold bytes at the peak of the
            timeline, the most bytes first. `*` stands for the number of a block.
        memory: the limit in bytes for `batches`; 0 without `report(memory=)`.
        model_bytes: bytes of the model and of AdamW's state, two tensors like each trained parameter; 0
            without `memory`.
        batches: for each timeline the largest batch size whose training step with AdamW fits in `memory`; 0
            if none fits. Empty without `memory`.
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

    saved_bytes = RenamedAttribute("freed_bytes")  # The old spelling; elsewhere "saved" means kept.

    @property
    def freed_bytes(self) -> int:
        """`kept_before` minus `kept_after`: below 0 if the converted model keeps more."""
        return self.kept_before - self.kept_after

    def _large_tensors(self) -> list[TensorReport]:
        min_bytes = _MIN_SHOWN_FRACTION * self.kept_before
        return [row for row in self.tensors if max(row.recomputed_bytes, row.kept_bytes) >= min_bytes]

    def __str__(self) -> str:
        lines = [self.summary(), *self._describe_batches(), "", *self._describe_tensors()]
        if self.timelines:
            lines += ["", *draw_timelines(self.timelines), *self._describe_peaks()]
        if not self.converted:
            lines += ["the model is not converted yet: fastvit.convert(model) does this; a copy was measured"]
        return "\n".join([*lines, *[f"note: {note}" for note in self.notes]])

    def _describe_tensors(self) -> list[str]:
        large_tensors = self._large_tensors()
        rows = [  # A kept part below 1 % of the recomputed bytes is not worth printing.
            (
                " & ".join(row.names),
                str(row.count),
                format_bytes(row.recomputed_bytes) if row.recomputed_bytes else "",
                format_bytes(row.kept_bytes) if row.kept_bytes > row.recomputed_bytes // 100 else "",
                row.reason,
            )
            for row in large_tensors
        ]
        lines = _align_columns([("saved by", "count", "recomputed", "kept", "why"), *rows]) if rows else []
        remaining_bytes = self.kept_after - sum(row.kept_bytes for row in large_tensors)
        if remaining_bytes > 0:
            lines.append(f"and {format_bytes(remaining_bytes)} in smaller tensors, the result, compiled code")
        if pair := next((row.skip[0] for row in large_tensors if row.skip), None):
            lines.append(f"convert(model, skip=[{pair}]) keeps one of them; report.tensors[i].skip has all")
        return lines

    def _describe_peaks(self) -> list[str]:
        lines = []
        for name, holders in self.peak_holders.items():
            names = ", ".join(f"{label} {format_bytes(nbytes)}" for label, nbytes in holders[:_MAX_HOLDERS])
            lines.append(f"at the peak {name}: {names}")
        paper_peak = max(self.timelines["as it was"])
        if abs(paper_peak - self.peak_before) > _MAX_DIFFERENCE_FRACTION * self.peak_before:
            lines.append(
                f"on paper the peak as it was is {format_bytes(paper_peak)}, measured it is "
                f"{format_bytes(self.peak_before)}: what compiled, scripted and checkpointed parts, and "
                "single ops, allocate for a while is not on paper"
            )
        return lines

    def _describe_batches(self) -> list[str]:
        if not self.batches:
            return []
        # For example "12 as it was, 24 as converted, 40 least".
        batches = ", ".join(f"{size or 'none'} {timeline}" for timeline, size in self.batches.items())
        return [
            f"the largest batch for a step with AdamW in {format_bytes(self.memory)}: {batches} "
            f"(the model and two tensors like each trained parameter, AdamW's state, take "
            f"{format_bytes(self.model_bytes)})"
        ]

    def summary(self) -> str:
        """Returns a line with the bytes that a forward keeps, as converted and as it was, and the peaks."""
        freed = self.freed_bytes
        fraction = abs(freed) / self.kept_before if self.kept_before else 0.0
        sign = "less" if freed >= 0 else "more"
        line = (
            f"a training forward keeps {format_bytes(self.kept_after)} instead of "
            f"{format_bytes(self.kept_before)}: "
            f"{format_bytes(abs(freed))} or {fraction:.1%} {sign} (measured)"
        )
        if self.peak_before:
            peaks = f"{format_bytes(self.peak_after)} instead of {format_bytes(self.peak_before)}"
            line += f"; the peak of a step is {peaks} (measured)"
        return line

    def plot(self, path: str | Path) -> None:
        """Draws two panels to an image file.

        The first panel has the bytes over a step, with a curve for each of `timelines`. The second panel has
        the kept and the recomputed bytes, with a bar for each kind of tensor.

        Raises:
            ImportError: matplotlib is not installed.
        """
        bars = [
            Bar(f"{row.count} x {' & '.join(row.names)}", row.kept_bytes, row.recomputed_bytes)
            for row in self._large_tensors()
        ]
        title = self.summary().replace(": ", "\n").replace("; ", "\n")
        plot_report(path, title, self.timelines, bars)


def _align_columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
