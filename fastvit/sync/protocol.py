"""The structures and constants of csrc/sync that Python uses, field by field."""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

MOST_RANKS = 64  # csrc/sync/protocol.h, kMaxRanks
LEAST_PACKETS = 2049  # capacity of an arena: enough for float32 moments of 2048 channels
STEPS = 2**24  # steps wrap here: float32 holds such numbers exactly
HEADER_WORDS = 4  # a message between CPUs begins with csrc/sync/protocol.h, Tag


class ExchangeState(IntEnum):
    """The state of an exchange."""

    PENDING, DONE, MISMATCH, PEER_ABANDONED, TIMEOUT = range(5)


class NumberKind(IntEnum):
    MOMENTS, SUMS = range(2)


FLOAT64 = 2  # a flag beside a NumberKind: numbers take two words


class Tag(NamedTuple):
    """Compared by the ranks in every exchange, so that different layers are never merged."""

    layer: int  # order in which the group first saw the layer
    forward_index: int  # count of the group's forward exchanges; a backward has that of its forward


Describe = Callable[[Tag, str], str]  # the text for an exchange, from its tag and direction


class _Words(ctypes.Structure):  # csrc/sync/protocol.h, Tag
    _fields_ = [(name, ctypes.c_uint32) for name in ("layer", "forward_index", "words", "kind")]


class FaultReport(ctypes.Structure):
    """An op's report of a failed exchange."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("fault", "rank", "peer", "epoch")]
    _fields_ += [("own_tag", _Words), ("peer_tag", _Words), ("missing_ranks_mask", ctypes.c_uint64)]


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


_reports: list[Tensor] = []  # never freed: a running kernel may write after its group was destroyed


class Exchange:
    """The ops' argument `exchange` (`tensor`, with the fields of `descriptor`), and the report they write.

    `arenas` are addresses, by rank. The host reads the report without waiting for the GPU, so it may see a
    fault late, but never a part of one.
    """

    def __init__(self, rank: int, world: int, on_gpu: bool = False, arenas: Sequence[int] = ()):
        memory = (ctypes.c_int64 * (len(ExchangeDescriptor._fields_) + len(arenas)))()
        memory[len(ExchangeDescriptor._fields_) :] = list(arenas)
        report = torch.zeros(ctypes.sizeof(FaultReport), dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        _reports.append(report)
        self.report = FaultReport.from_address(report.data_ptr())
        self.descriptor = ExchangeDescriptor.from_buffer(memory)
        self.descriptor.rank, self.descriptor.world, self.descriptor.report = rank, world, report.data_ptr()
        self.tensor = torch.frombuffer(memory, dtype=torch.int64)
        self._tag = memoryview(memory).cast("B")[
            ExchangeDescriptor.layer.offset : ExchangeDescriptor.report.offset
        ]

    def of(self, tag: Tag) -> Tensor:
        self.descriptor.layer, self.descriptor.forward_index = tag
        return self.tensor

    def tag(self) -> Tensor:
        """The last tag that `of` set, as a new tensor. frombuffer() calls no kernel, as clone() would."""
        return torch.frombuffer(bytearray(self._tag), dtype=torch.int64)

    def text(self, describe: Describe) -> str:
        """The text for this rank's exchange, after a fault."""
        return _text(self.report.own_tag, describe)

    def mismatch(self, describe: Describe) -> RuntimeError:
        report = self.report
        return RuntimeError(
            f"rank {report.rank} is in {_text(report.own_tag, describe)}, but rank {report.peer} in "
            f"{_text(report.peer_tag, describe)}: the ranks of a group must run the same layers in the same "
            "order; did one of them skip a layer, or repeat a step after an error?"
        )


def _text(words: _Words, describe: Describe) -> str:
    return describe(Tag(words.layer, words.forward_index), direction(words.kind))


def direction(kind: int) -> str:
    return "backward" if kind & NumberKind.SUMS else "forward"


def packets(channels: int, dtype: torch.dtype) -> int:
    """The number of packets of a layer's moments."""
    return (channels + 1) * dtype.itemsize // 4
