"""Agreement of the ranks before their first exchange: each writes an answer to the group's store, to compare.

Collectives cannot do this: ranks in different layers would wait in different collectives, and gloo aborts the
process when their sizes differ. Every process group of torch.distributed has a store.
"""

import contextlib
import datetime
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LONGEST_PAUSE = 0.02  # seconds between looks at the store
_GRACE = 1.0  # seconds after a timeout in which a store must answer
_LOOK = 0.1  # seconds between checks for ended processes
_NAMED = 8  # ranks in a message


def timeout_of(process_group: "dist.ProcessGroup", device_type: str) -> float:
    """The group's timeout in seconds."""
    backend = process_group._get_backend(torch.device(device_type))
    default: datetime.timedelta = dist.distributed_c10d.default_pg_timeout
    return getattr(backend.options, "_timeout", default).total_seconds()


def in_time(work: Callable[[], T], seconds: float) -> T:
    """Runs `work()` in another thread and returns its result.

    Raises TimeoutError after `seconds`; the thread continues. When the process that holds a store is frozen
    or unreachable, a request waits in C++ without a timeout and ignores signals.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may include None


def polled(seconds: float) -> Iterator[float]:
    """Yields the seconds since its start until `seconds` have passed, with growing pauses."""
    begin, pause = time.monotonic(), 1e-4
    while (waited := time.monotonic() - begin) <= seconds:
        yield waited
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def boot_id() -> str:
    """A name of this machine alone, which clones of a virtual machine share; OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """A name of the host and its PID namespace: equal on processes that see each other by PID.

    Raises OSError without /proc.
    """
    return f"host {boot_id()}, {os.readlink('/proc/self/ns/pid')}"


