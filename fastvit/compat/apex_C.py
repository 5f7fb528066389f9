"""apex's compiled module `apex_C`: lists of tensors as one flat tensor, and back."""

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
