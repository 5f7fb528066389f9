"""apex.multi_tensor_apply, which calls the operations of `amp_C` on lists of tensors."""

from collections.abc import Callable
from typing import Any

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`.

    Args:
        chunk_size: the first argument of the operations; fastvit's `amp_C` ignores it.
    """

    available, warned = True, False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing, since fastvit has `amp_C`; apex's method raises an error without `amp_C`."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)  # elements, as in apex
