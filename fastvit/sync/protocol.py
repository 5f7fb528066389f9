"""The structures and constants of csrc/sync that Python uses, field by field."""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

MAX_RANKS = 64  # csrc/sync/protocol.h, kMaxRanks
MIN_ARENA_PACKETS = 2049  # The packets of float32 moments of 2048 channels.
FORWARD_INDEX_MODULUS = 2**24  # A float32 of a collective's message holds smaller integers exactly.
HEADER_WORDS = 4  # The size of csrc/sync/protocol.h, Tag, with which a message between CPUs begins.


class ExchangeState(IntEnum):
    """The state of an exchange, as in csrc/sync/protocol.h. `FaultReport.fault` has one of these values."""

    PENDING, DONE, MISMATCH, PEER_ABANDONED, TIMEOUT = range(5)


class NumberKind(IntEnum):
    MOMENTS, SUMS = range(2)


FLOAT64 = 2  # A bit that a message's kind has besides the NumberKind: each number takes two words.


class Tag(NamedTuple):
    """Identifies an exchange. The ranks compare tags, so that different layers are never merged."""

    layer: int  # The index of the layer, in the order of first calls in the group.
    forward_index: int  # The count of the group's forward exchanges; a backward has its forward's count.


DescribeExchange = Callable[[Tag, str], str]  # Returns an exchange's text for messages: (tag, direction).


class _TagWords(ctypes.Structure):  # csrc/sync/protocol.h, Tag
    _fields_ = [(name, ctypes.c_uint32) for name in ("layer", "forward_index", "words", "kind")]


class FaultReport(ctypes.Structure):
    """The report of a failed exchange, which an op writes for the host. The tags are those of the two ranks.

    Bit r of `missing_ranks_mask` is set if a CPU op has not received the message of rank r.
    """

    _fields_ = [(name, ctypes.c_uint32) for name in ("fault", "rank", "peer", "epoch")]
    _fields_ += [("own_tag", _TagWords), ("peer_tag", _TagWords), ("missing_ranks_mask", ctypes.c_uint64)]


class Arena(ctypes.Structure):
    """The first fields of an arena, the part of a group's memory that one rank owns."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("epoch", "failed")]


class ExchangeDescriptor(ctypes.Structure):
    """The fields of the ops' argument `exchange`; the addresses of the ranks' arenas follow."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "rank",
            "world",
            "capacity",
            "float64_messages",
            "timeout_ns",
            "layer",
            "forward_index",
            "report",
        )
    ]


# Reports are never freed, because a kernel may still write one after its process group was destroyed.
_retained_reports: list[Tensor] = []


class Exchange:
    """The ops' argument `exchange`, which is `tensor`, and the report that the ops write, `report`.

    `descriptor` names the fields of `tensor`. `arenas` are addresses, by rank. The host reads the report
    without waiting for the GPU, so the host may see a fault late, but never a part of a fault.
    """

    def __init__(self, rank: int, world_size: int, is_cuda: bool = False, arenas: Sequence[int] = ()):
        memory = (ctypes.c_int64 * (len(ExchangeDescriptor._fields_) + len(arenas)))()
        memory[len(ExchangeDescriptor._fields_) :] = list(arenas)
        report = torch.zeros(ctypes.sizeof(FaultReport), dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        _retained_reports.append(report)
        self.report = FaultReport.from_address(report.data_ptr())
        self.descriptor = ExchangeDescriptor.from_buffer(memory)
        self.descriptor.rank, self.descriptor.world = rank, world_size
        self.descriptor.report = report.data_ptr()
        self.tensor = torch.frombuffer(memory, dtype=torch.int64)
        self._tag_bytes = memoryview(memory).cast("B")[
            ExchangeDescriptor.layer.offset : ExchangeDescriptor.report.offset
        ]

    def with_tag(self, tag: Tag) -> Tensor:
        """Sets the tag of the next exchange, and returns `tensor`."""
        self.descriptor.layer, self.descriptor.forward_index = tag
        return self.tensor

    def last_tag_tensor(self) -> Tensor:
        """Returns the last tag that `with_tag` set, as a new tensor."""
        # frombuffer() calls no kernel, as clone() would.
        return torch.frombuffer(bytearray(self._tag_bytes), dtype=torch.int64)

    def describe_local_exchange(self, describe: DescribeExchange) -> str:
        """Returns the text for this rank's exchange, after a fault."""
        return _describe_words(self.report.own_tag, describe)

    def mismatch_error(self, describe: DescribeExchange) -> RuntimeError:
        report = self.report
        local_text, peer_text = (_describe_words(tag, describe) for tag in (report.own_tag, report.peer_tag))
        return RuntimeError(
            f"rank {report.rank} is in {local_text}, but rank {report.peer} in {peer_text}: the ranks of a "
            "group must run the same layers in the same order; did one of them skip a layer, or repeat a "
            "step after an error?"
        )


def _describe_words(tag: _TagWords, describe: DescribeExchange) -> str:
    return describe(Tag(tag.layer, tag.forward_index), direction_name(tag.kind))


def direction_name(kind: int) -> str:
    return "backward" if kind & NumberKind.SUMS else "forward"


def num_packets(channels: int, dtype: torch.dtype) -> int:
    """Returns the number of packets of a layer's moments; a packet has two words of data, 8 bytes."""
    return (channels + 1) * dtype.itemsize // 4
