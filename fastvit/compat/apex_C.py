"""apex's compiled module `apex_C`, which flattens a list of tensors into one tensor, and back."""

from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = ["flatten", "unflatten"]
