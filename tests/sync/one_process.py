"""Ranks in one process and on one device that see each other's memory."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from ops import reference
from torch import Tensor

from fastvit import ops
from fastvit.sync.cuda_ipc import CudaIpcBackend, warm_up_kernels
from fastvit.sync.protocol import MIN_ARENA_PACKETS, Arena, Exchange, ExchangeState, Tag
from fastvit.sync.shared_memory import arena_bytes
from fastvit.sync.store_consensus import StoreConsensus
from sync.wire_format import PACKET_BYTES, encode_message, message_offset

T = TypeVar("T")
_raw_ops = torch.ops.fastvit
_warm_up_kernels_once = functools.cache(warm_up_kernels)


def describe_tag(tag: Tag, direction: str) -> str:
    return f"{direction} of layer {tag.layer}, step {tag.forward_index}"


def make_consensuses(world: int, timeout: float = 20.0) -> list[StoreConsensus]:
    """Returns the consensus of each rank, over one store and without a process group."""
    store = dist.HashStore()
    return [StoreConsensus(store, rank, world, timeout) for rank in range(world)]


def make_rank_rows(
    world: int, n: int, sums: bool, dtype: torch.dtype = torch.float32, device="cpu"
) -> list[Tensor]:
    """Returns random moments of each rank, `(n,)`, or random sums, `(1, n)`."""
    numbers = torch.randn(world, n, dtype=dtype)
    numbers[:, n // 2 - 1 : n - 2].abs_()  # M2 is a sum of squares.
    # The count has two numbers.
    numbers[:, -2:] = torch.stack([torch.zeros(world), torch.arange(world) + 2.0], 1)
    return list((numbers[:, None] if sums else numbers).to(device))


def assert_mismatch(actual: Tensor, exchange: Exchange, tags: list[Tag], rank: int, sums: bool) -> None:
    """Asserts that a rank got NaN and reports the first rank whose tag differs; rank 2 has another tag."""
    assert actual[-1:].isnan().all() if sums else actual.isnan().all()
    peer, direction = 2 if rank == 0 else 0, "backward" if sums else "forward"
    assert exchange.report.fault == ExchangeState.MISMATCH and exchange.report.peer == peer
    message = str(exchange.mismatch_error(describe_tag))
    assert message.startswith(f"rank {rank} is in {describe_tag(tags[rank], direction)}, but rank {peer} in ")
    assert describe_tag(tags[peer], direction) in message


def make_exchange_of_one_rank(device: str, capacity: int = MIN_ARENA_PACKETS) -> tuple[Exchange, Tensor]:
    """Returns an exchange that waits for nobody, and its arena, which must outlive the exchange."""
    arena = torch.zeros(_raw_ops.arena_bytes(1, capacity), dtype=torch.uint8, device=device)
    exchange = Exchange(0, 1, arena.is_cuda, [arena.data_ptr()])
    exchange.descriptor.capacity, exchange.descriptor.timeout_ns = capacity, 10**9
    return exchange, arena


class CpuRanks:
    """Ranks of the ops of csrc/sync/cpu_exchange.cpp, which send numbers that each rank can compute.

    Every arena is followed by GUARD_BYTES zeros, which no op may change.
    """

    GUARD_BYTES = 64

    def __init__(self, world: int, capacity: int = 34, epoch: int = 0):
        self.world, self.capacity = world, capacity
        size = arena_bytes(world, capacity) + self.GUARD_BYTES
        self.arenas = [torch.zeros(size, dtype=torch.uint8) for _ in range(world)]
        self.arena_words = [Arena.from_address(arena.data_ptr()) for arena in self.arenas]
        addresses = [arena.data_ptr() for arena in self.arenas]
        self.exchanges = [Exchange(rank, world, arenas=addresses) for rank in range(world)]
        self.results: list[Tensor | None] = [None] * world
        for words, exchange in zip(self.arena_words, self.exchanges, strict=True):
            words.epoch, exchange.descriptor.capacity = epoch, capacity

    def make_numbers(self, rank: int, step: int, channels=4, dtype=torch.float32, sums=False) -> Tensor:
        if sums:
            return torch.arange(2 * channels, dtype=dtype)[None] + 100 * rank + 1000 * step
        x = torch.randn(3 + rank, channels, generator=torch.Generator().manual_seed(10 * step + rank))
        return ops.bn_stats(x.to(dtype))

    def begin(self, rank: int, step: int, numbers=None, layer=3, seconds=0.0) -> ExchangeState:
        """Sends the messages of a rank, waits for those of the peers, and returns the state."""
        exchange = self.exchanges[rank]
        exchange.descriptor.timeout_ns = int(seconds * 1e9)
        numbers = self.make_numbers(rank, step) if numbers is None else numbers
        self.results[rank] = _raw_ops.exchange_merge(numbers, exchange.with_tag(Tag(layer, step)))
        return self.read_state(rank)

    def wait(self, rank: int) -> ExchangeState:
        """Polls once for the messages that were missing, and returns the state."""
        self.exchanges[rank].descriptor.timeout_ns = 0
        _raw_ops.exchange_wait(self.results[rank], self.exchanges[rank].tensor)
        return self.read_state(rank)

    def abandon(self, rank: int) -> None:
        _raw_ops.exchange_abandon(self.exchanges[rank].tensor)

    def read_state(self, rank: int) -> ExchangeState:
        if self.exchanges[rank].report.missing_ranks_mask:
            return ExchangeState.PENDING
        return ExchangeState(self.exchanges[rank].report.fault or ExchangeState.DONE)

    def assert_merged(self, rank: int, step: int, **options) -> None:
        """Asserts that a rank has the result of `make_numbers` of all ranks."""
        rows = torch.stack([self.make_numbers(peer, step, **options).flatten() for peer in range(self.world)])
        if options.get("sums"):
            expected = torch.stack([rows[rank], rows.double().sum(0).to(rows.dtype)])
        else:
            expected = reference.merge_moments(rows)
        torch.testing.assert_close(self.results[rank], expected, rtol=1e-6, atol=0)


class Loopback:
    """Ranks on one device, each on a stream of its own, so that their kernels can wait for each other.

    `ranks[r]` is the CudaIpcBackend of rank r. A sanitizer runs launches one after the other; there
    `write_messages` takes the place of the other ranks.
    """

    def __init__(self, world: int, capacity: int = MIN_ARENA_PACKETS, timeout: float = 5.0, device="cuda"):
        self.capacity = capacity
        size = _raw_ops.arena_bytes(world, capacity)
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        addresses = [arena.data_ptr() for arena in self.arenas]
        self.ranks = [
            CudaIpcBackend(arena, addresses, rank, capacity, timeout, describe_tag)
            for rank, arena in enumerate(self.arenas)
        ]
        self.is_gpu = self.arenas[0].is_cuda  # the tests of the model of CUDA set it to True
        if self.is_gpu:
            _warm_up_kernels_once(self.arenas[0].device)
        self.streams = [torch.cuda.Stream() if self.is_gpu else None for _ in self.ranks]

    @contextlib.contextmanager
    def on_stream_of(self, rank: int):
        """Launches kernels on the stream of a rank, after those that were launched before."""
        if (stream := self.streams[rank]) is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def run_each(self, work: Callable[[int, CudaIpcBackend], T]) -> list[T]:
        """Runs `work(rank, backend)` on each rank's stream, waits, and returns the results by rank."""
        results = []
        for rank, backend in enumerate(self.ranks):
            with self.on_stream_of(rank):
                results.append(work(rank, backend))
        for stream in filter(None, self.streams):
            torch.cuda.current_stream().wait_stream(stream)
        return results

    def view_inbox(self, receiver: int, sender: int, epoch: int, packet: int = 0) -> Tensor:
        """Returns the bytes of a receiver's arena, from a packet of a sender's message on."""
        offset = message_offset(self.capacity, sender, epoch, self.is_gpu)
        return self.arenas[receiver][offset + PACKET_BYTES * packet :]

    def write_messages(self, receiver: int, numbers: list[Tensor], tag: Tag) -> None:
        """Writes the messages of all ranks into the arena of a receiver, for its next exchange."""
        words = self.arenas[receiver][: Arena.failed.offset].view(torch.int32)
        epoch = int(words[0]) % 2**32 + 1
        for sender, row in enumerate(numbers):
            data = encode_message(row, tag, epoch, self.is_gpu)
            self.view_inbox(receiver, sender, epoch)[: data.numel()] = data
