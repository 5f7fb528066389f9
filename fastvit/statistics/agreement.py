"""What ranks must say alike before they exchange anything: questions to all, through the group's store.

Not by collectives: ranks that differ about what comes next cannot meet in one, and gloo ends the process when
their sizes differ. The store only has to exist, as it does for every group of torch.distributed.
"""

import contextlib
import datetime
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timeout_of(group: "dist.ProcessGroup", device_type: str) -> float:
    """The group's timeout in seconds."""
    backend = group._get_backend(torch.device(device_type))
    default: datetime.timedelta = dist.distributed_c10d.default_pg_timeout
    return getattr(backend.options, "_timeout", default).total_seconds()


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
        self._asked = 0

    def ask(self, question: str, answer: str) -> dict[str, list[int]]:
        """The ranks by what they answered; one key when they agree. Waits for all of them.

        Raises RuntimeError, naming the ranks that did not come, after the group's timeout; a rank that comes
        later raises too, and so do all when one leaves, after Ctrl-C or an error. The first answer is the one
        others are compared with, so a question costs each rank a handful of messages in a group of any size.
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
        self._store.set(f"{key}here/{self.rank}", "")
        if self._store.add(key + "count", 1) == self.world:
            self._store.compare_set(key + "end", "", "all")
        self._await(key + "end", lambda: self._close(key))
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

    def from_rank_0(self, what: str, value: str) -> str:
        """Rank 0's `value`, on every rank."""
        self._asked += 1
        key = f"{self._asked}/told"
        if self.rank == 0:
            self._store.set(key, value)
            return value

        def late() -> str:
            raise RuntimeError(f"rank {self.rank}: {what}: rank 0 did not come within {self.timeout:g} s")

        self._await(key, late)
        return self._store.get(key).decode()

    def _close(self, key: str) -> None:
        absent = [r for r in range(self.world) if not self._store.check([f"{key}here/{r}"])]
        text = f"{ranks_text(absent)} did not come within {self.timeout:g} s"
        self._store.compare_set(key + "end", "", text)

    def _await(self, key: str, late: Callable[[], None]) -> None:
        """Waits by looking, so that signals are seen; `late` is called once when time is up."""
        begin, pause = time.monotonic(), 1e-4
        while not self._store.check([key]):
            if time.monotonic() - begin > self.timeout:
                return late()
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def answers_text(answers: dict[str, list[int]]) -> str:
    return "; ".join(f"{ranks_text(ranks)}: {answer}" for answer, ranks in answers.items())
