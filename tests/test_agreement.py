"""Questions to all ranks, and memory in common, when a rank leaves or ends at the worst moment.

Ranks are threads or take turns: what happens when can then be said.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fastvit.statistics.agreement import Agreement, Watch
from fastvit.statistics.exchange import Tag
from fastvit.statistics.shared_memory import SharedMemory

ops = torch.ops.fastvit
CAPACITY = 9


def agreements(world, timeout=20.0):
    store, made = dist.HashStore(), []
    for rank in range(world):
        made.append(Agreement.__new__(Agreement))  # the store of a group, without the group
        made[-1].__dict__.update(rank=rank, world=world, timeout=timeout, _store=store, _asked=0)
        made[-1].watch = Watch(store, rank)
    return made


def interrupted_ask(agreement, question, answer, meanwhile=lambda: None):
    """Ctrl-C while the agreement waits, after `meanwhile`."""

    def wait(key, **options):
        meanwhile()
        raise KeyboardInterrupt

    agreement._await = wait
    with pytest.raises(KeyboardInterrupt):
        agreement.ask(question, answer)
    del agreement._await


def test_a_rank_that_leaves_is_not_waited_for():
    one, two = agreements(2)
    interrupted_ask(one, "a question", "yes")
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1: a question: rank 0 left it: KeyboardInterrupt"):
        two.ask("a question", "yes")
    assert time.monotonic() - begin < 5
    with ThreadPoolExecutor(2) as pool:  # and the next question is the same one to both
        assert set(map(str, pool.map(lambda a: a.ask("another", "yes"), (one, two)))) == {"{'yes': [0, 1]}"}


def test_a_rank_that_leaves_when_all_had_come_catches_up():
    one, two = agreements(2)

    def others_go_on():
        assert two.ask("a question", "no") == {"yes": [0], "no": [1]}

    interrupted_ask(one, "a question", "yes", others_go_on)
    assert one.ask("a question", "yes") == {"yes": [0], "no": [1]}
    with ThreadPoolExecutor(2) as pool:
        assert set(map(str, pool.map(lambda a: a.ask("another", "yes"), (one, two)))) == {"{'yes': [0, 1]}"}


@pytest.fixture
def pair():
    segment = torch.zeros(ops.peer_segment_bytes(2, CAPACITY), dtype=torch.uint8)
    describe = lambda tag, direction: f"{direction} of layer {tag.layer}, step {tag.step}"  # noqa: E731
    return [SharedMemory(segment, CAPACITY, agreement, describe) for agreement in agreements(2, 10.0)]


def test_a_rank_that_sends_and_ends_has_sent(pair):
    """Its message comes after this rank has looked for it, and before it looks whether the rank is alive."""
    numbers = torch.arange(6.0)

    def has_ended(rank):
        pair[1].start_sum(numbers, Tag(0, 1))
        pair[0]._watch.has_ended = lambda rank: True
        return True

    pair[0]._watch.has_ended = has_ended
    assert torch.equal(pair[0].start_sum(numbers, Tag(0, 1)).wait(), 2 * numbers)
    with pytest.raises(RuntimeError, match="rank 0 in backward of layer 0, step 2: rank 1 has ended"):
        pair[0].start_sum(numbers, Tag(0, 2)).wait()


def test_sums_that_nobody_awaited(pair):
    """After an error between sending and awaiting, the rank says so, the peer is told, and both go on."""
    numbers = torch.arange(6.0)
    pair[0].start_sum(numbers, Tag(0, 1))
    with pytest.raises(
        RuntimeError, match="rank 0: an exchange was begun .* never ended: backward of layer 0"
    ):
        pair[0].next_step()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 in backward of layer 0, step 1: rank 0 gave up"):
        pair[1].start_sum(numbers, Tag(0, 1)).wait()
    assert time.monotonic() - begin < 5
    threads = [threading.Thread(target=member.next_step) for member in pair]  # they meet again
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    pending = [member.start_sum(numbers, Tag(0, 2)) for member in pair]
    assert all(torch.equal(one.wait(), 2 * numbers) for one in pending)
