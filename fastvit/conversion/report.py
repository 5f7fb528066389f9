"""The report of `fastvit.convert`: tensors that a step keeps or rebuilds, and a row per BatchNorm layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_SHOWN = 0.005  # smallest share of all bytes that has a line in the table


@dataclass(frozen=True)
class TensorReport:
    """Saved tensors of one kind, over all blocks.

    Attributes:
        names: the modules whose ops saved one of them; a number that changes from block to block is `*`.
        count: the number of tensors.
        kept_bytes: bytes of them that stay in memory until backward.
        rebuilt_bytes: bytes of them that are rebuilt instead.
        reason: the op that rebuilds them and its inputs, or why they are kept.
    """

    names: tuple[str, ...]
    count: int
    kept_bytes: int
    rebuilt_bytes: int
    reason: str


@dataclass(frozen=True)
class LayerReport:
    """One BatchNorm layer. `mode` is "inplace", "recompute", "keep" or "left".

    `kept_bytes` is what the layer and its activation keep for backward after the conversion, `saved_bytes`
    the bytes that they kept before minus that. Both count tensors of the output's size, as the trace shows
    them. Both are None without example inputs, where sizes are unknown.
    """

    name: str
    kind: str
    activation: str
    mode: str
    reason: str
    kept_bytes: int | None = None
    saved_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """The result of a conversion. Prints as tables.

    `kept_before` and `kept_after` are the measured bytes that a training forward with the example inputs
    keeps for backward. `tensors` are the tensors that it keeps or rebuilds, those of one kind in one row.
    `layers` are the BatchNorm layers. Where nothing could be measured `saved_bytes` is the sum over the
    layers, and `estimated` is the reason.
    """

    layers: list[LayerReport]
    untraced: list[str] = field(default_factory=list)  # modules whose own forward could not be traced
    kept_before: int | None = None
    kept_after: int | None = None
    estimated: str = ""
    tensors: list[TensorReport] = field(default_factory=list)
    chosen: str = ""  # what a budget has chosen to rebuild

    @property
    def measured_bytes(self) -> int | None:
        """`kept_before` minus `kept_after`; None where they were not measured."""
        if self.kept_before is None or self.kept_after is None:
            return None
        return self.kept_before - self.kept_after

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.mode != "left"]

    @property
    def left(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.mode == "left"]

    @property
    def saved_bytes(self) -> int | None:
        """`measured_bytes`, or the sum over the layers; None where sizes are unknown."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        known = [layer.saved_bytes for layer in self.layers if layer.saved_bytes is not None]
        return sum(known) if known else None

    def __getitem__(self, name: str) -> LayerReport:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self):
        return iter(self.layers)

    def __str__(self) -> str:
        parts = [self.summary()]
        if self.tensors:
            parts.append(self._tensor_table())
        if self.layers:
            parts.append(self._layer_table())
        return "\n\n".join(parts)

    def _tensor_table(self) -> str:
        least = _SHOWN * (self.kept_before or 0)
        shown = [row for row in self.tensors if max(row.rebuilt_bytes, row.kept_bytes) >= least]
        rows = [
            (
                " & ".join(row.names),
                str(row.count),
                _amount(row.rebuilt_bytes),
                _amount(row.kept_bytes),
                row.reason,
            )
            for row in shown
        ]
        lines = _aligned([("saved by", "count", "rebuilt", "kept", "why"), *rows])
        rest = sum(row.kept_bytes for row in self.tensors if row not in shown)
        return "\n".join([*lines, *([f"and {_bytes(rest)} kept in smaller tensors"] if rest else [])])

    def _layer_table(self) -> str:
        rows = [
            (
                row.name or "(the model)",
                row.kind,
                row.activation,
                row.mode,
                _bytes(row.saved_bytes),
                row.reason,
            )
            for row in self.layers
        ]
        return "\n".join(_aligned([("layer", "was", "activation", "memory", "saves", "why"), *rows]))

    def summary(self) -> str:
        """One line: the bytes that a training forward keeps before and after, and the layers by mode."""
        modes = Counter(layer.mode for layer in self.layers)
        counts = ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items()))
        parts = [f"BatchNorm layers: {counts}" if counts else "no BatchNorm layers"]
        if self.measured_bytes is not None:
            share = self.measured_bytes / self.kept_before if self.kept_before else 0.0
            parts.insert(
                0,
                f"a training forward keeps {_bytes(self.kept_after)} instead of {_bytes(self.kept_before)}: "
                f"{_bytes(self.measured_bytes)} or {share:.1%} less kept for backward (measured)",
            )
        elif self.saved_bytes is not None:
            parts.insert(
                0, f"{_bytes(self.saved_bytes)} less kept for backward (estimated: {self.estimated})"
            )
        if self.chosen:
            parts.insert(1, self.chosen)
        if self.untraced:
            parts.append(f"not traced: {', '.join(self.untraced)}")
        return "; ".join(parts)

    def plot(self, path: str | Path) -> None:
        """Draws the kept and the rebuilt bytes to an image file, tensors of one kind in one bar.

        Raises:
            ValueError: nothing was measured, because there were no example inputs, for example.
        """
        if not self.tensors:
            raise ValueError(
                "plot: the report has no tensors; a report of convert with example_inputs expected"
            )
        from matplotlib.figure import Figure

        least = _SHOWN * (self.kept_before or 0)
        rows = [row for row in self.tensors if row.rebuilt_bytes + row.kept_bytes >= least]
        labels = [f"{row.count} x {' & '.join(row.names)}" for row in rows]
        figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for name, colour, left, values in (
            ("kept", "#1f77b4", None, [row.kept_bytes for row in rows]),
            ("rebuilt", "#c9d1d9", [row.kept_bytes for row in rows], [row.rebuilt_bytes for row in rows]),
        ):
            axis.barh(
                range(len(rows)), [value / 2**20 for value in values], label=name, color=colour,
                left=None if left is None else [value / 2**20 for value in left],
            )  # fmt: skip
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("MiB for backward", fontsize=8)
        figure.suptitle(
            self.summary().replace("; ", "\n"), fontsize=8
        )  # a title of the axes would be cut off
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=110)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _amount(count: int) -> str:
    return _bytes(count) if count else ""


def _bytes(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / 2**20:.1f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"
