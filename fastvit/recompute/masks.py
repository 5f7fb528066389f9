"""A `BitMask` has one bit an element, in place of dropout's mask or of what an activation has saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A 64-bit integer of 8 bytes b[i], each 0 or 1, times _GATHER_BITS has the bits b[i] << i in its top byte:
# no two of the 64 terms b[i] << 8 i + 56 - 7 j have the same exponent, and those of i > j overflow. A byte
# times _COPY_BYTE is in all 8 bytes, of which _SELECT_BITS leaves bit i in byte i.
_GATHER_BITS = sum(1 << (56 - 7 * i) for i in range(8))
_COPY_BYTE = sum(1 << 8 * i for i in range(8))
_SELECT_BITS = sum(1 << 9 * i for i in range(8)) - (1 << 64)  # as a signed integer


class BitMask:
    """One bit an element in place of a tensor: `true_value` where it is set, elsewhere `false_value`."""

    __slots__ = ("dtype", "false_value", "packed", "reason", "size", "stride", "true_value")

    def __init__(self, bits: Tensor, dtype: torch.dtype, true_value: float = 1, false_value: float = 0):
        self.dtype, self.true_value, self.false_value = dtype, true_value, false_value
        self.reason = "where an activation passes the gradient on, a bit an element"
        dense = torch.empty_like(bits, device="meta")  # its strides differ if the tensor is not dense
        if dense.stride() != bits.stride():
            bits = bits.contiguous()
        self.size, self.stride = bits.size(), bits.stride()
        flat = bits.as_strided((bits.numel(),), (1,))
        if bits.numel() % 8:
            flat = F.pad(flat, (0, -bits.numel() % 8))
        self.packed = (flat.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[7::8].contiguous()

    def unpack(self) -> Tensor:
        lanes = self.packed.to(torch.int64).mul_(_COPY_BYTE).bitwise_and_(_SELECT_BITS)
        bits = lanes.view(torch.uint8).ne(0).as_strided(self.size, self.stride)
        if self.false_value == 0:  # takes half as long on a CPU
            ones = bits.to(self.dtype)
            return ones if self.true_value == 1 else ones.mul_(self.true_value)
        like: dict[str, Any] = {"dtype": self.dtype, "device": bits.device}
        return torch.where(
            bits, torch.full((), self.true_value, **like), torch.full((), self.false_value, **like)
        )


def dropout_bit_mask(tensor: Tensor, p: float) -> BitMask:
    """Packs a dropout mask into bits. Its elements are 0 and 1, or 0 and 1 / (1 - p) rounded to its dtype."""
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
    """Asks the op's own backward, which compares half precision with its bounds in float32.

    Returns None where the dtype has no number between the bounds to stand for what passes.
    """
    low, high = node._saved_min_val, node._saved_max_val
    wide = torch.float32 if tensor.element_size() == 2 else tensor.dtype
    bounds = torch.tensor([low, high], dtype=torch.float64)
    inside = ((bounds[0] + bounds[1]) / 2).to(tensor.dtype).to(wide)
    if not bounds.to(wide)[0] < inside < bounds.to(wide)[1] or not math.isfinite(low + high):
        return None
    if (
        tensor.is_cpu and tensor.isnan().any()
    ):  # the layout of the gradient decides whether that of a NaN passes
        return None
    passes = torch.ops.aten.hardtanh_backward(torch.ones_like(tensor), tensor, low, high) != 0
    return BitMask(passes, tensor.dtype, inside.item(), math.inf)


# The node name of an activation: which of its saved tensors decides, and the mask in its place.
ACTIVATION_MASKS: dict[str, tuple[str, Callable[[Any, Tensor], BitMask | None]]] = {
    "ReluBackward0": ("_raw_saved_result", _relu_mask),
    "LeakyReluBackward0": ("_raw_saved_self", _leaky_relu_mask),
    "LeakyReluBackward1": ("_raw_saved_result", _leaky_relu_mask),
    "HardtanhBackward0": ("_raw_saved_self", _hardtanh_mask),
    "HardtanhBackward1": ("_raw_saved_result", _hardtanh_mask),
}
