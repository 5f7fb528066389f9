"""The ops of the peer protocol (csrc/cpu/peer.cpp), with all ranks of a group in one process."""

import random
import threading
import time

import pytest
import torch

import fastvit  # noqa: F401  (registers the ops)

ops = torch.ops.fastvit
PENDING, DONE, MISMATCH, GAVE_UP = range(4)  # csrc/peer.h, Fault
MOMENTS, SUMS = range(2)  # Kind
CAPACITY = 33  # packets


class Ranks:
    """Logical ranks over one segment; what each sends is known, so what each gets can be checked."""

    def __init__(self, world, capacity=CAPACITY, epoch=0):
        self.world = world
        self.segment = torch.zeros(ops.peer_segment_bytes(world, capacity), dtype=torch.uint8)
        self.states = [
            torch.tensor([rank, world, capacity, epoch] + [0] * (7 + world)) for rank in range(world)
        ]

    def numbers(self, rank, step, n=9, dtype=torch.float32):
        return torch.arange(n, dtype=dtype) + 100 * rank + 1000 * step

    def push(self, rank, step, numbers=None, layer=3, kind=MOMENTS):
        numbers = self.numbers(rank, step) if numbers is None else numbers
        ops.peer_push(self.segment, self.states[rank], numbers, layer, step, kind)

    def poll(self, rank, step, numbers=None, layer=3, kind=MOMENTS, seconds=0.0):
        numbers = self.numbers(rank, step) if numbers is None else numbers
        self.rows = torch.full((self.world, numbers.numel()), -1.0, dtype=numbers.dtype)
        self.total = torch.full_like(numbers, -1.0)
        return ops.peer_poll(
            self.segment, self.states[rank], numbers, self.rows, self.total, layer, step, kind, seconds
        )

    def state(self, rank):
        names = "rank world capacity epoch generation step peer peer_layer peer_step peer_words peer_kind"
        values = self.states[rank].tolist()
        return dict(zip(names.split(), values, strict=False)) | {"missing": values[11:]}

    def check(self, step, **options):
        want = torch.stack([self.numbers(rank, step, **options) for rank in range(self.world)])
        assert torch.equal(self.rows, want) and torch.equal(self.total, want.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 9, 33])
def test_numbers_arrive_by_rank(n, dtype):
    ranks = Ranks(3)
    for step in range(4):
        for rank in range(3):
            ranks.push(rank, step, ranks.numbers(rank, step, n, dtype))
        for rank in range(3):
            assert ranks.poll(rank, step, ranks.numbers(rank, step, n, dtype)) == DONE
            ranks.check(step, n=n, dtype=dtype)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_interleaved_at_random(world, seed):
    ranks, choose = Ranks(world, epoch=2**32 - 20), random.Random(seed)  # epochs wrap on the way
    step, pushed = [0] * world, [False] * world
    while min(step) < 40:
        rank = choose.choice([r for r in range(world) if step[r] < 40])
        if not pushed[rank]:
            ranks.push(rank, step[rank])
            pushed[rank] = True
        elif ranks.poll(rank, step[rank]) == DONE:
            ranks.check(step[rank])
            step[rank], pushed[rank] = step[rank] + 1, False
        assert max(step) - min(step) <= 1
    assert {ranks.state(rank)["epoch"] for rank in range(world)} == {22}


def test_epochs_keep_alternating_when_they_wrap():
    ranks = Ranks(2, epoch=2**32 - 2)
    seen = []
    for step in range(3):
        for rank in range(2):
            ranks.push(rank, step)
        seen.append(ranks.state(0)["epoch"])
        assert ranks.poll(0, step) == DONE == ranks.poll(1, step)
    assert seen == [2**32 - 1, 2, 3]


def test_a_late_peer_and_then_its_message():
    ranks = Ranks(3)
    ranks.push(0, 0), ranks.push(2, 0)
    begin = time.monotonic()
    assert ranks.poll(0, 0, seconds=0.1) == PENDING
    assert 0.1 <= time.monotonic() - begin < 5 and ranks.state(0)["missing"] == [0, 1, 0]
    ranks.push(1, 0)
    assert ranks.poll(0, 0) == DONE
    ranks.check(0)


@pytest.mark.parametrize("what", ["layer", "step", "words", "kind", "dtype"])
def test_another_tag_is_a_mismatch_on_both(what):
    ranks = Ranks(2)
    other = {
        "layer": {"layer": 4},
        "step": {"step": 8},
        "words": {"numbers": torch.zeros(5)},
        "kind": {"kind": SUMS},
        "dtype": {"numbers": torch.zeros(9, dtype=torch.float64)},
    }[what]
    ranks.push(0, 7), ranks.push(1, **{"step": 7} | other)
    assert ranks.poll(0, 7) == MISMATCH and ranks.poll(1, **{"step": 7} | other) == MISMATCH
    seen = ranks.state(0)
    assert seen["peer"] == 1 and ranks.state(1)["peer"] == 0
    assert [seen["peer_layer"], seen["peer_step"]] == [other.get("layer", 3), other.get("step", 7)]
    assert (ranks.rows[0] == -1).all()  # rank 1 polled last: nothing of rank 0 was taken


