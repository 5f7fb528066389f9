"""A half model, its loss and its optimizer, for the tests of optimizers that step half parameters."""

import torch
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex.optimizers import FusedAdam


def make_mlp(dtype=torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss_of_mlp(model, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def make_adam_of_bert(model) -> FusedAdam:
    """Returns the optimizer of scripts for BERT, which does not decay biases."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=1e-2, bias_correction=False, max_grad_norm=1.0)
