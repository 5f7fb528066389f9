"""The parts of the trainer: messages between ranks, steps, models."""

import argparse
import copy
import itertools
import math
import os
import re
import signal
import threading
import time

import pytest
import torch
from packages import import_or_skip
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fastvit
from fastvit.models import vit_digits
from fastvit.training import distributed, loop, model, pretrained, train_state
from fastvit.training.config import Config, ConfigError, TrainingError
from training.runs import train_on_rank, weights_of


def _conversation(rank, world):
    assert (distributed.is_main_process(), distributed.get_world_size()) == (rank == 0, 2)
    value = torch.tensor([1.0 + rank])
    assert distributed.average_over_ranks(value).item() == 1.5 and value.item() == 1.0 + rank
    assert distributed.all_gather_numbers(torch.tensor([value[0], 2 * rank])) == [[1.0, 2.0], [0, 2]]
    assert distributed.all_gather_objects(rank) == [0, 1]

    def fail():
        raise OSError(f"disk of rank {rank} is full")

    assert distributed.run_on_main(lambda: rank) == 0 and distributed.run_on_all_ranks(lambda: rank) == rank
    with pytest.raises(TrainingError, match="^disk of rank 0 is full$"):
        distributed.run_on_main(fail)
    with pytest.raises(TrainingError, match="^rank 1: disk of rank 1 is full$"):
        distributed.run_on_all_ranks(fail if rank else lambda: None)
    distributed.raise_on_all_ranks(None)

    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank)
    distributed.average_running_statistics(norm)
    assert norm.running_mean.tolist() == [0.5] * 3 and norm.running_var.tolist() == [1.0] * 3
    linear = torch.nn.Linear(2, 2).requires_grad_(bool(rank))
    linear.weight.data.fill_(rank)
    distributed.broadcast_weights(linear)
    assert linear.weight.tolist() == [[0.0] * 2] * 2


def test_collectives_of_the_trainer_reach_every_rank(ranks):
    ranks.run(2, _conversation)


def _interrupted(rank, world):
    distributed.all_gather_numbers(torch.ones(1))
    if rank == 1:
        time.sleep(1.5)  # there, but with no loss
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        distributed.all_gather_numbers(torch.ones(1))
    return time.monotonic() - begin


def test_the_wait_for_a_loss_obeys_an_interrupt(ranks):
    assert ranks.run(2, _interrupted, breaks=True, group_timeout=3)[0] < 1.2


def _cores(rank, world, of_rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: of_rank[rank])
        return distributed.cores_per_rank()


def test_ranks_divide_the_cores_that_they_share_and_no_others(ranks):
    every = set(range(8))
    assert ranks.run(2, _cores, [every, every]) == [4, 4]  # torchrun
    assert ranks.run(2, _cores, [set(range(4)), set(range(4, 8))]) == [4, 4]  # srun: each task has its own
    assert ranks.run(3, _cores, [{0}, {0}, every]) == [1, 1, 8]


def _small_learner(rank, world, config):
    torch.manual_seed(rank)  # the weights must come from rank 0 all the same
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return train_state.TrainState(net, config, torch.device("cpu"), (1, 2, 2), 10, None)


def _batch(rank, part):
    random = torch.Generator().manual_seed(10 * rank + part)
    images = torch.randn(5, 1, 2, 2, generator=random)
    return images, torch.randint(0, 3, (5,), generator=random)


def feed_of(batches):
    return loop.BatchFeed(batches, (5, 1, 2, 2))


def _accumulated_gradients(rank, world, parts):
    small, reduced = _small_learner(rank, world, Config(accumulate=parts)), []

    def hook(_, bucket):
        reduced.append(1)
        return allreduce_hook(None, bucket)

    if world > 1:
        small.ddp_model.register_comm_hook(None, hook)
    feed = feed_of([_batch(rank, part) for part in range(parts)])
    loss = loop._accumulate_gradients(small, feed, parts)
    expected = copy.deepcopy(small.model)
    expected.zero_grad()
    everything = [_batch(r, part) for r in range(world) for part in range(parts)]
    images, labels = (torch.cat([batch[i] for batch in everything]) for i in (0, 1))
    torch.nn.functional.cross_entropy(expected(images), labels).backward()
    for got, wanted in zip(small.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
    return len(reduced), distributed.all_gather_numbers(loss[None])[0], small.model[1].weight.detach()


def test_accumulated_gradients_are_those_of_one_large_batch(ranks):
    results = ranks.run(2, _accumulated_gradients, 3)
    assert [calls for calls, _, _ in results] == [1, 1]  # one exchange for three batches
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])
    _accumulated_gradients(0, 1, 2)


