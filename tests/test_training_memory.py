"""`--memory`: the converted layers, and bitwise resume."""

import copy

import pytest
import torch
from packages import package
from training_runs import assert_equal_runs, state_of, train_on_rank, weights_of

from fastvit.memory import live_bytes
from fastvit.models import NORMS, create_vit
from fastvit.training import model, run, train_state
from fastvit.training.command_line import parse
from fastvit.training.config import Config, ConfigError
from fastvit.training.distributed import Ranks

SHAPE = (1, 8, 8)
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), None)


def make(config, saved=None, shape=SHAPE):
    torch.manual_seed(0)
    return train_state.make_train_state(model.build_model(config, shape, 10), config, ALONE, shape, 10, saved)


def modes(made):
    return {layer.name: layer.mode for layer in made.memory.report}


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


@pytest.mark.parametrize("norm", [*NORMS[:1], *NORMS[2:]])
def test_memory_changes_no_loss(norm):
    expected, given = losses(make(Config(norm=norm))), {}
    for memory in ("keep", "recompute", "auto", "inplace"):
        made = make(Config(norm=norm, memory=memory))
        assert list(made.model.state_dict()) == list(make(Config(norm=norm)).model.state_dict())
        assert (set(modes(made).values()) == {"left"}) == norm.startswith("inplace-abn")
        given[memory] = losses(made)
        assert given[memory] == pytest.approx(expected, rel=2e-5)
    assert given["recompute"] == given["keep"]
    if norm == "fastvit-sync" or norm.startswith("inplace-abn"):
        assert given["recompute"] == expected  # the same kernels, or the same layers


def test_memory_of_a_training_step_is_what_the_report_says(capsys):
    images, used = torch.randn(32, *SHAPE), {}
    for memory in ("off", "auto", "recompute", "keep"):
        made = make(Config(norm="torch", memory=memory))
        made.model(images)
        used[memory] = live_bytes(lambda made=made: made.model(images))[0], made.memory
    whole = used["off"][0]
    for memory in ("auto", "recompute", "keep"):
        kept, saved = used[memory]
        assert abs(whole - kept - saved.report.saved_bytes) < 2**16, memory
    assert used["auto"][1].report.saved_bytes > 0.25 * whole


@pytest.mark.parametrize("amp", ["bf16", "O1", "O2", "O3"])
@pytest.mark.filterwarnings("ignore:amp. on the CPU half precision")
def test_every_precision_runs_the_converted_layers(amp):
    images, kept, given = torch.randn(32, *SHAPE), [], []
    for memory in ("off", "auto"):  # one after the other: amp serves one model at a time
        made = make(Config(norm="torch", memory=memory, amp=amp))
        with made.precision.forward():
            made.model(images)
            kept.append(live_bytes(lambda made=made: made.model(images))[0])
        given.append(losses(made))
    assert kept[0] - kept[1] > 0.8 * made.memory.report.saved_bytes
    assert given[1] == pytest.approx(given[0], rel=0.03)


def test_a_resumed_run_chooses_as_it_did_whatever_the_weights_became():
    config = Config(norm="torch", memory="auto")
    first = make(config)
    with torch.no_grad():
        first.model.stem.layers[1].norm.weight.zero_()  # after training, too small for in place
    saved = first.weights(), first.state_dict()
    resumed = make(config, saved)
    assert modes(resumed) == modes(first) and modes(first)["stem.layers.1.norm"] == "inplace"
    assert torch.equal(resumed.model.stem.layers[1].norm.weight, torch.zeros(32))
    state = saved[1] | {"memory": copy.deepcopy(saved[1]["memory"])}
    state["memory"]["stem.layers.1.norm.weight"].zero_()  # pretrained weights that the run began with
    assert modes(make(config, (saved[0], state)))["stem.layers.1.norm"] == "recompute"


