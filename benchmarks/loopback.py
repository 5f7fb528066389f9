"""Ranks in one process that see each other's memory, for tests and measurements on one device."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fastvit.sync.cuda_peer import DeviceMemory
from fastvit.sync.peer import Position, arena_bytes
from fastvit.sync.protocol import LEAST_PACKETS, Arena, Kind, Tag

T = TypeVar("T")
HEADER = 2  # packets
INBOX = arena_bytes(1, 6) - 2 * (HEADER + 6) * 16  # where it begins in an arena


def describe(tag: Tag, direction: str) -> str:
    return f"{direction} of layer {tag.layer}, step {tag.step}"


def message(numbers: Tensor, tag: Tag, epoch: int) -> Tensor:
    """The packets that a rank sends: moments, `(2C + 2,)`, or sums, `(1, 2C)`; as bytes."""
    kind = numbers.dim() - 1
    flat = numbers.flatten()
    channels = flat.numel() // 2 - (kind == Kind.MOMENTS)
    pairs = torch.stack([flat[:channels], flat[channels : 2 * channels]], 1).flatten()
    words = torch.cat([pairs, flat[2 * channels :]]).view(torch.int32)
    kind |= Kind.DOUBLE if flat.dtype == torch.float64 else 0
    head = torch.tensor([*tag, words.numel(), kind], dtype=torch.int32, device=words.device)
    even, odd = torch.cat([head, words]).view(-1, 2).T
    flags = torch.full_like(even, epoch - (epoch >> 31 << 32))
    return torch.stack([even, flags, odd, flags], 1).contiguous().view(torch.uint8).flatten()


class Loopback:
    """Ranks on one device, each on a stream of its own: the kernels of one wait while the others' run.

    `ranks[r]` is rank r's DeviceMemory. After an error, `rejoin()` stands for the meeting of all ranks. Where
    launches run one after the other (sanitizers, profilers, timing), `send` writes the packets of the others.
    """

    def __init__(self, world: int, capacity: int = LEAST_PACKETS, timeout: float = 5.0, device="cuda"):
        self.capacity = capacity
        size = arena_bytes(world, capacity)
        self.arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        self.said: list[Position] = []
        self.ranks = [
            DeviceMemory("Loopback", self.arenas, rank, capacity, timeout, describe, lambda _: self.said)
            for rank in range(world)
        ]
        on_gpu = self.arenas[0].is_cuda
        self.streams = [torch.cuda.Stream() if on_gpu else None for _ in self.ranks]

    @contextlib.contextmanager
    def on(self, rank: int):
        """Inside, launches are this rank's; later launches wait for them."""
        if (stream := self.streams[rank]) is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def each(self, work: Callable[[int, DeviceMemory], T]) -> list[T]:
        """Runs `work(rank, way)` of every rank on its stream, and waits for all of them."""
        results = []
        for rank, way in enumerate(self.ranks):
            with self.on(rank):
                results.append(work(rank, way))
        for stream in filter(None, self.streams):
            torch.cuda.current_stream().wait_stream(stream)
        return results

    def place(self, receiver: int, sender: int, epoch: int, packet: int = 0) -> Tensor:
        """The bytes of an inbox from a packet of a message on."""
        at = (sender * 2 + epoch % 2) * (HEADER + self.capacity) + packet
        return self.arenas[receiver][INBOX + 16 * at :]

    def send(self, receiver: int, numbers: list[Tensor], tag: Tag) -> None:
        """Messages of all ranks, for the next exchange of one of them."""
        words = self.arenas[receiver][: Arena.generation.offset].view(torch.int32)
        epoch = int(words[0]) % 2**32 + 1
        for sender, row in enumerate(numbers):
            packets = message(row, tag, epoch)
            self.place(receiver, sender, epoch)[: packets.numel()] = packets

    def rejoin(self) -> None:
        self.said = [rank.position() for rank in self.ranks]
        for rank in self.ranks:
            rank._rejoin()
