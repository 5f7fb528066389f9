"""What `fastvit.convert` did: a row per BatchNorm layer, as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
    """The rows of a conversion. Prints as a table; `saved_bytes` is what one training forward keeps less.

    That is measured with the example inputs, while the rows count tensors by what the trace tells. Where it
    could not be measured it is the sum of the rows, and `estimated` says why.
    """

    layers: list[LayerReport]
    untraced: list[str] = field(default_factory=list)  # modules whose own forward could not be traced
    measured_bytes: int | None = None
    estimated: str = ""

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
        header = ("layer", "was", "activation", "memory", "saves", "why")
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
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in [header, *rows]
        ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """One line: how many layers became what, and what that saves."""
        modes = Counter(layer.mode for layer in self.layers)
        counts = (
            ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items())) or "no BatchNorm layers"
        )
        saved = ""
        if self.saved_bytes is not None:
            how = f"estimated: {self.estimated}" if self.measured_bytes is None else "measured"
            saved = f"; {_bytes(self.saved_bytes)} less kept for backward ({how})"
        opaque = f"; not traced: {', '.join(self.untraced)}" if self.untraced else ""
        return counts + saved + opaque


def _bytes(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / 2**20:.1f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"
