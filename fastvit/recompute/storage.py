"""Functions on the storage of a tensor, and on the stream that uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# These functions do not call subclasses of Tensor. Sparse tensors and tensors of torch.func have no storage.
has_storage, _storage_id = torch._C._has_storage, torch._C._storage_id  # type: ignore[attr-defined]
_get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None if torch was built without CUDA


def view_base(tensor: Tensor) -> Any:
    """Returns the tensor of which `tensor` is a view in autograd's graph, or `tensor`."""
    base = tensor._base
    return tensor if base is None else base


def storage_id(tensor: Tensor) -> int:
    """Returns a number that no other existing storage has; 0 if `tensor` has no storage."""
    return _storage_id(tensor) if has_storage(tensor) else 0


def is_freed(tensor: Tensor) -> bool:
    """Returns whether the memory of `tensor` is freed, as FSDP does when it shards a parameter again."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def copy_memory(tensor: Tensor) -> Tensor:
    """Returns a copy of `tensor` and its whole storage, because recipes may read all of a view's base."""
    memory = tensor.new_empty(0).set_(tensor.untyped_storage().clone())
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def current_stream_id(tensor: Tensor) -> int:
    """Returns the id of the current stream of the tensor's device; 0 on the CPU."""
    return _get_raw_stream(tensor.get_device()) if tensor.is_cuda and _get_raw_stream else 0


def record_current_stream(tensor: Tensor) -> None:
    """Tells the caching allocator that the current stream uses `tensor`, which another stream allocated."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
