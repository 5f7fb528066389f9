"""The model of a run and its initial weights: files of other trainers, heads, frozen layers."""

import argparse

import pytest
import torch
from on_ranks import on_ranks
from packages import import_or_skip
from torch import nn

import fastvit
from fastvit import BatchNormActSync, SyncBatchNorm
from fastvit.models import vit_digits
from fastvit.training import loop, model
from fastvit.training.config import Config, ConfigError
from fastvit.training.pretrained import load_pretrained
from training.runs import train_on_rank, weights_of


def draw_weights(seed=1):
    torch.manual_seed(seed)
    return vit_digits("torch").state_dict()


def add_prefix(prefix, weights):
    return {prefix + name: value for name, value in weights.items()}


def test_the_model_follows_the_data():
    built = model.build_model(Config(), (3, 32, 32), 100)
    assert built.head.out_features == 100 and len(built.blocks) == 9
    built = model.build_model(Config(classes=12, norm="inplace-abn"), (1, 8, 8), 10)
    assert built.head.out_features == 12 and type(built.stem.layers[1].norm) is fastvit.InPlaceABN


# timm


def test_models_of_timm_have_norms_of_their_own():
    assert Config(model="timm/resnet18").norm == "fastvit-sync" and Config().norm == "inplace-abn-sync"


