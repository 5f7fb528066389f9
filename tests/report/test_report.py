"""`report`: the measured bytes, the tensors in the table, and its notes."""

import copy
import random
import re
import subprocess
import sys

import numpy
import pytest
import torch
from conversion.vit_models import measure_kept_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit
from report.models import WIDTH, SmallViT


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(16, 48, WIDTH)


def reasons_of(model, *inputs):
    return [row.reason for row in fastvit.report(model, *inputs).tensors]


@pytest.mark.parametrize(
    ("matmuls", "training"), [(False, True), (True, False)], ids=["in training", "in evaluation, matmuls"]
)
def test_a_report_says_what_a_step_keeps(matmuls, training, x):
    model = SmallViT()
    converted = fastvit.convert(copy.deepcopy(model), matmuls=matmuls)
    report = fastvit.report(converted.train(training), x)
    before, after = measure_kept_bytes(model, x), measure_kept_bytes(converted.train(), x)
    assert abs(report.kept_before - before) < 2**17 and abs(report.kept_after - after) < 2**17
    assert report.freed_bytes == report.kept_before - report.kept_after > 0.25 * before
    rows = report.tensors
    assert sum(row.kept_bytes for row in rows) <= report.kept_after
    assert sum(row.recomputed_bytes for row in rows) == pytest.approx(report.freed_bytes, rel=0.05)


def test_a_forward_is_measured_as_it_runs(x):
    """A mode that sees the ops would change which kernels run: this linear keeps more than its input."""
    model = nn.Sequential(nn.Linear(50, 256), nn.GELU(), nn.Linear(256, 256))
    y = torch.randn(16, 50, 512).transpose(1, 2)
    for matmuls in (False, True):
        converted = fastvit.convert(copy.deepcopy(model), matmuls=matmuls)
        assert abs(fastvit.report(converted, y).kept_after - measure_kept_bytes(converted, y)) < 2**16


@pytest.mark.nightly
def test_a_report_under_autocast_says_what_a_step_keeps(x):
    model = fastvit.convert(SmallViT(2))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        report, after = fastvit.report(model, x), measure_kept_bytes(model, x)
    assert abs(report.kept_after - after) < 2**17
    with torch.autocast("cpu", torch.bfloat16):  # the copies' casts, in autocast's cache, count
        assert fastvit.report(model, x).kept_after == pytest.approx(report.kept_after, rel=0.01)


def test_rows_name_modules_and_reasons(x):
    by_reason = {row.reason: row for row in fastvit.report(SmallViT(drop=0.1), x).tensors}
    recomputed = by_reason["recomputed by layer_norm from its saved input"]
    assert recomputed.names in (("blocks.*.fc1",), ("blocks.*.qkv",)) and recomputed.count == 4
    assert recomputed.recomputed_bytes == 4 * x.nbytes
    assert set(recomputed.skip) == {(f"blocks.{i}", "layer_norm") for i in range(4)}
    assert recomputed.kept_bytes == 4 * 2 * 64 * 4  # copies of weight and bias, as the op read them
    mask = by_reason["dropout's mask, kept as a bit an element"]
    assert mask.names == ("blocks.*.drop",) and mask.kept_bytes == 4 * x.numel() * 4 // 8
    product = by_reason[
        "the result of addmm: recomputed with matmuls=True, where it is no narrower than its input"
    ]
    assert product.names == ("blocks.*",) and product.kept_bytes == 4 * 7 * x.nbytes
    by_reason = {
        row.reason: row for row in fastvit.report(fastvit.convert(SmallViT(), matmuls=True), x).tensors
    }
    assert by_reason["recomputed by layer_norm, addmm from the saved input"].recomputed_bytes == 28 * x.nbytes


def test_a_product_is_named_whatever_view_it_has(x):
    for bias, op in ((True, "addmm"), (False, "mm")):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        message = f"the result of {op}: recomputed with matmuls=True"
        assert any(reason.startswith(message) for reason in reasons_of(model, x))


def test_a_report_prints_its_table(vit_report, x):
    text, summary = str(vit_report), vit_report.summary()
    assert text.splitlines()[0] == summary and "less (measured)" in summary
    assert text.splitlines()[2].split() == ["saved", "by", "count", "recomputed", "kept", "why"]
    assert "in smaller tensors, the result, compiled code" in text
    assert "the model is not converted yet: fastvit.convert(model)" in text
    assert "is not converted" not in str(fastvit.report(fastvit.convert(SmallViT()), x))


def test_the_pairs_of_a_row_are_those_that_convert_skips(x):
    model = SmallViT()
    first = fastvit.report(model, x)
    row = next(row for row in first.tensors if row.reason == "recomputed by gelu from its saved input")
    assert f"convert(model, skip=[{first._large_tensors()[0].skip[0]}]) keeps one of them" in str(first)
    after = fastvit.report(fastvit.convert(model, skip=row.skip), x)
    assert row.skip not in [other.skip for other in after.tensors]
    assert after.kept_after - first.kept_after == pytest.approx(row.recomputed_bytes, rel=0.01)