def test_average_and_checkpoints_go_with_and_without():
    made, plain = make(Config(norm="torch", memory="auto", ema=0.9)), make(Config(norm="torch", ema=0.9))
    losses(made)
    made.average.update_parameters(made.model)
    saved = made.weights()
    for key, net in (("model", plain.model), ("average", plain.average.module)):
        net.load_state_dict(saved[key])
    made.model.load_state_dict(plain.model.state_dict())
    images = torch.randn(4, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(made.average.module.eval()(images), plain.average.module.eval()(images))
        torch.testing.assert_close(made.model.eval()(images), plain.model.eval()(images))


def test_compiled_models_are_left_alone(capsys):
    made = make(Config(norm="torch", memory="auto", compile=True))
    assert made.memory is None and type(made.model) is type(create_vit("vit_digits", 8, 1, 10, "torch"))
    run._report_memory(made, None)
    assert capsys.readouterr().out.count("--memory auto has no effect with --compile") == 1


def test_memory_takes_a_budget(tmp_path):
    images, kept = torch.randn(32, *SHAPE), {}
    for memory in ("off", "budget=0.7"):
        made = make(Config(norm="torch", memory=memory))
        made.model(images)
        kept[memory], _ = live_bytes(lambda made=made: made.model(images))
    assert kept["budget=0.7"] < 0.72 * kept["off"]
    made.memory.write(tmp_path, Config(norm="torch", memory=memory))
    assert "a budget of 70% takes " in (tmp_path / "memory.txt").read_text()


@pytest.mark.parametrize(
    "memory", ["budget", "budget=", "budget=half", "budget=1", "budget=-0.5", "budget=nan"]
)
def test_a_budget_that_is_none(memory):
    with pytest.raises(
        ConfigError, match="--memory must be budget=<share> with one above 0 and below 1, got"
    ):
        Config(memory=memory)
    with pytest.raises(
        ConfigError, match="--memory must be one of off, auto, .*, or budget=<share>, got 'less'"
    ):
        Config(memory="less")


def test_the_norm_of_timm_models():
    assert Config(model="timm/resnet18").norm == "fastvit-sync" and Config().norm == "inplace-abn-sync"
    package("timm")
    config = Config(model="timm/test_resnet", norm="inplace-abn-sync")
    with pytest.raises(ConfigError, match="--norm inplace-abn-sync is built into .* and --memory auto to sa"):
        model.build_model(config, (3, 32, 32), 10)


START = ["--epochs", "2", "--batch-size", "180", "--warmup-epochs", "1", "--memory", "auto", "--ema", "0.9"]


@pytest.mark.parametrize("norm", ["torch", "fastvit-sync"])
def test_resume_on_two_ranks_is_bitwise(ranks, tmp_path, norm):
    start = [*START, "--norm", norm]
    ranks.run(2, train_on_rank, [*start, "--out", str(tmp_path / "whole")])
    ranks.run(2, train_on_rank, [*start, "--out", str(tmp_path / "parts"), "--stop-after", "1"])
    ranks.run(2, train_on_rank, ["--resume", str(tmp_path / "parts")])
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    whole, parts = (weights_of(tmp_path / name, file="average") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    report = (tmp_path / "parts" / "memory.txt").read_text()
    assert report.startswith("--memory auto, a batch of 180 images on one rank\n\na training forward keeps ")
    assert "stem.layers.1.norm" in report and "less kept for backward (measured)" in report


def test_resumed_runs_go_on_from_the_weights_that_they_were_given(tmp_path, monkeypatch, capsys):
    """In the file one layer is too small for in place; the file is gone when the run is resumed."""
    net = create_vit("vit_digits", 8, 1, 10, "torch")
    net.stem.layers[3].norm.weight.data.fill_(1e-6)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    start = [*START, "--norm", "torch", "--pretrained", str(tmp_path / "weights.pt")]
    threads = torch.get_num_threads()
    try:
        for arguments in (["--out", "whole"], ["--out", "parts", "--stop-after", "1"]):
            _in_process([*start, *arguments], monkeypatch, tmp_path)
        (tmp_path / "weights.pt").unlink()
        capsys.readouterr()
        _in_process(["--resume", "parts"], monkeypatch, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert "BatchNorm layers: 2 inplace, 5 recompute)" in capsys.readouterr().out
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    assert state_of(tmp_path / "parts")["memory"]["stem.layers.3.norm.weight"].max() < 1e-5


def _in_process(arguments, monkeypatch, directory):
    monkeypatch.chdir(directory)
    config, given, _ = parse([*arguments, "--device", "cpu", "--threads", "1"])
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
        for memory in ("off", "auto", "recompute", "keep"):
            _in_process([*start, "--memory", memory, "--out", memory], monkeypatch, tmp_path)
            rows[memory] = state_of(tmp_path / memory)["history"][-1]["train_loss"]
    finally:
        torch.set_num_threads(threads)
    assert rows["auto"] == pytest.approx(rows["off"], rel=1e-3)
    assert rows["recompute"] == rows["keep"]
    assert list(weights_of(tmp_path / "auto")) == list(weights_of(tmp_path / "off"))
    assert "less kept for backward" in capsys.readouterr().out
