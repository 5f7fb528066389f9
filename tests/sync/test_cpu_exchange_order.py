"""The ops of csrc/sync/cpu_exchange.cpp when ranks begin, wait, differ and give up in any order."""

import threading

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastvit.sync.protocol import ExchangeState
from sync.one_process import CpuRanks
from sync.wire_format import PACKET_BYTES, message_offset

LAST_EPOCH = 2**32 - 1  # 2 follows, since 0 is the epoch of an empty slot, and slots alternate
LARGEST_WORLD = 8
RANK = st.integers(0, LARGEST_WORLD - 1)


class ExchangesInAnyOrder(RuleBasedStateMachine):
    """Compares the state of every call with the state that follows from the messages sent so far."""

    @initialize(
        world=st.sampled_from([2, 3, LARGEST_WORLD]),
        epoch=st.sampled_from([0, LAST_EPOCH - 1]),
        first_fault=st.integers(0, 4),
    )
    def make_ranks(self, world, epoch, first_fault):
        self.world, self.first_epoch, self.first_fault = world, epoch, first_fault
        self.ranks = CpuRanks(world, epoch=epoch)
        self.steps = [0] * world  # the exchanges that a rank has completed
        self.sent_layers = [[] for _ in range(world)]  # the layer of each message of a rank
        self.abandoned_steps = {}
        self.ended = set()

    def expect_state(self, rank: int) -> tuple[ExchangeState, list[int]]:
        """Returns the state of a rank after a poll, and the peers that cause this state."""
        step, layers = self.steps[rank], self.sent_layers
        peers = [peer for peer in range(self.world) if peer != rank]
        missing = [peer for peer in peers if len(layers[peer]) <= step]
        different = [p for p in peers if p not in missing and layers[p][step] != layers[rank][step]]
        if different:
            return ExchangeState.MISMATCH, different
        abandoning = [p for p in peers if p in self.abandoned_steps]
        if not missing:  # then only this exchange matters
            abandoning = [p for p in abandoning if self.abandoned_steps[p] == step]
        if abandoning:
            return ExchangeState.PEER_ABANDONED, abandoning
        return (ExchangeState.PENDING if missing else ExchangeState.DONE), missing

    def run_rank(self, rank: int, layer: int = 3) -> None:
        """Begins the next exchange of a rank, or waits for the one that it has begun."""
        rank %= self.world
        if rank in self.ended:
            return
        step = self.steps[rank]
        has_begun = len(self.sent_layers[rank]) > step
        if not has_begun:
            self.sent_layers[rank].append(layer)
        state = self.ranks.wait(rank) if has_begun else self.ranks.begin(rank, step, layer=layer)
        expected, peers = self.expect_state(rank)
        assert state == expected
        if state == ExchangeState.DONE:
            self.ranks.assert_merged(rank, step)
            self.steps[rank] += 1
        elif state == ExchangeState.PENDING:
            assert self.ranks.exchanges[rank].report.missing_ranks_mask == sum(1 << peer for peer in peers)
            assert torch.equal(self.ranks.results[rank], self.ranks.make_numbers(rank, step))
        else:
            assert self.ranks.exchanges[rank].report.peer == peers[0]
            assert self.ranks.results[rank].isnan().all()
            self.ended.add(rank)

    @rule(order=st.lists(RANK, min_size=20, max_size=60))
    def run_ranks(self, order):
        for rank in order:
            self.run_rank(rank)

    @precondition(lambda self: min(self.steps) >= self.first_fault)
    @rule(rank=RANK)
    def run_another_layer(self, rank):
        self.run_rank(rank, layer=4)

    @precondition(lambda self: min(self.steps) >= self.first_fault)
    @rule(rank=RANK)
    def abandon(self, rank):
        rank %= self.world
        if rank not in self.abandoned_steps:
            self.ranks.abandon(rank)
            self.abandoned_steps[rank] = self.steps[rank]
            self.ended.add(rank)

    def teardown(self):
        if not hasattr(self, "ranks"):
            return
        for words, step in zip(self.ranks.arena_words, self.steps, strict=True):
            epoch = self.first_epoch + step
            assert words.epoch == (epoch if epoch <= LAST_EPOCH else epoch - LAST_EPOCH + 1)
        for arena in self.ranks.arenas:
            assert not arena[-CpuRanks.GUARD_BYTES :].any()


@pytest.mark.hypothesis  # as hypothesis marks tests with @given
def test_every_order_of_events_gives_the_result_of_the_messages():
    run_state_machine_as_test(ExchangesInAnyOrder)


@pytest.mark.parametrize("missing", [slice(0, 8), slice(8, 16), slice(0, 16)], ids=["first", "last", "both"])
@pytest.mark.parametrize("packet", [0, 1])
def test_a_torn_header_is_not_taken(packet, missing):
    """An exchange is incomplete as long as any half of a header's packets is missing."""
    ranks = CpuRanks(2)
    for step in range(2):
        ranks.begin(0, step)
        assert ranks.begin(1, step) == ExchangeState.DONE == ranks.wait(0)
    before = ranks.arenas[0].clone()
    ranks.begin(0, 2), ranks.begin(1, 2)
    begin = message_offset(ranks.capacity, sender=1, epoch=3, is_gpu=False) + PACKET_BYTES * packet
    half = slice(begin + missing.start, begin + missing.stop)
    stored = ranks.arenas[0][half].clone()
    assert not torch.equal(stored, before[half])
    ranks.arenas[0][half] = before[half]
    assert ranks.wait(0) == ExchangeState.PENDING
    ranks.arenas[0][half] = stored
    assert ranks.wait(0) == ExchangeState.DONE
    ranks.assert_merged(0, 2)


def test_no_exchange_mixes_the_numbers_of_two():
    """Two ranks in threads, with numbers that take a while to copy: a header before them would show."""
    ranks, wrong = CpuRanks(2, capacity=2**17), []

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
