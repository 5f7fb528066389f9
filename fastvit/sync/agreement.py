"""Agreement of the ranks before their first exchange: each writes an answer to the group's store, to compare.

Collectives cannot do this: ranks in different layers would wait in different collectives, and gloo aborts the
process when their sizes differ. Every process group of torch.distributed has a store.
"""

import contextlib
import datetime
import os
import select
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LONGEST_PAUSE = 0.02  # seconds between looks at the store
_LOOK = 0.1  # seconds between checks for ended processes


def timeout_of(process_group: "dist.ProcessGroup", device_type: str) -> float:
    """The group's timeout in seconds."""
    backend = process_group._get_backend(torch.device(device_type))
    default: datetime.timedelta = dist.distributed_c10d.default_pg_timeout
    return getattr(backend.options, "_timeout", default).total_seconds()


def process_space() -> str:
    """A name of the host and its PID namespace: equal on processes that see each other by PID.

    Raises OSError without /proc.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"host {boot}, {os.readlink('/proc/self/ns/pid')}"


class ProcessWatch:
    """Finds ranks of a group whose process has ended, zombies included.

    Ranks on other hosts are unknown, and so are all ranks where the system has no pidfd.
    """

    def __init__(self, store: "dist.Store", rank: int):
        self.processes: dict[int, int] = {}
        self._files: dict[int, int | None] = {}  # pidfds; None for a process that had ended before
        self._read = 0
        try:
            place = process_space()
        except OSError:
            place = f"rank {rank} alone"
        # Entries are numbered by place, so that a rank reads only those of its own host.
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
        """Reads the processes that have registered since the last call."""
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
    """Why ranks cannot share numbers in some way. Raised on all ranks."""


class Failed(Unavailable):
    """What ranks tried has failed on one."""


class Agreement:
    """Questions that every rank of a group answers in the same order."""

    def __init__(self, process_group: "dist.ProcessGroup", device_type: str):
        self.rank, self.world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.timeout = timeout_of(process_group, device_type)
        store = dist.PrefixStore(
            f"fastvit/{device_type}", dist.distributed_c10d._get_process_group_store(process_group)
        )
        # Several groups of one name may use a store, one after the other.
        self._store = dist.PrefixStore(str(store.add(f"made/{self.rank}", 1)), store)
        self.watch = ProcessWatch(self._store, self.rank)
        self._asked = 0

    def ask(self, question: str, answer: str) -> dict[str, list[int]]:
        """Waits for all ranks; returns the ranks by their answer, one key when they agree.

        Answers are compared with the first one, so a question costs each rank a constant number of messages.

        Raises:
            RuntimeError: on all ranks, when ranks did not answer within the group's timeout (the message
                names them), when one on this host has ended, or when one left after Ctrl-C or an error. A
                rank that answers later raises too.
        """
        self._asked += 1
        key = f"{self._asked}/"
        try:
            return self._ask(key, question, answer)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store may be destroyed
                self._store.compare_set(key + "end", "", f"rank {self.rank} left it: {type(error).__name__}")
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
        self._await(key)
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
        """The result of `work()`. Raises Failed on all ranks when it fails on one."""
        said = "done"
        try:
            result = work()
        except (OSError, RuntimeError, ValueError, ImportError, AttributeError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
        answers = self.ask(what, said)
        failed = {answer: ranks for answer, ranks in answers.items() if answer != "done"}
        if failed:
            raise Failed(answers_text(failed))
        return result

    def _await(self, key: str) -> None:
        """Waits for the end of a question by polling, so that signals are handled.

        Ends it, with the reason, when a rank ended without an answer or the time is up.
        """
        begin, pause = time.monotonic(), 1e-4
        look = begin + _LOOK

        def absent(ranks: Iterable[int]) -> list[int]:
            return [rank for rank in ranks if not self._store.check([f"{key}here/{rank}"])]

        while not self._store.check([key + "end"]):
            now, why = time.monotonic(), ""
            if now > look:
                look = now + _LOOK
                why = next(map(self.watch.text, absent(self.watch.ended())), "")
            if not why and now - begin > self.timeout:
                why = f"{ranks_text(absent(range(self.world)))} did not come within {self.timeout:g} s"
            if why:
                self._store.compare_set(key + "end", "", why)
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def answers_text(answers: dict[str, list[int]]) -> str:
    return "; ".join(f"{ranks_text(ranks)}: {answer}" for answer, ranks in answers.items())
