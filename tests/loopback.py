"""Ranks in one process that see each other's memory, for tests on one device."""

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
HEADER = 2  # packets
arena_bytes = torch.ops.fastvit.arena_bytes
_warm_up_once = functools.cache(warm_up_kernels)
INBOX = arena_bytes(1, 6) - 2 * (HEADER + 6) * 16  # where it begins in an arena


def describe(tag: Tag, direction: str) -> str:
    return f"{direction} of layer {tag.layer}, step {tag.forward_index}"


def consensuses(world: int, timeout: float = 20.0) -> list[StoreConsensus]:
    """Returns those of ranks in one process, over a store without a group."""
    store = dist.HashStore()
    return [StoreConsensus(store, rank, world, timeout) for rank in range(world)]


def rows(world: int, n: int, sums: bool, dtype: torch.dtype = torch.float32, device="cpu") -> list[Tensor]:
    """Moments of each rank, or sums."""
    numbers = torch.randn(world, n, dtype=dtype)
    numbers[:, n // 2 - 1 : n - 2].abs_()  # M2
    numbers[:, -2:] = torch.stack([torch.zeros(world), torch.arange(world) + 2.0], 1)
    return list((numbers[:, None] if sums else numbers).to(device))


def check_mismatch(got: Tensor, exchange: Exchange, tags: list[Tag], rank: int, sums: bool) -> None:
    """Of four ranks rank 2 has another tag: NaN, and the report names the first rank with another tag."""
    assert got[-1:].isnan().all() if sums else got.isnan().all()
    peer, direction = 2 if rank == 0 else 0, "backward" if sums else "forward"
    assert exchange.report.fault == ExchangeState.MISMATCH and exchange.report.peer == peer
    said = str(exchange.mismatch_error(describe))
    assert said.startswith(f"rank {rank} is in {describe(tags[rank], direction)}, but rank {peer} in ")
    assert describe(tags[peer], direction) in said


def in_packets(words: Tensor, epoch: int) -> Tensor:
    even, odd = words.view(-1, 2).T
    flags = torch.full_like(even, epoch - (epoch >> 31 << 32))
    return torch.stack([even, flags, odd, flags], 1).flatten()


def message(numbers: Tensor, tag: Tag, epoch: int, of_gpu: bool) -> Tensor:
    """The bytes that a rank sends: moments, `(2C + 2,)`, or sums, `(1, 2C)`; a GPU sends pairs in packets."""
    kind = numbers.dim() - 1
    flat = numbers.flatten()
    payload = flat.view(torch.int32)
    if of_gpu:
        channels = flat.numel() // 2 - (kind == NumberKind.MOMENTS)
        pairs = torch.stack([flat[:channels], flat[channels : 2 * channels]], 1).flatten()
        payload = in_packets(torch.cat([pairs, flat[2 * channels :]]).view(torch.int32), epoch)
    kind |= FLOAT64 if flat.dtype == torch.float64 else 0
    words = flat.numel() * flat.element_size() // 4
    head = torch.tensor([*tag, words, kind], dtype=torch.int32, device=flat.device)
    return torch.cat([in_packets(head, epoch), payload]).view(torch.uint8)


def exchange_of_one_rank(device: str, capacity: int = MIN_ARENA_PACKETS) -> tuple[Exchange, Tensor]:
    """An exchange that ends when it begins, and its arena, which must live as long."""
    arena = torch.zeros(arena_bytes(1, capacity), dtype=torch.uint8, device=device)
    exchange = Exchange(0, 1, arena.is_cuda, [arena.data_ptr()])
    exchange.descriptor.capacity, exchange.descriptor.timeout_ns = capacity, 10**9
    return exchange, arena


class Loopback:
    """Ranks on one device, each on a stream of its own: the kernels of one wait while the others' run.

    `ranks[r]` is rank r's CudaIpcBackend. Where launches run one after the other, under a sanitizer, `send`
    writes the others' messages.
    """

    def __init__(self, world: int, capacity: int = MIN_ARENA_PACKETS, timeout: float = 5.0, device="cuda"):
        self.capacity = capacity
        size = arena_bytes(world, capacity)
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        addresses = [arena.data_ptr() for arena in self.arenas]
        self.ranks = [
            CudaIpcBackend(own, addresses, rank, capacity, timeout, describe)
            for rank, own in enumerate(self.arenas)
        ]
        self.of_gpu = self.arenas[0].is_cuda  # a model of a GPU on the CPU sets it
        if self.of_gpu:
            _warm_up_once(self.arenas[0].device)
        self.streams = [torch.cuda.Stream() if self.of_gpu else None for _ in self.ranks]

    @contextlib.contextmanager
    def on(self, rank: int):
        """Inside, launches are this rank's; later launches wait for them."""
        if (stream := self.streams[rank]) is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def each(self, work: Callable[[int, CudaIpcBackend], T]) -> list[T]:
        """Runs `work(rank, way)` of every rank on its stream, and waits for all of them."""
        results = []
        for rank, way in enumerate(self.ranks):
            with self.on(rank):
                results.append(work(rank, way))
        for stream in filter(None, self.streams):
            torch.cuda.current_stream().wait_stream(stream)
        return results

    def inbox(self, receiver: int, sender: int, epoch: int, packet: int = 0) -> Tensor:
        """The bytes of an inbox from a packet of a message on."""
        room = self.capacity if self.of_gpu else (self.capacity + 1) // 2
        at = (sender * 2 + epoch % 2) * (HEADER + room) + packet
        return self.arenas[receiver][INBOX + 16 * at :]

    def send(self, receiver: int, numbers: list[Tensor], tag: Tag) -> None:
        """Messages of all ranks, for the next exchange of one of them."""
        words = self.arenas[receiver][: Arena.failed.offset].view(torch.int32)
        epoch = int(words[0]) % 2**32 + 1
        for sender, row in enumerate(numbers):
            data = message(row, tag, epoch, self.of_gpu)
            self.inbox(receiver, sender, epoch)[: data.numel()] = data
