"""Writes the page of the digits demo: one HTML file with its pictures inside, readable in light and dark."""

import html
import io
import math
import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from string import Template

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastvit import info

__all__ = ["LAYERS", "LayerCost", "Result", "write_page"]

TEMPLATE = Path(__file__).with_name("demo_page.html")
# matplotlib draws text in this colour, and `_svg` replaces the colour by the page's.
TEXT_COLOR_PLACEHOLDER = "#010203"
SYNC_COLOR = "#22a06b"  # All colours stand out on white and on near-black.
# A value of the trainer's --norm or, with --norm torch, of its --memory -> the layer's label and colour.
LAYERS = {
    "torch": ("torch BatchNorm + LeakyReLU", "#8b95a5"),
    "fastvit-sync": ("fastvit SyncBatchNorm + LeakyReLU", SYNC_COLOR),
    "inplace-abn": ("fastvit InPlaceABN", "#e2762d"),
    "inplace-abn-sync": ("fastvit InPlaceABNSync", "#3b82f6"),
    "convert": ("torch, convert(model)", "#0ea5a4"),
    "matmuls": ("torch, convert(model, matmuls=True)", "#0f766e"),
}
RUNS = LAYERS | {  # The second run of the demo has one of these labels.
    "fastvit-sync": ("apex's SyncBatchNorm by fastvit.compat, LeakyReLU", SYNC_COLOR),
    "apex-sync": ("NVIDIA apex SyncBatchNorm, LeakyReLU", SYNC_COLOR),
}
TIMELINE_COLORS = {"as it was": "#8b95a5", "as converted": "#0ea5a4", "least": "#a855f7"}
LOSS_TICKS = [digit * 10.0**exponent for exponent in range(-9, 4) for digit in (1, 2, 5)]
LAYER_TABLE_HEADS = (
    "layer",
    "kept for backward",
    "of torch's",
    "peak of a step",
    "of torch's",
    "step time, torch = 1",
)
COLOR_SETTINGS = "axes.edgecolor axes.labelcolor grid.color xtick.color ytick.color text.color".split()


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    norm: str
    level: str  # amp's level, as O1
    command: str
    ranks: int
    seconds: float  # time of the whole run, start of the processes included
    history: list[dict]  # one row per epoch, as in metrics.jsonl

    @property
    def accuracy(self) -> float:
        return self.history[-1]["test_accuracy"]


@dataclass(frozen=True)
class LayerCost:
    """The memory and the time of a training step of the model with one layer."""

    kept_bytes: int  # for the backward pass
    peak_bytes: int
    time_ratio: float  # to torch's model


def _svg(name: str, width: float, height: float, draw: Callable[[Axes], None]) -> str:
    """Returns the drawing of `draw` as an SVG element, whose text takes the page's font and colour.

    `width` and `height` are inches; `name` describes the picture to readers who do not see it.
    """
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # Several pictures share a page, so their ids must differ.
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.16,
    }
    with matplotlib.rc_context(settings | dict.fromkeys(COLOR_SETTINGS, TEXT_COLOR_PLACEHOLDER)):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        target = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=no_metadata)
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(TEXT_COLOR_PLACEHOLDER, "currentColor")
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # HTML needs no namespaces.
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(name)}"', 1)


def _set_loss_axis(axes: Axes, values: Sequence[float]) -> None:
    """Sets a logarithmic axis, whose ticks are 1, 2 and 5 times powers of ten, with a tick at either end."""
    first = max(bisect_right(LOSS_TICKS, min(values)) - 1, 0)
    ticks = LOSS_TICKS[first : bisect_left(LOSS_TICKS, max(values), first + 1) + 1]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(ticks[0], ticks[-1])


def _draw_curves(results: Sequence[Result], column: str) -> Callable[[Axes], None]:
    """Returns a function that draws a column of the history of each result, by epoch."""

    def draw(axes: Axes) -> None:
        for result in results:
            epochs, values = zip(*((row["epoch"], row[column]) for row in result.history), strict=True)
            axes.plot(epochs, values, color=RUNS[result.norm][1], marker=".")
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        values = [row[column] for result in results for row in result.history]
        if "loss" in column:
            _set_loss_axis(axes, values)
        else:
            axes.set_ylim(math.floor(10 * min(values)) / 10, 1.01)

    return draw


def _draw_bars(costs: Mapping[str, LayerCost]) -> Callable[[Axes], None]:
    """Returns a function that draws a horizontal bar for each layer, the first one on top."""

    def draw(axes: Axes) -> None:
        labels, colors = zip(*(LAYERS[name] for name in reversed(costs)), strict=True)
        values = [cost.kept_bytes / 2**20 for cost in reversed(costs.values())]
        bars = axes.barh(labels, values, color=colors, height=0.62)
        axes.bar_label(bars, [f"{value:.2f} MiB" for value in values], padding=5)
        axes.set_xlim(0, max(values) * 1.16)
        axes.set_xlabel("MiB kept for the backward pass of one batch")
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)

    return draw


def _draw_timelines(timelines: Mapping[str, Sequence[int]]) -> Callable[[Axes], None]:
    """Returns a function that draws the bytes over a step, with a dashed line where the backward begins."""

    def draw(axes: Axes) -> None:
        for name, color in TIMELINE_COLORS.items():
            memory = [nbytes / 2**20 for nbytes in timelines[name]]
            length = len(memory) // 3  # The forward's part of a timeline, which ends at time 1.
            times = [(slot + 0.5) / length for slot in range(len(memory))]
            axes.plot(times, memory, color=color, linewidth=1.6, label=f"{name}: peak {max(memory):.2f} MiB")
            axes.fill_between(times, memory, color=color, alpha=0.14, linewidth=0)
        axes.axvline(1, color=TEXT_COLOR_PLACEHOLDER, linewidth=1.2, linestyle="--")
        axes.set_xlim(0, 3)
        axes.set_ylim(0)
        axes.set_xticks([0.5, 2], ["forward", "backward"])
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("MiB in a training step")
        axes.legend(frameon=False)

    return draw


