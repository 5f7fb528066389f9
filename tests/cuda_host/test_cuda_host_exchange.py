"""Exchanges by the layers' kernels (csrc/cuda/peer.cuh), between logical ranks on GPUs of the model.

Each rank is a device of its own whose launches interleave with the others' as the seed says. Runs with
FASTVIT_TEST_DEVICE=cuda_host only.
"""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from fastvit import SyncBatchNorm, ops, statistics
from fastvit.statistics import device_memory, group
from fastvit.statistics.device_memory import Loopback
from fastvit.statistics.exchange import Tag

if os.environ.get("FASTVIT_TEST_DEVICE") != "cuda_host":
    pytest.skip("needs FASTVIT_TEST_DEVICE=cuda_host", allow_module_level=True)

from cuda_host import redirect

raw = torch.ops.fastvit
MOMENTS, SUMS = range(2)  # csrc/peer.h, Kind
HEADER = 2  # packets
ARENA = raw.exchange_arena_bytes(1, 1) - 2 * (HEADER + 1) * 16
POLLED = 1  # csrc/exchange.h, Arena: pushed, polled, ..., words of 4 bytes


def loopback(world, **options):
    return Loopback(world, timeout=0.5, device="cpu", **options)


@pytest.fixture
def engine():
    engine = redirect.install()
    config = engine.config
    names = ("seed", "sm_count", "deferred")
    before = {name: getattr(config, name) for name in names}
    config.sm_count = 2
    yield engine
    config.deferred = False
    engine.set_device(0)
    for name, value in before.items():
        setattr(config, name, value)


class Rank:
    """What one rank trains: a layer's buffers, and inputs that differ by rank and step."""

    def __init__(self, rank, channels=5, dtype=torch.float32, rows=None):
        self.rank, self.channels, self.dtype = rank, channels, dtype
        self.rows = 3 + rank % 3 if rows is None else rows  # ranks are uneven
        self.weight = torch.linspace(0.5, 1.5, channels)
        self.bias = torch.linspace(-1, 1, channels)
        self.running = [torch.zeros(channels), torch.ones(channels), torch.tensor(0)]
        self.before = [t.clone() for t in self.running]

    def input(self, seed):
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        x = torch.randn(self.rows, self.channels, 4, 5, generator=generator, dtype=torch.float64)
        return (x * 2 + self.rank).to(self.dtype)

    def forward(self, x, moments, exchange=None, z=None):
        """y (over x without a residual) and saved."""
        self.options = {"weight": self.weight, "bias": self.bias, "activation": "leaky_relu"}
        buffers = dict(zip(("running_mean", "running_var", "num_batches_tracked"), self.running, strict=True))
        if z is not None:
            return ops.bn_forward(x, moments, z=z, **self.options, **buffers, exchange=exchange)
        return x, ops.abn_forward_(x, moments, **self.options, **buffers, exchange=exchange)

    def reduce(self, kept, dy, saved, exchange=None, z=None):
        if z is not None:
            return ops.bn_reduce(kept, dy, z, saved, **self.options, exchange=exchange)
        return ops.abn_reduce(kept, dy, saved, **self.options, exchange=exchange)

    def backward(self, kept, dy, saved, sums, exchange=None, z=None):
        if z is not None:
            return ops.bn_backward(kept, dy, z, saved, sums, **self.options, exchange=exchange)
        return (ops.abn_backward(kept, dy, saved, sums, **self.options, exchange=exchange),)


def local_step(ranks, step, residual=False):
    """What the ranks compute when their moments and sums are merged from memory, in rank order."""
    x, dy = [r.input(step) for r in ranks], [r.input(step + 50) for r in ranks]
    z = [r.input(step + 70) if residual else None for r in ranks]
    moments = torch.stack([ops.bn_stats(t) for t in x])
    passed = [r.forward(t.clone(), moments, z=u) for r, t, u in zip(ranks, x, z, strict=True)]
    kept = x if residual else [y for y, _ in passed]
    parts = list(zip(ranks, kept, dy, passed, z, strict=True))
    sums = [r.reduce(k, d, saved, z=u) for r, k, d, (_, saved), u in parts]
    total = torch.stack(sums).double().sum(0).to(sums[0].dtype)
    dx = [r.backward(k, d, saved, total, z=u) for r, k, d, (_, saved), u in parts]
    return [[y, saved, s, *g] for (y, saved), s, g in zip(passed, sums, dx, strict=True)]


