"""apex.normalization over torch.nn.functional."""

from . import fused_layer_norm  # the module, as with apex; the function of this name is in it
from .fused_layer_norm import *  # noqa: F403

__all__ = ["fused_layer_norm", *fused_layer_norm.__all__]
