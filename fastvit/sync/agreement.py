"""Agreement of the ranks before their first exchange: answers in the group's store, compared.

Collectives cannot do this: ranks in different layers would wait in different collectives, and gloo ends the
process when their sizes differ. Every group of torch.distributed has a store.
"""

import contextlib
import datetime
import os
import select
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LONGEST_PAUSE = 0.02  # seconds between looks at the store
_LOOK = 0.1  # seconds of waiting between looks at processes that have ended


def timeout_of(group: "dist.ProcessGroup", device_type: str) -> float:
    """The group's timeout in seconds."""
    backend = group._get_backend(torch.device(device_type))
    default: datetime.timedelta = dist.distributed_c10d.default_pg_timeout
    return getattr(backend.options, "_timeout", default).total_seconds()


def process_space() -> str:
    """The same for processes of one host that see each other by number. Raises OSError without /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {boot}, {os.readlink('/proc/self/ns/pid')}"


class ProcessWatch:
    """Which processes of a group's ranks have ended, zombies included.

    Nothing is known of ranks on other hosts, nor where the system has no pidfd.
    """

    def __init__(self, store: "dist.Store", rank: int):
        self.processes: dict[int, int] = {}
        self._files: dict[int, int | None] = {}  # None: ended before it was looked for
        self._read = 0
        try:
            place = process_space()
        except OSError:
            place = f"rank {rank} alone"
        # Numbered by place, so that a rank reads no more entries than its host has ranks.
        self._store = dist.PrefixStore(place, store)
        self._store.set(str(self._store.add("count", 1)), f"{rank} {os.getpid()}")
        weakref.finalize(self, _close, self._files)

    def has_ended(self, rank: int) -> bool:
        if rank not in self._files:
            return False
        file = self._files[rank]
        if file is None:
            return True
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))

    def ended(self) -> list[int]:
        self.learn()
        return [rank for rank in self._files if self.has_ended(rank)]

    def learn(self) -> None:
        """Reads which processes have come since."""
        while self._store.check([key := str(self._read + 1)]):
            rank, process = map(int, self._store.get(key).split())
            self._read += 1
            self.processes[rank] = process
            with contextlib.suppress(OSError, AttributeError):  # no pidfd
                try:
                    self._files[rank] = os.pidfd_open(process)
                except ProcessLookupError:
                    self._files[rank] = None

    def text(self, rank: int) -> str:
        return f"rank {rank} has ended (process {self.processes[rank]})"


def _close(files: dict[int, int | None]) -> None:
    for file in files.values():
        if file is not None:
            os.close(file)


class Unavailable(Exception):
    """Why ranks cannot share numbers in some way; all ranks get it alike."""


class Agreement:
    """Questions that every rank of a group answers in the same order."""

    def __init__(self, group: "dist.ProcessGroup", device_type: str):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.group_name = group.group_name
        self.timeout = timeout_of(group, device_type)
        store = dist.PrefixStore(
            f"fastvit/{device_type}", dist.distributed_c10d._get_process_group_store(group)
        )
        # One store may outlive several groups of one name, which come after each other.
        self._store = dist.PrefixStore(str(store.add(f"made/{self.rank}", 1)), store)
        self.watch = ProcessWatch(self._store, self.rank)
        self._asked = 0

    def ask(self, question: str, answer: str) -> dict[str, list[int]]:
        """The ranks by what they answered; one key when they agree. Waits for all of them.

        Raises RuntimeError, naming the ranks that did not come, after the group's timeout, or as soon as one
        on this host has ended; a rank that comes later raises too. All do when one leaves, after Ctrl-C or an
        error. The first answer is the one others are compared with, so a question costs each rank a handful
        of messages in a group of any size.
        """
        self._asked += 1
        key = f"{self._asked}/"
        try:
            return self._ask(key, question, answer)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                left = f"rank {self.rank} left it: {type(error).__name__}"
                if self._store.compare_set(key + "end", "", left) == b"all":
                    self._asked -= 1  # the others go on: this rank catches up when it asks again
            raise

    def _ask(self, key: str, question: str, answer: str) -> dict[str, list[int]]:
        first = self._store.compare_set(key + "answer", "", answer).decode()
        if first != answer:
            self._store.set(f"{key}other/{self.rank}", answer)
            self._store.set(key + "differ", "yes")
        if self._store.add(key + "count", 1) == self.world:
            self._store.compare_set(key + "end", "", "all")
        # Last: a rank that was killed before this line may not have been counted, or not have said "all".
        self._store.set(f"{key}here/{self.rank}", "")
        self._await(
            key + "end",
            came=lambda rank: self._store.check([f"{key}here/{rank}"]),
            end=lambda why: self._store.compare_set(key + "end", "", why),
        )
        end = self._store.get(key + "end").decode()
        if end != "all":
            raise RuntimeError(f"rank {self.rank}: {question}: {end}")
        answers = {first: list(range(self.world))}
        if self._store.check([key + "differ"]):
            for rank in range(self.world):
                if self._store.check([other := f"{key}other/{rank}"]):
                    answers[first].remove(rank)
                    answers.setdefault(self._store.get(other).decode(), []).append(rank)
        return answers

    def together(self, what: str, work: Callable[[], T]) -> T:
        """What `work()` gives. Raises Unavailable on all ranks when it fails on one."""
        said = "done"
        try:
            result = work()
        except (OSError, RuntimeError, ValueError, ImportError, AttributeError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
        answers = self.ask(what, said)
        failed = {answer: ranks for answer, ranks in answers.items() if answer != "done"}
        if failed:
            raise Unavailable(answers_text(failed))
        return result

    def from_rank_0(self, what: str, value: str) -> str:
        """Rank 0's `value`, on every rank."""
        self._asked += 1
        key = f"{self._asked}/told"
        if self.rank == 0:
            self._store.set(key, value)
            return value

        def end(why: str) -> None:
            raise RuntimeError(f"rank {self.rank}: {what}: {why}")

        self._await(key, came=lambda rank: rank != 0 or self._store.check([key]), end=end)
        return self._store.get(key).decode()

    def _await(self, key: str, came: Callable[[int], bool], end: Callable[[str], object]) -> None:
        """Waits by looking, so that signals are seen.

        `end` is called once, with why, when a rank that has ended had not come before, or time is up.
        """
        begin, pause = time.monotonic(), 1e-4
        look = begin + _LOOK
        while not self._store.check([key]):
            now = time.monotonic()
            if now > look:
                look = now + _LOOK
                for rank in self.watch.ended():
                    if not came(rank):
                        end(self.watch.text(rank))
                        return
            if now - begin > self.timeout:
                absent = [rank for rank in range(self.world) if not came(rank)]
                end(f"{ranks_text(absent)} did not come within {self.timeout:g} s")
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def answers_text(answers: dict[str, list[int]]) -> str:
    return "; ".join(f"{ranks_text(ranks)}: {answer}" for answer, ranks in answers.items())
