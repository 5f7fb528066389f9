"""Pictures of a `Report`: lines of text that show bytes over a step, and an image with the tensors too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FORWARD_COLUMNS, _BACKWARD_COLUMNS = 14, 28  # A line with label and bytes has 72 columns at most.
_BLOCK_CHARACTERS, _ASCII_CHARACTERS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_COLORS = ("#8b949e", "#1f77b4", "#2ca02c")


class Bar(NamedTuple):
    """Bytes of the tensors of one kind."""

    label: str
    kept_bytes: int
    recomputed_bytes: int


def format_bytes(count: float) -> str:
    """Returns a number of bytes as text, in MiB or, below 256 KiB, in KiB."""
    return f"{count / 2**20:.1f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"


def draw_timelines(timelines: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns a heading, and a line for each timeline, whose heights are shares of the largest value."""
    max_bytes = max(map(max, timelines.values()))
    characters = _BLOCK_CHARACTERS if _can_print_blocks() else _ASCII_CHARACTERS
    width = max(map(len, timelines))
    lines = [f"{'on paper':{width}}  {'forward':{_FORWARD_COLUMNS}}|{'backward':{_BACKWARD_COLUMNS}}|  peak"]
    for name, memory in timelines.items():
        length = len(memory) // 3  # Slots of the forward.
        parts = (
            "".join(characters[-(-(len(characters) - 1) * nbytes // max(max_bytes, 1))] for nbytes in columns)
            for columns in (
                _find_maxima(memory[:length], _FORWARD_COLUMNS),
                _find_maxima(memory[length:], _BACKWARD_COLUMNS),
            )
        )
        lines.append(f"{name:{width}}  {'|'.join(parts)}|  {format_bytes(max(memory))}")
    return lines


def _can_print_blocks() -> bool:
    try:
        _BLOCK_CHARACTERS.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return True


def _find_maxima(memory: Sequence[int], count: int) -> list[int]:
    """Returns the largest values of `count` parts of equal length."""
    size = len(memory)
    return [
        max(memory[i * size // count : max((i + 1) * size // count, i * size // count + 1)])
        for i in range(count)
    ]


def plot_report(
    path: str | Path, title: str, timelines: Mapping[str, Sequence[int]], bars: Sequence[Bar]
) -> None:
    """Draws bytes over a step, if there are timelines, and bars to an image file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install matplotlib, or in fastvit's sources pip install '.[train]'"
        raise ImportError(f"Report.plot: matplotlib cannot be imported ({error}); {hint}") from error

    heights = [3.0] * bool(timelines) + [0.8 + 0.3 * len(bars)]
    figure = Figure(figsize=(10, 0.8 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    if timelines:
        _plot_timelines(axes[0], timelines)
    _plot_bars(axes[-1], bars)
    for axis in axes:
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=8)  # Axes would cut off a title.
    figure.savefig(path, dpi=110)


def _plot_timelines(axis, timelines: Mapping[str, Sequence[int]]) -> None:
    for color, (name, memory) in zip(_COLORS, timelines.items(), strict=False):
        length = len(memory) // 3  # Slots of the forward, which ends at time 1.
        times = [(slot + 0.5) / length for slot in range(len(memory))]
        mebibytes = [nbytes / 2**20 for nbytes in memory]
        axis.plot(times, mebibytes, label=f"{name}: {format_bytes(max(memory))}", color=color, linewidth=1.2)
        axis.fill_between(times, mebibytes, color=color, alpha=0.12, linewidth=0)
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 3)
    axis.set_ylim(0)
    axis.set_xticks([0.5, 2], ["forward", "backward"], fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("MiB in a step, on paper", fontsize=8)


def _plot_bars(axis, bars: Sequence[Bar]) -> None:
    kept = [bar.kept_bytes / 2**20 for bar in bars]
    recomputed = [bar.recomputed_bytes / 2**20 for bar in bars]
    axis.barh(range(len(bars)), kept, label="kept", color="#1f77b4")
    axis.barh(range(len(bars)), recomputed, label="recomputed", color="#c9d1d9", left=kept)
    axis.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.03 * max(map(sum, zip(kept, recomputed, strict=True)), default=0) or 1)
    axis.set_xlabel("MiB for backward", fontsize=8)
