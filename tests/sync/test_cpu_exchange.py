"""The results and the faults of the ops of csrc/sync/cpu_exchange.cpp; tests/ops has their bad arguments."""

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ops import reference

from fastvit import ops
from fastvit.sync.custom_op import merge_over_ranks
from fastvit.sync.protocol import MAX_RANKS, ExchangeState, Tag
from sync.one_process import CpuRanks

raw_ops = torch.ops.fastvit
F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("sums", [False, True], ids=["moments", "sums"])
@pytest.mark.parametrize(
    ("world", "channels", "dtype"),
    [
        *((3, channels, dtype) for channels in (1, 9) for dtype in (F32, F64)),
        (3, 2, F32),
        (3, 16, F64),
        (3, 1100, F32),  # more than are merged together
        (12, 5, F32),
        (17, 5, F64),
        (MAX_RANKS, 5, F32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_cpu_exchange_merges_in_rank_order(world, channels, dtype, sums):
    options = {"channels": channels, "sums": sums, "dtype": dtype}
    ranks = CpuRanks(world, capacity=max(34, 2 * channels + 2))
    for step in range(4):
        for rank in range(world):
            state = ranks.begin(rank, step, ranks.make_numbers(rank, step, **options))
            assert state == (ExchangeState.DONE if rank == world - 1 else ExchangeState.PENDING)
        for rank in range(world):
            assert rank == world - 1 or ranks.wait(rank) == ExchangeState.DONE
            assert torch.equal(ranks.results[rank][sums:], ranks.results[0][sums:])
            if rank in (0, 1, world - 1):
                ranks.assert_merged(rank, step, **options)


def test_ranks_without_values_change_no_moments():
    ranks = CpuRanks(3)
    rows = [ops.bn_stats(x) for x in torch.randn(8, 4).split([3, 0, 5])]
    for rank in range(3):
        ranks.begin(rank, 1, rows[rank])
    torch.testing.assert_close(ranks.results[2], reference.merge_moments(torch.stack(rows)))
    for rank in range(2):
        assert ranks.wait(rank) == ExchangeState.DONE
    for rank in range(3):
        ranks.begin(rank, 2, torch.zeros(10))
    assert ranks.results[2].tolist() == [0.0] * 10


def test_a_late_peer_and_then_its_message():
    ranks = CpuRanks(3)
    ranks.begin(2, 0)
    begin = time.monotonic()
    assert ranks.begin(0, 0, seconds=0.1) == ExchangeState.PENDING
    assert 0.1 <= time.monotonic() - begin < 5 and ranks.exchanges[0].report.missing_ranks_mask == 0b010
    assert torch.equal(ranks.results[0], ranks.make_numbers(0, 0))  # as long as it waits
    ranks.begin(1, 0)
    assert ranks.wait(0) == ExchangeState.DONE
    ranks.assert_merged(0, 0)


OTHER_TAGS = {
    "layer": {"layer": 4},
    "step": {"step": 8},
    "words": {"numbers": torch.ones(6)},
    "kind": {"numbers": torch.ones(1, 10)},
    "dtype": {"numbers": torch.ones(10, dtype=F64)},
}


@pytest.mark.parametrize("difference", OTHER_TAGS)
def test_another_tag_is_a_mismatch_on_both(difference):
    ranks, other = CpuRanks(2), {"step": 7} | OTHER_TAGS[difference]
    ranks.begin(0, 7)
    assert ranks.begin(1, **other) == ExchangeState.MISMATCH == ranks.wait(0)
    report = ranks.exchanges[0].report
    assert report.peer == 1 and ranks.exchanges[1].report.peer == 0
    assert [report.peer_tag.layer, report.peer_tag.forward_index] == [other.get("layer", 3), other["step"]]
    assert all(result.flatten()[-6:].isnan().all() for result in ranks.results)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("capacity", [6, 14])
def test_the_longest_message_fills_an_inbox_and_no_more(capacity, dtype):
    ranks, channels = CpuRanks(4, capacity), capacity * 4 // dtype.itemsize  # such inboxes need no padding
    options = {"channels": channels, "dtype": dtype, "sums": True}
    for step in range(3):
        for rank in range(4):
            ranks.begin(rank, step, ranks.make_numbers(rank, step, **options))
        for rank in range(4):
            assert rank == 3 or ranks.wait(rank) == ExchangeState.DONE  # the last one found all messages
            ranks.assert_merged(rank, step, **options)
    guard = ranks.GUARD_BYTES
    for arena in ranks.arenas[:3]:  # the last one sends nothing to itself
        assert arena[-guard - 4 : -guard].any() and not arena[-guard:].any()


@pytest.mark.parametrize("is_later", [False, True], ids=["in this exchange", "in the next one"])
def test_a_complete_exchange_counts_unless_a_peer_gave_it_up(is_later):
    ranks = CpuRanks(2)
    ranks.begin(0, 0)
    if is_later:
        assert ranks.begin(1, 0) == ExchangeState.DONE
        ranks.begin(1, 1)
    else:
        ranks.begin(1, 0)
        ranks.arena_words[1].epoch = 0  # as if it had not been polled
    ranks.abandon(1)
    assert ranks.exchanges[1].report.epoch == 1 + is_later
    assert ranks.wait(0) == (ExchangeState.DONE if is_later else ExchangeState.PEER_ABANDONED)
    if is_later:
        assert ranks.begin(0, 1) == ExchangeState.PEER_ABANDONED and ranks.results[0].isnan().all()


def test_waiting_releases_the_interpreter():
    ranks, count = CpuRanks(2), 0
    waiting_thread = threading.Thread(target=lambda: ranks.begin(0, 0, seconds=0.5))
    waiting_thread.start()
    while waiting_thread.is_alive():
        time.sleep(0.01)
        count += 1
    assert count > 10


def test_statistics_ops_exchange_as_exchange_merge_does():
    """bn_stats and bn_reduce with an exchange equal exchange_merge of their own numbers."""
    x, dy = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 3)
    saved = torch.cat([torch.rand(10) + 0.5, torch.tensor([0.0, 24.0])])
    for compute in (
        lambda r, e=None: ops.bn_stats(x[r], exchange=e),
        lambda r, e=None: ops.bn_reduce(x[r], dy[r], saved, exchange=e),
        lambda r, e=None: ops.bn_reduce(
            x[r], dy[r], saved, activation="leaky_relu", from_output=True, exchange=e
        ),
    ):
        ranks, expected = CpuRanks(2), CpuRanks(2)
        for rank in range(2):
            ranks.results[rank] = compute(rank, ranks.exchanges[rank].with_tag(Tag(3, 1)))
            expected.begin(rank, 1, compute(rank))
        for group in (ranks, expected):
            assert group.wait(0) == ExchangeState.DONE
        assert all(map(torch.equal, ranks.results, expected.results))


def test_fakes_of_share_and_arena_bytes_agree_with_the_ops():
    utils = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(raw_ops.arena_bytes.default, (2, 34), **utils)
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        layer = dist.group.WORLD.group_name, "sync_batch_norm", 1, 0.1
        torch.library.opcheck(merge_over_ranks._opoverload, (torch.zeros(10), None, *layer), **utils)
        _, tag = merge_over_ranks(torch.zeros(10), None, *layer)
        torch.library.opcheck(merge_over_ranks._opoverload, (torch.ones(1, 8), tag, *layer), **utils)
    finally:
        dist.destroy_process_group()


def test_the_schema_of_share_stays_for_exported_programs():
    """An exported program finds the op, and passes its arguments, by these names."""
    arguments = "Tensor numbers, Tensor? tag, str process_group, str op, SymInt number, float? momentum"
    assert str(raw_ops.share.default._schema) == f"fastvit::share({arguments}) -> (Tensor, Tensor)"