def test_a_torn_message_is_not_taken():
    """Some packets of an exchange are not enough, whichever are missing."""
    for missing in range(7):
        ranks = Ranks(2)
        for step in range(2):
            ranks.push(0, step), ranks.push(1, step)
            assert ranks.poll(0, step) == DONE == ranks.poll(1, step)
        before = ranks.segment.clone()
        ranks.push(0, 2), ranks.push(1, 2)
        changed = (ranks.segment != before).view(-1, 16).any(1).nonzero().flatten()
        in_inbox_of_0 = changed[: len(changed) // 2]
        assert len(in_inbox_of_0) == 7  # two of header, five of payload
        packet = slice(16 * in_inbox_of_0[missing], 16 * in_inbox_of_0[missing] + 16)
        half = slice(packet.start, packet.start + 8 * (1 + missing % 2))  # or only half of it
        whole = ranks.segment[half].clone()
        ranks.segment[half] = before[half]
        assert ranks.poll(0, 2) == PENDING and ranks.poll(1, 2) == DONE
        ranks.segment[half] = whole
        assert ranks.poll(0, 2) == DONE
        ranks.check(2)


def test_giving_up_ends_the_others_waits_and_all_rejoin():
    ranks = Ranks(3)
    for step in range(3):  # rank 0 is alone in these: its epoch runs ahead
        ranks.push(0, step)
    ops.peer_give_up(ranks.segment, ranks.states[0])
    for rank in (1, 2):
        ranks.push(rank, 0)
        assert ranks.poll(rank, 0, seconds=5.0) == GAVE_UP and ranks.state(rank)["peer"] == 0
        ops.peer_give_up(ranks.segment, ranks.states[rank])
    for rank, step in ((0, 5), (1, 9), (2, 1)):
        ranks.states[rank][5] = step
        done = ops.peer_rejoin(ranks.segment, ranks.states[rank], 0.0) == DONE
        assert done == (rank == 2) and ranks.state(0)["missing"] == [0, 1, 1]
    for rank in (0, 1):
        assert ops.peer_rejoin(ranks.segment, ranks.states[rank], 0.0) == DONE
    assert {(ranks.state(r)["epoch"], ranks.state(r)["step"]) for r in range(3)} == {(3, 9)}
    for rank in range(3):
        ranks.push(rank, 10)
    for rank in range(3):
        assert ranks.poll(rank, 10) == DONE
        ranks.check(10)


@pytest.mark.parametrize("later", [False, True])
def test_a_complete_exchange_counts_unless_a_peer_gave_it_up(later):
    ranks = Ranks(2)
    ranks.push(0, 0), ranks.push(1, 0)
    if later:
        assert ranks.poll(1, 0) == DONE
        ranks.push(1, 1)
    ops.peer_give_up(ranks.segment, ranks.states[1])
    assert ranks.poll(0, 0) == (DONE if later else GAVE_UP)
    ranks.push(0, 1)
    assert ranks.poll(0, 1) == GAVE_UP


def test_waiting_releases_the_interpreter():
    ranks, counted = Ranks(2), 0
    ranks.push(0, 0)
    waiting = threading.Thread(target=lambda: ranks.poll(0, 0, seconds=0.5))
    waiting.start()
    while waiting.is_alive():
        time.sleep(0.01)
        counted += 1
    assert counted > 10


def test_bad_arguments():
    ranks = Ranks(2)
    with pytest.raises(RuntimeError, match="numbers takes 34 packets; at most 33 expected"):
        ranks.push(0, 0, torch.zeros(67))
    with pytest.raises(RuntimeError, match="numbers is Half .9.; one contiguous row of float32 or float64"):
        ranks.push(0, 0, torch.zeros(9, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="segment has 100 bytes; .* expected"):
        ops.peer_give_up(ranks.segment[:100], ranks.states[0])
    with pytest.raises(RuntimeError, match="state has rank 2 of 2"):
        ops.peer_give_up(ranks.segment, torch.tensor([2, 2, CAPACITY] + [0] * 10))


def test_sizes_that_overflow_are_refused():
    ranks = Ranks(2)
    for capacity in (2**59, 2**60, 2**63 - 1):
        ranks.states[0][2] = capacity
        with pytest.raises(
            RuntimeError, match=f"peer_push: state is for 2 ranks and {capacity} packets; 1 to"
        ):
            ranks.push(0, 0)
        for size in (ops.peer_segment_bytes, ops.exchange_arena_bytes):
            with pytest.raises(RuntimeError, match=f"world is for 2 ranks and {capacity} packets"):
                size(2, capacity)
            with pytest.raises(RuntimeError, match=f"world is for {capacity} ranks and 2 packets"):
                size(capacity, 2)


@pytest.mark.parametrize("freed", ["segment", "state", "numbers", "rows", "total"])
def test_freed_storage_is_refused(freed):
    ranks = Ranks(2)
    ranks.push(0, 0), ranks.push(1, 0)
    given = {
        "segment": ranks.segment,
        "state": ranks.states[0],
        "numbers": torch.zeros(9),
        "rows": torch.zeros(2, 9),
        "total": torch.zeros(9),
    }
    storage = given[freed].untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    with pytest.raises(RuntimeError, match=f"peer_poll: {freed} has shape .*freed or shrunk"):
        ops.peer_poll(*given.values(), 3, 0, MOMENTS, 0.0)
