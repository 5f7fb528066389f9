"""`--memory`: the converted layers, and bitwise resume."""

import pytest
import torch
from packages import package
from training_runs import TINY, assert_equal_runs, state_of, train_on_rank, weights_of

from fastvit.memory import live_bytes
from fastvit.training import model, run, train_state
from fastvit.training.command_line import parse
from fastvit.training.config import Config, ConfigError
from fastvit.training.distributed import Ranks

SHAPE = (1, 8, 8)
ALONE = Ranks(0, 1, torch.device("cpu"))


def make(config, saved=None, shape=SHAPE):
    torch.manual_seed(0)
    return train_state.make_train_state(model.build_model(config, shape, 10), config, ALONE, shape, 10, saved)


def losses(made, steps=4):
    """The losses of some steps of training, with the same images in all of them."""
    random = torch.Generator().manual_seed(3)
    images = torch.randn(steps, 16, *SHAPE, generator=random)
    labels = torch.randint(0, 10, (steps, 16), generator=random)
    given = []
    for batch, target in zip(images, labels, strict=True):
        with made.precision.forward():
            logits = made.parallel(batch)
        loss = torch.nn.functional.cross_entropy(logits.float(), target)
        made.precision.backward(loss, made.optimizer, True)
        made.optimizer.step()
        made.optimizer.zero_grad()
        given.append(loss.item())
    return given


@pytest.mark.parametrize(
    ("norm", "memories"),
    [("torch", ("convert", "products", "budget=0.8")), ("inplace-abn-sync", ("products",))],
)
def test_memory_changes_no_loss(norm, memories):
    expected = losses(make(Config(norm=norm)))
    for memory in memories:
        made = make(Config(norm=norm, memory=memory))
        assert list(made.model.state_dict()) == list(make(Config(norm=norm)).model.state_dict())
        assert losses(made) == expected, memory


def test_memory_of_a_training_step_is_what_the_report_says():
    images, used = torch.randn(32, *SHAPE), {}
    for memory in ("off", "convert", "products"):
        made = make(Config(norm="torch", memory=memory))
        made.model(images)
        used[memory] = live_bytes(lambda made=made: made.model(images))[0], made.memory
    whole = used["off"][0]
    for memory in ("convert", "products"):
        kept, saved = used[memory]
        assert abs(whole - kept - saved.saved_bytes) < 2**17, memory
    assert used["products"][1].saved_bytes > used["convert"][1].saved_bytes > 0.35 * whole


@pytest.mark.parametrize("amp", ["bf16", "O2"])
@pytest.mark.filterwarnings("ignore:amp. on the CPU half precision")
def test_every_precision_runs_the_converted_model(amp):
    images, kept, given = torch.randn(32, *SHAPE), [], []
    for memory in ("off", "convert"):  # one after the other: amp serves one model at a time
        made = make(Config(norm="torch", memory=memory, amp=amp))
        with made.precision.forward():
            made.model(images)
            kept.append(live_bytes(lambda made=made: made.model(images))[0])
        given.append(losses(made))
    assert kept[0] - kept[1] > 0.8 * made.memory.saved_bytes
    assert given[1] == given[0]


def test_a_checkpoint_of_an_older_version_has_more_state():
    first = make(Config(memory="convert"))
    state = first.state_dict() | {"epoch": 1, "step": 0}
    state["memory"] = {"stem.layers.1.norm.weight": torch.zeros(32)}
    assert make(Config(memory="convert"), state).memory is not None


