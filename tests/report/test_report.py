"""`report`: the measured bytes, the tensors in the table, and what it says where it cannot work."""

import copy
import random
import re
import subprocess
import sys

import numpy
import pytest
import torch
from conversion.vit_models import measure_kept_bytes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastvit
from report.models import WIDTH, SmallViT, hold_graph_tensor


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(16, 48, WIDTH)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_said_is_what_a_step_keeps(products, training, x):
    model = SmallViT()
    converted = fastvit.convert(copy.deepcopy(model), matmuls=products)
    found = fastvit.report(converted.train(training), x)
    before, after = measure_kept_bytes(model, x), measure_kept_bytes(converted.train(), x)
    assert abs(found.kept_before - before) < 2**17 and abs(found.kept_after - after) < 2**17
    assert found.freed_bytes == found.kept_before - found.kept_after > 0.25 * before
    rows = found.tensors
    assert sum(row.kept_bytes for row in rows) <= found.kept_after
    assert sum(row.recomputed_bytes for row in rows) == pytest.approx(found.freed_bytes, rel=0.05)


def test_a_forward_is_measured_as_it_runs(x):
    """A mode that sees the ops would change which kernels run: this linear keeps more than its input."""
    model = nn.Sequential(nn.Linear(50, 256), nn.GELU(), nn.Linear(256, 256))
    y = torch.randn(16, 50, 512).transpose(1, 2)
    for products in (False, True):
        converted = fastvit.convert(copy.deepcopy(model), matmuls=products)
        assert abs(fastvit.report(converted, y).kept_after - measure_kept_bytes(converted, y)) < 2**16


def test_under_autocast(x):
    model = fastvit.convert(SmallViT())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found, after = fastvit.report(model, x), measure_kept_bytes(model, x)
    assert abs(found.kept_after - after) < 2**17
    with torch.autocast("cpu", torch.bfloat16):  # the copies' casts, in autocast's cache, count
        assert fastvit.report(model, x).kept_after == pytest.approx(found.kept_after, rel=0.01)


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


@pytest.mark.parametrize("bias, op", [(True, "addmm"), (False, "mm")])
def test_a_product_is_named_whatever_view_it_has(bias, op, x):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    reasons = [row.reason for row in fastvit.report(model, x).tensors]
    assert any(reason.startswith(f"the result of {op}: recomputed with matmuls=True") for reason in reasons)


def test_it_prints_and_plots(x, tmp_path):
    found = fastvit.report(SmallViT(), x)
    text = str(found)
    assert text.splitlines()[0] == found.summary() and "less (measured)" in found.summary()
    assert text.splitlines()[2].split() == ["saved", "by", "count", "recomputed", "kept", "why"]
    assert "in smaller tensors, the result, compiled code" in text
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_the_pairs_of_a_row_are_those_that_convert_skips(x):
    model = SmallViT()
    first = fastvit.report(model, x)
    row = next(row for row in first.tensors if row.reason == "recomputed by gelu from its saved input")
    assert f"convert(model, skip=[{first._large_tensors()[0].skip[0]}]) keeps one of them" in str(first)
    after = fastvit.report(fastvit.convert(model, skip=row.skip), x)
    assert row.skip not in [other.skip for other in after.tensors]
    assert after.kept_after - first.kept_after == pytest.approx(row.recomputed_bytes, rel=0.01)


def test_older_names_warn(x):
    found = fastvit.report(SmallViT(), x)
    with pytest.warns(DeprecationWarning, match="Report.saved_bytes is Report.freed_bytes now"):
        assert found.saved_bytes == found.freed_bytes
    with pytest.warns(DeprecationWarning, match="TensorReport.rebuilt_bytes is TensorReport.recomp"):
        assert found.tensors[0].rebuilt_bytes == found.tensors[0].recomputed_bytes


