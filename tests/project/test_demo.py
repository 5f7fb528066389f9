"""The demo of `make demo`, in its quick form."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "digits_demo.py"


@pytest.mark.nightly
def test_the_demo_writes_a_page_that_stands_alone_and_shows_the_memory_saved(tmp_path):
    command = [sys.executable, str(DEMO), "--out", "demo", "--quick", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    # A profiler measures, and its own lines do not appear. On a slow machine reports show their progress.
    assert "profiler" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("digits_demo: measures what a ViT keeps for backward, then trains it with ")
    assert "[epoch 2] mean loss" in done.stdout and lines[-2] == f"page: {tmp_path / 'demo/index.html'}"
    assert re.fullmatch(r"test accuracy [01]\.\d{3}", lines[-1])

    kept = json.loads((tmp_path / "demo/memory.json").read_text())
    # 32 images: three layers of the stem at 8x8, and in each of four blocks one of 16 tokens of 256.
    batch_norms = 32 * 4 * (32 + 32 + 64) * 64 + 32 * 4 * 4 * 16 * 256
    layer_norms = 32 * 4 * (2 * 4) * 16 * 64  # outputs of the blocks' LayerNorms
    slack = 64 * 1024  # mean and deviation per channel
    assert abs(kept["torch"] - kept["inplace-abn"] - batch_norms) < slack
    assert kept["inplace-abn-sync"] == kept["inplace-abn"]
    assert abs(kept["fastvit-sync"] - kept["torch"]) < slack
    assert kept["torch"] - kept["convert"] > batch_norms + layer_norms - slack
    assert kept["convert"] - kept["products"] > 4 * slack

    page = (tmp_path / "demo/index.html").read_text()
    assert page.rstrip().endswith("</html>") and page.count("<figure") == 4
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\((?!#)", page)
    chart = page[page.index('aria-label="kept for backward by layer"') :].split("</svg>")[0]
    for label in ("torch BatchNorm", "InPlaceABN<", "SyncBatchNorm", "InPlaceABNSync", "matmuls=True)"):
        assert label in chart
    assert all(f"{size:,} B" in page and f"{size / 2**20:.2f} MiB" in chart for size in kept.values())


def test_a_wrong_option_of_the_demo_is_named(monkeypatch, capsys):
    monkeypatch.syspath_prepend(DEMO.parent)
    monkeypatch.setattr(sys, "argv", ["digits_demo.py", "--epochs", "0"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("digits_demo").main()
    assert end.value.code == 2 and "--epochs must be at least 1, got 0" in capsys.readouterr().err
