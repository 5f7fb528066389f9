"""Masks, a bit an element: of dropout, and of where an activation passes its gradient on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A 64-bit integer of 8 bytes b[i], each 0 or 1, times _GATHER has the bits b[i] << i in its highest byte: of
# the 64 terms b[i] << 8 i + 56 - 7 j no two have the same exponent, and those of i > j overflow. A byte times
# _REPEAT is in all 8 bytes, of which _SPREAD leaves bit i in byte i.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_REPEAT = sum(1 << 8 * i for i in range(8))
_SPREAD = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # as a signed integer


class Bits:
    """A mask in an eighth of its bytes."""

    __slots__ = ("packed", "size", "stride")

    def __init__(self, mask: Tensor):
        dense = torch.empty_like(mask, device="meta")  # has other strides where elements are not side by side
        if dense.stride() != mask.stride():
            mask = mask.contiguous()
        self.size, self.stride = mask.size(), mask.stride()
        flat = mask.as_strided((mask.numel(),), (1,))
        if mask.numel() % 8:
            flat = F.pad(flat, (0, -mask.numel() % 8))
        self.packed = (flat.view(torch.int64) * _GATHER).view(torch.uint8)[7::8].contiguous()

    def mask(self) -> Tensor:
        lanes = self.packed.to(torch.int64).mul_(_REPEAT).bitwise_and_(_SPREAD)
        return lanes.view(torch.uint8).ne(0).as_strided(self.size, self.stride)


class Gate:
    """Stands for a tensor of which the backward of an activation reads where it passes the gradient on.

    There the stand-in has the number `open`, elsewhere `closed`.
    """

    __slots__ = ("bits", "closed", "dtype", "open")

    def __init__(self, tensor: Tensor, passes: Tensor, opened: float, closed: float):
        self.bits, self.dtype = Bits(passes), tensor.dtype
        self.open, self.closed = opened, closed

    def unpack(self) -> Tensor:
        mask = self.bits.mask()
        if self.closed == 0:  # takes half as long on a CPU
            passed = mask.to(self.dtype)
            return passed if self.open == 1 else passed.mul_(self.open)
        opened, closed = (
            torch.full((), n, dtype=self.dtype, device=mask.device) for n in (self.open, self.closed)
        )
        return torch.where(mask, opened, closed)


def _relu(node, tensor: Tensor) -> Gate:
    # torch compares for what it stops, so that the gradient of a NaN passes.
    return Gate(tensor, (tensor <= 0).logical_not_(), 1, 0)


def _leaky_relu(node, tensor: Tensor) -> Gate:
    return Gate(tensor, tensor > 0, 1, 0)


def _threshold(node, tensor: Tensor) -> Gate:
    return Gate(tensor, (tensor <= node._saved_threshold).logical_not_(), torch.inf, -torch.inf)


def _hardtanh(node, tensor: Tensor) -> Gate | None:
    low, high = node._saved_min_val, node._saved_max_val
    if not math.isfinite(low + high):
        return None
    inside = (tensor > low).logical_and_(tensor < high)
    if not tensor.is_cpu:  # torch's vectors on the CPU stop the gradient of a NaN
        inside.logical_or_(tensor.isnan())
    return Gate(tensor, inside, (low + high) / 2, low)


# By the node of an activation: which of its saved tensors decides, and the gate in its place.
GATES: dict[str, tuple[str, Callable[[Any, Tensor], Gate | None]]] = {
    "ReluBackward0": ("_raw_saved_result", _relu),
    "LeakyReluBackward0": ("_raw_saved_self", _leaky_relu),
    "LeakyReluBackward1": ("_raw_saved_result", _leaky_relu),
    "ThresholdBackward0": ("_raw_saved_self", _threshold),
    "HardtanhBackward0": ("_raw_saved_self", _hardtanh),
    "HardtanhBackward1": ("_raw_saved_result", _hardtanh),
}
