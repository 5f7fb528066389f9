"""apex.multi_tensor_apply, which calls compiled operations of apex (`amp_C`). fastvit has none of them.

Scripts import it, often for nothing, and ask whether it is `available` before they use it.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Takes apex's argument; `available` is False.

    Args:
        chunk_size: elements that one block of threads would work on.
    """

    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> NoReturn:
        raise RuntimeError(
            "multi_tensor_applier: needs the operations of NVIDIA apex (amp_C), which fastvit has not; "
            "torch._foreach_* do the same on lists of tensors"
        )

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        self.check_avail()


multi_tensor_applier = MultiTensorApply(2048 * 32)
