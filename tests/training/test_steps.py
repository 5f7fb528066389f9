"""Steps of training: gradients, faults, the schedule, the optimizer, averaged weights and evaluation."""

import argparse
import copy
import itertools
import math
import re

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastvit.models import vit_digits
from fastvit.training import distributed, loop, train_state
from fastvit.training.config import Config, TrainingError


def make_linear_state(config, rank=0):
    """Returns the state of a linear model whose weights differ between ranks until rank 0 sends its own."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return train_state.TrainState(model, config, torch.device("cpu"), (1, 2, 2), 10, None)


def draw_batch(rank, part):
    generator = torch.Generator().manual_seed(10 * rank + part)
    images = torch.randn(5, 1, 2, 2, generator=generator)
    return images, torch.randint(0, 3, (5,), generator=generator)


def make_feed(batches):
    return loop.BatchFeed(batches, (5, 1, 2, 2))


@on_ranks()
@pytest.mark.parametrize(("world", "parts"), [(1, 2), (2, 3)], ids=["1 rank", "2 ranks"])
def test_accumulated_gradients_are_those_of_one_large_batch(rank, world, parts):
    state, exchanges = make_linear_state(Config(accumulate=parts), rank), []

    def count_and_reduce(_, bucket):
        exchanges.append(1)
        return allreduce_hook(None, bucket)

    if world > 1:
        state.ddp_model.register_comm_hook(None, count_and_reduce)
    feed = make_feed([draw_batch(rank, part) for part in range(parts)])
    loss = loop._accumulate_gradients(state, feed, parts)
    expected = copy.deepcopy(state.model)
    expected.zero_grad()
    batches = [draw_batch(other, part) for other in range(world) for part in range(parts)]
    images, labels = map(torch.cat, zip(*batches, strict=True))
    torch.nn.functional.cross_entropy(expected(images), labels).backward()
    for parameter, other in zip(state.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    assert len(exchanges) == (world > 1)  # one exchange for all parts
    return distributed.all_gather_numbers(loss[None])[0], state.model[1].weight.detach()


@test_accumulated_gradients_are_those_of_one_large_batch.check
def _(results):
    for losses, weight in results:
        assert losses == results[0][0] and torch.equal(weight, results[0][1])


def test_clipping_bounds_the_norm_and_reports_what_it_was():
    state = make_linear_state(Config(clip_norm=0.01))
    loop._accumulate_gradients(state, make_feed([draw_batch(0, 0)]), 1)
    before = loop._clip_gradients(state).item()
    after = loop._clip_gradients(state).item()
    assert before > 0.1 and after == pytest.approx(0.01, rel=1e-3)


def fail_by_fault(rank, world, fault, step, clip_norm):
    """Trains with a loss or a gradient that is not finite in one step. Returns the message and the steps."""
    state = make_linear_state(Config(batch_size=5, clip_norm=clip_norm), rank)
    gradients, progress, bias = [], loop.Progress(), state.model[1].bias
    batches = [draw_batch(rank, part) for part in range(4)]
    if fault == "gradient":
        bias.register_hook(lambda g: gradients.append(1) or (g / 0 if len(gradients) == step else g))
    elif rank == world - 1:
        batches[step - 1][0].fill_(math.nan)
    with pytest.raises(TrainingError) as error:
        loop.train_one_epoch(state, batches, (1, 2, 2), 1, progress, [])
    assert all(parameter.isfinite().all() for parameter in state.model.parameters())
    return str(error.value), progress.step


@on_ranks()
@pytest.mark.parametrize(
    ("world", "fault", "step", "clip_norm"),
    [
        pytest.param(1, "loss", 3, 0.0, id="loss, 1 rank"),
        pytest.param(2, "loss", 3, 0.0, id="loss, 2 ranks"),
        pytest.param(1, "gradient", 4, 0.0, id="gradient of the last step, 1 rank"),
        pytest.param(2, "gradient", 2, 9.0, id="clipped gradient, 2 ranks"),
    ],
)
def test_what_is_not_finite_ends_the_run_before_the_step(rank, world, fault, step, clip_norm):
    message, steps = fail_by_fault(rank, world, fault, step, clip_norm)
    finding = "the norm of the gradients is (nan|inf)"
    if fault == "loss":
        finding = f"the loss is nan on rank {world - 1}"
    assert re.match(f"epoch 1, step {step}: {finding}; training", message) and steps == step


def test_an_exchange_that_failed_in_a_backward_says_why(monkeypatch):
    def check():
        raise RuntimeError("rank 1 in backward of layer 0: nothing from rank 0")

    monkeypatch.setattr(loop.sync, "check", check)
    with pytest.raises(RuntimeError, match="nothing from rank 0"):
        fail_by_fault(0, 1, "gradient", 2, 9.0)


def test_random_numbers_of_a_step_do_not_depend_on_those_before():
    def draw_in_epoch(epoch, first_step=0):
        state, numbers = make_linear_state(Config(batch_size=5)), []
        state.model.register_forward_hook(lambda *_: numbers.append(torch.rand(()).item()))
        batches = [draw_batch(0, part) for part in range(4)]
        loop.train_one_epoch(state, batches, (1, 2, 2), epoch, loop.Progress(first_step), [])
        return numbers

    numbers = draw_in_epoch(1)
    assert numbers[2:] == draw_in_epoch(1, first_step=2) and len({*numbers, *draw_in_epoch(2)}) == 8


def test_the_share_of_the_time_that_is_spent_waiting_for_data(monkeypatch):
    """The clock is a second later at each reading: at the start, around each batch, at the end."""
    monkeypatch.setattr(loop, "time", argparse.Namespace(perf_counter=itertools.count().__next__))
    state, batches = make_linear_state(Config(batch_size=5)), [draw_batch(0, part) for part in range(4)]
    speed, _ = loop.train_one_epoch(state, batches, (1, 2, 2), 1, loop.Progress(), [])
    assert speed == {"images_per_second": 4 * 5 / 9, "data_wait": 4 / 9}


def test_the_learning_rate_is_scaled_by_accumulation_unless_it_is_turned_off():
    for scale_lr, expected in ((True, 4e-3), (False, 1e-3)):
        config = Config(accumulate=4, scale_lr=scale_lr, warmup_epochs=0)
        assert make_linear_state(config).schedule(0) == pytest.approx(expected)


def test_the_schedule_rises_then_falls_to_zero():
    rates = [*map(train_state.make_schedule(0.1, 10, 4), range(11))]
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert all(rate > following for rate, following in itertools.pairwise(rates[4:]))
    assert rates[10] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw", "fused-adam"])
def test_weight_decay_leaves_vectors_alone(name):
    model = vit_digits("torch")
    optimizer = train_state.make_optimizer(model, name, 0.1, 0.01)
    decayed, free = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert all(parameter.ndim >= 2 for parameter in decayed)
    assert any(parameter is model.position for parameter in free)
    assert len(decayed) + len(free) == len(list(model.parameters()))


def test_the_average_follows_the_float32_weights_with_a_decay_that_grows():
    state, expected = make_linear_state(Config(amp="O2", ema=0.3)), None
    for step in range(5):
        loop._accumulate_gradients(state, make_feed([draw_batch(0, step)]), 1)
        loop._optimizer_step(state)
        weights = [p.detach().clone() for p in state.model.parameters()]
        decay = min(0.3, (1 + step) / (10 + step)) if step else 0  # The least is 0.3 from the fourth step on.
        expected = [p.lerp(mean, decay) for p, mean in zip(weights, expected or weights, strict=True)]
    for parameter, mean in zip(state.ema_model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), mean, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_evaluation_counts_each_image_once(rank, world):
    images, labels = torch.randn(7, 4), torch.arange(7) % 4
    batch = images[rank::world].view(-1, 4, 1, 1), labels[rank::world]
    loss, accuracy = loop.evaluate(make_linear_state(Config(), rank), torch.nn.Flatten(), [batch])
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(images, labels).item(), abs=1e-6)
    assert accuracy == (images.argmax(1) == labels).double().mean().item()
