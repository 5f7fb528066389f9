"""`report`: the peak of a step, measured and on paper, who holds it, and the largest batch that fits."""

import copy
import io
import math
import sys

import pytest
import torch
from packages import import_or_skip
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit.conversion import largest_batch
from fastvit.conversion.copy_runner import CopyRunner
from fastvit.conversion.report_pictures import draw_timelines
from fastvit.conversion.scope_hooks import add_scope_hooks
from fastvit.recompute import Policy
from report.batch_steps import measure_training
from report.models import WIDTH, SmallViT, measure_step_peak

NAMES = ["as it was", "as converted", "least"]
GRADIENTS = "gradients of activations and the result"


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.conv2, self.norm2 = nn.Conv2d(2 * width, width, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def vit():
    torch.manual_seed(0)
    return SmallViT(), torch.randn(16, 48, WIDTH)


def resnet():
    torch.manual_seed(0)
    # For smaller batches oneDNN's convolutions allocate less than on paper.
    return nn.Sequential(*(Stage(16) for _ in range(4))), torch.randn(16, 16, 28, 28)


MODELS = pytest.mark.parametrize("make", [vit, resnet])


@MODELS
def test_the_peak_on_paper_is_that_which_is_measured(make):
    model, x = make()
    found = fastvit.report(model, x)
    assert list(found.timelines) == NAMES and not found.batches
    peaks = [max(line) for line in found.timelines.values()]
    assert peaks[0] == pytest.approx(found.peak_before, rel=0.02)
    assert peaks[1] == pytest.approx(found.peak_after, rel=0.02)
    assert peaks[2] < peaks[1] < peaks[0]
    for line in found.timelines.values():
        assert len(line) % 3 == 0
    kept = [line[len(line) // 3 - 1] for line in found.timelines.values()]  # when the forward ends
    assert kept[0] == pytest.approx(found.kept_before, rel=0.05)
    again = fastvit.report(fastvit.convert(model), x)
    assert (again.peak_before, again.peak_after) == (found.peak_before, found.peak_after)
    assert again.timelines == found.timelines


@MODELS
def test_the_measured_peak_is_that_of_a_step(make):
    model, x = make()
    assert fastvit.report(model, x).peak_before == pytest.approx(measure_step_peak(model, x), rel=0.01)


def test_the_peak_of_a_converted_model_by_a_budget():
    model, x = vit()
    budget = fastvit.convert(copy.deepcopy(model), budget=0.6, example_inputs=x)
    found = fastvit.report(budget, x)
    assert found.peak_after <= 0.6 * found.peak_before
    assert max(found.timelines["as converted"]) == pytest.approx(found.peak_after, rel=0.03)
    # Names of blocks are those that `convert` has given, of a part of the model too.
    part = nn.Sequential(nn.Identity(), fastvit.convert(copy.deepcopy(model)))
    assert fastvit.report(part, x).timelines == fastvit.report(model, x).timelines


def test_a_fused_model_is_compared_with_the_original():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for _ in "abc")
    )
    x = torch.randn(8, 16, 28, 28)
    found = fastvit.report(fastvit.convert(fastvit.fuse(copy.deepcopy(model))), x, memory="64 MiB")
    plain = fastvit.report(model, x, memory="64 MiB")
    assert found.timelines["as it was"] == plain.timelines["as it was"] != found.timelines["least"]
    assert found.batches["as it was"] == plain.batches["as it was"]


def test_frozen_models_and_nested_results():
    class Nested(SmallViT):
        def forward(self, x):
            y = super().forward(x)
            return {"y": [y, (y * 2, x.detach())], "shape": x.shape}

    model, x = Nested(), torch.randn(16, 48, WIDTH)
    found = fastvit.report(model, x)
    assert found.peak_before == pytest.approx(max(found.timelines["as it was"]), rel=0.02)
    frozen = fastvit.report(model.requires_grad_(False), x)
    runner = CopyRunner("report", model, ((x,), {}))
    assert frozen.peak_before == runner.measure_step_peak(model.train()) > 4 * x.nbytes  # a forward alone
    assert frozen.kept_before < found.kept_before / 3 and str(frozen)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_who_holds_the_peak():
    model, x = vit()
    found = fastvit.report(model, x)
    for name in NAMES[:2]:
        holders = dict(found.peak_holders[name])
        assert sum(holders.values()) == max(found.timelines[name])
        assert list(holders.values()) == sorted(holders.values(), reverse=True)
        assert {"blocks.*", "blocks.*.norm2", GRADIENTS} <= set(holders)
    before, after = (dict(found.peak_holders[name]) for name in NAMES[:2])
    assert before["blocks.*.fc2"] == 4 * 4 * x.nbytes  # the output of the GELU
    assert after["blocks.*.fc2"] == 4 * x.nbytes  # of the block whose backward runs
    assert "as converted" in str(found) and f"at the peak as it was: blocks.* {6.0} MiB, " in str(found)


def test_the_picture_in_text():
    lines = str(fastvit.report(*vit())).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("on paper"))
    rows = lines[at : at + 4]
    assert [row[:12].strip() for row in rows[1:]] == NAMES
    assert all(len(row) <= 72 for row in rows) and len({row.index("|") for row in rows}) == 1
    assert "█" in rows[1] and "█" not in rows[3] and rows[1].endswith("13.1 MiB")
    assert draw_timelines({"none": [0, 0, 0]})[1].endswith("0.0 KiB")


