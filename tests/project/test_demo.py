"""The demo of `make demo`: its page from invented numbers and, nightly, its quick form."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "digits_demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DEMO.parent)
        return importlib.import_module("digits_demo")


def find_chart(page: str, label: str) -> str:
    return page[page.index(f'aria-label="{label}"') :].split("</svg>")[0]


def read_labels(chart: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", chart)


@pytest.mark.nightly
def test_the_demo_writes_a_page_that_stands_alone_and_shows_the_memory_saved(tmp_path):
    command = [sys.executable, str(DEMO), "--out", "demo", "--quick", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    # A profiler measures, and its own lines do not appear. On a slow machine reports show their progress.
    assert "profiler" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "digits_demo: measures memory and time of a ViT's training step, then trains it"
    )
    assert "[epoch 2] mean loss" in done.stdout and lines[-2] == f"page: {tmp_path / 'demo/index.html'}"
    assert re.fullmatch(r"test accuracy [01]\.\d{3}", lines[-1])

    memory = json.loads((tmp_path / "demo/memory.json").read_text())
    kept, peaks, ratios = (
        {name: cost[key] for name, cost in memory["layers"].items()}
        for key in ("kept_bytes", "peak_bytes", "time_ratio")
    )
    # 32 images: three layers of the stem at 8x8, and in each of four blocks one of 16 tokens of 256.
    batch_norms = 32 * 4 * (32 + 32 + 64) * 64 + 32 * 4 * 4 * 16 * 256
    layer_norms = 32 * 4 * (2 * 4) * 16 * 64  # outputs of the blocks' LayerNorms
    slack = 64 * 1024  # mean and deviation per channel
    assert abs(kept["torch"] - kept["inplace-abn"] - batch_norms) < slack
    assert kept["inplace-abn-sync"] == kept["inplace-abn"]
    assert abs(kept["fastvit-sync"] - kept["torch"]) < slack
    assert kept["torch"] - kept["convert"] > batch_norms + layer_norms - slack
    assert kept["convert"] - kept["matmuls"] > 4 * slack
    assert peaks["matmuls"] < peaks["convert"] < peaks["torch"]
    assert all(peaks[name] > kept[name] for name in kept)
    assert ratios["torch"] == 1 and all(0.3 < ratio < 5 for ratio in ratios.values())
    timelines = memory["timelines"]
    assert max(timelines["as it was"]) == pytest.approx(peaks["torch"], rel=0.1)
    assert max(timelines["as converted"]) == pytest.approx(peaks["convert"], rel=0.1)

    page = (tmp_path / "demo/index.html").read_text()
    assert page.rstrip().endswith("</html>") and page.count("<figure") == 5
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\((?!#)", page)
    chart = find_chart(page, "kept for backward by layer")
    for label in ("torch BatchNorm", "InPlaceABN<", "SyncBatchNorm", "InPlaceABNSync", "matmuls=True)"):
        assert label in chart
    assert all(f"{size:,} B" in page and f"{size / 2**20:.2f} MiB" in chart for size in kept.values())


@pytest.fixture(scope="module")
def page(demo, tmp_path_factory) -> str:
    """Returns a page of three epochs, whose layers differ in each number."""
    losses, accuracies = (1.7, 0.31, 0.06), (0.42, 0.9, 0.98)
    history = [
        {
            "epoch": i + 1,
            "train_loss": losses[i],
            "test_loss": 0.3 + i / 100,
            "test_accuracy": accuracies[i],
            "images_per_second": 1000.0,
        }
        for i in range(3)
    ]
    results = [
        demo.Result(norm, "O1", "python", 2, 9.0, history) for norm in (demo.MAIN_NORM, "fastvit-sync")
    ]
    costs = {
        name: demo.LayerCost(8_000_000 - i * 1_000_000, 10_000_000 - i * 1_000_000, 1 + i / 8)
        for i, name in enumerate(demo.LAYERS)
    }
    timelines = {
        name: [size * 2**20 // 4, size * 2**20, 0] * 4
        for name, size in (("as it was", 8), ("as converted", 5), ("least", 3))
    }
    path = tmp_path_factory.mktemp("demo") / "index.html"
    return demo.write_page(path, results, costs, timelines, 32).read_text(encoding="utf-8")


def test_the_page_shows_the_time_of_each_layer_beside_its_bytes(page):
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    cells = {row[0]: row[1:] for row in rows if len(row) == 6 and row[1].endswith(" B")}
    assert len(cells) == 6
    assert cells["torch BatchNorm + LeakyReLU"] == ["8,000,000 B", "100%", "10,000,000 B", "100%", "1.00x"]
    assert cells["torch, convert(model)"] == ["4,000,000 B", "50%", "6,000,000 B", "60%", "1.50x"]
    matmuls = cells["torch, convert(model, matmuls=True)"]
    assert matmuls == ["3,000,000 B", "38%", "5,000,000 B", "50%", "1.62x"]
    tile = "kept for backward by convert(model) than by torch, at 1.50x its step time"
    assert f"<b>50% less</b><span>{tile}</span>" in page


def test_the_page_draws_the_memory_over_a_step_with_the_boundary_of_the_backward(page):
    chart = find_chart(page, "memory over a training step")
    labels = read_labels(chart)
    for name, peak, color in (
        ("as it was", 8, "#8b95a5"),
        ("as converted", 5, "#0ea5a4"),
        ("least", 3, "#a855f7"),
    ):
        assert f"{name}: peak {peak:.2f} MiB" in labels
        assert chart.count(f"stroke: {color}") == 2  # the curve and its line in the legend
    # The forward is the first third. Labels are at its middle, and at that of the backward.
    forward, backward = (
        float(re.search(rf'<text[^>]* x="([\d.]+)"[^>]*>{label}<', chart)[1])
        for label in ("forward", "backward")
    )
    (dashed,) = (path for path in re.findall(r"<path[^>]*>", chart) if "stroke-dasharray" in path)
    boundary = float(re.search(r'd="M ([\d.]+)', dashed)[1])
    assert boundary == pytest.approx(forward + (backward - forward) / 3, abs=0.1)


def test_the_pictures_take_text_and_lines_from_the_colour_scheme(page):
    assert page.count("<svg") == 5 and "currentColor" in page
    assert "#010203" not in page  # in place of the text's colour
    assert "#000000" not in page and "fill: black" not in page


def test_ticks_of_losses_are_1_2_or_5_times_a_power_of_ten_and_those_of_epochs_are_integers(page):
    assert read_labels(find_chart(page, "training loss by epoch")) == [
        *("1", "2", "3", "epoch"),
        *("0.05", "0.1", "0.2", "0.5", "1", "2"),
    ]
    # The losses 0.3 to 0.32 lie between two ticks, which are both there.
    assert read_labels(find_chart(page, "test loss by epoch")) == ["1", "2", "3", "epoch", "0.2", "0.5"]


def test_the_page_names_files_to_read_next_that_exist(page):
    names = re.findall(r"<dt><code>(.*?)</code></dt><dd>[a-z]", page)
    assert names[0] == "docs/tutorial.md" and len(names) == 5
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_the_time_of_a_step_is_measured_for_the_model_that_it_names(demo, monkeypatch):
    def create_model(name: str) -> nn.Module:
        depth = 40 if name == "convert" else 1
        return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(depth)))

    monkeypatch.setattr(demo, "create_model", create_model)
    monkeypatch.setattr(demo, "TIMING_SECONDS", 0.1)
    ratios = demo.measure_time_ratios(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    assert ratios["torch"] == 1 and ratios.keys() == demo.LAYERS.keys()
    assert ratios["convert"] > 3 > max(ratios[name] for name in ratios if name != "convert")


def test_a_wrong_option_of_the_demo_is_named(demo, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits_demo.py", "--epochs", "0"])
    with pytest.raises(SystemExit) as end:
        demo.main()
    assert end.value.code == 2 and "--epochs must be at least 1, got 0" in capsys.readouterr().err
