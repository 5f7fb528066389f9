"""`--memory`: training keeps less, and no loss changes."""

import functools

import pytest
import torch
from packages import import_or_skip

from fastvit.memory import live_bytes
from fastvit.training import loop, model, train_state
from fastvit.training.config import Config, ConfigError
from training.runs import run_here, state_of

SHAPE = (1, 8, 8)
CPU = torch.device("cpu")
nightly = pytest.mark.nightly


def make_train_state(config):
    torch.manual_seed(0)
    built = model.build_model(config, SHAPE, 10)
    return train_state.TrainState(built, config, CPU, SHAPE, 10, None)


def train_losses(state, steps=2):
    """Returns the losses of some steps of training."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(steps, 16, *SHAPE, generator=generator)
    labels = torch.randint(0, 10, (steps, 16), generator=generator)
    feed, losses = loop.BatchFeed(zip(images, labels, strict=True), (16, *SHAPE)), []
    for _ in range(steps):
        losses.append(loop._accumulate_gradients(state, feed, 1).item())
        loop._optimizer_step(state)
    return losses


def measure_kept_bytes(state, images):
    return live_bytes(lambda: state.model(images))[0]


@pytest.mark.parametrize(
    ("amp", "norm", "memory"),
    [
        pytest.param("off", "torch", "budget=0.8", id="budget"),
        pytest.param("bf16", "torch", "convert", id="bf16"),
        pytest.param("off", "torch", "matmuls", id="matmuls", marks=nightly),
        pytest.param("off", "inplace-abn-sync", "matmuls", id="in place", marks=nightly),
        pytest.param("O2", "torch", "convert", id="O2", marks=nightly),
    ],
)
@pytest.mark.filterwarnings("ignore:amp. on the CPU half precision")
def test_less_is_kept_and_no_loss_changes(amp, norm, memory):
    images, kept, losses, names = torch.randn(32, *SHAPE), [], [], []
    for option in ("off", memory):  # One after the other, since amp serves one model at a time.
        state = make_train_state(Config(norm=norm, memory=option, amp=amp))
        with state.autocast():
            state.model(images)
            kept.append(measure_kept_bytes(state, images))
        losses.append(train_losses(state))
        names.append(list(state.model.state_dict()))
    assert kept[0] - kept[1] > 0.8 * state.memory_report.freed_bytes > 0
    assert losses[1] == losses[0] and names[1] == names[0]


@nightly
def test_a_compiled_model_keeps_less_too(monkeypatch):
    """The backend compiles no code, since compiling takes half a minute."""
    compiled = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    images, kept, losses = torch.randn(16, *SHAPE), [], []
    for memory in ("off", "convert"):
        torch._dynamo.reset()
        state = make_train_state(Config(norm="torch", memory=memory, compile=True))
        losses.append(train_losses(state))
        kept.append(measure_kept_bytes(state, images))
    assert losses[0] == losses[1] and kept[1] < 0.75 * kept[0]


def test_a_budget_that_cannot_be_met_is_an_error_of_the_option():
    message = r"--memory budget=9KB: .* cannot be met; the least peak of a step is \d+ bytes"
    with pytest.raises(ConfigError, match=message):
        make_train_state(Config(norm="torch", memory="budget=9KB"))


@pytest.mark.packages("timm")
@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_models_of_timm_train_with_the_same_losses(name, tmp_path, capsys):
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
