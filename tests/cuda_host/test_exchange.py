"""Exchanges by the layers' kernels (csrc/cuda/exchange.cuh), between logical ranks on GPUs of the model.

Each rank is a device of its own, or a stream of one device, whose launches interleave with the others' in an
order that the seed determines. Runs with --device cuda_model only.
"""

import contextlib
import datetime
import functools

import pytest
import torch
import torch.distributed as dist
from ops.matrix import name_of
from sync.one_process import Loopback
from sync.wire_format import HEADER_PACKETS

from fastvit import SyncBatchNorm, ops, sync
from fastvit.sync import cuda_ipc, statistics_group
from fastvit.sync.protocol import Arena, Exchange, Tag

pytestmark = pytest.mark.cuda_model


raw = torch.ops.fastvit


class Ranks(Loopback):
    """Ranks that launch on devices of the model, or with `streams` on streams of one."""

    def __init__(self, engine, world, streams=False, **options):
        super().__init__(world, timeout=0.5, device="cpu", **options)
        self.engine, self.side_by_side, self.is_gpu = engine, streams, True

    @contextlib.contextmanager
    def on_stream_of(self, rank):
        if self.side_by_side:
            self.engine.config.stream = rank + 1
        else:
            self.engine.set_device(rank)
        yield
        self.engine.set_device(0)
        self.engine.config.stream = 0

    @contextlib.contextmanager
    def together(self):
        """Queues launches, and runs them together at the end."""
        self.engine.config.deferred = True
        yield
        self.engine.run()
        self.engine.config.deferred = False

    def words(self, rank):
        return Arena.from_address(self.arenas[rank].data_ptr())


@pytest.fixture
def engine(engine):
    engine.config.sm_count = 2
    return engine


class Rank:
    """One rank's data: a layer's buffers, and inputs that differ by rank and step."""

    def __init__(self, rank, channels=5, dtype=torch.float32, rows=None, inner=(4, 5)):
        self.rank, self.channels, self.dtype = rank, channels, dtype
        rows = rows[rank] if isinstance(rows, tuple) else rows
        self.shape = (3 + rank % 3 if rows is None else rows, channels, *inner)  # ranks are uneven
        self.weight = torch.linspace(0.5, 1.5, channels)
        self.bias = torch.linspace(-1, 1, channels)
        self.running = [torch.zeros(channels), torch.ones(channels), torch.tensor(0)]
        self.before = [t.clone() for t in self.running]

    def input(self, seed):
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return (x * 2 + self.rank).to(self.dtype)

    def forward(self, x, moments, residual=None):
        """y (over x without a residual) and saved."""
        self.options = {"weight": self.weight, "bias": self.bias, "activation": "leaky_relu"}
        buffers = dict(zip(("running_mean", "running_var", "num_batches_tracked"), self.running, strict=True))
        if residual is not None:
            return ops.bn_forward(x, **self.options, residual=residual, moments=moments, **buffers)
        return x, ops.bn_forward_inplace(x, **self.options, moments=moments, **buffers)

    def of_backward(self, residual):
        return self.options | {"residual": residual, "from_output": residual is None}

    def reduce(self, kept, dy, saved, residual=None, exchange=None):
        return ops.bn_reduce(kept, dy, saved, **self.of_backward(residual), exchange=exchange)

    def backward(self, kept, dy, saved, sums, residual=None):
        results = ops.bn_backward(kept, dy, saved, **self.of_backward(residual), global_sums=sums)
        return results[: 1 if residual is None else 2]


def merged(rows):
    """The result of a collective with the same moments."""
    exchanges = [Exchange(rank, len(rows)) for rank in range(len(rows))]
    for exchange in exchanges:
        exchange.descriptor.capacity, exchange.descriptor.float64_messages = (
            rows[0].numel(),
            rows[0].dtype == torch.float64,
        )
    messages = [raw.pack_message(row, e.tensor) for row, e in zip(rows, exchanges, strict=True)]
    return raw.merge_messages(torch.cat(messages), rows[0], exchanges[0].tensor)


