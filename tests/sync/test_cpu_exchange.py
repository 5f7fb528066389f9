"""The ops of the peer protocol (csrc/sync/cpu_exchange.cpp), with all ranks of a group in one process."""

import datetime
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ops import reference

from fastvit import ops
from fastvit.sync.custom_op import merge_over_ranks
from fastvit.sync.protocol import MAX_RANKS, Arena, Exchange, ExchangeState, Tag
from fastvit.sync.shared_memory import arena_bytes
from sync.one_process import INBOX_OFFSET

raw = torch.ops.fastvit
CAPACITY = 34  # packets
GUARD = 64  # bytes behind an arena


class Ranks:
    """Logical ranks over one segment, which send known numbers."""

    def __init__(self, world, capacity=CAPACITY, epoch=0):
        self.world, self.capacity = world, capacity
        size = arena_bytes(world, capacity) + GUARD
        self.arenas = [torch.zeros(size, dtype=torch.uint8) for _ in range(world)]
        self.words = [Arena.from_address(arena.data_ptr()) for arena in self.arenas]
        addresses = [arena.data_ptr() for arena in self.arenas]
        self.exchanges = [Exchange(rank, world, arenas=addresses) for rank in range(world)]
        self.results = [None] * world
        for words, exchange in zip(self.words, self.exchanges, strict=True):
            words.epoch, exchange.descriptor.capacity = epoch, capacity

    def numbers(self, rank, step, channels=4, dtype=torch.float32, sums=False):
        if sums:
            return torch.arange(2 * channels, dtype=dtype)[None] + 100 * rank + 1000 * step
        x = torch.randn(3 + rank, channels, generator=torch.Generator().manual_seed(10 * step + rank))
        return ops.bn_stats(x.to(dtype))

    def begin(self, rank, step, numbers=None, layer=3, seconds=0.0):
        """Sends this rank's packets, and polls the others' once."""
        exchange = self.exchanges[rank]
        exchange.descriptor.timeout_ns = int(seconds * 1e9)
        numbers = self.numbers(rank, step) if numbers is None else numbers
        self.results[rank] = raw.exchange_merge(numbers, exchange.with_tag(Tag(layer, step)))
        return self.state(rank)

    def wait(self, rank, seconds=0.0):
        self.exchanges[rank].descriptor.timeout_ns = int(seconds * 1e9)
        raw.exchange_wait(self.results[rank], self.exchanges[rank].tensor)
        return self.state(rank)

    def state(self, rank):
        if self.exchanges[rank].report.missing_ranks_mask:
            return ExchangeState.PENDING
        return ExchangeState(self.exchanges[rank].report.fault or ExchangeState.DONE)

    def check(self, rank, step, **options):
        rows = torch.stack([self.numbers(r, step, **options).flatten() for r in range(self.world)])
        if options.get("sums"):
            want = torch.stack([rows[rank], rows.double().sum(0).to(rows.dtype)])
        else:
            want = reference.merge_moments(rows)
        torch.testing.assert_close(self.results[rank], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 9, 16])
def test_cpu_exchange_merges_in_rank_order(channels, sums, dtype):
    ranks, options = Ranks(3), {"channels": channels, "sums": sums, "dtype": dtype}
    for step in range(4):
        for rank in range(3):
            state = ranks.begin(rank, step, ranks.numbers(rank, step, **options))
            assert state == (ExchangeState.DONE if rank == 2 else ExchangeState.PENDING)
        for rank in range(3):
            assert rank == 2 or ranks.wait(rank) == ExchangeState.DONE
            ranks.check(rank, step, **options)
            assert torch.equal(ranks.results[rank][sums:], ranks.results[0][sums:])


