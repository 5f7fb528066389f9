"""apex's compiled module `amp_C` over torch's operations on lists of tensors, on the CPU and on CUDA.

All take `chunk_size`, which has no effect, an int32 flag `(1,)`, which norms, scale and axpby set to 1 for
values that are not finite, and lists of tensors of one device. Arithmetic is float32 for half tensors.
"""

from ._finder import without
from .apex._operations import *  # noqa: F403

__getattr__ = without("amp_C")