def test_the_picture_where_blocks_cannot_be_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(fastvit.report(*vit()))
    sys.stdout.flush()
    assert b"@" in sys.stdout.buffer.getvalue()


def test_what_is_not_on_paper_is_said():
    class Checkpointed(SmallViT):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    text = str(fastvit.report(Checkpointed(), torch.randn(16, 48, WIDTH)))
    assert "on paper the peak as it was is " in text and "checkpointed parts" in text
    assert "checkpointed parts" not in str(fastvit.report(*vit()))


def convert_to_least(monkeypatch):
    """Returns a function that gives a copy of a model the plan of a report's largest batch."""
    plans = []
    find = largest_batch.BatchSearch.find_least_plan

    def spy(*args):
        plans.append(find(*args))
        return plans[-1]

    monkeypatch.setattr(largest_batch.BatchSearch, "find_least_plan", spy)
    return lambda model: add_scope_hooks(
        copy.deepcopy(model), Policy(plans[-1].level, only_sites=plans[-1].sites)
    )


def check_batches(monkeypatch, model, x, memory):
    """Trains with the batches that a report says."""
    convert_least = convert_to_least(monkeypatch)
    found = fastvit.report(model, x, memory=memory)
    assert list(found.batches) == NAMES and found.batches["as it was"] < found.batches["as converted"]
    assert found.batches["as converted"] < found.batches["least"]
    variants = model, fastvit.convert(copy.deepcopy(model)), convert_least(model)
    for batch, variant in zip(found.batches.values(), variants, strict=True):
        used = measure_training(variant, lambda batch=batch: torch.randn(batch, *x.shape[1:]))
        assert 0.95 * found.memory <= used <= 1.05 * found.memory, (batch, used / found.memory)
        more = math.ceil(1.06 * batch)
        assert measure_training(variant, lambda more=more: torch.randn(more, *x.shape[1:])) > found.memory


class Mean(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


@MODELS
def test_the_largest_batch_is_that_which_fits(make, monkeypatch):
    model, x = make()
    check_batches(monkeypatch, nn.Sequential(model, Mean()), x, "48 MiB")


@pytest.mark.nightly
@pytest.mark.packages("timm")
@pytest.mark.parametrize(
    "name, options, size, memory",
    [
        ("vit_tiny_patch16_224", {"img_size": 96}, 96, "120 MiB"),
        ("resnet26", {}, 64, "330 MiB"),
        ("swin_tiny_patch4_window7_224", {"img_size": 96, "window_size": 3}, 96, "600 MiB"),
    ],
)
def test_the_largest_batch_of_published_models(name, options, size, memory, monkeypatch):
    timm = import_or_skip("timm")
    model = timm.create_model(name, **options).train()
    check_batches(monkeypatch, model, torch.randn(8, 3, size, size), memory)


def test_a_report_says_which_batch_fits():
    model, x = vit()
    small, found = (fastvit.report(model, x[:size], memory="24 MiB") for size in (1, 16))
    assert found.memory == 24 * 2**20 and found.model_bytes == 3 * sum(p.nbytes for p in model.parameters())
    counts = ", ".join(f"{count} {name}" for name, count in found.batches.items())
    assert f"the largest batch for a step with AdamW in 24.0 MiB: {counts} (" in str(found)
    assert small.batches["as it was"] == pytest.approx(found.batches["as it was"], rel=0.1)
    for size in (16, 5):
        masked = fastvit.report(model, x[:size], torch.ones(size, 1, 1), memory=24 * 2**20)
        assert masked.batches["as it was"] == pytest.approx(found.batches["as it was"], abs=1)
    none = fastvit.report(model, x, memory="2 MiB")
    assert set(none.batches.values()) == {0} and "none as it was, none as converted, none least" in str(none)


def test_inputs_without_a_batch_are_named():
    model, x = vit()
    message = (
        r"report: memory= needs tensors .* the batch, the same in all, got argument 'x': \(16, 48, 64\); "
    )
    with pytest.raises(ValueError, match=message + r"argument 'mask': \(48, 1\); pass the others"):
        fastvit.report(model, x, mask=torch.ones(48, 1), memory="1 GiB")
    assert fastvit.report(model, x, torch.ones(()), memory="1 GiB").batches  # a number
    with pytest.raises(ValueError, match="got none"):
        fastvit.report(nn.Linear(2, 2), memory="1 GiB")
    for memory in ("much", 0.5, 0, True, "least", "0 GiB"):
        with pytest.raises(ValueError, match="report: memory must be bytes, as an int or as '8 GiB', got "):
            fastvit.report(model, x, memory=memory)

    class Fixed(SmallViT):
        def forward(self, x):
            return super().forward(x.reshape(16, 48, WIDTH))

    with pytest.raises(ValueError, match="first dimension of the inputs, 16, as the batch, and with 8"):
        fastvit.report(Fixed(), x, memory="1 GiB")


def test_memory_may_be_an_argument_of_the_forward():
    decoder = nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(4, 8, 32)
    found = fastvit.report(decoder, x, memory=x)
    assert not found.batches and found.kept_before > 10 * x.nbytes
    assert found.kept_before == fastvit.report(decoder, x, x).kept_before


def test_a_plot_shows_the_step(tmp_path):
    pytest.importorskip("matplotlib")
    found = fastvit.report(*vit())
    found.plot(tmp_path / "both.png")
    fastvit.Report(found.kept_before, found.kept_after, found.tensors).plot(tmp_path / "bars.png")
    assert (tmp_path / "both.png").stat().st_size > 1.5 * (tmp_path / "bars.png").stat().st_size
