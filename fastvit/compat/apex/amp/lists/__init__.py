"""Which functions `amp.init` casts, by name.

`functional_overrides` is for torch.nn.functional, `torch_overrides` for torch, `tensor_overrides` for methods
of torch.Tensor. O1 casts by autocast's own lists; a name that a script moves, adds or takes away here before
`initialize` is cast as the script says.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
