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


class Mask:
    """Stands for a tensor by a bit an element: `on` where that is set, elsewhere `off`."""

    __slots__ = ("dtype", "off", "on", "packed", "reason", "size", "stride")

    def __init__(self, bits: Tensor, dtype: torch.dtype, on: float = 1, off: float = 0):
        self.dtype, self.on, self.off = dtype, on, off
        self.reason = "where an activation passes the gradient on, a bit an element"
        dense = torch.empty_like(bits, device="meta")  # has other strides where elements are not side by side
        if dense.stride() != bits.stride():
            bits = bits.contiguous()
        self.size, self.stride = bits.size(), bits.stride()
        flat = bits.as_strided((bits.numel(),), (1,))
        if bits.numel() % 8:
            flat = F.pad(flat, (0, -bits.numel() % 8))
        self.packed = (flat.view(torch.int64) * _GATHER).view(torch.uint8)[7::8].contiguous()

    def unpack(self) -> Tensor:
        lanes = self.packed.to(torch.int64).mul_(_REPEAT).bitwise_and_(_SPREAD)
        bits = lanes.view(torch.uint8).ne(0).as_strided(self.size, self.stride)
        if self.off == 0:  # takes half as long on a CPU
            ones = bits.to(self.dtype)
            return ones if self.on == 1 else ones.mul_(self.on)
        like: dict[str, Any] = {"dtype": self.dtype, "device": bits.device}
        return torch.where(bits, torch.full((), self.on, **like), torch.full((), self.off, **like))


def of_dropout(tensor: Tensor, p: float) -> Mask:
    """Of dropout's mask, in which elements are 0 and 1, or 1 / (1 - p) as its dtype has it."""
    one = torch.ones((), dtype=tensor.dtype)
    mask = Mask(tensor != 0, tensor.dtype, 1 if tensor.dtype is torch.bool else one.div_(1 - p).item())
    mask.reason = "dropout's mask, kept as a bit an element"
    return mask


def _relu(node, tensor: Tensor) -> Mask:
    # torch compares for what it stops, so that the gradient of a NaN passes.
    return Mask((tensor <= 0).logical_not_(), tensor.dtype)


def _leaky_relu(node, tensor: Tensor) -> Mask:
    return Mask(tensor > 0, tensor.dtype)


def _hardtanh(node, tensor: Tensor) -> Mask | None:
    low, high = node._saved_min_val, node._saved_max_val
    if not math.isfinite(low + high):
        return None
    inside = (tensor > low).logical_and_(tensor < high)
    if not tensor.is_cpu:  # torch's vectors on the CPU stop the gradient of a NaN
        inside.logical_or_(tensor.isnan())
    return Mask(inside, tensor.dtype, (low + high) / 2, low)


# By the node of an activation: which of its saved tensors decides, and the mask in its place.
OF_ACTIVATIONS: dict[str, tuple[str, Callable[[Any, Tensor], Mask | None]]] = {
    "ReluBackward0": ("_raw_saved_result", _relu),
    "LeakyReluBackward0": ("_raw_saved_self", _leaky_relu),
    "LeakyReluBackward1": ("_raw_saved_result", _leaky_relu),
    "HardtanhBackward0": ("_raw_saved_self", _hardtanh),
    "HardtanhBackward1": ("_raw_saved_result", _hardtanh),
}
