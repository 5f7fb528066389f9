"""Ranks that die, differ, skip, are late or are forked: an error on every living rank, and no buffer changes.

Over gloo's collectives and over shared memory. Each wait is bounded by a short timeout of the group.
"""

import contextlib
import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from on_ranks import EACH_BACKEND, on_ranks

import fastvit
from sync.layer_steps import catch_error, check_group_has_failed, check_steps, make_layers, make_leaf

nightly = pytest.mark.nightly


@on_ranks(statistics=EACH_BACKEND, group_timeout=15, breaks=True)
@pytest.mark.parametrize(
    ("place", "world"),
    [
        pytest.param("backward", 3, id="backward"),
        pytest.param("forward", 2, id="forward", marks=nightly),
        pytest.param("between", 4, id="between", marks=nightly),
        pytest.param("agreeing", 3, id="agreeing", marks=nightly),
    ],
)
def test_survivors_raise_soon_after_a_rank_is_killed(rank, world, place):
    torch.manual_seed(rank)
    first, second = make_layers(2)
    check_steps([first] if place == "agreeing" else [first, second])
    y = first(make_leaf())
    if place == "backward":
        z = second(y)
        if rank == 1:
            y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # between two exchanges
        return catch_error(lambda: z.square().sum().backward(), first, second)
    if place == "between":
        second(y).square().sum().backward()
    if rank == 1:
        time.sleep(0.3)  # so that the others are waiting
        os.kill(os.getpid(), signal.SIGKILL)
    return catch_error(lambda: second(y), first, second)


@test_survivors_raise_soon_after_a_rank_is_killed.check
def _(results, place, statistics):
    assert results.pop(1) is None
    first_call = "first call of layer 1 (sync_batch_norm, 6 channels): rank 1 has ended (process"
    expected = {"between": " in forward of layer ", "agreeing": first_call}
    for error in results:
        assert error.seconds < 5, error  # well before the timeout
        assert expected.get(place, f" in {place} of layer ") in error.message
        assert statistics == "collective" or "rank 1 has ended" in error.message


@on_ranks(2, group_timeout=2, breaks=True)
def test_a_rank_that_is_killed_before_the_first_call_is_named(rank, world):
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    error = catch_error(lambda: fastvit.SyncBatchNorm(6)(make_leaf()))
    assert "rank 1 did not answer within 2 s" in error.message and error.seconds < 6


