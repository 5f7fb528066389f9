"""Consensus of ranks and shared memory, when a rank leaves or ends at a critical moment.

Ranks are threads or take turns, so that the order of events is fixed.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fastvit.sync import process_watch, shared_memory, waiting
from fastvit.sync.collective import wait_interruptibly
from fastvit.sync.process_watch import ProcessWatch
from fastvit.sync.protocol import Tag
from fastvit.sync.shared_memory import SharedMemoryBackend
from fastvit.sync.store_consensus import StoreConsensus
from sync.one_process import describe_tag, make_consensuses

ops = torch.ops.fastvit
CAPACITY = 9


def raise_interrupt(*arguments):
    raise KeyboardInterrupt


def test_a_rank_that_leaves_is_not_waited_for(monkeypatch):
    one, two = make_consensuses(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(one, "_wait_for_all", raise_interrupt)
        one.gather_answers("a question", "yes")
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1: a question: rank 0 raised KeyboardInterrupt"):
        two.gather_answers("a question", "yes")
    assert time.monotonic() - begin < 5
    with ThreadPoolExecutor(2) as pool:  # and the next question is the same one to both
        answers = list(pool.map(lambda consensus: consensus.gather_answers("another", "yes"), (one, two)))
    assert answers == [{"yes": [0, 1]}] * 2


@pytest.fixture
def backends():
    """Returns the backends of two ranks over one segment."""
    segment = torch.zeros(2 * ops.arena_bytes(2, CAPACITY), dtype=torch.uint8)
    return [SharedMemoryBackend(segment, CAPACITY, one, describe_tag) for one in make_consensuses(2, 10.0)]


def test_the_message_of_a_rank_that_has_ended_counts(backends):
    """The peer's message arrives between this rank's poll and its check whether the peer lives."""
    numbers = torch.arange(6.0)[None]
    pool = ThreadPoolExecutor(1)

    def has_ended(rank):
        pool.submit(backends[1].merge_over_ranks, numbers, Tag(0, 1)).result(10)
        backends[0]._process_watch.has_ended = lambda rank: True
        return True

    backends[0]._process_watch.has_ended = has_ended
    assert torch.equal(backends[0].merge_over_ranks(numbers, Tag(0, 1)), torch.cat([numbers, 2 * numbers]))
    with pytest.raises(RuntimeError, match="rank 0 in backward of layer 0, step 2: rank 1 has ended"):
        backends[0].merge_over_ranks(numbers, Tag(0, 2))


def test_an_interrupted_exchange_fails_at_once_on_the_peer(backends, monkeypatch):
    """The peer raises at once, and no later exchange begins."""
    numbers = torch.arange(6.0)[None]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backends[0]._process_watch, "has_ended", raise_interrupt)
        backends[0].merge_over_ranks(numbers, Tag(0, 1))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="backward of layer 0, step 1: rank 0 abandoned the exchange"):
        backends[1].merge_over_ranks(numbers, Tag(0, 1))
    assert time.monotonic() - begin < 5
    for backend, reason in zip(backends, ("KeyboardInterrupt", "rank 1 in backward"), strict=True):
        with pytest.raises(RuntimeError, match=rf"an exchange of this group has failed \({reason}"):
            backend.merge_over_ranks(numbers, Tag(0, 2))


class Killed(Exception):
    """Ends a rank at once, as a signal would."""


@pytest.mark.parametrize("last_call", ["add", "compare_set"])
def test_a_rank_that_ends_while_it_answers_is_not_waited_for(last_call, monkeypatch):
    """It has come last, and may have been counted: the others do not wait for its "all"."""
    one, two = make_consensuses(2, timeout=20.0)
    is_killed = threading.Event()

    class StoreOfKilledRank:
        def __getattr__(self, name):
            def call(*arguments):
                if is_killed.is_set():
                    raise Killed  # what the rank does on its way out, too
                result = getattr(two._store, name)(*arguments)
                if name == last_call:
                    is_killed.set()
                return result

            return call

    dying = StoreConsensus.__new__(StoreConsensus)
    dying.__dict__.update(two.__dict__, _store=StoreOfKilledRank())
    monkeypatch.setattr(one.process_watch, "find_ended_ranks", lambda: [1] * is_killed.is_set())
    monkeypatch.setattr(one.process_watch, "ended_message", lambda rank: f"rank {rank} has ended")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one.gather_answers, "a question", "yes")
        while not one._store.check(["1/here/0"]):
            assert not answer.done()
        with pytest.raises(Killed):
            dying.gather_answers("a question", "yes")
        with pytest.raises(RuntimeError, match="rank 0: a question: rank 1 has ended"):
            answer.result(timeout=5)


class NeverEnds:
    """A collective over gloo that has missed the end of a connection."""

    def wait(self, timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


def test_a_collective_that_misses_the_end_of_a_rank_is_ended(monkeypatch):
    one, _ = make_consensuses(2)
    one.process_watch.read_registrations()
    monkeypatch.setattr(one.process_watch, "has_ended", lambda rank: rank == 1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        wait_interruptibly(NeverEnds(), one.process_watch)
    assert 1 < time.monotonic() - begin < 10


STORE_SCRIPT = """
import datetime, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("signal_number", "reason"),
    [(signal.SIGSTOP, "did not answer within 1 s"), (signal.SIGKILL, "cannot be reached: ")],
    ids=["frozen", "ended"],
)
def test_a_store_that_does_not_answer_is_an_error_in_time(signal_number, reason):
    """A question of TCPStore has no timeout of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        consensus = StoreConsensus(client, 0, 1, 1.0)
        assert consensus.gather_answers("a question", "yes") == {"yes": [0]}
        process.send_signal(signal_number)
        # A signal acts later: until then a thread of the store answers.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=f"^rank 0: first call of layer 3: the store .* {reason}"):
            consensus.gather_answers("first call of layer 3", "yes")
        assert time.monotonic() - begin < 4
    finally:
        process.kill()
        process.wait(10)


def test_the_pauses_of_a_waiting_rank_grow(monkeypatch):
    """Short pauses give a low latency; long ones take little CPU time."""
    (one,) = make_consensuses(1)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 12:
            one._store.set("end", "")

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    one._wait_for_all("")
    assert pauses == [1e-4 * 2**n for n in range(8)] + [0.02] * 4


def test_only_processes_that_were_seen_are_said_to_have_ended():
    """The processes of another host are unknown."""
    store = dist.HashStore()
    watch = ProcessWatch(store, 0)
    watch_of_another_host = ProcessWatch(dist.PrefixStore("another host", store), 3)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]

    def register(rank, start):
        process = children[rank - 1].pid
        watch._store.set(str(watch._store.add("count", 1)), f"{rank} {process} {start}")

    register(1, process_watch._process_start_ticks(children[0].pid))
    children[0].kill(), children[0].wait()  # before this rank has seen it
    register(2, process_watch._process_start_ticks(children[1].pid))
    register(4, "1")  # a process of the clone of this host has the same number
    assert watch.find_ended_ranks() == [] and not watch.has_ended(2)
    children[1].kill(), children[3].kill()
    os.waitid(os.P_PID, children[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert watch.find_ended_ranks() == [2]
    assert watch.ended_message(2) == f"rank 2 has ended (process {children[1].pid})"
    children[2].kill()
    for child in children:
        child.wait()
    assert not watch.has_ended(3) and not watch.has_ended(4)
    assert watch_of_another_host.find_ended_ranks() == []


SEGMENT_BYTES, MARK = 4096, bytes(range(16))
FILES = {
    "segment with a name": bytes(SEGMENT_BYTES) + MARK,
    "another mark": bytes(SEGMENT_BYTES + 16),
    "short": b"data",
}


@pytest.mark.parametrize("file_kind", FILES)
def test_a_file_that_is_not_the_segment_of_rank_0_is_not_touched(file_kind, tmp_path):
    """On a clone of rank 0's virtual machine its path may be of any file."""
    path = tmp_path / "data"
    path.write_bytes(FILES[file_kind])
    has_name = file_kind == "segment with a name"
    with path.open("r+b") as file:
        if not has_name:
            path.unlink()
        descriptor_path = f"/proc/self/fd/{file.fileno()}"
        with pytest.raises(OSError, match="is not the segment of rank 0"):
            shared_memory._map_segment(descriptor_path, SEGMENT_BYTES, MARK)
        assert os.pread(file.fileno(), 2 * SEGMENT_BYTES, 0) == FILES[file_kind]
        if has_name:
            path.unlink()
            assert shared_memory._map_segment(descriptor_path, SEGMENT_BYTES, MARK).numel() == SEGMENT_BYTES