def launch_step(member, rank, step, residual=False, tag=None):
    """The same by one rank's four launches."""
    x, dy, z = rank.input(step), rank.input(step + 50), rank.input(step + 70) if residual else None
    exchange = member.exchange(tag or Tag(3, step))
    moments = ops.bn_stats(x, exchange=exchange)
    y, saved = rank.forward(x if residual else x.clone(), moments, exchange, z)
    kept = x if residual else y
    exchange = member.exchange(tag or Tag(3, step))
    sums = rank.reduce(kept, dy, saved, exchange, z)
    gradients = rank.backward(kept, dy, saved, sums, exchange, z)
    return [y, saved, sums, *gradients], [x, dy, z, moments, kept]


def run_steps(engine, members, ranks, steps, residual=False, late=None):
    """All ranks' launches, interleaved; returns results by step and rank."""
    engine.config.deferred = True
    results, alive = [], []
    for step in steps:
        for r, (member, rank) in enumerate(zip(members, ranks, strict=True)):
            engine.set_device(r)
            if r == late:
                busy = torch.randn(9, 60, 3)
                alive += [busy, *(ops.bn_stats(busy) for _ in range(8))]
            result, keep = launch_step(member, rank, step, residual)
            results.append(result)
            alive.append(keep)
    engine.run()
    engine.config.deferred = False
    engine.set_device(0)
    return [results[i : i + len(ranks)] for i in range(0, len(results), len(ranks))]


