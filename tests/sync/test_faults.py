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
from on_ranks import EACH_BACKEND

import fastvit


def layers(count, channels=6, **options):
    return [fastvit.SyncBatchNorm(channels, **options) for _ in range(count)]


def leaf(channels=6, dtype=torch.float32):
    return torch.randn(4, channels, 3, dtype=dtype).requires_grad_()


def state(layer):
    tensors = [*layer.parameters(), *layer.buffers()]
    return [tensor.detach().clone() for tensor in tensors]


def error_of(call, *touched):
    """Message and seconds of the RuntimeError of `call`; `touched` layers do not change."""
    before = [state(layer) for layer in touched]
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    seconds = time.monotonic() - begin
    for layer, old in zip(touched, before, strict=True):
        assert all(map(torch.equal, state(layer), old)), "an error left its mark on a layer"
    return str(caught.value), seconds


def works(chosen):
    """A step of every layer, checked against the batches of all ranks."""
    for layer in chosen:
        x, count = leaf(), layer.num_batches_tracked.item()
        y = layer(x)
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x.detach())
        want = torch.nn.functional.batch_norm(torch.cat(everyone), None, None, training=True)
        torch.testing.assert_close(y, want[4 * dist.get_rank() :][:4], rtol=1e-4, atol=1e-5)
        y.square().sum().backward()
        assert x.grad.isfinite().all() and layer.num_batches_tracked == count + 1


def ends(chosen):
    """After an exchange that failed every other one raises at once."""
    for layer in (*chosen, fastvit.SyncBatchNorm(4096)):  # the last would need more memory
        message, seconds = error_of(lambda layer=layer: layer(leaf(layer.num_features)), layer)
        assert "an exchange of this group has failed (" in message and "start them anew" in message
        assert seconds < 1


def killed(rank, world, where):
    torch.manual_seed(rank)
    first, second = layers(2)
    works([first] if where == "agreeing" else [first, second])
    y = first(leaf())
    if where == "backward":
        z = second(y)
        if rank == 1:
            y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # between two exchanges
        return error_of(lambda: z.square().sum().backward(), first, second)
    if where == "between":
        second(y).square().sum().backward()
    if rank == 1:
        time.sleep(0.3)  # so that the others are waiting
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: second(y), first, second)


@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize("where", ["forward", "backward", "between", "agreeing"])
def test_survivors_raise_soon_after_a_rank_is_killed(ranks, where, statistics):
    world = {"forward": 2, "backward": 3, "between": 4, "agreeing": 3}[where]
    results = ranks.run(world, killed, where, statistics=statistics, group_timeout=15, breaks=True)
    assert results.pop(1) is None
    said = {
        "between": " in forward of layer ",
        "agreeing": "first call of layer 1 (sync_batch_norm, 6 channels): rank 1 has ended (process",
    }
    for message, seconds in results:
        assert seconds < 5, message  # well before the timeout
        assert said.get(where, f" in {where} of layer ") in message
        assert statistics == "collective" or "rank 1 has ended" in message


def killed_in_set_up(rank, world):
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: fastvit.SyncBatchNorm(6)(leaf()))


def test_killed_before_the_first_call(ranks):
    (message, seconds), _ = ranks.run(2, killed_in_set_up, group_timeout=2, breaks=True)
    assert "rank 1 did not answer within 2 s" in message and seconds < 6


def skips(rank, world, channels, directions):
    torch.manual_seed(rank)
    a, b, c = (fastvit.SyncBatchNorm(n) for n in (6, channels, 6))
    x = leaf(), leaf(channels), leaf()
    for layer, one in zip((a, b, c), x, strict=True):
        layer(one).sum().backward()
    y = [a(x[0])]
    if "forward" not in directions:
        y.append(b(x[1]))
    if directions[rank] == "forward":
        message, seconds = error_of((lambda: b(x[1])) if rank == 0 else (lambda: c(x[2])), a, b, c)
    else:
        message, seconds = error_of(y[1 - rank].sum().backward)
    ends([a, c])
    return message, seconds


@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize(
    "channels,directions",
    [
        *((channels, (way, way)) for way in ("forward", "backward") for channels in (6, 40)),
        (6, ("forward", "backward")),  # one rank is in a forward when the other is in its backward
    ],
)
def test_a_rank_skips_a_layer(ranks, directions, channels, statistics):
    results = ranks.run(2, skips, channels, directions, statistics=statistics)
    second = 2 if directions[1] == "forward" else 0
    names = f"layer 1 (sync_batch_norm, {channels} channels)", f"layer {second} (sync_batch_norm, 6 channels)"
    for rank, (message, seconds) in enumerate(results):
        assert f"rank {rank} is in {directions[rank]} of {names[rank]}, step" in message and seconds < 5
        other = 1 - rank
        assert f"rank {other} in {directions[other]} of {names[other]}, step" in message


class Fails(torch.autograd.Function):
    """The identity; its first backward raises on rank 1."""

    failed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if dist.get_rank() == 1 and not Fails.failed:
            Fails.failed = True
            raise ValueError("an error of the model")
        return dy


def begins_anew(rank, world, where):
    """Repeats the step after every error, and then uses a new group."""
    a, b = chosen = layers(2)
    works(chosen)
    parts = [a, b]
    parts.insert(where, Fails.apply)
    Fails.failed, said = False, []
    for _ in range(4):
        y = leaf()
        try:
            for part in parts:
                y = part(y)
            y.sum().backward()
            said.append("done")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    group = dist.new_group([0, 1])
    a.set_process_group(group), b.set_process_group(group)
    works(chosen)
    return said


