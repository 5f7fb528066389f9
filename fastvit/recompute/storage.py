"""The memory in which a tensor lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Subclasses of Tensor do not see these. Sparse tensors and those of torch.func have no storage.
has_storage, _storage_id = torch._C._has_storage, torch._C._storage_id  # type: ignore[attr-defined]
_get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # none in a torch for the CPU


def view_base(tensor: Tensor) -> Any:
    """Returns the tensor of which `tensor` is a view, as far as autograd follows it, or itself."""
    base = tensor._base
    return tensor if base is None else base


def storage_id(tensor: Tensor) -> int:
    """Returns what tells the storage of `tensor` from others that exist; 0 if it has none."""
    return _storage_id(tensor) if has_storage(tensor) else 0


def is_freed(tensor: Tensor) -> bool:
    """Returns whether the memory of `tensor` is gone, as where FSDP has sharded a parameter again."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def copy_memory(tensor: Tensor) -> Tensor:
    """Copies the whole storage, since recipes may read the rest of a view's base."""
    memory = tensor.new_empty(0).set_(tensor.untyped_storage().clone())
    return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def current_stream_id(tensor: Tensor) -> int:
    """Returns the current stream of the tensor's device; 0 on the CPU."""
    return _get_raw_stream(tensor.get_device()) if tensor.is_cuda and _get_raw_stream else 0


def record_current_stream(tensor: Tensor) -> None:
    """Tells the caching allocator that the current stream uses `tensor`, which another stream allocated."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
