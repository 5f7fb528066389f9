"""Statistics between GPUs that see each other's memory: no collective, and no kernels but the layers' own.

The op that has numbers sends them, the one that needs them awaits them, by the protocol of csrc/peer.h. The
host never waits: when an exchange has failed, the GPU writes a report into memory of the host, which the next
call raises as an error.
"""

import array
from collections.abc import Callable

import torch
from torch import Tensor

from .agreement import Agreement, answers_text
from .exchange import (
    GAVE_UP,
    LEAST_PACKETS,
    MISMATCH,
    MOMENTS,
    STEPS,
    SUMS,
    PendingSum,
    Report,
    Tag,
    mismatch,
    never_ended,
    packets,
)

_ops = torch.ops.fastvit

_TRIALS, _TRIAL_SECONDS = 4, 10.0
MOST_RANKS = 16  # csrc/exchange.h, kMostRanks
_LAYER, _STEP, _OPEN = 3, 4, 5  # csrc/exchange.h, namespace field


class DeviceMemory:
    """Statistics over ranks that have each other's arenas (csrc/exchange.h) mapped.

    One stream at a time: when the caller's stream changes, the new one waits for the one before. What is
    captured into a CUDA graph exchanges anew at every replay; on which stream is for the caller to order.

    Args:
        arenas: of all ranks, each `exchange_arena_bytes` zeros at first.
        timeout: seconds that a GPU waits for a peer.
        describe: what to call an exchange in an error.
        meet: called after an error, when this rank's GPU is idle, with its `(epoch, generation, step)`; waits
            for the other ranks and returns what all of them say.
    """

    def __init__(
        self,
        name: str,
        arenas: list[Tensor],
        rank: int,
        capacity: int,
        timeout: float,
        describe: Callable[[Tag, str], str],
        meet: Callable[[tuple[int, int, int]], list[tuple[int, int, int]]],
    ):
        self.name, self.capacity = name, capacity
        self._arenas, self._rank, self._timeout = arenas, rank, timeout
        self._describe, self._meet = describe, meet
        self.device = arenas[rank].device
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.current_stream(self.device) if on_gpu else None
        self._report = Report(on_gpu)
        self._fields = array.array(
            "q",
            [rank, len(arenas), capacity, 0, 0, 0, int(timeout * 1e9), self._report.memory.data_ptr()]
            + [arena.data_ptr() for arena in arenas],
        )
        self._exchange = torch.frombuffer(self._fields, dtype=torch.int64)
        self._step = self._generation = 0
        self._abandoned = False  # an exchange: the ranks meet before the next

    def reserve(self, channels: int, dtype: torch.dtype) -> bool:
        """Whether a layer fits into the arenas."""
        return packets(channels, dtype) <= self.capacity

    def next_step(self) -> int:
        if self._capturing():
            return 0  # which goes with every step
        self._begin()
        self._step = (self._step + 1) % STEPS
        return self._step

    def exchange(self, tag: Tag) -> Tensor:
        """The argument `exchange` of two ops, the one that sends and the one that awaits."""
        self._begin()
        if self._fields[_OPEN]:
            self._give_up()
        self._follow_stream()
        self._fields[_LAYER], self._fields[_STEP] = tag
        return self._exchange

    def gather(self, moments: Tensor, tag: Tag) -> Tensor:
        """The moments of all ranks, `(world_size, 2C + 2)`, in rank order."""
        exchange = self.exchange(tag)
        _ops.exchange_push(exchange, moments, MOMENTS)
        return _ops.exchange_poll(exchange, moments, MOMENTS, False)

    def start_sum(self, sums: Tensor, tag: Tag) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks; the argument itself stays local."""
        exchange = self.exchange(tag)
        _ops.exchange_push(exchange, sums, SUMS)
        return PendingSum(lambda: _ops.exchange_poll(exchange, sums, SUMS, True))

    def _capturing(self) -> bool:
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def _follow_stream(self) -> None:
        if self._stream is None or self._capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._stream = stream

    def _begin(self) -> None:
        """Before an exchange: raises what the GPU has reported, or has the ranks meet after that."""
        if self._abandoned:
            self._rejoin()
        self.check()

    def check(self) -> None:
        """Raises what the GPU has reported, once."""
        if self._abandoned or not self._report:
            return
        self._abandoned = True
        peer, mine = self._report.peer, self._report.mine(self._describe)
        if self._report.fault == MISMATCH:
            raise mismatch(self._rank, mine, [(peer, self._report.theirs(self._describe))])
        if self._report.fault == GAVE_UP:
            raise RuntimeError(f"rank {self._rank} in {mine}: rank {peer} gave up after an error of its own")
        raise RuntimeError(
            f"rank {self._rank} in {mine}: nothing from rank {peer} within {self._timeout:g} s "
            "(reported by the GPU; what it computed since is NaN)"
        )

    def _give_up(self) -> None:
        """After an error between the two ops of an exchange: the peers are told, and this rank raises."""
        _ops.exchange_give_up(self._exchange, self._arenas[self._rank])
        self._fields[_OPEN] = 0
        self._abandoned = True
        tag = Tag(self._fields[_LAYER], self._fields[_STEP])
        raise never_ended(self._rank, self._describe(tag, "exchange"))

    def _says(self) -> tuple[int, int, int]:
        """Epoch, generation and step, as told to the others when the ranks meet."""
        return self._report.epoch, self._generation + 1, self._step

    def _rejoin(self) -> None:
        """Waits until every rank has come back from the error, and agrees on epoch and step."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)  # no kernel of this rank sends or awaits any more
        everybody = self._meet(self._says())
        epoch = everybody[0][0]
        for other, _, _ in everybody[1:]:
            ahead = (other - epoch) % 2**32
            epoch = other if 0 < ahead < 2**31 else epoch  # epochs wrap
        self._generation = max(generation for _, generation, _ in everybody)
        self._step = max(step for _, _, step in everybody)
        _ops.exchange_rejoin(self._arenas[self._rank], epoch, self._generation)
        self._report.clear()
        self._abandoned = False