def test_average_and_checkpoints_go_with_and_without():
    made, plain = make(Config(norm="torch", memory="convert", ema=0.9)), make(Config(norm="torch", ema=0.9))
    losses(made)
    made.average.update_parameters(made.model)
    saved = made.state_dict()
    for key in ("model", "average"):
        getattr(plain, key).load_state_dict(saved[key])
    made.model.load_state_dict(plain.model.state_dict())
    images = torch.randn(4, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(made.average.module.eval()(images), plain.average.module.eval()(images))
        torch.testing.assert_close(made.model.eval()(images), plain.model.eval()(images))


def test_compiled_models_are_not_converted():
    with pytest.raises(ConfigError, match="--memory is for models that are not compiled, got --memory conv"):
        Config(memory="convert", compile=True)


def test_memory_takes_a_budget():
    images, kept = torch.randn(32, *SHAPE), {}
    for memory in ("off", "budget=0.7", "budget=4MiB"):
        made = make(Config(norm="torch", memory=memory))
        made.model(images)
        kept[memory], _ = live_bytes(lambda made=made: made.model(images))
    assert kept["budget=0.7"] < 0.72 * kept["off"]
    assert made.memory.kept_after < 1.01 * 4 * 2**20 < 0.5 * made.memory.kept_before
    assert "the budget is met without it" in str(made.memory)
    with pytest.raises(ConfigError, match=r"--memory budget=9KB: .* cannot be met; the least is \d+ bytes"):
        make(Config(norm="torch", memory="budget=9KB"))


@pytest.mark.parametrize(
    "memory", ["budget", "budget=", "budget=half", "budget=1.5", "budget=-0.5", "budget=nan", "budget=2 G"]
)
def test_a_budget_that_is_none(memory):
    with pytest.raises(ConfigError, match=f"--memory {memory}: budget must be a share above 0 and at most 1"):
        Config(memory=memory)
    with pytest.raises(ConfigError, match="--memory must be one of off, convert, products, or budget=<sha"):
        Config(memory="less")


def test_the_norm_of_timm_models():
    assert Config(model="timm/resnet18").norm == "fastvit-sync" and Config().norm == "inplace-abn-sync"
    package("timm")
    config = Config(model="timm/test_resnet", norm="inplace-abn-sync")
    with pytest.raises(
        ConfigError, match="--norm inplace-abn-sync is built into .* and --memory convert to sa"
    ):
        model.build_model(config, (3, 32, 32), 10)


def test_resume_on_two_ranks_is_bitwise(ranks, tmp_path):
    start = [*TINY, *"--epochs 2 --warmup-epochs 1 --memory convert --ema 0.9 --norm torch".split()]
    ranks.run(2, train_on_rank, [*start, "--out", str(tmp_path / "whole")])
    ranks.run(2, train_on_rank, [*start, "--out", str(tmp_path / "parts"), "--stop-after", "1"])
    ranks.run(2, train_on_rank, ["--resume", str(tmp_path / "parts")])
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    whole, parts = (weights_of(tmp_path / name, "average") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    report = (tmp_path / "parts" / "memory.txt").read_text()
    assert report.startswith(
        "--memory convert, a batch of 16 images on one rank\n\na training forward keeps "
    )
    assert "stem.layers.*" in report and "less kept for backward (measured)" in report


def _in_process(arguments, monkeypatch, directory):
    monkeypatch.chdir(directory)
    config, given = parse([*arguments, "--device", "cpu", "--threads", "1"])
    run.train(config, given, ALONE)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_timm_models_train(name, tmp_path, monkeypatch, capsys):
    package("timm")
    threads = torch.get_num_threads()
    start = [
        "--model", f"timm/{name}", "--data", "synthetic", "--image-size", "32", "--synthetic-images", "128",
        "--epochs", "1", "--batch-size", "32",
    ]  # fmt: skip
    rows = {}
    try:
        for memory in ("off", "convert", "products"):
            _in_process([*start, "--memory", memory, "--out", memory], monkeypatch, tmp_path)
            rows[memory] = state_of(tmp_path / memory)["history"][-1]["train_loss"]
    finally:
        torch.set_num_threads(threads)
    assert rows["convert"] == rows["products"] == rows["off"]
    assert list(weights_of(tmp_path / "convert")) == list(weights_of(tmp_path / "off"))
    assert "less kept for backward" in capsys.readouterr().out
