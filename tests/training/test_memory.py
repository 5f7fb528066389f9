"""`--memory`: the converted layers, and bitwise resume."""

import functools

import pytest
import torch
from packages import import_or_skip
from torch import nn

from fastvit import BatchNormActSync, SyncBatchNorm
from fastvit.memory import live_bytes
from fastvit.training import loop, model, train_state
from fastvit.training.config import Config, ConfigError
from training.runs import run_here, state_of

SHAPE = (1, 8, 8)
CPU = torch.device("cpu")


def make_train_state(config):
    torch.manual_seed(0)
    net = model.build_model(config, SHAPE, 10)
    return train_state.TrainState(net, config, CPU, SHAPE, 10, None)


def train_losses(built, steps=4):
    """The losses of some steps of training."""
    random = torch.Generator().manual_seed(3)
    images = torch.randn(steps, 16, *SHAPE, generator=random)
    labels = torch.randint(0, 10, (steps, 16), generator=random)
    feed, losses = loop.BatchFeed(zip(images, labels, strict=True), (16, *SHAPE)), []
    for _ in range(steps):
        losses.append(loop._accumulate_gradients(built, feed, 1).item())
        loop._optimizer_step(built)
    return losses


@pytest.mark.parametrize(
    ("amp", "norm", "memory"),
    [
        ("off", "torch", "matmuls"),
        ("off", "torch", "budget=0.8"),
        ("off", "inplace-abn-sync", "matmuls"),
        ("bf16", "torch", "convert"),
        ("O2", "torch", "convert"),
    ],
)
@pytest.mark.filterwarnings("ignore:amp. on the CPU half precision")
def test_less_is_kept_and_no_loss_changes(amp, norm, memory):
    images, kept, losses, names = torch.randn(32, *SHAPE), [], [], []
    for option in ("off", memory):  # one after the other: amp serves one model at a time
        built = make_train_state(Config(norm=norm, memory=option, amp=amp))
        with built.autocast():
            built.model(images)
            kept.append(live_bytes(lambda built=built: built.model(images))[0])
        losses.append(train_losses(built))
        names.append(list(built.model.state_dict()))
    assert kept[0] - kept[1] > 0.8 * built.memory_report.freed_bytes > 0
    assert losses[1] == losses[0] and names[1] == names[0]


@pytest.mark.nightly
def test_a_compiled_model_keeps_less_too(monkeypatch):
    """The backend compiles no code, since compiling takes half a minute."""
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    images, kept, losses = torch.randn(16, *SHAPE), [], []
    for memory in ("off", "convert"):
        torch._dynamo.reset()
        built = make_train_state(Config(norm="torch", memory=memory, compile=True))
        losses.append(train_losses(built, steps=2))
        kept.append(live_bytes(lambda built=built: built.model(images))[0])
    assert losses[0] == losses[1] and kept[1] < 0.75 * kept[0]


def test_memory_takes_a_budget():
    images, kept = torch.randn(32, *SHAPE), {}
    for memory in ("off", "0.7", "least", "5MiB"):
        built = make_train_state(Config(norm="torch", memory=memory))
        built.model(images)
        kept[memory], _ = live_bytes(lambda built=built: built.model(images))
    assert kept["0.7"] < 0.72 * kept["off"] and kept["least"] < kept["5MiB"]
    assert built.memory_report.kept_after < 5 * 2**20 < 0.5 * built.memory_report.kept_before
    assert "the budget is met without it" in str(built.memory_report)
    with pytest.raises(
        ConfigError, match=r"--memory budget=9KB: .* cannot be met; the least peak of a step is \d+ bytes"
    ):
        make_train_state(Config(norm="torch", memory="budget=9KB"))


def test_the_norm_of_timm_models():
    assert Config(model="timm/resnet18").norm == "fastvit-sync" and Config().norm == "inplace-abn-sync"
    import_or_skip("timm")
    config = Config(model="timm/test_resnet", norm="inplace-abn-sync")
    with pytest.raises(
        ConfigError, match="--norm inplace-abn-sync is built into .* and --memory convert to sa"
    ):
        model.build_model(config, (3, 32, 32), 10)
    for name in ("test_resnet", "test_efficientnet"):  # BatchNorm2d, and timm's BatchNormAct2d
        built = model.build_model(Config(model=f"timm/{name}"), (3, 32, 32), 10)
        norms = [m for m in built.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert norms and all(isinstance(m, (SyncBatchNorm, BatchNormActSync)) for m in norms)


def test_a_model_whose_batch_norms_cannot_be_synchronised(monkeypatch):
    timm, norm = import_or_skip("timm"), type("Own", (nn.BatchNorm2d,), {"forward": lambda self, x: x})
    monkeypatch.setattr(timm, "create_model", lambda name, **options: nn.Sequential(norm(3)))
    with pytest.raises(ConfigError, match=r"--norm fastvit-sync: .* Own \(1\), which overr.* --norm torch"):
        model.build_model(Config(model="timm/test_resnet"), (3, 32, 32), 10)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_timm_models_train(name, tmp_path, capsys):
    import_or_skip("timm")
    start = f"--model timm/{name} --data synthetic --image-size 32 --synthetic-images 128 --batch-size 32"
    states = []
    for memory in ("off", "convert", "matmuls"):
        out = tmp_path / memory
        assert run_here(*start.split(), "--epochs", "1", "--memory", memory, "--out", str(out)) == 0
        states.append(state_of(out))
        assert states[-1]["history"][0]["train_loss"] == states[0]["history"][0]["train_loss"]
        assert list(states[-1]["model"]) == list(states[0]["model"])
    assert "less (measured)" in capsys.readouterr().out
