"""`StoreConsensus` compares answers of all ranks, which they write into the process group's store.

Ranks compare layers before the first exchange. Collectives cannot compare layers: ranks in different layers
would wait in different collectives, and gloo aborts the process when the sizes of a collective differ. Every
process group of torch.distributed has a store.

The keys of a question begin with its number. `answer` is the first answer; `other/<rank>` is an answer that
differs from the first, and `differ` exists if one does; `count` is the number of ranks that have answered,
and `here/<rank>` exists if a rank has; `end` is "all" or an error; `read` counts ranks that read the answers.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

from .process_watch import ProcessWatch
from .waiting import poll_with_backoff, run_with_timeout

T = TypeVar("T")
_STORE_GRACE_SECONDS = 1.0  # A store must answer within a timeout and this time.
_PROCESS_CHECK_SECONDS = 0.1  # The time between two checks for ended processes.
_MAX_RANKS_SHOWN = 8  # A message names so many ranks, and counts the others.


def group_timeout(process_group: "dist.ProcessGroup", device_type: str) -> float:
    """Returns the timeout of a process group in seconds."""
    c10d_backend = process_group._get_backend(torch.device(device_type))
    default: datetime.timedelta = dist.distributed_c10d.default_pg_timeout
    return getattr(c10d_backend.options, "_timeout", default).total_seconds()


class BackendUnavailable(Exception):
    """Raised on all ranks if they cannot use a backend; the message says why."""


class BackendSetupFailed(BackendUnavailable):
    """Raised on all ranks if an attempt to use a backend failed on one of them."""


class StoreConsensus:
    """Asks questions that every rank of a group answers in the same order.

    No other StoreConsensus may have used `store`.
    """

    def __init__(self, store: "dist.Store", rank: int, world_size: int, timeout: float):
        self.rank, self.world_size, self.timeout, self._store = rank, world_size, timeout, store
        self.process_watch = ProcessWatch(store, rank)
        self._num_questions = 0

    @classmethod
    def for_group(cls, process_group: "dist.ProcessGroup", device_type: str) -> "StoreConsensus":
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        timeout = group_timeout(process_group, device_type)
        store = dist.PrefixStore(
            f"fastvit/{device_type}", dist.distributed_c10d._get_process_group_store(process_group)
        )

        def create() -> StoreConsensus:
            # Groups of one name may use a store one after another, so the count is part of the prefix.
            count = store.add(f"made/{rank}", 1)
            return cls(dist.PrefixStore(str(count), store), rank, world_size, timeout)

        return run_store_request(f"rank {rank}: first call of a layer", create, timeout)

    def refreshed_process_watch(self) -> ProcessWatch:
        """Returns `process_watch` after it has read all registrations, since the store may be gone later."""
        read = self.process_watch.read_registrations
        run_store_request(f"rank {self.rank}: first call of a layer", read, self.timeout)
        return self.process_watch

    def gather_answers(self, question: str, answer: str) -> dict[str, list[int]]:
        """Waits for all ranks, and returns the ranks by their answers: a dict of one key if all ranks agree.

        Each rank compares its answer with the first answer, so a question costs a rank a constant number of
        messages if all ranks agree.

        Raises:
            RuntimeError: on all ranks, if ranks did not answer within the group's timeout (the message
                names these ranks), a rank on this host has ended, a rank raised KeyboardInterrupt or another
                error, or the store does not answer. A rank that answers after the end raises too.
        """
        return self._run_question(question, answer, self._ranks_by_answer)

    def all_ranks_equal(self, question: str, answer: str) -> bool:
        """Returns whether all answers are equal; cheaper than `gather_answers` if the answers differ."""
        return self._run_question(
            question, answer, lambda key, first_answer: not self._store.check([key + "differ"])
        )

    def run_on_all_ranks(self, question: str, function: Callable[[], T]) -> T:
        """Returns the result of `function()`. Raises BackendSetupFailed on all ranks if one rank fails."""
        outcome = "done"
        try:
            result = function()
        except (OSError, RuntimeError, ValueError, ImportError, AttributeError) as error:
            outcome = (str(error).splitlines() or [type(error).__name__])[0]
        failures = self.gather_answers(question, outcome)
        failures.pop("done", None)
        if failures:
            raise BackendSetupFailed(format_answers(failures))
        return result

    def _run_question(self, question: str, answer: str, read_result: Callable[[str, str], T]) -> T:
        """Returns `read_result(key, first answer)` for a question. If this rank raises, all ranks raise."""
        self._num_questions += 1
        key = f"{self._num_questions}/"
        context = f"rank {self.rank}: {question}"
        try:
            return run_store_request(
                context, lambda: read_result(key, self._submit_and_wait(key, context, answer)), self.timeout
            )
        except BaseException as error:
            end = f"rank {self.rank} raised {type(error).__name__} before all ranks had answered"
            with contextlib.suppress(RuntimeError):  # The store may be destroyed already.
                run_store_request(context, lambda: self._store.compare_set(key + "end", "", end), 0)
            raise

    def _submit_and_wait(self, key: str, context: str, answer: str) -> str:
        """Writes this rank's answer, waits for those of all ranks, and returns the first answer."""
        first_answer = self._store.compare_set(key + "answer", "", answer).decode()
        if first_answer != answer:
            self._store.set(f"{key}other/{self.rank}", answer)
            self._store.set(key + "differ", "yes")
        if self._store.add(key + "count", 1) == self.world_size:
            self._store.compare_set(key + "end", "", "all")
        # This key comes last: a rank that was killed before may be missing in "count", or may have written no
        # "end", so the other ranks must take this rank for absent.
        self._store.set(f"{key}here/{self.rank}", "")
        self._wait_for_all(key)
        end = self._store.get(key + "end").decode()
        if end != "all":
            # Rank 0 may host the store, so it lets the other ranks read the end marker before it raises.
            time.sleep(_PROCESS_CHECK_SECONDS if self.rank == 0 else 0)
            raise RuntimeError(f"{context}: {end}")
        self.process_watch.read_registrations()  # Read while all ranks are alive.
        return first_answer

    def _ranks_by_answer(self, key: str, first_answer: str) -> dict[str, list[int]]:
        answers = {first_answer: list(range(self.world_size))}
        if self._store.check([key + "differ"]):
            for rank in range(self.world_size):
                if self._store.check([other_key := f"{key}other/{rank}"]):
                    answers[first_answer].remove(rank)
                    answers.setdefault(self._store.get(other_key).decode(), []).append(rank)
            # The caller may raise, and the end of rank 0 may end the store. So rank 0 waits for the other
            # ranks. With the limit -1 the other ranks do not poll at all.
            num_readers = self._store.add(key + "read", 1)
            for _ in poll_with_backoff(_STORE_GRACE_SECONDS if self.rank == 0 else -1):
                if num_readers == self.world_size:
                    break
                num_readers = self._store.add(key + "read", 0)
        return answers

    def _wait_for_all(self, key: str) -> None:
        """Waits for the end of a question.

        If a rank ends without an answer, or the timeout is over, this rank ends the question with the reason.
        """
        next_process_check = _PROCESS_CHECK_SECONDS

        def select_absent(ranks: Iterable[int]) -> list[int]:
            return [rank for rank in ranks if not self._store.check([f"{key}here/{rank}"])]

        for seconds_waited in poll_with_backoff(self.timeout):
            if self._store.check([key + "end"]):
                return
            if seconds_waited > next_process_check:
                next_process_check = seconds_waited + _PROCESS_CHECK_SECONDS
                if absent_ranks := select_absent(self.process_watch.find_ended_ranks()):
                    reason = self.process_watch.ended_message(absent_ranks[0])
                    break
        else:
            absent_ranks = select_absent(range(self.world_size))
            reason = f"{format_ranks(absent_ranks)} did not answer within {self.timeout:g} s"
        self._store.compare_set(key + "end", "", reason)


def run_store_request(context: str, function: Callable[[], T], timeout: float) -> T:
    """Returns the result of `function()`, which uses a store.

    Raises RuntimeError when the store does not answer within `timeout` and a grace period.
    """
    try:
        return run_with_timeout(function, timeout + _STORE_GRACE_SECONDS)
    except TimeoutError:
        problem = f"did not answer within {timeout:g} s"
    except dist.DistError as error:  # The connection broke.
        problem = f"cannot be reached: {str(error).splitlines()[0]}"
    raise RuntimeError(
        f"{context}: the store of the ranks, in the process of rank 0 or of its launcher, {problem}"
    )


def format_ranks(ranks: list[int]) -> str:
    suffix = f" and {len(ranks) - _MAX_RANKS_SHOWN} more" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_RANKS_SHOWN]))}{suffix}"


def format_answers(ranks_by_answer: dict[str, list[int]]) -> str:
    in_rank_order = sorted(ranks_by_answer.items(), key=lambda item: item[1])
    return "; ".join(f"{format_ranks(ranks)}: {answer}" for answer, ranks in in_rank_order)