def local_step(ranks, step, residual=False):
    """The ranks' results when their moments and sums are merged on the host, in rank order."""
    x, dy = [r.input(step) for r in ranks], [r.input(step + 50) for r in ranks]
    added = [r.input(step + 70) if residual else None for r in ranks]
    moments = merged([ops.bn_stats(t) for t in x])
    passed = [r.forward(t.clone(), moments, u) for r, t, u in zip(ranks, x, added, strict=True)]
    kept = x if residual else [y for y, _ in passed]
    parts = list(zip(ranks, kept, dy, passed, added, strict=True))
    own = torch.cat([r.reduce(k, d, saved, u) for r, k, d, (_, saved), u in parts])
    total = sum(own.double()).to(own.dtype)  # Tensor.sum would add many rows in another order.
    dx = [r.backward(k, d, saved, total, u) for r, k, d, (_, saved), u in parts]
    sums = [torch.stack([row, total]) for row in own]
    return [[y, saved, s, *g] for (y, saved), s, g in zip(passed, sums, dx, strict=True)]


def launch_step(member, rank, step, residual=False, tag=None):
    """One rank's step, by its four launches."""
    x, dy, added = rank.input(step), rank.input(step + 50), rank.input(step + 70) if residual else None
    moments = member.compute_moments(x, 1, tag or Tag(3, step))
    y, saved = rank.forward(x if residual else x.clone(), moments, added)
    kept = x if residual else y
    sums = member.compute_sums(lambda e: rank.reduce(kept, dy, saved, added, e), tag or Tag(3, step))
    gradients = rank.backward(kept, dy, saved, sums[1], added)
    return [y, saved, sums, *gradients], [x, dy, added, moments, kept]


def run_steps(loop, ranks, steps, residual=False, late=None):
    """All ranks' launches, interleaved; returns results by step and rank."""
    results, alive = [], []
    with loop.together():
        for step in steps:
            for r, (member, rank) in enumerate(zip(loop.ranks, ranks, strict=True)):
                with loop.on_stream_of(r):
                    if r == late:
                        busy = torch.randn(9, 60, 3)
                        alive += [busy, *(ops.bn_stats(busy) for _ in range(8))]
                    result, keep = launch_step(member, rank, step, residual)
                    results.append(result)
                    alive.append(keep)
    return [results[i : i + len(ranks)] for i in range(0, len(results), len(ranks))]


