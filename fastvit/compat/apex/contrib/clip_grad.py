"""apex.contrib.clip_grad has torch's own function, which works on lists of tensors too."""

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