def test_a_rank_without_values():
    ranks = Ranks(3)
    rows = [ops.bn_stats(x) for x in torch.randn(8, 4).split([3, 0, 5])]
    for rank in range(3):
        ranks.begin(rank, 1, rows[rank])
    torch.testing.assert_close(ranks.results[2], reference.merge_moments(torch.stack(rows)))
    for rank in range(2):
        assert ranks.wait(rank) == ExchangeState.DONE
    for rank in range(3):
        ranks.begin(rank, 2, torch.zeros(10))
    assert ranks.results[2].tolist() == [0.0] * 10


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_interleaved_at_random(world, seed):
    ranks, choose = Ranks(world, epoch=2**32 - 20), random.Random(seed)  # epochs wrap on the way
    step, waits = [0] * world, [False] * world
    while min(step) < 40:
        rank = choose.choice([r for r in range(world) if step[r] < 40])
        if (ranks.wait(rank) if waits[rank] else ranks.begin(rank, step[rank])) == ExchangeState.DONE:
            ranks.check(rank, step[rank])
            step[rank], waits[rank] = step[rank] + 1, False
        else:
            waits[rank] = True
        assert max(step) - min(step) <= 1
    assert {words.epoch for words in ranks.words} == {22}


def test_a_late_peer_and_then_its_message():
    ranks = Ranks(3)
    ranks.begin(2, 0)
    begin = time.monotonic()
    assert ranks.begin(0, 0, seconds=0.1) == ExchangeState.PENDING
    assert 0.1 <= time.monotonic() - begin < 5 and ranks.exchanges[0].report.missing_ranks_mask == 0b010
    assert torch.equal(ranks.results[0], ranks.numbers(0, 0))  # as long as it waits
    ranks.begin(1, 0)
    assert ranks.wait(0) == ExchangeState.DONE
    ranks.check(0, 0)