def test_older_names_of_a_report_warn(vit_report):
    with pytest.warns(DeprecationWarning, match="Report.saved_bytes is Report.freed_bytes now"):
        assert vit_report.saved_bytes == vit_report.freed_bytes
    with pytest.warns(DeprecationWarning, match="TensorReport.rebuilt_bytes is TensorReport.recomp"):
        assert vit_report.tensors[0].rebuilt_bytes == vit_report.tensors[0].recomputed_bytes


def test_more_is_not_a_negative_less():
    assert "1.0 MiB or 50.0% more (measured)" in fastvit.Report(2**21, 3 * 2**20).summary()
    assert "0.0 KiB or 0.0% less" in fastvit.Report(0, 0).summary()


def test_hooks_around_hold_what_is_kept(x):
    with torch.autograd.graph.save_on_cpu():
        reasons = reasons_of(SmallViT(), x)
    assert "packed by the saved-tensor hooks around the scope" in reasons


def test_a_budget_and_skipped_ops_show_in_the_reasons(x):
    model = fastvit.convert(SmallViT(), budget=0.9, example_inputs=x)
    assert "the budget is met without it" in reasons_of(model, x)
    assert "skipped" in reasons_of(fastvit.convert(SmallViT(), skip=[("blocks.1", "layer_norm")]), x)


def test_a_report_changes_neither_model_nor_random_states():
    class Random(nn.Sequential):
        def forward(self, x):
            scale = random.random() + numpy.random.random() + torch.rand(())
            return super().forward(x) * scale.to(x)

    model = Random(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU()).train()
    model[1].eval()
    handle = model[2].register_forward_hook(lambda *_: None)
    state, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    y = torch.randn(4, 8, 16, 16)
    given = y.clone()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    report = fastvit.report(model, y)
    assert report.kept_before > 0 and torch.equal(y, given)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert list(model[2]._forward_hooks) == [handle.id] and not model._forward_pre_hooks


def test_slow_models_show_their_progress(x, monkeypatch, capsys):
    monkeypatch.setattr("fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 600.0)
    fastvit.report(SmallViT(), x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 0.0)
    fastvit.report(SmallViT(), x)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("fastvit.report: runs a copy of the model: forward 9, after ")


def test_checkpointed_blocks_are_noted_and_not_on_paper(vit_report, x):
    class CheckpointedViT(SmallViT):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    report = fastvit.report(CheckpointedViT(), x)
    text = str(report)
    assert report.notes == ["blocks.*: nothing is recomputed, because torch.utils.checkpoint runs it"]
    assert f"note: {report.notes[0]}" in text
    assert "on paper the peak as it was is " in text and "checkpointed parts" in text
    assert "checkpointed parts" not in str(vit_report)


@pytest.mark.filterwarnings("ignore:fastvit. recompute_scope has no effect here")
def test_disabled_hooks_are_noted(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        report = fastvit.report(SmallViT(), x)
    assert report.notes[0].endswith("because saved-tensor hooks are disabled: not now")
    assert abs(report.freed_bytes) < 2**16


@pytest.mark.nightly
def test_compiled_models_are_measured_or_noted(x):
    model = SmallViT(2)
    report = fastvit.report(torch.compile(model, backend="aot_eager"), x)
    assert report.freed_bytes > 0.2 * report.kept_before
    assert fastvit.convert(torch.compile(model, backend="aot_eager"))(x).shape == x.shape
    model.compile(backend="eager")
    notes = fastvit.report(model, x).notes
    assert notes == ["measured without Module.compile, which is not copied; pass torch.compile(model)"]


PROFILED = """
import torch
with torch.profiler.profile(acc_events=True):  # without it torch 2.11 warns
    torch.ones(3)
"""


def test_torchs_profiler_writes_nothing_in_a_report_and_its_usual_lines_in_other_profiles(
    x, capfd, monkeypatch
):
    """The first profile of a process may be of either kind."""

    def read_lines():
        return [re.sub(r"\d+", "#", line) for line in capfd.readouterr().err.splitlines()]

    # No lines of progress are written.
    monkeypatch.setattr("fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 600.0)
    exec(PROFILED)  # the first of a process may write more
    read_lines()
    exec(PROFILED)
    usual = read_lines()
    fastvit.report(fastvit.convert(SmallViT()), x)
    assert read_lines() == []
    exec(PROFILED)
    assert read_lines() == usual
    code = f"import fastvit.memory, torch; fastvit.memory.live_bytes(lambda: torch.ones(3))\n{PROFILED}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert read_lines() == usual
