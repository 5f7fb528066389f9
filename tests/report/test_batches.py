"""`report(memory=)`: the largest batch that fits."""

import copy
import math

import pytest
import torch
from packages import import_or_skip
from torch import nn

import fastvit
from fastvit.conversion import largest_batch
from fastvit.conversion.copy_runner import CopyRunner
from fastvit.conversion.scope_hooks import add_scope_hooks
from fastvit.recompute import Policy
from report.models import EXAMPLES, TIMELINES, WIDTH, SmallViT, make_vit_example, measure_adamw_peak


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
    report = fastvit.report(model, x, memory=memory)
    assert list(report.batches) == TIMELINES and report.batches["as it was"] < report.batches["as converted"]
    assert report.batches["as converted"] < report.batches["least"]
    variants = model, fastvit.convert(copy.deepcopy(model)), convert_least(model)
    for batch, variant in zip(report.batches.values(), variants, strict=True):
        used = measure_adamw_peak(variant, lambda batch=batch: torch.randn(batch, *x.shape[1:]))
        assert 0.95 * report.memory <= used <= 1.05 * report.memory, (batch, used / report.memory)
        more = math.ceil(1.06 * batch)
        assert measure_adamw_peak(variant, lambda more=more: torch.randn(more, *x.shape[1:])) > report.memory


class MeanOfTokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).mean(2)


@pytest.mark.parametrize("name", ["vit", pytest.param("convolutions", marks=pytest.mark.nightly)])
def test_the_largest_batch_is_that_which_fits(name, monkeypatch):
    model, x = EXAMPLES[name]()
    check_batches(monkeypatch, nn.Sequential(model, MeanOfTokens()), x, "48 MiB")


class ScratchFunction(torch.autograd.Function):
    """The identity; its backward holds a workspace while it runs, as convolutions do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        torch.empty(10 * 2**20, dtype=torch.uint8)
        return dy


class Scratch(nn.Module):
    def forward(self, x):
        return ScratchFunction.apply(x)


def test_a_workspace_and_gradients_that_are_not_held_at_once_do_not_add_up(monkeypatch):
    """The backward begins with the workspace. A small batch has its peak there, a large one does not."""
    model, x = make_vit_example()
    check_batches(monkeypatch, nn.Sequential(model, MeanOfTokens(), Scratch()), x, "48 MiB")


def test_a_workspace_of_the_smaller_batch_alone_is_not_extrapolated():
    """The larger batch was measured one byte below the paper, which has 1000 bytes for each sample."""
    runner = CopyRunner("report", nn.Linear(2, 2), ((torch.randn(8, 2),), {}))
    search = largest_batch.BatchSearch(runner, 1_000_000)
    batch = search.find_batch(([0, 4000], [0, 8000]), [0, 0], peaks=(6000, 7999))
    assert 980 <= batch <= 1000


@pytest.mark.nightly
@pytest.mark.packages("timm")
@pytest.mark.parametrize(
    ("name", "options", "size", "memory"),
    [
        ("vit_tiny_patch16_224", {"img_size": 96}, 96, "120 MiB"),
        ("resnet26", {}, 64, "330 MiB"),
        ("swin_tiny_patch4_window7_224", {"img_size": 96, "window_size": 3}, 96, "600 MiB"),
    ],
    ids=["vit", "resnet", "swin"],
)
def test_the_largest_batch_of_published_models(name, options, size, memory, monkeypatch):
    timm = import_or_skip("timm")
    model = timm.create_model(name, **options).train()
    check_batches(monkeypatch, model, torch.randn(8, 3, size, size), memory)


def test_a_report_says_which_batch_fits():
    model, x = make_vit_example()
    small, report = (fastvit.report(model, x[:size], memory="24 MiB") for size in (1, 16))
    assert report.memory == 24 * 2**20 and report.model_bytes == 3 * sum(p.nbytes for p in model.parameters())
    counts = ", ".join(f"{count} {name}" for name, count in report.batches.items())
    assert f"the largest batch for a step with AdamW in 24.0 MiB: {counts} (" in str(report)
    assert small.batches["as it was"] == pytest.approx(report.batches["as it was"], rel=0.1)
    for size in (16, 5):
        masked = fastvit.report(model, x[:size], torch.ones(size, 1, 1), memory=24 * 2**20)
        assert masked.batches["as it was"] == pytest.approx(report.batches["as it was"], abs=1)
    none = fastvit.report(model, x, memory="2 MiB")
    assert set(none.batches.values()) == {0} and "none as it was, none as converted, none least" in str(none)


def test_inputs_without_a_batch_are_named():
    model, x = make_vit_example()
    message = r"report: memory= needs tensors .* the batch, the same in all, got argument 'x': \(16, 48, 64\)"
    with pytest.raises(ValueError, match=message + r"; argument 'mask': \(48, 1\); pass the others"):
        fastvit.report(model, x, mask=torch.ones(48, 1), memory="1 GiB")
    assert fastvit.report(model, x, torch.ones(()), memory="1 GiB").batches  # a number
    with pytest.raises(ValueError, match="got none"):
        fastvit.report(nn.Linear(2, 2), memory="1 GiB")
    for memory in ("much", 0.5, 0, True, "least", "0 GiB"):
        with pytest.raises(ValueError, match="report: memory must be bytes, as an int or as '8 GiB', got "):
            fastvit.report(model, x, memory=memory)

    class FixedBatch(SmallViT):
        def forward(self, x):
            return super().forward(x.reshape(16, 48, WIDTH))

    with pytest.raises(ValueError, match="first dimension of the inputs, 16, as the batch, and with 8"):
        fastvit.report(FixedBatch(), x, memory="1 GiB")


def test_memory_may_be_an_argument_of_the_forward():
    decoder = nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(4, 8, 32)
    report = fastvit.report(decoder, x, memory=x)
    assert not report.batches and report.kept_before > 10 * x.nbytes
    assert report.kept_before == fastvit.report(decoder, x, x).kept_before
