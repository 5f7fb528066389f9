"""The demo of `make demo`, in its quick form."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "digits_demo.py"


def run_demo(directory, *arguments):
    command = [sys.executable, str(DEMO), "--out", "demo", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    done = run_demo(directory, "--quick", "--epochs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    # Measured by a profiler whose own lines do not appear; of a slow machine reports show their progress.
    assert "profiler" not in done.stderr
    return directory / "demo", done.stdout


def test_the_demo_prints_its_progress_and_the_page(demo):
    out, text = demo
    assert re.fullmatch(r"test accuracy [01]\.\d{3}", text.splitlines()[-1])
    assert text.splitlines()[-2] == f"page: {out / 'index.html'}"
    assert text.startswith("digits_demo: measures what a ViT keeps for backward, then trains it with ")
    assert re.search(r"2 epochs each, \d+ rank\(s\), (CUDA|the CPU: about a minute)", text.splitlines()[0])
    assert "[epoch 2] mean loss" in text  # the main run shows how it goes


def test_page_is_whole_and_stands_alone(demo):
    page = (demo[0] / "index.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\((?!#)", page)
    assert page.count("<figure") == 4
    labels = ["torch BatchNorm", "fastvit InPlaceABN<", "fastvit SyncBatchNorm", "fastvit InPlaceABNSync"]
    assert all(label in page for label in labels)
    assert "apex's SyncBatchNorm by fastvit.compat" in page or "NVIDIA apex SyncBatchNorm" in page
    assert re.search(r"amp O[01]", page)
    ends = r"the test losses are \d\.\d{3} and \d\.\d{3}, and the test accuracies \d\.\d{3} and \d\.\d{3}\."
    assert re.search(ends, page)


def test_in_place_layers_and_conversions_save_memory(demo):
    kept = json.loads((demo[0] / "memory.json").read_text())
    # 32 images: three layers of the stem at 8x8, and in each of four blocks one of 16 tokens of 256.
    stem, tokens = 32 * 4 * (32 + 32 + 64) * 64, 32 * 4 * 4 * 16 * 256
    norms = 32 * 4 * (2 * 4) * 16 * 64  # outputs of the blocks' LayerNorms
    slack = 64 * 1024  # mean and deviation per channel
    assert abs(kept["torch"] - kept["inplace-abn"] - stem - tokens) < slack
    assert kept["inplace-abn-sync"] == kept["inplace-abn"]
    assert abs(kept["fastvit-sync"] - kept["torch"]) < slack
    saved = {memory: kept["torch"] - kept[memory] for memory in ("convert", "products")}
    assert saved["convert"] > stem + tokens + norms - slack
    assert saved["products"] > saved["convert"] + 4 * slack
    page = (demo[0] / "index.html").read_text()
    svg = page[page.index('aria-label="kept for backward by layer"') :].split("</svg>")[0]
    assert "convert(model, matmuls=True)" in svg
    assert all(f"{size:,} B" in page and f"{size / 2**20:.2f} MiB" in svg for size in kept.values())


def test_wrong_flag(monkeypatch, capsys):
    monkeypatch.syspath_prepend(DEMO.parent)
    monkeypatch.setattr(sys, "argv", ["digits_demo.py", "--epochs", "0"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("digits_demo").main()
    assert end.value.code == 2 and "--epochs must be at least 1, got 0" in capsys.readouterr().err
