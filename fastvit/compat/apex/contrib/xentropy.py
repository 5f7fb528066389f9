"""apex.contrib.xentropy over torch.nn.functional.cross_entropy."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..normalization.fused_layer_norm import as_autograd_function


def _cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
) -> Tensor:
    """Returns the losses `(N,)` of logits `(N, C)` and labels `(N,)`, in the dtype of the logits.

    Args:
        smoothing: fraction of the target that is spread over all classes, as torch's `label_smoothing`.
        padding_idx: label of rows whose loss is 0.
        half_to_float: return losses in float32 for logits in half.
    """
    float32_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        float32_logits, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
    )
    return losses if half_to_float else losses.to(logits.dtype)


SoftmaxCrossEntropyLoss = as_autograd_function(_cross_entropy)