def _html_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{name}</th>" for name in names)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in cells) for cells in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>{body}</table></div>'


def _median_speed(result: Result) -> float:
    """Returns the median over epochs of the images per second."""
    # The first epoch includes work of the start, such as allocations.
    return statistics.median(row["images_per_second"] for row in result.history[1:] or result.history)


def _cost_cells(name: str, cost: LayerCost, base: LayerCost) -> list[str]:
    """Returns the cells of a layer in the table of memory and time. `base` is the cost of torch's layer."""
    pairs = (cost.kept_bytes, base.kept_bytes), (cost.peak_bytes, base.peak_bytes)
    nbytes = [text for size, torch_size in pairs for text in (f"{size:,} B", f"{size / torch_size:.0%}")]
    return [LAYERS[name][0], *nbytes, f"{cost.time_ratio:.2f}x"]


def _table_row(result: Result) -> dict[str, str]:
    """Returns the cells of a run, by the heads of their columns."""
    return {
        "layer": RUNS[result.norm][0],
        "test accuracy": f"{result.accuracy:.3f}",
        "test loss": f"{result.history[-1]['test_loss']:.4f}",
        "images/s": f"{_median_speed(result):,.0f}",
        "run": f"{result.seconds:.0f} s",
        "ranks": str(result.ranks),
    }


def _facts_html(results: Sequence[Result], batch: int) -> str:
    epochs, machine = len(results[0].history), info.facts()
    facts = {
        "Data": "scikit-learn digits, 8x8: 1438 for training (shifted by up to a pixel), 359 for test",
        "Model": "ViT with a stem of three convolutions and BatchNorm in the MLP, 4 blocks of width 64",
        "Recipe": f"apex's: amp {results[0].level}, DistributedDataParallel, FusedAdam; {epochs} epochs, "
        f"{batch} images per rank and step, cosine schedule",
        "Machine": f"{machine['machine']}; CPU kernels: {machine['CPU kernels']}; GPUs: {machine['GPUs']}",
        "Versions": f"fastvit {machine['fastvit']}, torch {machine['torch']}, Python {machine['python']}",
        "Date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()) + "</dl>"


def write_page(
    path: Path,
    results: Sequence[Result],
    costs: Mapping[str, LayerCost],
    timelines: Mapping[str, Sequence[int]],
    batch: int,
) -> Path:
    """Writes the page and returns its path.

    Args:
        path: the HTML file.
        results: the results of both runs, the main run first.
        costs: memory and time of a training step, with all keys of LAYERS.
        timelines: bytes over a training step of torch's model, as in `fastvit.Report`.
        batch: images of the batch for which `costs` and `timelines` were measured.
    """
    main = results[0]
    base = costs["torch"]
    emulated = ", since this CPU emulates bfloat16" if main.level == "O0" else ""
    tiles = (
        (f"{main.accuracy:.3f}", "test accuracy, InPlaceABNSync"),
        *(
            (
                f"{1 - costs[name].kept_bytes / base.kept_bytes:.0%} less",
                f"kept for backward {text} than by torch, at {costs[name].time_ratio:.2f}x its step time",
            )
            for name, text in (("convert", "by convert(model)"), (main.norm, "by InPlaceABNSync"))
        ),
        (f"{_median_speed(main):,.0f}", f"images per second in training, {main.ranks} rank(s)"),
        (f"{main.seconds:.0f} s", "main run, start of the processes included"),
    )
    columns = {"Training loss": "train_loss", "Test loss": "test_loss", "Test accuracy": "test_accuracy"}
    charts = {
        title: _svg(f"{title.lower()} by epoch", 3.7, 2.8, _draw_curves(results, column))
        for title, column in columns.items()
    }
    rows = [_table_row(result) for result in results]
    layers = [_cost_cells(name, cost, base) for name, cost in costs.items()]
    parts = {
        "tiles": "".join(f'<div class="tile"><b>{big}</b><span>{text}</span></div>' for big, text in tiles),
        "legend": "".join(
            '<span><i style="background: {1}"></i>{0}</span>'.format(*RUNS[result.norm]) for result in results
        ),
        "charts": "".join(f"<figure><figcaption>{k}</figcaption>{svg}</figure>" for k, svg in charts.items()),
        "table": _html_table([*rows[0]], [[*row.values()] for row in rows]),
        "bars": _svg("kept for backward by layer", 10.4, 2.9, _draw_bars(costs)),
        "layer_table": _html_table(LAYER_TABLE_HEADS, layers),
        "timelines": _svg("memory over a training step", 10.4, 3.7, _draw_timelines(timelines)),
        "level": main.level + emulated,
        "losses": " and ".join(f"{result.history[-1]['test_loss']:.3f}" for result in results),
        "accuracies": " and ".join(f"{result.accuracy:.3f}" for result in results),
        "facts": _facts_html(results, batch),
        "commands": html.escape("\n".join(result.command for result in results)),
        "batch": str(batch),
    }
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    path.write_text(template.substitute(parts), encoding="utf-8")
    return path
