"""torch.nn.functional: functions that run in half, in float32, or refuse half tensors."""

import torch.nn.functional

__all__ = ["BANNED_FUNCS", "FP16_FUNCS", "FP32_FUNCS", "MODULE"]

MODULE = torch.nn.functional

_DIMENSIONS = (1, 2, 3)

FP16_FUNCS = [
    "linear",
    "conv_tbc",
    *(f"conv{n}d" for n in _DIMENSIONS),
    *(f"conv_transpose{n}d" for n in _DIMENSIONS),
]

FP32_FUNCS = [
    # exponentials and normalisation
    *("gelu", "softplus", "softmax", "softmin", "log_softmax"),
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    # sampling
    *("grid_sample", "interpolate"),
    # losses
    *("l1_loss", "smooth_l1_loss", "mse_loss", "kl_div", "nll_loss", "poisson_nll_loss", "ctc_loss"),
    *("cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "margin_ranking_loss", "triplet_margin_loss"),
    *("cosine_embedding_loss", "hinge_embedding_loss"),
]

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "amp: F.binary_cross_entropy and torch.nn.BCELoss take no half tensors, whose probabilities round to "
        "0 and 1; leave the sigmoid out and use torch.nn.BCEWithLogitsLoss, or give float32, or call "
        "amp.init(allow_banned=True), which casts to float32",
    )
]
"""(name, message of the error)."""