@pytest.mark.parametrize("what", ["layer", "step", "words", "kind", "dtype"])
def test_another_tag_is_a_mismatch_on_both(what):
    ranks = Ranks(2)
    other = {
        "layer": {"layer": 4},
        "step": {"step": 8},
        "words": {"numbers": torch.ones(6)},
        "kind": {"numbers": torch.ones(1, 10)},
        "dtype": {"numbers": torch.ones(10, dtype=torch.float64)},
    }[what]
    ranks.begin(0, 7)
    assert ranks.begin(1, **{"step": 7} | other) == ExchangeState.MISMATCH == ranks.wait(0)
    seen = ranks.exchanges[0].report
    assert seen.peer == 1 and ranks.exchanges[1].report.peer == 0
    assert [seen.peer_tag.layer, seen.peer_tag.forward_index] == [other.get("layer", 3), other.get("step", 7)]
    assert all(result.flatten()[-6:].isnan().all() for result in ranks.results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity", [6, 14])
def test_the_longest_message_fills_an_inbox_and_no_more(capacity, dtype):
    ranks, channels = Ranks(4, capacity), capacity * 4 // dtype.itemsize  # such inboxes need no padding
    for step in range(3):
        for rank in range(4):
            ranks.begin(rank, step, ranks.numbers(rank, step, channels, dtype, sums=True))
        for rank in range(4):
            assert rank == 3 or ranks.wait(rank) == ExchangeState.DONE  # the last one found all messages
            ranks.check(rank, step, channels=channels, dtype=dtype, sums=True)
    for arena in ranks.arenas[:3]:  # the last one sends nothing to itself
        assert arena[-GUARD - 4 : -GUARD].any() and not arena[-GUARD:].any()


@pytest.mark.parametrize("packet", [0, 1])
@pytest.mark.parametrize("bytes_missing", [slice(0, 8), slice(8, 16), slice(0, 16)])
def test_a_torn_header_is_not_taken(packet, bytes_missing):
    """An exchange is incomplete as long as any half of a header's packets is missing."""
    ranks = Ranks(2)
    for step in range(2):
        ranks.begin(0, step)
        assert ranks.begin(1, step) == ExchangeState.DONE == ranks.wait(0)
    before = ranks.arenas[0].clone()
    ranks.begin(0, 2), ranks.begin(1, 2)
    inbox = ranks.arenas[0][INBOX_OFFSET:]
    header = 16 * int((inbox != before[INBOX_OFFSET:]).view(-1, 16).any(1).nonzero()[packet])
    half = slice(header + bytes_missing.start, header + bytes_missing.stop)
    whole = inbox[half].clone()
    inbox[half] = before[INBOX_OFFSET:][half]
    assert ranks.wait(0) == ExchangeState.PENDING
    inbox[half] = whole
    assert ranks.wait(0) == ExchangeState.DONE
    ranks.check(0, 2)


def test_no_exchange_mixes_the_numbers_of_two():
    """Two ranks in threads, with numbers that take a while to copy: a header before them would show."""
    ranks, wrong = Ranks(2, capacity=2**17), []

    def exchange(rank):
        for step in range(200):
            numbers = torch.full((1, 2**18), float(step + rank))
            state = ranks.begin(rank, step, numbers, seconds=20)
            if state != ExchangeState.DONE or (ranks.results[rank][1] != 2 * step + 1).any():
                wrong.append((rank, step, state))
                return

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.parametrize("later", [False, True])
def test_a_complete_exchange_counts_unless_a_peer_gave_it_up(later):
    ranks = Ranks(2)
    ranks.begin(0, 0)
    if later:
        assert ranks.begin(1, 0) == ExchangeState.DONE
        ranks.begin(1, 1)
    else:
        ranks.begin(1, 0)
        ranks.words[1].epoch = 0  # as if it had not been polled
    raw.exchange_abandon(ranks.exchanges[1].tensor)
    assert ranks.exchanges[1].report.epoch == 1 + later
    assert ranks.wait(0) == (ExchangeState.DONE if later else ExchangeState.PEER_ABANDONED)
    if later:
        assert ranks.begin(0, 1) == ExchangeState.PEER_ABANDONED and ranks.results[0].isnan().all()


def test_waiting_releases_the_interpreter():
    ranks, counted = Ranks(2), 0
    waiting = threading.Thread(target=lambda: ranks.begin(0, 0, seconds=0.5))
    waiting.start()
    while waiting.is_alive():
        time.sleep(0.01)
        counted += 1
    assert counted > 10


def test_ops_of_a_layer_share():
    """bn_stats and bn_reduce with an exchange equal exchange_merge of their own numbers."""
    x, dy = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 3)
    saved = torch.cat([torch.rand(10) + 0.5, torch.tensor([0.0, 24.0])])
    for work in (
        lambda r, e=None: ops.bn_stats(x[r], exchange=e),
        lambda r, e=None: ops.bn_reduce(x[r], dy[r], saved, exchange=e),
        lambda r, e=None: ops.bn_reduce(
            x[r], dy[r], saved, activation="leaky_relu", from_output=True, exchange=e
        ),
    ):
        ranks, shared = Ranks(2), Ranks(2)
        for rank in range(2):
            ranks.results[rank] = work(rank, ranks.exchanges[rank].with_tag(Tag(3, 1)))
            shared.begin(rank, 1, work(rank))
        for both in (ranks, shared):
            assert both.wait(0) == ExchangeState.DONE
        assert all(map(torch.equal, ranks.results, shared.results))


def opcheck(op, *arguments, traced=False):
    utils = ("test_schema", "test_faketensor") if traced else "test_schema"
    torch.library.opcheck(op, arguments, test_utils=utils)