def assert_same(got, want):
    for mine, wanted in zip(got, want, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert torch.equal(a, b), (a, b)


def check_steps(engine, world, steps=(1, 2, 3), residual=False, loop=None, late=None, **options):
    loop = loop or loopback(world)
    ranks, alone = ([Rank(r, **options) for r in range(world)] for _ in range(2))
    got = run_steps(engine, loop.ranks, ranks, steps, residual, late)
    for step, results in zip(steps, got, strict=True):
        assert_same(results, local_step(alone, step, residual))
    assert_same([r.running for r in ranks], [r.running for r in alone])
    return loop


@pytest.mark.parametrize("world,seeds", [(2, (0, 1, 2, 3)), (4, (1, 2)), (8, (3,))])
@pytest.mark.parametrize("residual", [False, True], ids=["in_place", "residual"])
def test_equals_merged_moments_whatever_the_order(engine, world, seeds, residual):
    for engine.config.seed in seeds:
        check_steps(engine, world, residual=residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(engine, dtype):
    engine.config.seed = 1
    check_steps(engine, 3, dtype=dtype)


def test_a_slice_of_channels_per_block(engine):
    """More channels than one block takes: blocks send and await their own."""
    engine.config.seed = 2
    check_steps(engine, 2, channels=120, rows=1, steps=(1,))


def test_one_rank(engine):
    check_steps(engine, 1)


def test_a_rank_without_values(engine):
    ranks = [Rank(0), Rank(1, rows=0)]
    alone = [Rank(0), Rank(1, rows=0)]
    got = run_steps(engine, loopback(2).ranks, ranks, [1, 2])
    for step, results in zip((1, 2), got, strict=True):
        assert_same(results, local_step(alone, step))
    assert_same([ranks[1].running], [ranks[0].running])


def test_two_kernels_each_way(engine):
    loop, rank = loopback(1), Rank(0)
    before = engine.launches()
    launch_step(loop.ranks[0], rank, 1)
    assert engine.launches() - before == 4


def test_a_late_peer(engine):
    engine.config.seed = 5
    check_steps(engine, 3, late=1)


def test_epochs_wrap(engine):
    loop = loopback(2)
    for arena in loop.arenas:
        arena.view(torch.int32)[POLLED] = -4  # 2^32 - 4
    check_steps(engine, 2, steps=range(1, 5), loop=loop)
    assert {arena.view(torch.int32)[POLLED].item() for arena in loop.arenas} == {
        6
    }  # after -3, -2, -1, 2, 3, ...


def test_channel_counts_that_change(engine):
    """What an earlier, longer message left behind is never taken."""
    loop = loopback(2)
    for channels, steps in ((40, (1, 2)), (3, (3, 4)), (90, (5,))):
        check_steps(engine, 2, steps=steps, loop=loop, channels=channels)


def test_a_captured_launch_goes_with_every_step(engine):
    loop, ranks, alone = loopback(2), [Rank(0), Rank(1)], [Rank(0), Rank(1)]
    engine.config.deferred = True
    kept = []
    for step in (1, 2):  # one rank replays a graph, the other does not
        for r, tag in enumerate((Tag(3, 0), Tag(3, step))):
            engine.set_device(r)
            kept.append(launch_step(loop.ranks[r], ranks[r], step, tag=tag))
    engine.run()
    engine.config.deferred = False
    for step in (1, 2):
        assert_same([k[0] for k in kept[2 * step - 2 : 2 * step]], local_step(alone, step))


def assert_untouched(rank):
    for now, before in zip(rank.running, rank.before, strict=True):
        assert torch.equal(now, before)


def all_nan(*tensors):
    return all(t.isnan().all() for t in tensors)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_dead_peer(engine, seed):
    """Rank 1 never sends: the others end in an error, all of them, and go on when it is back."""
    engine.config.seed = seed
    loop, ranks = loopback(3), [Rank(r) for r in range(3)]
    engine.config.deferred = True
    results = {}
    for r in (0, 2):
        engine.set_device(r)
        results[r] = launch_step(loop.ranks[r], ranks[r], 7)
    engine.run()
    engine.config.deferred = False
    messages = []
    for r in (0, 2):
        y, saved, _, dx = results[r][0]
        assert all_nan(y, saved, dx)
        assert_untouched(ranks[r])
        with pytest.raises(RuntimeError, match=rf"rank {r} in forward of layer 3, step 7: ") as error:
            loop.ranks[r].next_step()
        messages.append(str(error.value))
    assert any("nothing from rank 1 within 0.5 s" in message for message in messages)
    engine.set_device(1)  # it comes late, and is told
    engine.config.deferred = True
    late, keep = launch_step(loop.ranks[1], ranks[1], 7)
    engine.run()
    engine.config.deferred = False
    assert all_nan(late[0]) and keep
    with pytest.raises(RuntimeError, match=r"rank 1 in forward of layer 3, step 7: rank [02] gave up"):
        loop.ranks[1].exchange(Tag(3, 8))
    loop.rejoin()
    check_steps(engine, 3, steps=range(8, 11), loop=loop)


def test_exchanges_after_a_fault_wait_for_nobody(engine):
    loop = loopback(2)
    exchange = loop.ranks[0].exchange(Tag(0, 1))
    numbers = torch.ones(4)
    taken = []
    for _ in range(2):
        raw.exchange_push(exchange, numbers, SUMS)
        before = engine.steps()
        assert all_nan(raw.exchange_poll(exchange, numbers, SUMS, True))
        taken.append(engine.steps() - before)
    assert taken[1] < taken[0] / 10


def packet_offset(loop, receiver, sender, epoch, packet):
    capacity = loop.ranks[0].capacity
    return ARENA + ((sender * 2 + epoch % 2) * (HEADER + capacity) + packet) * 16


@pytest.mark.parametrize("packet", [0, 1, HEADER, HEADER + 2, HEADER + 5])
@pytest.mark.parametrize("half", [0, 8])
def test_a_lost_packet(engine, packet, half):
    """Header, channel or count, or half of one: the rank that misses it keeps nothing; the other is told."""
    loop, ranks = loopback(2), [Rank(0), Rank(1)]
    inputs = [rank.input(1) for rank in ranks]
    handles = [member.exchange(Tag(3, 1)) for member in loop.ranks]
    moments = [ops.bn_stats(x, exchange=e) for x, e in zip(inputs, handles, strict=True)]
    at = packet_offset(loop, 0, 1, 1, packet) + half
    assert (loop.arenas[0][at + 4 : at + 8].view(torch.int32) == 1).all()  # the epoch is where it is thought
    loop.arenas[0][at : at + 8] = 0
    y, saved = ranks[0].forward(inputs[0], moments[0], handles[0])
    assert all_nan(saved) and y.isnan().any()
    assert_untouched(ranks[0])
    with pytest.raises(
        RuntimeError, match="rank 0 in forward of layer 3, step 1: nothing from rank 1 within"
    ):
        loop.ranks[0].next_step()
    assert all_nan(ranks[1].forward(inputs[1], moments[1], handles[1])[1])
    with pytest.raises(RuntimeError, match="rank 1 in forward of layer 3, step 1: rank 0 gave up"):
        loop.ranks[1].next_step()


@pytest.mark.parametrize("other", ["layer", "step", "channels", "dtype"])
def test_another_tag_is_an_error_on_both(engine, other):
    loop = loopback(2)
    changed = {"channels": {"channels": 9}, "dtype": {"dtype": torch.float64}}.get(other, {})
    ranks = [Rank(0), Rank(1, **changed)]
    tags = [Tag(3, 1), {"layer": Tag(4, 1), "step": Tag(3, 2)}.get(other, Tag(3, 1))]
    engine.config.deferred = True
    results = []
    for r in range(2):
        engine.set_device(r)
        results.append(launch_step(loop.ranks[r], ranks[r], 1, tag=tags[r]))
    engine.run()
    engine.config.deferred = False
    for r in range(2):
        assert all_nan(results[r][0][1])
        assert_untouched(ranks[r])
        with pytest.raises(RuntimeError, match=f"rank {r} (is )?in forward of layer {tags[r].layer}"):
            loop.ranks[r].next_step()
    loop.rejoin()
    check_steps(engine, 2, steps=(5, 6), loop=loop)


def test_a_backward_that_fails(engine):
    loop, rank = loopback(2), Rank(0)
    kept, dy, saved = rank.input(1), rank.input(2), torch.rand(2 * 5 + 2)
    saved[-2:] = torch.tensor([0.0, 80.0])
    rank.options = {"weight": rank.weight, "bias": rank.bias}
    exchange = loop.ranks[0].exchange(Tag(2, 9))
    sums = rank.reduce(kept, dy, saved, exchange)
    assert sums.isfinite().all() and all_nan(*rank.backward(kept, dy, saved, sums, exchange))
    with pytest.raises(RuntimeError, match="rank 0 in backward of layer 2, step 9: nothing from rank 1"):
        loop.ranks[0].exchange(Tag(2, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_of_their_own(engine, dtype):
    """Rows and sums by exchange_push and exchange_poll; a rank that traces meets one that does not."""
    loop, ranks = loopback(3), [Rank(r, dtype=dtype) for r in range(3)]
    inputs = [rank.input(4) for rank in ranks]
    want = torch.stack([ops.bn_stats(x) for x in inputs])
    handles = [member.exchange(Tag(1, 1)) for member in loop.ranks]
    moments = [ops.bn_stats(x, exchange=e) for x, e in zip(inputs[:2], handles, strict=False)]
    raw.exchange_push(handles[2], want[2], MOMENTS)
    assert torch.equal(raw.exchange_poll(handles[2], want[2], MOMENTS, False), want)
    assert torch.equal(raw.exchange_poll(handles[1], moments[1], MOMENTS, False), want)
    y, saved = ranks[0].forward(inputs[0].clone(), moments[0], handles[0])
    assert_same([[y, saved]], [Rank(0, dtype=dtype).forward(inputs[0].clone(), want)])
    sums = torch.randn(3, 10, dtype=dtype)
    waiting = [member.start_sum(row, Tag(1, 1)) for member, row in zip(loop.ranks, sums, strict=True)]
    for total in waiting:
        assert torch.equal(total.wait(), sums.double().sum(0).to(dtype))


def test_an_exchange_that_is_left_half_way(engine):
    """An error between the two ops: the rank says so at its next exchange, the peers are told."""
    loop = loopback(2)
    exchange = loop.ranks[0].exchange(Tag(1, 1))
    ops.bn_stats(torch.randn(3, 5), exchange=exchange)
    with pytest.raises(RuntimeError, match="bn_stats: exchange was sent before and not awaited"):
        ops.bn_stats(torch.randn(3, 5), exchange=exchange)
    with pytest.raises(RuntimeError, match="rank 0: an exchange was begun .* layer 1, step 1"):
        loop.ranks[0].exchange(Tag(1, 2))
    other = loop.ranks[1].exchange(Tag(1, 2))
    ops.bn_stats(torch.randn(3, 5), exchange=other)
    assert all_nan(raw.exchange_poll(other, torch.zeros(12), MOMENTS, False))
    with pytest.raises(
        RuntimeError, match="rank 1 in .*: rank 0 (gave up|in )|rank 1 is in .*, but rank 0 in"
    ):
        loop.ranks[1].exchange(Tag(1, 3))
    loop.rejoin()
    check_steps(engine, 2, steps=(4, 5), loop=loop)


def test_bad_arguments(engine):
    loop = loopback(2, capacity=4)
    exchange = loop.ranks[0].exchange(Tag(0, 0))
    with pytest.raises(
        RuntimeError, match="bn_stats: exchange takes 6 packets of 12 numbers; 1 to 4 expected"
    ):
        ops.bn_stats(torch.randn(3, 5), exchange=exchange)
    with pytest.raises(RuntimeError, match="bn_forward: exchange was not sent"):
        ops.bn_forward(torch.randn(3, 2), torch.zeros(6), exchange=exchange)
    with pytest.raises(RuntimeError, match="bn_forward: moments is not this rank's row"):
        ops.bn_forward(torch.randn(3, 2), torch.zeros(2, 6), exchange=exchange)
    with pytest.raises(RuntimeError, match="bn_stats: exchange has rank 3 of 2"):
        ops.bn_stats(torch.randn(3, 2), exchange=torch.tensor([3, 2, 4] + [0] * 7))


@pytest.mark.parametrize("way,kernels", [("auto", 4), ("collective", 8)])
def test_a_layer_over_a_group(engine, monkeypatch, way, kernels):
    """SyncBatchNorm through the choice of a provider, tickets and autograd, in a group of one rank.

    Two kernels each way; around a collective one more makes its message, and one takes it apart.
    """
    monkeypatch.setenv("FASTVIT_STATISTICS", way)

    def connect(agreement, channels, dtype, describe, device, asked):
        loop = loopback(1)
        return device_memory.trial("CudaIpc", loop.arenas, agreement, loop.ranks[0].capacity, describe)

    provider = type("Provider", (), {"connect": staticmethod(connect), "host": lambda device: "host here"})
    monkeypatch.setitem(group.PROVIDERS, "cpu", provider)
    monkeypatch.setattr(
        statistics, "over", lambda process_group, layer: statistics.Shared(dist.group.WORLD, layer)
    )
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        x, z, dy = torch.randn(3, 6, 5, 4, 4)
        results = []
        for shared in (True, False):
            if not shared:
                monkeypatch.undo()
            layer, leaf = SyncBatchNorm(5, fuse_relu=True), x.clone().requires_grad_()
            for _ in range(2):
                before = engine.launches()
                y = layer(leaf, z)
                gradients = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)
                launched = engine.launches() - before
            assert launched == kernels if shared else launched <= 4
            results.append([y, *gradients, *layer.buffers()])
            if shared:
                name = "CudaIpc, host here" if way == "auto" else "Collective"
                assert name in " ".join(statistics.taken())
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    finally:
        dist.destroy_process_group()
