"""What `fastvit.convert` did: what a step keeps less, tensor by tensor, and a row per BatchNorm layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .accounts import Saved

_SHOWN = 0.005  # of all bytes, at least, in a line of the table


@dataclass(frozen=True)
class LayerReport:
    """One layer. `mode` is "inplace", "recompute", "keep" or "left".

    `kept_bytes` is what the layer and its activation keep for backward as they are, `saved_bytes` how much
    less that is than before, in tensors of the output's size by what the trace tells; both None where sizes
    are unknown, for lack of example inputs.
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
    """What a conversion saves, and its rows. Prints as tables.

    `kept_before` and `kept_after` are the bytes that a training forward with the example inputs leaves for
    backward, both measured, and `tensors` what those are that are left or rebuilt, those alike in one row.
    `layers` are the BatchNorm layers, counted in tensors by what the trace tells. Where nothing could be
    measured `saved_bytes` is the sum over these, and `estimated` says why.
    """

    layers: list[LayerReport]
    untraced: list[str] = field(default_factory=list)  # modules whose own forward could not be traced
    kept_before: int | None = None
    kept_after: int | None = None
    estimated: str = ""
    tensors: list[Saved] = field(default_factory=list)
    chosen: str = ""  # by a budget: what is rebuilt of what could be

    @property
    def measured_bytes(self) -> int | None:
        """What one training forward keeps less, measured; None where it was not."""
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
        """Measured, or else summed over the layers; None where sizes are unknown."""
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
        shown = [row for row in self.tensors if max(row.saved_bytes, row.kept_bytes) >= least]
        rows = [
            (
                " & ".join(row.names),
                str(row.count),
                _amount(row.saved_bytes),
                _amount(row.kept_bytes),
                row.reason,
            )
            for row in shown
        ]
        lines = _aligned([("kept for", "times", "rebuilt", "kept", "why"), *rows])
        rest = sum(row.kept_bytes for row in self.tensors if row not in shown)
        return "\n".join([*lines, *([f"and {_bytes(rest)} in smaller ones"] if rest else [])])

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
        """One line: what a training forward keeps, before and after, and how many layers became what."""
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
        """Draws what is kept and what is rebuilt, tensors alike in one bar, to an image file.

        Raises:
            ValueError: nothing was measured, for lack of example inputs say.
        """
        if not self.tensors:
            raise ValueError("plot: this report has no tensors; convert with example_inputs expected")
        from matplotlib.figure import Figure

        least = _SHOWN * (self.kept_before or 0)
        rows = [row for row in self.tensors if row.saved_bytes + row.kept_bytes >= least]
        labels = [f"{row.count} x {' & '.join(row.names)}" for row in rows]
        figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for name, colour, left, values in (
            ("kept", "#1f77b4", None, [row.kept_bytes for row in rows]),
            ("rebuilt", "#c9d1d9", [row.kept_bytes for row in rows], [row.saved_bytes for row in rows]),
        ):
            axis.barh(
                range(len(rows)), [value / 2**20 for value in values], label=name, color=colour,
                left=None if left is None else [value / 2**20 for value in left],
            )  # fmt: skip
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("MiB for backward", fontsize=8)
        figure.suptitle(self.summary().replace("; ", "\n"), fontsize=8)  # axes' titles are cut at the edge
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