def _start_of(process: int | str) -> str:
    """When a process started, in ticks since the boot; with its PID it names the process."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


class ProcessWatch:
    """Finds ranks of a group whose process was seen on this host and has ended, zombies included.

    Ranks on other hosts are unknown, and so are all ranks where the system has no pidfd. Clones of one
    virtual machine name their host and their processes alike, so a process that is not found is unknown too.
    """

    def __init__(self, store: "dist.Store", rank: int):
        self.processes: dict[int, int] = {}
        self._files: dict[int, int] = {}  # pidfds
        self._read = 0
        try:
            host, start = process_space(), _start_of("self")
        except OSError:
            host, start = f"rank {rank} alone", "unknown"
        # Entries are numbered for each host, so that a rank reads only those of its own.
        self._store = dist.PrefixStore(host, store)
        self._store.set(str(self._store.add("count", 1)), f"{rank} {os.getpid()} {start}")
        weakref.finalize(self, _close, self._files)

    def has_ended(self, rank: int) -> bool:
        if rank not in self._files:
            return False
        poll = select.poll()
        poll.register(self._files[rank], select.POLLIN)
        return bool(poll.poll(0))

    def ended(self) -> list[int]:
        self.learn()
        return [rank for rank in self._files if self.has_ended(rank)]

    def learn(self) -> None:
        """Reads the processes that have registered since the last call."""
        while self._store.check([key := str(self._read + 1)]):
            rank, process, start = self._store.get(key).decode().split()
            self._read += 1
            self.processes[int(rank)] = int(process)
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or there is no pidfd
                file = os.pidfd_open(int(process))
                if _start_of(process) == start:
                    self._files[int(rank)] = file
                else:
                    os.close(file)

    def text(self, rank: int) -> str:
        return f"rank {rank} has ended (process {self.processes[rank]})"


def _close(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)


class Unavailable(Exception):
    """The ranks cannot use a backend; the message says why. Raised on all ranks."""


class Failed(Unavailable):
    """An attempt to use a backend failed on at least one rank."""


class Agreement:
    """Questions that every rank of a group answers in the same order.

    `store` is one that no other agreement has used.
    """

    def __init__(self, store: "dist.Store", rank: int, world: int, timeout: float):
        self.rank, self.world, self.timeout, self._store = rank, world, timeout, store
        self.watch = ProcessWatch(store, rank)
        self._asked = 0

    @classmethod
    def of(cls, process_group: "dist.ProcessGroup", device_type: str) -> "Agreement":
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        timeout = timeout_of(process_group, device_type)
        store = dist.PrefixStore(
            f"fastvit/{device_type}", dist.distributed_c10d._get_process_group_store(process_group)
        )

        def make() -> Agreement:
            # Several groups of one name may use a store, one after the other.
            return cls(dist.PrefixStore(str(store.add(f"made/{rank}", 1)), store), rank, world, timeout)

        return answered(f"rank {rank}: first call of a layer", make, timeout)

    def watched(self) -> ProcessWatch:
        """`watch`, after reading all ranks that have registered, since the store may be gone later."""
        answered(f"rank {self.rank}: first call of a layer", self.watch.learn, self.timeout)
        return self.watch

    def ask(self, question: str, answer: str) -> dict[str, list[int]]:
        """Waits for all ranks; returns the ranks by their answer, one key when they agree.

        Answers are compared with the first one, so a question costs each rank a constant number of messages
        when they agree.

        Raises:
            RuntimeError: on all ranks, when ranks did not answer within the group's timeout (the message
                names them), when one on this host has ended, when one left after Ctrl-C or an error, or when
                the store does not answer. A rank that answers later raises too.
        """
        return self._ask(question, answer, self._answers)

    def same(self, question: str, answer: str) -> bool:
        """Whether all answers are equal: `ask` at the same cost where they are not."""
        return self._ask(question, answer, lambda key, first: not self._store.check([key + "differ"]))

    def _ask(self, question: str, answer: str, read: Callable[[str, str], T]) -> T:
        self._asked += 1
        key = f"{self._asked}/"
        context = f"rank {self.rank}: {question}"
        try:
            return answered(context, lambda: read(key, self._answer(key, context, answer)), self.timeout)
        except BaseException as error:
            left = f"rank {self.rank} left it: {type(error).__name__}"
            with contextlib.suppress(RuntimeError):  # the store may be destroyed
                answered(context, lambda: self._store.compare_set(key + "end", "", left), 0)
            raise

    def _answer(self, key: str, context: str, answer: str) -> str:
        """Answers, waits for all ranks, and returns the first answer."""
        first = self._store.compare_set(key + "answer", "", answer).decode()
        if first != answer:
            self._store.set(f"{key}other/{self.rank}", answer)
            self._store.set(key + "differ", "yes")
        if self._store.add(key + "count", 1) == self.world:
            self._store.compare_set(key + "end", "", "all")
        # Written last: a rank that was killed before may not have been counted, or not have written "all".
        self._store.set(f"{key}here/{self.rank}", "")
        self._await(key)
        end = self._store.get(key + "end").decode()
        if end != "all":
            # Rank 0 may hold the store, so the others read the end first.
            time.sleep(_LOOK if self.rank == 0 else 0)
            raise RuntimeError(f"{context}: {end}")
        self.watch.learn()  # while all are alive
        return first

    def _answers(self, key: str, first: str) -> dict[str, list[int]]:
        answers = {first: list(range(self.world))}
        if self._store.check([key + "differ"]):
            for rank in range(self.world):
                if self._store.check([other := f"{key}other/{rank}"]):
                    answers[first].remove(rank)
                    answers.setdefault(self._store.get(other).decode(), []).append(rank)
            # The caller may raise, and the end of rank 0 may end the store.
            done = self._store.add(key + "read", 1)
            for _ in polled(_GRACE if self.rank == 0 else -1):
                if done == self.world:
                    break
                done = self._store.add(key + "read", 0)
        return answers

    def together(self, context: str, work: Callable[[], T]) -> T:
        """The result of `work()`. Raises Failed on all ranks when it fails on one."""
        said = "done"
        try:
            result = work()
        except (OSError, RuntimeError, ValueError, ImportError, AttributeError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
        answers = self.ask(context, said)
        failed = {answer: ranks for answer, ranks in answers.items() if answer != "done"}
        if failed:
            raise Failed(answers_text(failed))
        return result

    def _await(self, key: str) -> None:
        """Waits for the end of a question.

        Ends it, with the reason, when a rank ended without an answer or the time is up.
        """
        look = _LOOK

        def absent(ranks: Iterable[int]) -> list[int]:
            return [rank for rank in ranks if not self._store.check([f"{key}here/{rank}"])]

        for waited in polled(self.timeout):
            if self._store.check([key + "end"]):
                return
            if waited > look:
                look = waited + _LOOK
                if ended := absent(self.watch.ended()):
                    why = self.watch.text(ended[0])
                    break
        else:
            why = f"{ranks_text(absent(range(self.world)))} did not come within {self.timeout:g} s"
        self._store.compare_set(key + "end", "", why)


def answered(context: str, work: Callable[[], T], timeout: float) -> T:
    """The result of `work()`, which uses a store. Raises RuntimeError when the store does not answer."""
    try:
        return in_time(work, timeout + _GRACE)
    except TimeoutError:
        why = f"did not answer within {timeout:g} s"
    except dist.DistError as error:  # the connection broke
        why = f"cannot be reached: {str(error).splitlines()[0]}"
    raise RuntimeError(
        f"{context}: the store of the ranks, in the process of rank 0 or of its launcher, {why}"
    )


def ranks_text(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def answers_text(answers: dict[str, list[int]]) -> str:
    by_rank = sorted(answers.items(), key=lambda one: one[1])
    return "; ".join(f"{ranks_text(ranks)}: {answer}" for answer, ranks in by_rank)