def test_opcheck_of_an_exchange():
    """exchange_merge and exchange_abandon have no fakes: fastvit::share, which has one, stands for them."""
    ranks, numbers = Ranks(2), [torch.zeros(10), torch.zeros(1, 10)]
    opcheck(raw.arena_bytes.default, 2, CAPACITY, traced=True)
    for step, row in enumerate(numbers):
        mine, theirs = (exchange.with_tag(Tag(3, step)) for exchange in ranks.exchanges)
        opcheck(raw.exchange_merge.default, row, mine)
        assert ranks.state(0) == ExchangeState.PENDING
        raw.exchange_merge(row, theirs)
        opcheck(raw.exchange_wait.default, torch.zeros(10) if step == 0 else torch.zeros(2, 10), mine)
        assert ranks.state(0) == ExchangeState.DONE
    opcheck(raw.exchange_abandon.default, ranks.exchanges[0].tensor)


def test_opcheck_of_share():
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        layer = dist.group.WORLD.group_name, "sync_batch_norm", 1, 0.1
        opcheck(merge_over_ranks._opoverload, torch.zeros(10), None, *layer, traced=True)
        _, tag = merge_over_ranks(torch.zeros(10), None, *layer)
        opcheck(merge_over_ranks._opoverload, torch.ones(1, 8), tag, *layer, traced=True)
    finally:
        dist.destroy_process_group()


def test_the_schema_that_exported_programs_have():
    """An exported program finds the op, and passes its arguments, by these names."""
    arguments = "Tensor numbers, Tensor? tag, str process_group, str op, SymInt number, float? momentum"
    assert str(raw.share.default._schema) == f"fastvit::share({arguments}) -> (Tensor, Tensor)"


def test_bad_arguments():
    ranks = Ranks(2)
    expected = "exchange is for 70 numbers, that is 35 packets; an even n > 0 and at most 34 packets expected"
    with pytest.raises(RuntimeError, match=expected):
        ranks.begin(0, 0, torch.zeros(70))
    with pytest.raises(
        RuntimeError, match="numbers is Half .10.; moments .2C . 2,. or sums .1, 2C. expected"
    ):
        ranks.begin(0, 0, torch.zeros(10, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="bn_stats: exchange is not a contiguous row of at least 8 int64"):
        ops.bn_stats(torch.randn(3, 4), exchange=torch.zeros(3))
    with pytest.raises(RuntimeError, match="exchange has rank 2 of 2"):
        ops.bn_stats(torch.randn(3, 4), exchange=torch.tensor([2, 2, CAPACITY] + [0] * 7))
    with pytest.raises(RuntimeError, match="exchange has 2 ranks and no peer memory"):
        raw.exchange_abandon(Exchange(0, 2).tensor + torch.tensor([0, 0, 1, 0, 0, 0, 0, 0]))
    assert Ranks(MAX_RANKS).begin(0, 0) == ExchangeState.PENDING
    with pytest.raises(RuntimeError, match=f"has {MAX_RANKS + 1} ranks .*; at most {MAX_RANKS} ranks"):
        Ranks(MAX_RANKS + 1).begin(0, 0)


def test_sizes_that_overflow_are_refused():
    ranks = Ranks(2)
    for many in (2**59, 2**60, 2**63 - 1):
        for world, capacity in ((2, many), (many, 2)):
            with pytest.raises(RuntimeError, match=f"world is for {world} ranks and {capacity} packets"):
                raw.arena_bytes(world, capacity)
        ranks.exchanges[0].descriptor.capacity = many
        with pytest.raises(RuntimeError, match=f"exchange_merge: exchange is for 2 ranks, capacity {many}"):
            ranks.begin(0, 0)


@pytest.mark.parametrize("freed", ["exchange", "numbers", "result"])
def test_freed_storage_is_refused(freed):
    ranks = Ranks(2)
    ranks.begin(0, 0)
    given = {
        "exchange": ranks.exchanges[0].tensor.clone(),
        "numbers": torch.zeros(10),
        "result": torch.zeros(10),
    }
    storage = given[freed].untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    with pytest.raises(RuntimeError, match=f"{freed} has shape .*freed or shrunk"):
        if freed == "numbers":
            raw.exchange_merge(given["numbers"], given["exchange"])
        else:
            raw.exchange_wait(given["result"], given["exchange"])