def test_more_is_not_a_negative_less():
    assert "1.0 MiB or 50.0% more (measured)" in fastvit.Report(2**21, 3 * 2**20).summary()
    assert "0.0 KiB or 0.0% less" in fastvit.Report(0, 0).summary()


def test_hooks_around_hold_what_is_kept(x):
    with torch.autograd.graph.save_on_cpu():
        rows = fastvit.report(SmallViT(), x).tensors
    assert any(row.reason == "packed by the saved-tensor hooks around the scope" for row in rows)


def test_a_budget_shows_in_the_reasons(x):
    model = fastvit.convert(SmallViT(), budget=0.9, example_inputs=x)
    assert any("the budget is met without it" == row.reason for row in fastvit.report(model, x).tensors)
    skipping = fastvit.convert(SmallViT(), skip=[("blocks.1", "layer_norm")])
    assert any("skipped" == row.reason for row in fastvit.report(skipping, x).tensors)


def test_nothing_of_the_model_changes():
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
    found = fastvit.report(model, y)
    assert found.kept_before > 0 and torch.equal(y, given)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert list(model[2]._forward_hooks) == [handle.id] and not model._forward_pre_hooks


def test_progress_of_slow_models(x, monkeypatch, capsys):
    monkeypatch.setattr("fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 600.0)
    fastvit.report(SmallViT(), x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 0.0)
    fastvit.report(SmallViT(), x)
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("fastvit.report: runs a copy of the model: forward 9, after ")
    )


def test_checkpointed_blocks_are_noted(x):
    class Checkpointed(SmallViT):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    found = fastvit.report(Checkpointed(), x)
    assert found.notes == ["blocks.*: nothing is recomputed, because torch.utils.checkpoint runs it"]
    assert f"note: {found.notes[0]}" in str(found)


@pytest.mark.filterwarnings("ignore:fastvit. recompute_scope has no effect here")
def test_disabled_hooks_are_noted(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        found = fastvit.report(SmallViT(), x)
    assert found.notes[0].endswith("because saved-tensor hooks are disabled: not now")
    assert abs(found.freed_bytes) < 2**16


def test_compiled_models(x):
    model = SmallViT()
    found = fastvit.report(torch.compile(model, backend="aot_eager"), x)
    assert found.freed_bytes > 0.2 * found.kept_before
    assert fastvit.convert(torch.compile(model, backend="aot_eager"))(x).shape == x.shape
    model.compile(backend="eager")
    notes = fastvit.report(model, x).notes
    assert notes == ["measured without Module.compile, which is not copied; pass torch.compile(model)"]


SIZE = (16, 48, 64)


@pytest.mark.parametrize("args", [(torch.Size(SIZE),), (SIZE,), SIZE])
@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify])
def test_sizes_as_inputs_are_named(function, args):
    message = r": a tensor expected, such as torch.zeros\(16, 48, 64\), got the size"
    with pytest.raises(TypeError, match=function.__name__ + message):
        function(SmallViT(), *args)
    with pytest.raises(TypeError, match="must be Tensor, not str"):  # torch's own
        function(SmallViT(), "x")


@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify])
@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"x": torch.zeros(SIZE)}, r"a dict .*; pass what it holds as keyword arguments, \*\*batch"),
        ((torch.zeros(SIZE),), r"a tuple .*; pass what it holds as arguments, \*batch"),
        (torch.utils.data.DataLoader([0]), r"a DataLoader .*; pass a batch of it, next\(iter\(loader\)\)"),
    ],
)
def test_what_holds_the_inputs_is_named(function, given, instead):
    with pytest.raises(TypeError, match=f"{function.__name__}: the model failed with {instead}"):
        function(SmallViT(), given)


def test_a_model_that_fixes_its_dtype():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    with pytest.raises(RuntimeError, match="does not run in torch.float64 .*; pass dtype=None for its own"):
        fastvit.verify(Fixed(2, 2), torch.ones(1, 2))
    assert fastvit.verify(Fixed(2, 2), torch.ones(1, 2), dtype=None)


