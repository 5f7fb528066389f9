"""Ranks in one process and on one device that see each other's memory."""

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastvit.sync.cuda_ipc import CudaIpcBackend, warm_up_kernels
from fastvit.sync.protocol import FLOAT64, MIN_ARENA_PACKETS, Arena, Exchange, ExchangeState, NumberKind, Tag
from fastvit.sync.store_consensus import StoreConsensus

T = TypeVar("T")
HEADER_PACKETS = 2
PACKET_BYTES = 16
arena_bytes = torch.ops.fastvit.arena_bytes
_warm_up_kernels_once = functools.cache(warm_up_kernels)
# The first inbox follows the rest of an arena, whose size does not depend on the capacity.
INBOX_OFFSET = arena_bytes(1, 6) - 2 * (HEADER_PACKETS + 6) * PACKET_BYTES


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


def pack_words(words: Tensor, epoch: int) -> Tensor:
    """Returns 32-bit words as packets `{word, epoch, word, epoch}`."""
    even, odd = words.view(-1, 2).T
    flags = torch.full_like(even, epoch - (epoch >> 31 << 32))
    return torch.stack([even, flags, odd, flags], 1).flatten()


def encode_message(numbers: Tensor, tag: Tag, epoch: int, is_gpu: bool) -> Tensor:
    """Returns the bytes that a rank sends of moments, `(2C + 2,)`, or of sums, `(1, 2C)`.

    A GPU sends packets, in which the two numbers of a channel are neighbours. A CPU sends the numbers as they
    are.
    """
    kind = numbers.dim() - 1
    flat = numbers.flatten()
    payload = flat.view(torch.int32)
    if is_gpu:
        channels = flat.numel() // 2 - (kind == NumberKind.MOMENTS)
        pairs = torch.stack([flat[:channels], flat[channels : 2 * channels]], 1).flatten()
        payload = pack_words(torch.cat([pairs, flat[2 * channels :]]).view(torch.int32), epoch)
    kind |= FLOAT64 if flat.dtype == torch.float64 else 0
    words = flat.numel() * flat.element_size() // 4
    head = torch.tensor([*tag, words, kind], dtype=torch.int32, device=flat.device)
    return torch.cat([pack_words(head, epoch), payload]).view(torch.uint8)


def make_exchange_of_one_rank(device: str, capacity: int = MIN_ARENA_PACKETS) -> tuple[Exchange, Tensor]:
    """Returns an exchange that waits for nobody, and its arena, which must outlive the exchange."""
    arena = torch.zeros(arena_bytes(1, capacity), dtype=torch.uint8, device=device)
    exchange = Exchange(0, 1, arena.is_cuda, [arena.data_ptr()])
    exchange.descriptor.capacity, exchange.descriptor.timeout_ns = capacity, 10**9
    return exchange, arena


class Loopback:
    """Ranks on one device, each on a stream of its own, so that their kernels can wait for each other.

    `ranks[r]` is the CudaIpcBackend of rank r. A sanitizer runs launches one after the other; there
    `write_messages` takes the place of the other ranks.
    """

    def __init__(self, world: int, capacity: int = MIN_ARENA_PACKETS, timeout: float = 5.0, device="cuda"):
        self.capacity = capacity
        size = arena_bytes(world, capacity)
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
        num_packets = self.capacity if self.is_gpu else (self.capacity + 1) // 2
        first = (sender * 2 + epoch % 2) * (HEADER_PACKETS + num_packets) + packet
        return self.arenas[receiver][INBOX_OFFSET + PACKET_BYTES * first :]

    def write_messages(self, receiver: int, numbers: list[Tensor], tag: Tag) -> None:
        """Writes the messages of all ranks into the arena of a receiver, for its next exchange."""
        words = self.arenas[receiver][: Arena.failed.offset].view(torch.int32)
        epoch = int(words[0]) % 2**32 + 1
        for sender, row in enumerate(numbers):
            data = encode_message(row, tag, epoch, self.is_gpu)
            self.view_inbox(receiver, sender, epoch)[: data.numel()] = data
