"""A `PinnedTensor` is an operand of a recipe, as the op read it.

A small tensor is copied when the op runs. For a large tensor the version counter is stored. An open scope
counts writes that do not raise the counter, as through `.data` (write_tracker.py). After the forward nothing
notices writes of this kind to large tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .storage import copy_memory, current_stream_id, is_freed, record_current_stream

MAX_COPY_BYTES = 2**16  # Larger vectors are pinned without a copy.


class OperandChanged(Exception):
    """Raised when a recipe would read a tensor that is no longer as the op read it."""

    def __init__(self, tensor: Tensor, change: str):
        super().__init__(f"the memory of its operand [{tensor.type()} {list(tensor.shape)}] {change}")

    @classmethod
    def by_version(cls, tensor: Tensor, version: int) -> OperandChanged:
        return cls(
            tensor,
            "has been modified by an inplace operation after the op read it: it is at version "
            f"{tensor._version}; expected version {version}",
        )


FREED = "has been freed, or is sharded now"


class PinnedTensor:
    """A tensor as the op read it: the op has not saved the tensor, or the tensor is small."""

    pre_write_copy: Tensor | None = None
    version = 0
    writes = 0  # number of untracked writes to the memory before the op

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None, copies: bool = False):
        """Pins `tensor` now.

        Args:
            dtype: the dtype to which autocast has cast the op's operand.
            copies: whether the tensor is copied; a small one, or one of another dtype, always is.
        """
        self.source = tensor if tensor.requires_grad else None  # the tensor in autograd's graph
        self.stream = current_stream_id(tensor)
        self.is_copy = copies or is_small(tensor) or (dtype is not None and dtype is not tensor.dtype)
        self.number: tuple[Any, torch.dtype] | None = None  # a CPU scalar and its dtype
        self.tensor: Tensor | None = None
        if self.is_copy and tensor.dim() == 0 and tensor.device.type == "cpu":
            self.number = tensor.item(), dtype or tensor.dtype
            return
        self.tensor = tensor.detach()
        if self.is_copy:
            self.tensor = self.tensor.clone() if dtype is None else self.tensor.to(dtype, copy=True)
        self.version = self.tensor._version

    def is_valid_operand(self) -> bool:
        if self.is_copy or self.tensor is None:
            return True
        return self.tensor._version == self.version and self.pre_write_copy is None

    def is_sharded_now(self) -> bool:
        return self.tensor is not None and is_freed(self.tensor)

    def held_tensor(self) -> Tensor | None:
        """Returns the tensor whose memory recipes read, if it is not a copy; else None."""
        return None if self.is_copy else self.tensor

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def get_tensor(self) -> Tensor:
        """Returns the tensor as the op read it.

        Raises:
            OperandChanged: the tensor was written to, or its memory is freed.
        """
        if self.number is not None:
            return torch.tensor(self.number[0], dtype=self.number[1])
        tensor = self.tensor if self.pre_write_copy is None else self.pre_write_copy
        assert tensor is not None
        if not self.is_copy and self.pre_write_copy is None:
            if tensor._version != self.version:
                raise OperandChanged.by_version(tensor, self.version)
            if is_freed(tensor):
                raise OperandChanged(tensor, FREED)
        if current_stream_id(tensor) != self.stream:
            record_current_stream(tensor)
        return tensor

    def save_pre_write_copy(self) -> None:
        """Copies the memory before a write to it, for the recipes that read it."""
        if not self.is_copy and self.is_valid_operand():
            assert self.tensor is not None
            self.pre_write_copy = copy_memory(self.tensor)


def is_small(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a number or a vector, such as the weights of channels."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.nbytes > MAX_COPY_BYTES:
        return False
    return tensor.dim() <= 1 or max(tensor.shape) == tensor.numel()
