"""Checks and draws the curve of budgets: the peak of a step against its time.

A fault is a contender that dominates the curve, or a budget that breaks a property of the curve:

    dominated     a rival of `convert` takes less time than the line between the curve's points at its bytes
    not convex    a budget takes more time than a point of the curve, or a mix, of no larger peak
    not monotone  a budget has a larger peak than a larger budget
    over budget   the peak is more than the budget

The curve's points are the eager model, plain `convert` and the budgets. Each comparison allows MARGIN. A
rival with fewer bytes than the curve's lowest point and with more time is listed, but is no fault.
"""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from harness import markdown_table

BUDGETS = ("0.8", "0.6", "0.5", "0.4", "0.3", "0.2", "least")
RIVALS = {  # a contender -> its name in the picture, and its marker
    "matmuls": ("matmuls=True", "v"),
    "sac": ("selective checkpointing", "s"),
    "sac_half": ("every second matmul", "D"),
    "checkpoint": ("block checkpointing", "^"),
}
COLORS = {"fp32": "#1f5fa8", "bf16": "#c8641e"}
MARGIN = 0.03  # This share of the compared time or peak is noise of the measurement.
BELOW_LEAST = "below the least"  # the kind of a fault that is a note


class CurvePoint(NamedTuple):
    """Peak, kept bytes and time of a contender, each divided by the eager model's."""

    contender: str
    peak: float
    kept: float
    time: float

    def __str__(self) -> str:
        return f"{self.contender} (peak {self.peak:.3f}, kept {self.kept:.3f}, {self.time:.2f}x)"


class CurveKey(NamedTuple):
    model: str
    dtype: str
    is_compiled: bool


class CurveFault(NamedTuple):
    kind: str  # as in the list above
    point: CurvePoint
    reason: str


def is_budget(contender: str) -> bool:
    return contender == "least" or re.fullmatch(r"0\.\d+", contender) is not None


def get_budget_share(contender: str) -> float:
    """Returns the share of the peak that a budget allows; 0 for "least"."""
    return 0.0 if contender == "least" else float(contender)


def order_contenders(contenders: Iterable[str]) -> list[str]:
    """Returns the contenders in their order, but with the budgets, sorted from the largest, side by side."""
    names = list(contenders)
    budgets = sorted(filter(is_budget, names), key=get_budget_share, reverse=True)
    first_budget = next((i for i, name in enumerate(names) if is_budget(name)), len(names))
    rivals = [name for name in names[first_budget:] if not is_budget(name)]
    return [*names[:first_budget], *budgets, *rivals]


def group_points(rows: Iterable[dict]) -> dict[CurveKey, list[CurvePoint]]:
    """Groups rows by model and precision, with groups of their own for compiled contenders."""
    rows_by_model: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        rows_by_model.setdefault((row["what"], row["dtype"]), {})[row["contender"]] = row
    groups: dict[CurveKey, list[CurvePoint]] = {}
    for (model, dtype), model_rows in rows_by_model.items():
        eager = model_rows["torch"]
        for contender, row in model_rows.items():
            name = contender.removeprefix("compiled_")
            shares = (float(row[k]) / float(eager[k]) for k in ("peak_MiB", "kept_MiB", "p50_us"))
            key = CurveKey(model, dtype, name != contender)
            groups.setdefault(key, []).append(CurvePoint(name, *shares))
    return groups


def select_curve(points: Iterable[CurvePoint]) -> list[CurvePoint]:
    """Returns the points of the curve, sorted by peak: the eager model, plain `convert`, and the budgets."""
    curve = [p for p in points if p.contender in ("torch", "eager", "convert") or is_budget(p.contender)]
    return sorted(curve, key=lambda point: (point.peak, point.time))


def select_front(points: Iterable[CurvePoint], axis: str) -> list[CurvePoint]:
    """Returns the points that take less time than every point of fewer bytes, sorted by their bytes.

    Bytes are those of `axis`: `peak` or `kept`.
    """
    front: list[CurvePoint] = []
    for point in sorted(points, key=lambda point: (getattr(point, axis), point.time)):
        if not front or point.time < front[-1].time:
            front.append(point)
    return front


def mix_time(low: CurvePoint, high: CurvePoint, share: float, axis: str) -> float:
    """Returns the time on the line between two points, at a share of the eager model's bytes."""
    low_share, high_share = getattr(low, axis), getattr(high, axis)
    return low.time + (high.time - low.time) * (share - low_share) / (high_share - low_share)


def find_faults(points: Iterable[CurvePoint]) -> list[CurveFault]:
    """Returns the faults of the curve of one model in one precision."""
    points = list(points)
    curve = select_curve(points)
    rivals = [point for point in points if point not in curve and point.contender != "accumulate"]
    budgets = sorted(
        (point for point in curve if is_budget(point.contender)),
        key=lambda point: get_budget_share(point.contender),
        reverse=True,
    )
    if not budgets:
        return []
    faults = [_find_domination(curve, rival, axis) for axis in ("peak", "kept") for rival in rivals]
    faults += [_find_dent(curve, point) for point in budgets]
    faults += [_find_growth(budgets[:i], point) for i, point in enumerate(budgets)]
    faults += [_find_excess(point) for point in budgets]
    return [fault for fault in faults if fault is not None]


