"""Every interleaving of a model of csrc/sync/protocol.h: one slot loses packets or deadlocks, two do not.

A rank's stores become visible one by one, in any order, at any later time; only stores to one place have a
fixed order. A rank reads the packets of an exchange in any order, each when its epoch has arrived, and then
begins the next exchange. The model has epochs in place of words: a packet is correct when its epoch is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Rank(NamedTuple):
    epoch: int  # of the exchange it is in; 1 is the first
    pending: tuple  # ((peer, slot, packet), epoch): stores not yet visible, oldest first
    unread: frozenset  # (peer, packet) still to be read in this exchange


class State(NamedTuple):
    ranks: tuple
    memory: tuple  # memory[receiver]: sorted ((sender, slot, packet), epoch)


class Model:
    def __init__(self, world: int, exchanges: int, packets: int, slots: int):
        self.world, self.exchanges, self.packets, self.slots = world, exchanges, packets, slots

    def start(self) -> State:
        ranks = tuple(self._enter(rank, 1, ()) for rank in range(self.world))
        return State(ranks, tuple(() for _ in range(self.world)))

    def _enter(self, rank: int, epoch: int, pending: tuple) -> Rank:
        """Pushes an exchange without waiting; then all packets of its peers are unread."""
        if epoch > self.exchanges:
            return Rank(epoch, pending, frozenset())
        peers = [peer for peer in range(self.world) if peer != rank]
        places = [(peer, epoch % self.slots, packet) for peer in peers for packet in range(self.packets)]
        unread = frozenset((peer, packet) for peer in peers for packet in range(self.packets))
        return Rank(epoch, pending + tuple((place, epoch) for place in places), unread)

    def next(self, state: State) -> Iterator[State]:
        for rank in range(self.world):
            yield from self._stores(state, rank)
            yield from self._reads(state, rank)

    def _stores(self, state: State, rank: int) -> Iterator[State]:
        own, seen = state.ranks[rank], set()
        for i, ((receiver, slot, packet), epoch) in enumerate(own.pending):
            if (receiver, slot, packet) in seen:
                continue  # an older store to the same place comes first
            seen.add((receiver, slot, packet))
            inbox = dict(state.memory[receiver])
            inbox[rank, slot, packet] = epoch
            memory = _with(state.memory, receiver, tuple(sorted(inbox.items())))
            left = own._replace(pending=own.pending[:i] + own.pending[i + 1 :])
            yield State(_with(state.ranks, rank, left), memory)

    def _reads(self, state: State, rank: int) -> Iterator[State]:
        own, inbox = state.ranks[rank], dict(state.memory[rank])
        for peer, packet in own.unread:
            if inbox.get((peer, own.epoch % self.slots, packet)) != own.epoch:
                continue
            unread = own.unread - {(peer, packet)}
            after = own._replace(unread=unread)
            if not unread:
                after = self._enter(rank, own.epoch + 1, own.pending)
            yield State(_with(state.ranks, rank, after), state.memory)

    def finished(self, state: State) -> bool:
        return all(rank.epoch > self.exchanges and not rank.pending for rank in state.ranks)

    def lost(self, state: State) -> bool:
        """A packet that is still to be read has been overwritten by a later one."""
        for rank, inbox in zip(state.ranks, state.memory, strict=True):
            there = dict(inbox)
            for peer, packet in rank.unread:
                if there.get((peer, rank.epoch % self.slots, packet), 0) > rank.epoch:
                    return True
        return False


def _with(items: tuple, index: int, item) -> tuple:
    return items[:index] + (item,) + items[index + 1 :]


def explore(model: Model) -> tuple[int, str]:
    """The number of reachable states, and a fault of one of them."""
    seen = {model.start()}
    stack = list(seen)
    while stack:
        state = stack.pop()
        if model.lost(state):
            return len(seen), "lost"
        following = list(model.next(state))
        if not following and not model.finished(state):
            return len(seen), "deadlock"
        for new in following:
            if new not in seen:
                seen.add(new)
                stack.append(new)
    return len(seen), ""


@pytest.mark.parametrize("world,exchanges,packets", [(2, 3, 2), (2, 5, 3), (3, 3, 1), (3, 4, 1)])
def test_two_slots_are_enough(world, exchanges, packets):
    states, wrong = explore(Model(world, exchanges, packets, slots=2))
    assert not wrong and states > 300


@pytest.mark.parametrize("world,packets", [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_one_slot_is_not(world, packets):
    assert explore(Model(world, 3, packets, slots=1))[1] == "lost"