@on_ranks(2, statistics=EACH_BACKEND)
@pytest.mark.parametrize(
    ("channels", "directions"),
    [
        (6, ("forward", "forward")),
        (40, ("forward", "forward")),
        (40, ("backward", "backward")),
        (6, ("forward", "backward")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_skipped_layer_is_an_error_on_both_ranks(rank, world, channels, directions):
    """Rank 0 is in the layer of `channels`, which rank 1 skips."""
    torch.manual_seed(rank)
    layers = a, b, c = [fastvit.SyncBatchNorm(n) for n in (6, channels, 6)]
    x = make_leaf(), make_leaf(channels), make_leaf()
    for layer, leaf in zip(layers, x, strict=True):
        layer(leaf).sum().backward()
    y = [a(x[0])]
    if "forward" not in directions:
        y.append(b(x[1]))
    if directions[rank] == "forward":
        error = catch_error((lambda: b(x[1])) if rank == 0 else (lambda: c(x[2])), *layers)
    else:
        error = catch_error(y[1 - rank].sum().backward)
    check_group_has_failed([a, c])

    layer_of_rank_1 = 2 if directions[1] == "forward" else 0
    names = f"1 (sync_batch_norm, {channels} channels)", f"{layer_of_rank_1} (sync_batch_norm, 6 channels)"
    texts = [f"{directions[r]} of layer {names[r]}, step" for r in range(2)]
    assert f"rank {rank} is in {texts[rank]}" in error.message and error.seconds < 5
    assert f"rank {1 - rank} in {texts[1 - rank]}" in error.message


class FailOnce(torch.autograd.Function):
    """The identity; its first backward raises on rank 1."""

    has_failed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if dist.get_rank() == 1 and not FailOnce.has_failed:
            FailOnce.has_failed = True
            raise ValueError("an error of the model")
        return dy


@on_ranks(2)
@pytest.mark.parametrize(("place", "statistics"), [(0, "peer"), (1, "peer"), (2, "peer"), (0, "collective")])
def test_a_repeated_step_is_refused_until_a_new_group_is_made(rank, world, place, statistics):
    """Different tries of a step are never mixed, at any place of the error in the backward."""
    a, b = layers = make_layers(2)
    check_steps(layers)
    modules = [a, b]
    modules.insert(place, FailOnce.apply)
    FailOnce.has_failed, outcomes = False, []
    for _ in range(4):
        y = make_leaf()
        try:
            for module in modules:
                y = module(y)
            y.sum().backward()
            outcomes.append("done")
        except (RuntimeError, ValueError) as error:
            outcomes.append(str(error))
    group = dist.new_group([0, 1])
    a.set_process_group(group), b.set_process_group(group)
    check_steps(layers)
    return outcomes


@test_a_repeated_step_is_refused_until_a_new_group_is_made.check
def _(results, place):
    first, second = results
    assert second.pop(0) == "an error of the model"
    if place == 0:
        assert first.pop(0) == "done"  # it had what it needed
    for rank, outcomes in enumerate((first, second)):
        assert f"rank {rank} is in " in outcomes[0] and "repeat a step after an error" in outcomes[0]
        assert all("an exchange of this group has failed (" in text for text in outcomes[1:]), outcomes


DIFFERENCES = {  # layer's channels and options, by rank
    "channels": [(6, {}), (7, {})],
    "dtype": [(6, {}), (6, {"dtype": torch.float64})],
    "momentum": [(6, {}), (6, {"momentum": None})],
    "order": [(6, {}), (6, {})],
    "arenas": [(6, {}), (4096, {})],  # 4096 need larger arenas than the first ones
    "arenas of rank 0": [(4096, {}), (6, {})],
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("difference", "statistics"),
    [
        ("channels", "collective"),
        ("dtype", "peer"),
        ("momentum", "collective"),
        ("order", "peer"),
        *((difference, backend) for difference in ("arenas", "arenas of rank 0") for backend in EACH_BACKEND),
    ],
)
def test_layers_that_differ_are_described_by_rank(rank, world, difference, statistics):
    is_first_call = difference.startswith("arenas")  # the very first call of the group
    layers = [] if is_first_call else make_layers(1)
    check_steps(layers)
    channels, options = DIFFERENCES[difference][rank]
    layer_class = fastvit.InPlaceABNSync if difference == "order" and rank else fastvit.SyncBatchNorm
    layer = layer_class(channels, **options)
    x = make_leaf(channels, options.get("dtype", torch.float32)).detach()
    message, seconds = catch_error(lambda: layer(x), layer)
    check_steps(layers or make_layers(2))

    assert f"the ranks of group 0 differ in their layer {len(layers)}: " in message and seconds < 5
    for peer, (channels, options) in enumerate(DIFFERENCES[difference]):
        op = "inplace_abn" if difference == "order" and peer else "sync_batch_norm"
        momentum = "cumulative" if "momentum" in options else "0.1"
        expected = f"{op}, {channels} channels, {options.get('dtype', torch.float32)}, momentum {momentum}"
        assert f"rank {peer}: {expected}" in message


@on_ranks(2)
@pytest.mark.parametrize(
    ("is_used_before", "statistics"),
    [(False, "auto"), (True, "collective"), (True, "peer")],
    ids=["first call", "later call-collective", "later call-peer"],
)
def test_ranks_in_different_groups_give_up_in_time(rank, world, is_used_before, statistics):
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2)) for _ in range(2)]
    layers = [fastvit.SyncBatchNorm(6, process_group=group) for group in groups]
    if is_used_before:
        check_steps(layers)
    message, seconds = catch_error(lambda: layers[rank](make_leaf()), *layers)
    check_steps(make_layers(1))  # the default group is untouched
    assert 1 < seconds < 6
    assert is_used_before or "did not answer within 2 s" in message


@on_ranks(2, group_timeout=1.5, statistics="peer")
def test_a_late_rank_is_told_that_the_exchange_was_abandoned(rank, world):
    (layer,) = make_layers(1)
    check_steps([layer])
    if rank == 1:
        time.sleep(2)
    message, seconds = catch_error(lambda: layer(make_leaf()), layer)
    check_group_has_failed([layer])
    if rank == 0:
        exchange = "rank 0 in forward of layer 0 (sync_batch_norm, 6 channels), step 2 of group 0"
        assert f"{exchange}: nothing from rank 1" in message
        assert "within 1.5 s" in message and 1.4 < seconds < 4
    else:
        assert "rank 0 abandoned the exchange after an error of its own" in message and seconds < 1


@on_ranks(2, statistics=EACH_BACKEND, breaks=True, group_timeout=3)
def test_ctrl_c_ends_a_wait(rank, world):
    (layer,) = make_layers(1)
    check_steps([layer])
    if rank == 1:
        time.sleep(1.5)  # there, but not in the layer
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        layer(make_leaf())
    assert time.monotonic() - begin < 2


@on_ranks(2, statistics=EACH_BACKEND)
def test_layers_work_after_a_group_is_destroyed_and_made_anew(rank, world, tmp_path):
    layer, group = make_layers(1)[0], dist.new_group([0, 1])
    other = fastvit.SyncBatchNorm(6, process_group=group)
    check_steps([layer, other])
    dist.destroy_process_group()
    assert "process_group was destroyed" in catch_error(lambda: other(make_leaf()), other).message
    layer(make_leaf())  # this process alone, as the default group is none
    for attempt in range(2):  # over one store: what the group before left there must not matter
        dist.init_process_group("gloo", f"file://{tmp_path}/anew{attempt}", rank=rank, world_size=world)
        check_steps([layer])
        if attempt == 0:
            dist.barrier()
            dist.destroy_process_group()


@on_ranks(2, statistics=EACH_BACKEND)
def test_a_forked_process_may_not_take_part(rank, world):
    (layer,) = make_layers(1)
    check_steps([layer])
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(writing_end, catch_error(lambda: layer(make_leaf()), layer).message.encode())
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as file:
        message = file.read()
    os.waitpid(child, 0)
    check_steps([layer])
    assert "was forked from process" in message and "which is a rank of group" in message