def test_clipping_bounds_the_norm_and_reports_what_it_was():
    small = _small_learner(0, 1, Config(clip_norm=0.01))
    loop._accumulate_gradients(small, feed_of([_batch(0, 0)]), 1)
    before = loop._clip_gradients(small).item()
    after = loop._clip_gradients(small).item()
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-3)


def _poisoned(rank, world, what, poisoned, clip):
    """Trains with a loss or a gradient that is not finite in one step; says why and where it ended."""
    small = _small_learner(rank, world, Config(batch_size=5, clip_norm=clip))
    gradients, progress, bias = [], loop.Progress(), small.model[1].bias
    batches = [_batch(rank, part) for part in range(4)]
    if what == "gradient":
        bias.register_hook(lambda g: gradients.append(1) or (g / 0 if len(gradients) == poisoned else g))
    elif rank == world - 1:
        batches[poisoned - 1][0].fill_(math.nan)
    with pytest.raises(TrainingError) as error:
        loop.train_one_epoch(small, batches, (1, 2, 2), 1, progress, [])
    assert all(parameter.isfinite().all() for parameter in small.model.parameters())
    return str(error.value), progress.step


@pytest.mark.parametrize(
    ("what", "poisoned", "clip", "why"),
    [
        ("loss", 3, 0.0, "the loss is nan on rank {}"),
        ("gradient", 2, 9.0, "the norm of the gradients is (nan|inf)"),
        ("gradient", 4, 0.0, "the norm of the gradients is (nan|inf)"),
    ],
)
def test_what_is_not_finite_ends_the_run_before_the_step(ranks, what, poisoned, clip, why):
    for world in (2, 1):
        for said, steps in ranks.run(world, _poisoned, what, poisoned, clip):
            assert re.match(rf"epoch 1, step {poisoned}: {why.format(world - 1)}; training", said)
            assert steps == poisoned


def test_random_numbers_of_a_step_do_not_depend_on_those_before():
    def drawn(epoch, first=0):
        small, numbers = _small_learner(0, 1, Config(batch_size=5)), []
        small.model.register_forward_hook(lambda *_: numbers.append(torch.rand(()).item()))
        batches = [_batch(0, part) for part in range(4)]
        loop.train_one_epoch(small, batches, (1, 2, 2), epoch, loop.Progress(first), [])
        return numbers

    assert drawn(1)[2:] == drawn(1, first=2) and len({*drawn(1), *drawn(2)}) == 8


def test_the_share_of_the_time_that_is_spent_waiting_for_data(monkeypatch):
    """The clock is a second later at each reading: at the start, around each batch, at the end."""
    monkeypatch.setattr(loop, "time", argparse.Namespace(perf_counter=itertools.count().__next__))
    small, batches = _small_learner(0, 1, Config(batch_size=5)), [_batch(0, part) for part in range(4)]
    measured, _ = loop.train_one_epoch(small, batches, (1, 2, 2), 1, loop.Progress(), [])
    assert measured == {"images_per_second": 4 * 5 / 9, "data_wait": 4 / 9}


def test_an_exchange_that_failed_in_a_backward_says_why(monkeypatch):
    def check():
        raise RuntimeError("rank 1 in backward of layer 0: nothing from rank 0")

    monkeypatch.setattr(loop.sync, "check", check)
    with pytest.raises(RuntimeError, match="nothing from rank 0"):
        _poisoned(0, 1, "gradient", 2, 9.0)


@pytest.mark.parametrize(("scale_lr", "expected"), [(True, 4e-3), (False, 1e-3)])
def test_learning_rate_is_scaled_by_accumulation(scale_lr, expected):
    config = Config(accumulate=4, scale_lr=scale_lr, warmup_epochs=0)
    assert _small_learner(0, 1, config).schedule(0) == pytest.approx(expected)