def test_a_report_says_that_the_model_is_not_converted(x):
    assert "the model is not converted yet: fastvit.convert(model)" in str(fastvit.report(SmallViT(), x))
    assert "is not converted" not in str(fastvit.report(fastvit.convert(SmallViT()), x))


@pytest.mark.parametrize(
    "function",
    [
        fastvit.report,
        fastvit.verify,
        fastvit.convert,
        fastvit.revert,
        fastvit.fuse,
        fastvit.convert_syncbn_model,
        fastvit.revert_syncbn_model,
    ],
)
def test_a_model_that_is_none(function):
    with pytest.raises(TypeError, match=f"{function.__name__}: model must be a torch.nn.Module, got .* type"):
        function(measure_kept_bytes)


PROFILED = """
import torch
with torch.profiler.profile(acc_events=True):  # without it torch 2.11 warns
    torch.ones(3)
"""


def test_torchs_profiler_writes_nothing_in_a_report_and_what_it_wrote_before_in_other_profiles(
    x, capfd, monkeypatch
):
    """Whichever is the first profile of a process."""

    def lines():
        return [re.sub(r"\d+", "#", line) for line in capfd.readouterr().err.splitlines()]

    monkeypatch.setattr(
        "fastvit.conversion.copy_runner._SECONDS_BEFORE_PROGRESS", 600.0
    )  # no lines of progress
    exec(PROFILED)  # the first of a process may write more
    lines()
    exec(PROFILED)
    usual = lines()
    fastvit.report(fastvit.convert(SmallViT()), x)
    assert lines() == []
    exec(PROFILED)
    assert lines() == usual
    code = f"import fastvit.memory, torch; fastvit.memory.live_bytes(lambda: torch.ones(3))\n{PROFILED}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert lines() == usual


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"Report.plot: matplotlib cannot .*; pip install matplotlib, or in .* pip install '.\[train\]'"
    with pytest.raises(ImportError, match=message):
        fastvit.Report(1, 1).plot(tmp_path / "report.png")


def test_a_profiler_that_runs_goes_on(x):
    with torch.profiler.profile() as profile:
        with pytest.raises(
            RuntimeError, match="a profiler of torch is running, and counting bytes on the CPU would end it"
        ):
            fastvit.report(fastvit.convert(SmallViT()), x)
    assert profile.key_averages()


def test_models_that_cannot_be_measured(x):
    for model, y, message in (
        (
            hold_graph_tensor(SmallViT(), x),
            x,
            r"a copy of the model is run, and copy.deepcopy\(model\) raised ",
        ),
        (SmallViT().to("meta"), x.to("meta"), "a model and inputs on the CPU or on CUDA expected, got meta"),
    ):
        with pytest.raises(ValueError, match=f"report: {message}"):
            fastvit.report(model, y)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fastvit.report(SmallViT(), torch.zeros(2, 3))  # an error of the model
    with (
        fastvit.recompute_scope(),
        pytest.raises(RuntimeError, match="report: a recompute_scope\\(\\) is open; call report outside"),
    ):
        fastvit.report(SmallViT(), x)


def test_wrapped_models_name_what_to_pass(tmp_path, x):
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="DistributedDataParallel cannot run .* pass its .module"):
            fastvit.report(DistributedDataParallel(SmallViT()), x)
        layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.SyncBatchNorm(8), fastvit.SyncBatchNorm(8), nn.GELU())
        assert fastvit.report(layers, torch.randn(4, 8, 16, 16)).freed_bytes > 0  # no exchange
        sharded = SmallViT()
        distributed.fsdp.fully_shard(sharded, mesh=distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(
            ValueError, match="FSDPSmallViT is sharded, .* pass the model before it is sharded"
        ):
            fastvit.report(sharded, x)
    finally:
        distributed.destroy_process_group()
