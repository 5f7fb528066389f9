"""The functions that `amp.init` casts, by name.

`functional_overrides` is for torch.nn.functional, `torch_overrides` for torch, `tensor_overrides` for methods
of torch.Tensor. O1 uses autocast's lists, with the changes that a script makes to these lists before
`initialize`.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