def test_average_follows_the_float32_weights_with_a_decay_that_grows():
    small, expected = _small_learner(0, 1, Config(amp="O2", ema=0.3)), None
    for n in range(5):
        loop._accumulate_gradients(small, feed_of([_batch(0, n)]), 1)
        loop._optimizer_step(small)
        stepped = [p.detach().clone() for p in small.model.parameters()]
        decay = min(0.3, (1 + n) / (10 + n)) if n else 0  # 0.3 is less from the fourth on
        expected = [p.lerp(mean, decay) for p, mean in zip(stepped, expected or stepped, strict=True)]
    for mean, parameter in zip(expected, small.ema_model.module.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), mean, rtol=1e-6, atol=1e-7)


def _evaluate_seven_images(rank, world, images, labels):
    small, mine = _small_learner(rank, world, Config()), slice(rank, None, world)
    return loop.evaluate(small, torch.nn.Flatten(), [(images[mine].view(-1, 4, 1, 1), labels[mine])])


def test_evaluation_counts_each_image_once(ranks):
    images, labels = torch.randn(7, 4), torch.arange(7) % 4
    loss, accuracy = ranks.run(2, _evaluate_seven_images, images, labels)[0]
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(images, labels).item(), abs=1e-6)
    assert accuracy == (images.argmax(1) == labels).double().mean().item()


def test_schedule_rises_then_falls_to_zero():
    rates = [*map(train_state.make_schedule(0.1, 10, 4), range(11))]
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert rates[10] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw", "fused-adam"])
def test_weight_decay_leaves_vectors_alone(name):
    net = vit_digits("torch")
    optimizer = train_state.make_optimizer(net, name, 0.1, 0.01)
    decayed, free = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert all(parameter.ndim >= 2 for parameter in decayed)
    assert any(parameter is net.position for parameter in free)
    assert len(decayed) + len(free) == len(list(net.parameters()))


# Models and weights


def test_model_follows_the_data():
    small = model.build_model(Config(), (3, 32, 32), 100)
    assert small.head.out_features == 100 and len(small.blocks) == 9
    small = model.build_model(Config(classes=12, norm="inplace-abn"), (1, 8, 8), 10)
    assert small.head.out_features == 12 and type(small.stem.layers[1].norm) is fastvit.InPlaceABN


def test_pretrained_weights_and_their_report(tmp_path):
    from safetensors.torch import save_file

    weights = {name: value.clone() for name, value in _weights().items()}
    weights |= {"head.weight": torch.zeros(7, 64), "extra": torch.zeros(1)}
    del weights["norm.bias"]
    save_file(weights, path := tmp_path / "weights.safetensors")
    net = vit_digits("torch")
    head = net.head.weight.detach().clone()
    report = pretrained.load_pretrained(net, path)
    assert f"pretrained: {len(weights) - 2} of {len(weights)} tensors from {path}" in report
    assert "missing in the file: norm.bias" in report
    assert "unexpected, not in the model: extra" in report
    assert "for another number of classes, not loaded: head.weight" in report
    assert torch.equal(net.head.weight, head) and torch.equal(net.position, weights["position"])


def _weights(seed=1):
    torch.manual_seed(seed)
    return vit_digits("torch").state_dict()


def _under(prefix, weights):
    return {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("prefix", "make"),
    [
        (" (module)", lambda w: _under("module._orig_mod.", w)),
        ("", lambda w: {name.replace(".0.", ".0._checkpoint_wrapped_module."): v for name, v in w.items()}),
        (" (backbone)", lambda w: _under("backbone.", w) | {"head_of_another.weight": torch.zeros(3)}),
        (" (state_dict.model.encoder)", lambda w: {"state_dict": _under("model.encoder.", w), "best": 0.5}),
        (" (model_ema.module)", lambda w: {"model": _weights(2), "model_ema": _under("module.", w)}),
        (" (teacher.backbone)", lambda w: {"student": _weights(2), "teacher": _under("backbone.", w)}),
        (" (model)", lambda w: {"model": w, "args": argparse.Namespace(lr=0.1)}),
        (" (net)", lambda w: {"net": w, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}}),
    ],
)  # fmt: skip
def test_pretrained_weights_as_others_save_them(tmp_path, prefix, make):
    path, net = tmp_path / "weights.pt", vit_digits("torch")
    torch.save(make(weights := _weights()), path)
    report = pretrained.load_pretrained(net, path)
    assert f"{len(weights)} of {len(weights)} tensors from {path}{prefix}" in report
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


