"""A `BitMask` stores one bit for each element of dropout's mask, or of what an activation has saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A 64-bit integer of 8 bytes b[i], each 0 or 1, times _GATHER_BITS has the bits b[i] << i in its top byte:
# no two of the 64 terms b[i] << 8 i + 56 - 7 j have the same exponent, and the terms with i > j overflow. A
# byte times _COPY_BYTE is a copy of the byte in all 8 bytes. _SELECT_BITS leaves bit i of byte i.
_GATHER_BITS = sum(1 << (56 - 7 * i) for i in range(8))
_COPY_BYTE = sum(1 << 8 * i for i in range(8))
_SELECT_BITS = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # as a signed integer


class BitMask:
    """Stores a tensor of two values by one bit for each element: `true_value` if the bit is set."""

    __slots__ = ("dtype", "false_value", "packed", "reason", "size", "stride", "true_value")

    def __init__(self, bits: Tensor, dtype: torch.dtype, true_value: float = 1, false_value: float = 0):
        self.dtype, self.true_value, self.false_value = dtype, true_value, false_value
        self.reason = "where an activation passes the gradient on, a bit an element"
        # empty_like changes the strides of a tensor that is not dense.
        if torch.empty_like(bits, device="meta").stride() != bits.stride():
            bits = bits.contiguous()
        self.size, self.stride = bits.size(), bits.stride()
        flat = bits.as_strided((bits.numel(),), (1,))
        if bits.numel() % 8:
            flat = F.pad(flat, (0, -bits.numel() % 8))
        self.packed = (flat.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[7::8].contiguous()

    def unpack(self) -> Tensor:
        lanes = self.packed.to(torch.int64).mul_(_COPY_BYTE).bitwise_and_(_SELECT_BITS)
        bits = lanes.view(torch.uint8).ne(0).as_strided(self.size, self.stride)
        if self.false_value == 0:  # this branch takes half as long as torch.where on a CPU
            ones = bits.to(self.dtype)
            return ones if self.true_value == 1 else ones.mul_(self.true_value)
        options: dict[str, Any] = {"dtype": self.dtype, "device": bits.device}
        return torch.where(
            bits, torch.full((), self.true_value, **options), torch.full((), self.false_value, **options)
        )


def dropout_bit_mask(tensor: Tensor, p: float) -> BitMask:
    """Packs a dropout mask into bits. The elements of the mask are 0 and 1, or 0 and 1 / (1 - p) rounded."""
    one = torch.ones((), dtype=tensor.dtype)
    is_bool = tensor.dtype is torch.bool
    mask = BitMask(tensor != 0, tensor.dtype, 1 if is_bool else one.div_(1 - p).item())
    mask.reason = "dropout's mask, kept as a bit an element"
    return mask


def _relu_mask(node, tensor: Tensor) -> BitMask:
    # torch's relu backward zeroes the gradient where `result <= 0`, so the gradient of a NaN passes.
    return BitMask((tensor <= 0).logical_not_(), tensor.dtype)


def _leaky_relu_mask(node, tensor: Tensor) -> BitMask:
    return BitMask(tensor > 0, tensor.dtype)


def _hardtanh_mask(node, tensor: Tensor) -> BitMask | None:
    """Returns a mask of the elements whose gradient passes, by the op's own backward.

    That backward compares half precision with the bounds in float32. Returns None if the dtype has no number
    between the bounds, by which the mask could replace these elements.
    """
    low, high = node._saved_min_val, node._saved_max_val
    comparison_dtype = torch.float32 if tensor.element_size() == 2 else tensor.dtype
    bounds = torch.tensor([low, high], dtype=torch.float64)
    passing_value = ((bounds[0] + bounds[1]) / 2).to(tensor.dtype).to(comparison_dtype)
    lower, upper = bounds.to(comparison_dtype)
    if not lower < passing_value < upper or not math.isfinite(low + high):
        return None
    # The layout of the gradient decides whether the gradient of a NaN passes on a CPU.
    if tensor.is_cpu and tensor.isnan().any():
        return None
    passes = torch.ops.aten.hardtanh_backward(torch.ones_like(tensor), tensor, low, high) != 0
    return BitMask(passes, tensor.dtype, passing_value.item(), math.inf)


# Node name of an activation -> the node's attribute of the saved tensor, and the maker of the mask.
ACTIVATION_MASKS: dict[str, tuple[str, Callable[[Any, Tensor], BitMask | None]]] = {
    "ReluBackward0": ("_raw_saved_result", _relu_mask),
    "LeakyReluBackward0": ("_raw_saved_self", _leaky_relu_mask),
    "LeakyReluBackward1": ("_raw_saved_result", _leaky_relu_mask),
    "HardtanhBackward0": ("_raw_saved_self", _hardtanh_mask),
    "HardtanhBackward1": ("_raw_saved_result", _hardtanh_mask),
}