class Loopback:
    """Ranks in one process, for tests and measurements on one GPU: all send, and then all await.

    `ranks[r]` is rank r's DeviceMemory. After an error, `rejoin()` stands for all of them meeting again.
    """

    def __init__(self, world: int, capacity: int = LEAST_PACKETS, timeout: float = 5.0, device="cuda"):
        size = _ops.exchange_arena_bytes(world, capacity)
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        self.said: list[tuple[int, int, int]] = []
        self.ranks = [
            DeviceMemory("Loopback", self.arenas, rank, capacity, timeout, _describe, lambda _: self.said)
            for rank in range(world)
        ]

    def rejoin(self) -> None:
        self.said = [rank._says() for rank in self.ranks]
        for rank in self.ranks:
            rank._rejoin()


def _describe(tag: Tag, direction: str) -> str:
    return f"{direction} of layer {tag.layer}, step {tag.step}"


def trial(
    name: str, arenas: list[Tensor], agreement: Agreement, capacity: int, describe: Callable[[Tag, str], str]
) -> DeviceMemory | str:
    """Statistics over arenas that all ranks have opened, after exchanges whose numbers are known; or what is
    wrong with them. All ranks get the same kind of answer.

    Memory that could be opened is not yet memory that works: a path between two GPUs may be blocked, and then
    a peer's packets do not arrive. The GPU gives up after a few seconds, and nobody has trained with it.
    """
    rank, world, device = agreement.rank, agreement.world, arenas[0].device
    seconds = min(_TRIAL_SECONDS, agreement.timeout / 2)
    tested = DeviceMemory(name, arenas, rank, capacity, seconds, describe, lambda said: [said])
    numbers, result = torch.arange(2 * capacity, device=device).float(), "works"
    try:
        for step in range(1, _TRIALS + 1):  # to the end, unless the peers know: nobody waits for this rank
            rows = tested.gather(numbers + (rank + step), Tag(0, step))
            total = tested.start_sum(numbers + (rank + step), Tag(0, step)).wait()
            want = torch.stack([numbers + (peer + step) for peer in range(world)])
            if not (torch.equal(rows, want) and torch.equal(total, want.sum(0))):
                result = "does not work: numbers arrived changed"
            tested.check()
    except RuntimeError as error:
        result = f"does not work: {str(error).splitlines()[0]}"
    answers = agreement.ask(f"trial of {name}", result)
    if list(answers) != ["works"]:
        return answers_text(answers)

    def meet(said: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        texts = agreement.ask("the first exchange after an error", " ".join(map(str, said)))
        if wrong := {text: ranks for text, ranks in texts.items() if len(text.split()) != 3}:
            raise RuntimeError(f"rank {rank} is back after an error, but {answers_text(wrong)}")
        return [tuple(map(int, text.split())) for text in texts]

    return DeviceMemory(name, arenas, rank, capacity, agreement.timeout, describe, meet)