class TwoHeads(torch.nn.Module):
    def __init__(self, classes, heads):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head, self.head_dist = heads(4, classes), heads(4, classes)


@pytest.mark.parametrize("heads", [torch.nn.Linear, lambda *sizes: torch.nn.Conv2d(*sizes, 1)])
def test_heads_for_another_number_of_classes(tmp_path, heads):
    path, net, saved = tmp_path / "weights.pt", TwoHeads(3, heads), TwoHeads(5, heads)
    torch.save(saved.state_dict(), path)
    report = pretrained.load_pretrained(net, path)
    names = "head.weight, head.bias, head_dist.weight, head_dist.bias"
    assert f"2 of 6 tensors from {path}" in report and f"not loaded: {names}" in report
    assert torch.equal(net.body.weight, saved.body.weight)
    torch.save(saved.state_dict() | {"body.weight": torch.zeros(7, 4)}, path)  # no layer before a head
    with pytest.raises(ConfigError, match=r"body.weight must have the shape \(4, 4\), got \(7, 4\)"):
        pretrained.load_pretrained(net, path)


def test_pretrained_weights_of_timm(tmp_path):
    timm = import_or_skip("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1}
    saved = timm.create_model("deit_tiny_distilled_patch16_224", **options, num_classes=5)
    torch.save({"model": saved.state_dict()}, tmp_path / "weights.pt")
    net = timm.create_model("deit_tiny_distilled_patch16_224", **options | {"img_size": 64}, num_classes=3)
    report = pretrained.load_pretrained(net, tmp_path / "weights.pt")
    assert "missing" not in report and net.pos_embed.shape[1] == 2 + 8 * 8
    assert "not loaded: head.weight, head.bias, head_dist.weight, head_dist.bias" in report
    assert torch.equal(net.blocks[0].attn.qkv.weight, saved.blocks[0].attn.qkv.weight)


def test_pretrained_files_that_are_not(tmp_path):
    net, path, weights = vit_digits("torch"), tmp_path / "weights.pt", _weights()
    for content, message in (
        ({"a": torch.zeros(1)}, "is a name of the model, such as position.*; the file has a$"),
        ({"epoch": 3, "net": {}}, "is a name of the model, .*; the file has epoch, net$"),
        ({"position": torch.zeros(1, 4, 64)}, r"must have the shape \(1, 16, 64\), got \(1, 4, 64\)"),
        ([1], "is a name of the model, .*; the file has list$"),
        (_under("a.", weights) | _under("b.", weights), r"has the model as a\.\* and as b\.\*; save one"),
        ({"model": loop.Progress()}, "an object of .*Progress, which may run code; save the model's"),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=message):
            pretrained.load_pretrained(net, path)
    (tmp_path / "weights.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="weights.safetensors is damaged"):
        pretrained.load_pretrained(net, tmp_path / "weights.safetensors")
    for name in ("absent.pt", "absent.safetensors"):
        with pytest.raises(ConfigError, match=f"--pretrained: cannot read .*{name}: No such file"):
            pretrained.load_pretrained(net, tmp_path / name)


def test_frozen_layers_keep_their_weights_and_use_batch_statistics(ranks, tmp_path):
    arguments = ["--norm", "fastvit-sync", "--epochs", "1", "--batch-size", "256", "--freeze", "stem.*"]
    ranks.run(2, train_on_rank, [*arguments, "--out", str(tmp_path / "run")])
    trained = weights_of(tmp_path / "run")
    torch.manual_seed(0)
    first = vit_digits("fastvit-sync").state_dict()
    kept = {name for name in first if torch.equal(first[name], trained[name])}
    assert {name for name in first if name.startswith("stem") and "running" not in name} - kept == {
        f"stem.layers.{i}.norm.num_batches_tracked" for i in (1, 3, 5)
    }
    assert not torch.equal(first["stem.layers.1.norm.running_var"], trained["stem.layers.1.norm.running_var"])
    assert not torch.equal(first["head.weight"], trained["head.weight"])
