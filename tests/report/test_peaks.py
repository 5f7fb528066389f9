"""`report`: the peak of a step, measured and on paper, who holds it, and its pictures."""

import copy
import io
import sys

import pytest
import torch
from torch import nn

import fastvit
from fastvit.conversion.copy_runner import CopyRunner
from fastvit.conversion.report_pictures import draw_timelines
from report.models import EXAMPLES, TIMELINES, WIDTH, SmallViT, make_vit_example, measure_step_peak

GRADIENTS = "gradients of activations and the result"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_peak_on_paper_is_that_of_a_step_and_of_the_report(name):
    model, x = EXAMPLES[name]()
    report = fastvit.report(model, x)
    assert list(report.timelines) == TIMELINES and not report.batches
    assert report.peak_before == pytest.approx(measure_step_peak(model, x), rel=0.01)
    peaks = [max(line) for line in report.timelines.values()]
    assert peaks[0] == pytest.approx(report.peak_before, rel=0.02)
    assert peaks[1] == pytest.approx(report.peak_after, rel=0.02)
    assert peaks[2] < peaks[1] < peaks[0]
    for line in report.timelines.values():
        assert len(line) % 3 == 0
    kept = [line[len(line) // 3 - 1] for line in report.timelines.values()]  # when the forward ends
    assert kept[0] == pytest.approx(report.kept_before, rel=0.05)
    again = fastvit.report(fastvit.convert(model), x)
    assert (again.peak_before, again.peak_after) == (report.peak_before, report.peak_after)
    assert again.timelines == report.timelines


def test_a_model_with_a_budget_has_its_peak_on_paper_too(vit_report):
    model, x = make_vit_example()
    budget = fastvit.convert(copy.deepcopy(model), budget=0.6, example_inputs=x)
    report = fastvit.report(budget, x)
    assert report.peak_after <= 0.6 * report.peak_before
    assert max(report.timelines["as converted"]) == pytest.approx(report.peak_after, rel=0.03)
    # Names of blocks are those that `convert` has given, of a part of the model too.
    part = nn.Sequential(nn.Identity(), fastvit.convert(copy.deepcopy(model)))
    assert fastvit.report(part, x).timelines == vit_report.timelines


def test_a_fused_model_is_compared_with_the_original():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for _ in "abc")
    )
    x = torch.randn(8, 16, 28, 28)
    report = fastvit.report(fastvit.convert(fastvit.fuse(copy.deepcopy(model))), x, memory="64 MiB")
    plain = fastvit.report(model, x, memory="64 MiB")
    assert report.timelines["as it was"] == plain.timelines["as it was"] != report.timelines["least"]
    assert report.batches["as it was"] == plain.batches["as it was"]


def test_frozen_models_and_nested_results_are_measured():
    class Nested(SmallViT):
        def forward(self, x):
            y = super().forward(x)
            return {"y": [y, (y * 2, x.detach())], "shape": x.shape}

    model, x = Nested(), torch.randn(16, 48, WIDTH)
    report = fastvit.report(model, x)
    assert report.peak_before == pytest.approx(max(report.timelines["as it was"]), rel=0.02)
    frozen = fastvit.report(model.requires_grad_(False), x)
    runner = CopyRunner("report", model, ((x,), {}))
    assert frozen.peak_before == runner.measure_step_peak(model.train()) > 4 * x.nbytes  # a forward alone
    assert frozen.kept_before < report.kept_before / 3 and str(frozen)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_holders_of_a_peak_add_up_to_it(vit_report):
    for name in TIMELINES[:2]:
        holders = dict(vit_report.peak_holders[name])
        assert sum(holders.values()) == max(vit_report.timelines[name])
        assert list(holders.values()) == sorted(holders.values(), reverse=True)
        assert {"blocks.*", "blocks.*.norm2", GRADIENTS} <= set(holders)
    before, after = (dict(vit_report.peak_holders[name]) for name in TIMELINES[:2])
    _, x = make_vit_example()
    assert before["blocks.*.fc2"] == 4 * 4 * x.nbytes  # the output of the GELU
    assert after["blocks.*.fc2"] == 4 * x.nbytes  # of the block whose backward runs
    text = str(vit_report)
    assert "as converted" in text and "at the peak as it was: blocks.* 6.0 MiB, " in text


def test_a_report_has_a_picture_in_text(vit_report):
    lines = str(vit_report).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("on paper"))
    rows = lines[first : first + 4]
    assert [row[:12].strip() for row in rows[1:]] == TIMELINES
    assert all(len(row) <= 72 for row in rows) and len({row.index("|") for row in rows}) == 1
    assert "█" in rows[1] and "█" not in rows[3] and rows[1].endswith("13.1 MiB")
    assert draw_timelines({"none": [0, 0, 0]})[1].endswith("0.0 KiB")


def test_the_picture_has_other_signs_where_blocks_cannot_be_printed(vit_report, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(vit_report)
    sys.stdout.flush()
    assert b"@" in sys.stdout.buffer.getvalue()


def test_a_plot_shows_the_step(vit_report, tmp_path):
    pytest.importorskip("matplotlib")
    both, bars = tmp_path / "both.png", tmp_path / "bars.png"
    vit_report.plot(both)
    fastvit.Report(vit_report.kept_before, vit_report.kept_after, vit_report.tensors).plot(bars)
    assert both.stat().st_size > 1.5 * bars.stat().st_size and bars.stat().st_size > 7_000