def assert_same(got, want):
    for mine, wanted in zip(got, want, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            assert torch.equal(a, b), (a, b)


def check_steps(engine, world, steps=(1, 2, 3), residual=False, loop=None, late=None, **options):
    loop = loop or Ranks(engine, world)
    ranks, alone = ([Rank(r, **options) for r in range(world)] for _ in range(2))
    got = run_steps(loop, ranks, steps, residual, late)
    for step, results in zip(steps, got, strict=True):
        assert_same(results, local_step(alone, step, residual))
    assert_same([r.running for r in ranks], [r.running for r in alone])
    return loop


def describe_case(value) -> str:
    """Returns a parameter's id."""
    if isinstance(value, dict):
        return "-".join(f"{name}={name_of(option)}" for name, option in value.items()) or "plain"
    return str(value)


@pytest.mark.parametrize(
    "world,seeds,options",
    [
        (1, (0,), {}),
        (2, (0, 1, 2, 3), {}),
        (4, (1, 2), {}),
        (9, (3,), {}),
        (2, (0, 1, 2, 3), {"residual": True}),
        (9, (3,), {"residual": True}),
        (3, (1,), {"dtype": torch.bfloat16}),
        (3, (1,), {"dtype": torch.float64}),
        (17, (4,), {"dtype": torch.float64, "steps": (1,)}),  # threads wait for several ranks in turn
        (3, (5,), {"late": 1}),
        (2, (0,), {"rows": (3, 0), "steps": (1, 2)}),  # a rank without values
        # More channels than one block takes: blocks send their own, the last to finish awaits all.
        (2, (2,), {"channels": 300, "rows": 1, "steps": (1,)}),
    ],
    ids=describe_case,
)
def test_exchanged_steps_equal_merged_ones_in_any_order(engine, world, seeds, options):
    for engine.config.seed in seeds:
        check_steps(engine, world, **options)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ranks_may_share_a_small_gpu(engine, seed):
    """Each rank's grid has more blocks than the device has room for, and only its last one waits."""
    engine.config.seed, engine.config.resident = seed, 2
    check_steps(engine, 2, steps=(1, 2), loop=Ranks(engine, 2, streams=True), channels=120, rows=1)


@pytest.fixture
def large(engine):
    """A device on which several blocks of a grid wait."""
    engine.config.sm_count, engine.config.resident = 128, 4
    return engine


@pytest.mark.parametrize(
    "world,dtype,channels", [(2, torch.float64, 520), (3, torch.float64, 260)], ids=name_of
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_may_wait_for_a_part_of_the_channels(large, world, dtype, channels, seed):
    """Two blocks of each rank, for a batch of channels each; small planes, so that a block takes several."""
    large.config.seed = seed
    check_steps(large, world, channels=channels, rows=1, inner=(2,), steps=(1,), dtype=dtype)


@pytest.mark.parametrize("lost", [(0,), (300,), (599,), (0, 300, 599)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_of_a_rank_fail_together_and_report_once(large, direction, lost):
    """The three fail together, one report is made, and the stream's semaphores are zeros again."""
    large.config.seed = 1
    x = torch.randn(5, 3, 600)
    rows = [ops.bn_stats(part, 1) for part in x]
    want = merged(rows)
    saved = ops.bn_forward(x[0], moments=want)[1]
    if direction == "backward":
        rows = [ops.bn_reduce(part, part, saved) for part in x]
        want = torch.cat(rows).double().sum(0).float()
    for failing in (True, False):
        loop = Ranks(large, 5)
        loop.write_messages(0, rows, Tag(3, 1))
        for channel in lost if failing else ():
            loop.view_inbox(0, 3, 1, HEADER_PACKETS + channel)[:16].zero_()
        if direction == "forward":
            got = loop.ranks[0].compute_moments(x[0], 1, Tag(3, 1))
        else:
            reduce = functools.partial(ops.bn_reduce, x[0], x[0], saved)
            own, got = loop.ranks[0].compute_sums(lambda e, reduce=reduce: reduce(exchange=e), Tag(3, 1))
            assert torch.equal(own, rows[0][0])
        assert got.isnan().all() if failing else torch.equal(got, want)
        assert (loop.words(0).epoch, loop.words(0).failed) == (not failing, failing)
        message = f"rank 0 in {direction} of layer 3, step 1: nothing from rank 3"
        with pytest.raises(RuntimeError, match=message) if failing else contextlib.nullcontext():
            loop.ranks[0].next_forward_index()


def test_epochs_wrap_past_0_and_1(engine):
    loop = Ranks(engine, 2)
    for rank in range(2):
        loop.words(rank).epoch = 2**32 - 4
    check_steps(engine, 2, steps=range(1, 5), loop=loop)
    assert [loop.words(rank).epoch for rank in range(2)] == [6, 6]  # after -3, -2, -1, 2, 3, ...


def test_packets_of_an_earlier_longer_message_are_not_read(engine):
    """Packets of an earlier, longer message are never read."""
    loop = Ranks(engine, 2)
    for channels, steps in ((40, (1, 2)), (3, (3, 4)), (90, (5,))):
        check_steps(engine, 2, steps=steps, loop=loop, channels=channels)


def test_step_0_matches_any_step(engine):
    loop, ranks, alone = Ranks(engine, 2), [Rank(0), Rank(1)], [Rank(0), Rank(1)]
    kept = []
    with loop.together():
        for step in (1, 2):  # one rank replays a graph, the other does not
            for r, tag in enumerate((Tag(3, 0), Tag(3, step))):
                with loop.on_stream_of(r):
                    kept.append(launch_step(loop.ranks[r], ranks[r], step, tag=tag))
    for step in (1, 2):
        assert_same([k[0] for k in kept[2 * step - 2 : 2 * step]], local_step(alone, step))


def test_counters_of_a_captured_launch_are_the_graphs_own(engine):
    """The graph clears the counter that elects the last block, since it may run beside any other work."""
    loop, x = Ranks(engine, 1), torch.randn(3, 300, 5)
    want = ops.bn_stats(x)
    engine.config.capturing = True
    for step in (1, 2):
        assert torch.equal(loop.ranks[0].compute_moments(x, 1, Tag(1, step)), want)


def assert_untouched(rank):
    for now, before in zip(rank.running, rank.before, strict=True):
        assert torch.equal(now, before)


def all_nan(*tensors):
    return all(t.isnan().all() for t in tensors)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_peer_that_does_not_send_fails_every_rank(engine, seed):
    """Rank 1 does not send: all others raise, and it when it comes; nobody goes on."""
    engine.config.seed = seed
    loop, ranks = Ranks(engine, 3), [Rank(r) for r in range(3)]
    results = {}
    with loop.together():
        for r in (0, 2):
            with loop.on_stream_of(r):
                results[r] = launch_step(loop.ranks[r], ranks[r], 7)
    messages = []
    for r in (0, 2):
        y, saved, sums, dx = results[r][0]
        assert all_nan(y, saved, sums[1], dx)
        assert_untouched(ranks[r])
        with pytest.raises(RuntimeError, match=rf"rank {r} in forward of layer 3, step 7: ") as error:
            loop.ranks[r].next_forward_index()
        messages.append(str(error.value))
    assert any("nothing from rank 1 within 0.5 s" in message for message in messages)
    with loop.together(), loop.on_stream_of(1):  # it is late, and gets an error
        late, keep = launch_step(loop.ranks[1], ranks[1], 7)
    assert all_nan(late[0]) and keep
    with pytest.raises(RuntimeError, match=r"forward of layer 3, step 7: rank [02] abandoned the exchange"):
        loop.ranks[1].raise_reported_fault()
    for rank in loop.ranks:
        with pytest.raises(RuntimeError, match="an exchange of this group has failed"):
            rank.next_forward_index()


def test_exchanges_after_a_fault_wait_for_nobody(engine):
    loop = Ranks(engine, 2)
    exchange = loop.ranks[0]._exchange.with_tag(Tag(0, 1))
    taken = []
    for _ in range(2):
        before = engine.steps()
        assert all_nan(raw.exchange_merge(torch.ones(1, 4), exchange)[1])
        taken.append(engine.steps() - before)
    assert taken[1] < taken[0] / 10


@pytest.mark.parametrize("packet", [0, 1, HEADER_PACKETS, HEADER_PACKETS + 2, HEADER_PACKETS + 5])
@pytest.mark.parametrize("half", [0, 8])
def test_a_lost_packet_fails_both_ranks(engine, packet, half):
    """A lost header, channel or count, or half of one: that rank's result is NaN; the other is notified."""
    loop, ranks = Ranks(engine, 2), [Rank(0), Rank(1)]
    inputs = [rank.input(1) for rank in ranks]
    loop.write_messages(0, [ops.bn_stats(x) for x in inputs], Tag(3, 1))
    lost = loop.view_inbox(0, 1, 1, packet)[half : half + 8]
    assert lost[4:].view(torch.int32) == 1  # the epoch
    lost.zero_()
    y, saved = ranks[0].forward(inputs[0], loop.ranks[0].compute_moments(inputs[0], 1, Tag(3, 1)))
    assert all_nan(saved, y)
    assert_untouched(ranks[0])
    with pytest.raises(
        RuntimeError, match="rank 0 in forward of layer 3, step 1: nothing from rank 1 within"
    ):
        loop.ranks[0].next_forward_index()
    assert all_nan(ranks[1].forward(inputs[1], loop.ranks[1].compute_moments(inputs[1], 1, Tag(3, 1)))[1])
    with pytest.raises(RuntimeError, match="rank 1 in forward of layer 3, step 1: rank 0 abandoned"):
        loop.ranks[1].next_forward_index()


@pytest.mark.parametrize("other", ["layer", "step", "channels", "dtype"])
def test_another_tag_is_an_error_on_both(engine, other):
    loop = Ranks(engine, 2)
    changed = {"channels": {"channels": 9}, "dtype": {"dtype": torch.float64}}.get(other, {})
    ranks = [Rank(0), Rank(1, **changed)]
    tags = [Tag(3, 1), {"layer": Tag(4, 1), "step": Tag(3, 2)}.get(other, Tag(3, 1))]
    results = []
    with loop.together():
        for r in range(2):
            with loop.on_stream_of(r):
                results.append(launch_step(loop.ranks[r], ranks[r], 1, tag=tags[r]))
    for r in range(2):
        assert all_nan(results[r][0][1])
        assert_untouched(ranks[r])
        with pytest.raises(RuntimeError, match=f"rank {r} (is )?in forward of layer {tags[r].layer}"):
            loop.ranks[r].next_forward_index()


def test_a_failed_backward_keeps_the_local_sums(engine):
    loop, rank = Ranks(engine, 2), Rank(0)
    kept, dy, saved = rank.input(1), rank.input(2), torch.rand(2 * 5 + 2)
    saved[-2:] = torch.tensor([0.0, 80.0])
    rank.options = {"weight": rank.weight, "bias": rank.bias}
    own, total = loop.ranks[0].compute_sums(lambda e: rank.reduce(kept, dy, saved, None, e), Tag(2, 9))
    assert own.isfinite().all() and all_nan(total, *rank.backward(kept, dy, saved, total))
    with pytest.raises(RuntimeError, match="rank 0 in backward of layer 2, step 9: nothing from rank 1"):
        loop.ranks[0].merge_over_ranks(own[None], Tag(2, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_exchange_merge_gives_what_fused_exchanges_give(engine, dtype):
    """exchange_merge; a rank that traces meets one that does not."""
    loop, ranks = Ranks(engine, 3), [Rank(r, dtype=dtype) for r in range(3)]
    inputs = [rank.input(4) for rank in ranks]
    rows, sums = [ops.bn_stats(x) for x in inputs], list(torch.randn(3, 1, 10, dtype=dtype))
    with loop.together():
        got = loop.run_each(
            lambda r, way: way.merge_over_ranks(rows[r], Tag(1, 1))
            if r == 2
            else way.compute_moments(inputs[r], 1, Tag(1, 1))
        )
        both = loop.run_each(lambda r, way: way.merge_over_ranks(sums[r], Tag(1, 1)))
    assert all(torch.equal(moments, merged(rows)) for moments in got)
    total = torch.cat(sums).double().sum(0).to(dtype)
    for own, result in zip(sums, both, strict=True):
        assert torch.equal(result, torch.stack([own[0], total]))


def test_all_kernels_of_shared_layers_have_run_at_set_up(engine):
    """All kernels of a shared layer have run once before the ranks wait for each other."""
    engine.kernels()
    cuda_ipc.warm_up_kernels(torch.device("cpu"))
    loaded = set(engine.kernels())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for channels, memory_format in ((3, torch.contiguous_format), (16, torch.channels_last)):
            x = torch.randn(2, channels, 9, 16).to(dtype).contiguous(memory_format=memory_format)
            for residual in (False, True):
                for crop in (x, x[..., 1:]):
                    rank, loop = Rank(0, channels), Ranks(engine, 1)
                    rank.input = lambda seed, crop=crop: crop.clone(memory_format=torch.preserve_format)
                    launch_step(loop.ranks[0], rank, 1, residual)
    assert loaded.issuperset(engine.kernels())


@pytest.mark.parametrize("way,kernels", [("auto", 4), ("collective", 8)])
def test_a_layer_over_a_group_has_the_bits_of_a_local_one(engine, monkeypatch, way, kernels):
    """SyncBatchNorm through the choice of a backend, semaphores and autograd, in a group of one rank.

    Forward and backward launch two kernels each; with a collective, two more write and read its message.
    """
    monkeypatch.setenv("FASTVIT_STATISTICS", way)

    def connect(consensus, capacity, describe, device, asked):
        (own,) = Ranks(engine, 1).arenas
        return cuda_ipc.verify_arenas(own, [own.data_ptr()], consensus, capacity, describe)

    members = {"connect": staticmethod(connect), "host_name": lambda device: "host here"}
    peer_backend = type("PeerBackend", (), members)
    monkeypatch.setitem(statistics_group.PEER_BACKENDS, "cpu", peer_backend)
    # The tensors of the model are a GPU's.
    gpu_backend = statistics_group.GpuCollectiveBackend
    monkeypatch.setattr(statistics_group, "CpuCollectiveBackend", gpu_backend)
    shared_transport = lambda _, layer: sync.GroupTransport(dist.group.WORLD, layer)  # noqa: E731
    monkeypatch.setattr(sync, "get_transport", shared_transport)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        x, residual, dy = torch.randn(3, 6, 5, 4, 4)
        results = []
        for shared in (True, False):
            if not shared:
                monkeypatch.undo()
            layer, leaf = SyncBatchNorm(5, fuse_relu=True), x.clone().requires_grad_()
            for _ in range(2):
                before = engine.launches()
                y = layer(leaf, residual)
                gradients = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)
                launched = engine.launches() - before
            assert launched == kernels if shared else launched <= 4
            results.append([y, *gradients, *layer.buffers()])
            if shared:
                name = "CudaIpc, host here" if way == "auto" else "Collective"
                assert name in " ".join(sync.describe_groups())
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    finally:
        dist.destroy_process_group()