@pytest.mark.packages("timm")
def test_the_batch_norms_of_timm_models_are_converted():
    import_or_skip("timm")
    config = Config(model="timm/test_resnet", norm="inplace-abn-sync")
    message = "--norm inplace-abn-sync is built into .* and --memory convert to sa"
    with pytest.raises(ConfigError, match=message):
        model.build_model(config, (3, 32, 32), 10)
    for name in ("test_resnet", "test_efficientnet"):  # BatchNorm2d, and timm's BatchNormAct2d
        built = model.build_model(Config(model=f"timm/{name}"), (3, 32, 32), 10)
        norms = [m for m in built.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert norms and all(isinstance(m, (SyncBatchNorm, BatchNormActSync)) for m in norms)


@pytest.mark.packages("timm")
def test_a_model_whose_batch_norms_cannot_be_synchronised_is_refused(monkeypatch):
    timm, norm = import_or_skip("timm"), type("Own", (nn.BatchNorm2d,), {"forward": lambda self, x: x})
    monkeypatch.setattr(timm, "create_model", lambda name, **options: nn.Sequential(norm(3)))
    with pytest.raises(ConfigError, match=r"--norm fastvit-sync: .* Own \(1\), which overr.* --norm torch"):
        model.build_model(Config(model="timm/test_resnet"), (3, 32, 32), 10)


@pytest.mark.packages("timm")
def test_pretrained_weights_of_timm_fit_other_sizes_of_images(tmp_path):
    timm = import_or_skip("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}
    saved = timm.create_model("deit_tiny_distilled_patch16_224", **options, num_classes=5)
    torch.save({"model": saved.state_dict()}, tmp_path / "weights.pt")
    net = timm.create_model("deit_tiny_distilled_patch16_224", **options | {"img_size": 64}, num_classes=3)
    report = load_pretrained(net, tmp_path / "weights.pt")
    assert "missing" not in report and net.pos_embed.shape[1] == 2 + 8 * 8
    assert "not loaded: head.weight, head.bias, head_dist.weight, head_dist.bias" in report
    assert torch.equal(net.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight)


# Pretrained weights


def test_pretrained_weights_are_loaded_with_a_report(tmp_path):
    from safetensors.torch import save_file

    weights = {name: value.clone() for name, value in draw_weights().items()}
    weights |= {"head.weight": torch.zeros(7, 64), "extra": torch.zeros(1)}
    del weights["norm.bias"]
    save_file(weights, path := tmp_path / "weights.safetensors")
    net = vit_digits("torch")
    head = net.head.weight.detach().clone()
    report = load_pretrained(net, path)
    assert f"pretrained: {len(weights) - 2} of {len(weights)} tensors from {path}" in report
    assert "missing in the file: norm.bias" in report
    assert "unexpected, not in the model: extra" in report
    assert "for another number of classes, not loaded: head.weight" in report
    assert torch.equal(net.head.weight, head) and torch.equal(net.position, weights["position"])


WEIGHTS_FILES = {  # The keys are the prefixes that a report names.
    " (module)": lambda w: add_prefix("module._orig_mod.", w),
    "": lambda w: {name.replace(".0.", ".0._checkpoint_wrapped_module."): v for name, v in w.items()},
    " (backbone)": lambda w: add_prefix("backbone.", w) | {"head_of_another.weight": torch.zeros(3)},
    " (state_dict.model.encoder)": lambda w: {"state_dict": add_prefix("model.encoder.", w), "best": 0.5},
    " (model_ema.module)": lambda w: {"model": draw_weights(2), "model_ema": add_prefix("module.", w)},
    " (teacher.backbone)": lambda w: {"student": draw_weights(2), "teacher": add_prefix("backbone.", w)},
    " (model)": lambda w: {"model": w, "args": argparse.Namespace(lr=0.1)},
    " (net)": lambda w: {"net": w, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}},
}


@pytest.mark.parametrize("prefix", WEIGHTS_FILES, ids=lambda prefix: prefix.strip(" ()") or "no prefix")
def test_pretrained_weights_are_found_where_other_trainers_save_them(tmp_path, prefix):
    path, net = tmp_path / "weights.pt", vit_digits("torch")
    torch.save(WEIGHTS_FILES[prefix](weights := draw_weights()), path)
    report = load_pretrained(net, path)
    assert f"{len(weights)} of {len(weights)} tensors from {path}{prefix}" in report
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


class TwoHeads(nn.Module):
    def __init__(self, classes, make_head):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head, self.head_dist = make_head(4, classes), make_head(4, classes)


@pytest.mark.parametrize(
    "make_head",
    [
        pytest.param(nn.Linear, id="linear"),
        pytest.param(lambda *sizes: nn.Conv2d(*sizes, 1), id="convolution"),
    ],
)
def test_heads_for_another_number_of_classes_are_not_loaded(tmp_path, make_head):
    path, net, saved = tmp_path / "weights.pt", TwoHeads(3, make_head), TwoHeads(5, make_head)
    torch.save(saved.state_dict(), path)
    report = load_pretrained(net, path)
    names = "head.weight, head.bias, head_dist.weight, head_dist.bias"
    assert f"2 of 6 tensors from {path}" in report and f"not loaded: {names}" in report
    assert torch.equal(net.body.weight, saved.body.weight)
    torch.save(saved.state_dict() | {"body.weight": torch.zeros(7, 4)}, path)  # This is no head.
    with pytest.raises(ConfigError, match=r"body.weight must have the shape \(4, 4\), got \(7, 4\)"):
        load_pretrained(net, path)


def test_files_that_are_no_weights_are_named(tmp_path):
    net, path, weights = vit_digits("torch"), tmp_path / "weights.pt", draw_weights()
    for content, message in (
        ({"a": torch.zeros(1)}, "is a name of the model, such as position.*; the file has a$"),
        ({"epoch": 3, "net": {}}, "is a name of the model, .*; the file has epoch, net$"),
        ({"position": torch.zeros(1, 4, 64)}, r"must have the shape \(1, 16, 64\), got \(1, 4, 64\)"),
        ([1], "is a name of the model, .*; the file has list$"),
        (add_prefix("a.", weights) | add_prefix("b.", weights), r"the model as a\.\* and as b\.\*; save one"),
        ({"model": loop.Progress()}, "an object of .*Progress, which may run code; save the model's"),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=message):
            load_pretrained(net, path)
    (tmp_path / "weights.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="weights.safetensors is damaged"):
        load_pretrained(net, tmp_path / "weights.safetensors")
    for name in ("absent.pt", "absent.safetensors"):
        with pytest.raises(ConfigError, match=f"--pretrained: cannot read .*{name}: No such file"):
            load_pretrained(net, tmp_path / name)


@on_ranks(2)
def test_frozen_layers_keep_their_weights_and_use_batch_statistics(rank, world, tmp_path):
    arguments = ["--norm", "fastvit-sync", "--epochs", "1", "--batch-size", "256", "--freeze", "stem.*"]
    assert train_on_rank(rank, world, [*arguments, "--out", str(tmp_path / "run")]) is None


@test_frozen_layers_keep_their_weights_and_use_batch_statistics.check
def _(tmp_path):
    trained = weights_of(tmp_path / "run")
    torch.manual_seed(0)
    initial = vit_digits("fastvit-sync").state_dict()
    changed = {name for name, value in initial.items() if not torch.equal(value, trained[name])}
    counters = {f"stem.layers.{i}.norm.num_batches_tracked" for i in (1, 3, 5)}
    assert {name for name in changed if name.startswith("stem") and "running" not in name} == counters
    assert {"stem.layers.1.norm.running_var", "head.weight"} <= changed