@pytest.mark.parametrize("where,statistics", [(0, "peer"), (1, "peer"), (2, "peer"), (0, "collective")])
def test_a_rank_begins_anew_after_an_error_of_its_own(ranks, where, statistics):
    """Different tries of a step are never mixed, at any place of the error in the backward."""
    first, second = ranks.run(2, begins_anew, where, statistics=statistics)
    assert second.pop(0) == "an error of the model"
    if where == 0:
        assert first.pop(0) == "done"  # it had what it needed
    for rank, said in enumerate((first, second)):
        assert f"rank {rank} is in " in said[0] and "repeat a step after an error" in said[0]
        assert all("an exchange of this group has failed (" in text for text in said[1:]), said


DIFFERENCES = {  # layer's channels and options, by rank
    "channels": [(6, {}), (7, {})],
    "dtype": [(6, {}), (6, {"dtype": torch.float64})],
    "momentum": [(6, {}), (6, {"momentum": None})],
    "order": [(6, {}), (6, {})],
    "arenas": [(6, {}), (4096, {})],  # 4096 need larger arenas than the first ones
    "arenas of rank 0": [(4096, {}), (6, {})],
}


def differ(rank, world, what):
    first = what.startswith("arenas")  # at the very first call of a group
    good = [] if first else layers(1)
    works(good)
    channels, options = DIFFERENCES[what][rank]
    kind = fastvit.InPlaceABNSync if what == "order" and rank else fastvit.SyncBatchNorm
    layer, x = kind(channels, **options), leaf(channels, options.get("dtype", torch.float32)).detach()
    message, seconds = error_of(lambda: layer(x), layer)
    works(good or layers(2))
    return message, seconds


@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_layers_that_differ(ranks, what, statistics):
    number = 0 if what.startswith("arenas") else 1
    for message, seconds in ranks.run(2, differ, what, statistics=statistics):
        assert f"the ranks of group 0 differ in their layer {number}: " in message and seconds < 5
        for rank, (channels, options) in enumerate(DIFFERENCES[what]):
            op = "inplace_abn" if what == "order" and rank else "sync_batch_norm"
            momentum = "cumulative" if "momentum" in options else "0.1"
            said = f"{op}, {channels} channels, {options.get('dtype', torch.float32)}, momentum {momentum}"
            assert f"rank {rank}: {said}" in message


def other_group(rank, world, used_before):
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2)) for _ in range(2)]
    own = [fastvit.SyncBatchNorm(6, process_group=group) for group in groups]
    if used_before:
        works(own)
    message, seconds = error_of(lambda: own[rank](leaf()), *own)
    works(layers(1))  # the default group is untouched
    return message, seconds


@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize("used_before", [False, True])
def test_ranks_in_different_groups(ranks, used_before, statistics):
    for message, seconds in ranks.run(2, other_group, used_before, statistics=statistics):
        assert 1 < seconds < 6
        assert used_before or "did not answer within 2 s" in message


def late(rank, world):
    (layer,) = layers(1)
    works([layer])
    if rank == 1:
        time.sleep(2)
    message, seconds = error_of(lambda: layer(leaf()), layer)
    ends([layer])
    return message, seconds


def test_a_rank_that_comes_late(ranks):
    first, second = ranks.run(2, late, group_timeout=1.5, statistics="peer")
    assert (
        "rank 0 in forward of layer 0 (sync_batch_norm, 6 channels), step 2 of group 0: nothing from rank 1"
        in first[0]
    )
    assert "within 1.5 s" in first[0] and 1.4 < first[1] < 4
    assert "rank 0 abandoned the exchange after an error of its own" in second[0] and second[1] < 1


def interrupted(rank, world):
    (layer,) = layers(1)
    works([layer])
    if rank == 1:
        time.sleep(1.5)  # there, but not in the layer
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background jobs ignore it
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        layer(leaf())
    return time.monotonic() - begin


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_waits_obey_an_interrupt(ranks, statistics):
    assert ranks.run(2, interrupted, statistics=statistics, breaks=True, group_timeout=3)[0] < 2


def made_anew(rank, world, folder):
    layer, group = layers(1)[0], dist.new_group([0, 1])
    other = fastvit.SyncBatchNorm(6, process_group=group)
    works([layer, other])
    dist.destroy_process_group()
    assert "process_group was destroyed" in error_of(lambda: other(leaf()), other)[0]
    layer(leaf())  # this process alone, as the default group is none
    for attempt in range(2):  # over one store: what the group before left there must not matter
        dist.init_process_group("gloo", f"file://{folder}/anew{attempt}", rank=rank, world_size=world)
        works([layer])
        if attempt == 0:
            dist.barrier()
            dist.destroy_process_group()


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_a_group_destroyed_and_made_anew(ranks, statistics, tmp_path):
    ranks.run(2, made_anew, str(tmp_path), statistics=statistics)


def forked(rank, world):
    (layer,) = layers(1)
    works([layer])
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(theirs, error_of(lambda: layer(leaf()), layer)[0].encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        message = file.read()
    os.waitpid(child, 0)
    works([layer])
    return message


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_forked_after_initialisation(ranks, statistics):
    for message in ranks.run(2, forked, statistics=statistics):
        assert "was forked from process" in message and "which is a rank of group" in message
