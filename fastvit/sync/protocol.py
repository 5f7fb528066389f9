"""The structures and constants of csrc/sync that Python uses, field by field."""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

MAX_RANKS = 64  # csrc/sync/protocol.h, kMaxRanks
MIN_ARENA_PACKETS = 2049  # enough for float32 moments of 2048 channels
FORWARD_INDEX_MODULUS = 2**24  # float32 holds smaller integers exactly
HEADER_WORDS = 4  # the size of csrc/sync/protocol.h, Tag, with which a message between CPUs begins


class ExchangeState(IntEnum):
    """The state of an exchange."""

    PENDING, DONE, MISMATCH, PEER_ABANDONED, TIMEOUT = range(5)


class NumberKind(IntEnum):
    MOMENTS, SUMS = range(2)


FLOAT64 = 2  # a flag beside a NumberKind: a number takes two words


class Tag(NamedTuple):
    """Identifies an exchange. The ranks compare tags, so that different layers are never merged."""

    layer: int  # its index in the order in which the group first saw the layers
    forward_index: int  # the count of the group's forward exchanges; a backward has that of its forward


DescribeExchange = Callable[[Tag, str], str]  # makes the text for an exchange from its tag and direction


class _TagWords(ctypes.Structure):  # csrc/sync/protocol.h, Tag
    _fields_ = [(name, ctypes.c_uint32) for name in ("layer", "forward_index", "words", "kind")]


class FaultReport(ctypes.Structure):
    """Tells the host of a failed exchange; an op writes it."""

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
    """The ops' argument `exchange` (`tensor`, with the fields of `descriptor`), and the report the ops write.

    `arenas` are addresses, by rank. The host reads the report without waiting for the GPU, so it may see a
    fault late, but never a part of one.
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
        """Sets the tag, and returns `tensor`."""
        self.descriptor.layer, self.descriptor.forward_index = tag
        return self.tensor

    def last_tag_tensor(self) -> Tensor:
        """Returns the last tag that `with_tag` set, as a new tensor."""
        # frombuffer() calls no kernel, as clone() would.
        return torch.frombuffer(bytearray(self._tag_bytes), dtype=torch.int64)

    def describe_own(self, describe: DescribeExchange) -> str:
        """Returns the text for this rank's exchange, after a fault."""
        return _describe_words(self.report.own_tag, describe)

    def mismatch_error(self, describe: DescribeExchange) -> RuntimeError:
        report = self.report
        own, other = (_describe_words(words, describe) for words in (report.own_tag, report.peer_tag))
        return RuntimeError(
            f"rank {report.rank} is in {own}, but rank {report.peer} in {other}: the ranks of a group must "
            "run the same layers in the same order; did one of them skip a layer, or repeat a step after an "
            "error?"
        )


def _describe_words(words: _TagWords, describe: DescribeExchange) -> str:
    return describe(Tag(words.layer, words.forward_index), direction_name(words.kind))


def direction_name(kind: int) -> str:
    return "backward" if kind & NumberKind.SUMS else "forward"


def num_packets(channels: int, dtype: torch.dtype) -> int:
    """Returns the number of packets of a layer's moments."""
    return (channels + 1) * dtype.itemsize // 4