def _find_domination(curve: list[CurvePoint], rival: CurvePoint, axis: str) -> CurveFault | None:
    """Returns a fault if a rival takes less time than the line between the curve's points on either side."""
    front, share = select_front(curve, axis), getattr(rival, axis)
    lowest, fastest = front[0], front[-1]
    if share > getattr(fastest, axis):  # The fastest point has fewer bytes, so no line goes over the rival.
        return None
    if share < getattr(lowest, axis) * (1 - MARGIN):
        is_slower = rival.time > lowest.time
        return CurveFault(f"{axis}: {BELOW_LEAST if is_slower else 'dominated'}", rival, f"ours: {lowest}")
    allowed_time, reason = lowest.time, f"ours: {lowest}"
    for low, high in pairwise(front):
        if getattr(low, axis) < share <= getattr(high, axis):
            allowed_time = mix_time(low, high, share, axis)
            reason = f"ours: {allowed_time:.2f}x between {low.contender} and {high.contender}"
    is_dominated = rival.time < allowed_time * (1 - MARGIN)
    return CurveFault(f"{axis}: dominated", rival, reason) if is_dominated else None


def _find_dent(curve: list[CurvePoint], budget: CurvePoint) -> CurveFault | None:
    """Returns a fault if a point with no larger peak, or a mix of two points, takes less time."""
    lower = [point for point in curve if point != budget and point.peak <= budget.peak]
    higher = [point for point in curve if point.peak > budget.peak]
    alternatives = [(point.time, f"{point} alone") for point in lower]
    alternatives += [
        (mix_time(low, high, budget.peak, "peak"), f"mix of {low.contender} and {high.contender}")
        for low in lower
        for high in higher
    ]
    time, reason = min(alternatives, default=(budget.time, ""))
    is_dent = budget.time > time * (1 + MARGIN)
    return CurveFault("not convex", budget, f"{time:.2f}x: {reason}") if is_dent else None


def _find_growth(larger_budgets: list[CurvePoint], budget: CurvePoint) -> CurveFault | None:
    """Returns a fault if a larger budget has a smaller peak."""
    lowest = min(larger_budgets, key=lambda point: point.peak, default=budget)
    is_growth = budget.peak > lowest.peak * (1 + MARGIN)
    return CurveFault("not monotone", budget, f"a larger budget: {lowest}") if is_growth else None


def _find_excess(budget: CurvePoint) -> CurveFault | None:
    """Returns a fault if the peak exceeds the budget; "least" has no limit."""
    share = get_budget_share(budget.contender)
    is_excess = share > 0 and budget.peak > share * (1 + MARGIN)
    return CurveFault("over budget", budget, f"the budget is {share} of the peak") if is_excess else None


def check_curve(rows: Iterable[dict]) -> tuple[list[str], bool]:
    """Returns the lines of a table of faults, and whether one of them is more than a note.

    Compiled contenders are not checked, and neither is accumulation, which computes with other batches.
    """
    groups = {key: points for key, points in group_points(rows).items() if not key.is_compiled}
    faults = [(key, fault) for key, points in groups.items() for fault in find_faults(points)]
    if not faults:
        return [f"No fault in the curve, with a margin of {MARGIN:.0%}."], False
    lines = markdown_table(
        ("model", "precision", "fault", "contender", "why"),
        ((key.model, key.dtype, fault.kind, fault.point, fault.reason) for key, fault in faults),
    )
    return lines, any(BELOW_LEAST not in fault.kind for _, fault in faults)


def draw_curve(rows: Iterable[dict], path: Path) -> None:
    """Draws a panel for each model: the peak of a step against its time, in each precision."""
    import matplotlib.pyplot as plt

    groups = group_points(rows)
    models = list(dict.fromkeys(key.model for key in groups))
    num_columns = min(4, len(models))
    num_lines = -(-len(models) // num_columns)
    size = 4.4 * num_columns, 3.6 * num_lines  # inches
    figure, axes = plt.subplots(num_lines, num_columns, figsize=size, layout="constrained", squeeze=False)
    panels = dict(zip(models, axes.flat, strict=False))
    legend: dict[str, object] = {}  # a label -> the first line that is drawn for the label
    for key, points in groups.items():
        color = COLORS.get(key.dtype, "black")
        label = f"fastvit.convert by budget, {key.dtype}" + ", compiled" * key.is_compiled
        draw = _make_draw(panels[key.model], legend, color)
        draw(select_curve(points), label, "o", "--" if key.is_compiled else "-")
        for point in points:
            if point.contender in RIVALS:
                name, marker = RIVALS[point.contender]
                draw([point], name + ", compiled" * key.is_compiled, marker, "")
    for model, panel in panels.items():
        panel.set_title(model, fontsize=9)
        panel.set_xlabel("peak of a step, eager = 1", fontsize=8)
        panel.set_ylabel("time of a step, eager = 1", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(models) :]:
        panel.remove()
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _make_draw(panel, legend: dict[str, object], color: str) -> Callable[..., None]:
    """Returns a function that draws points into a panel, and adds their label to the legend."""

    def draw(points: list[CurvePoint], label: str, marker: str, line_style: str) -> None:
        peaks, times = [point.peak for point in points], [point.time for point in points]
        (line,) = panel.plot(peaks, times, marker=marker, linestyle=line_style, color=color, markersize=4)
        if not line_style:
            line.set_markerfacecolor("white")
        legend.setdefault(label, line)

    return draw
