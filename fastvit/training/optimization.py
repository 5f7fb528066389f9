"""Optimizer, learning rate and averaged weights of a run."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from .engine import engine_part

__all__ = ["make_average", "make_optimizer", "make_scheduler"]


def make_optimizer(
    model: nn.Module, name: str, lr: float, weight_decay: float, engine: str = "torch"
) -> Optimizer:
    """`sgd` (momentum 0.9), `adamw`, or apex's `fused-adam`.

    Vectors (biases, gamma, beta) and the parameters of the model's `no_weight_decay()` have no weight decay.
    """
    no_weight_decay = getattr(model, "no_weight_decay", None)
    spared = no_weight_decay() if callable(no_weight_decay) else set()
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim < 2 or key in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=0.9, fused=True)
    if name == "adamw":
        return AdamW(groups, lr=lr, fused=True)
    return engine_part(engine, "optimizers").FusedAdam(groups, lr=lr)


def make_scheduler(optimizer: Optimizer, steps: int, warmup: int) -> LambdaLR:
    """Learning rate by step: linear from `lr / warmup` to `lr`, then half a cosine, 0 after `steps`.

    With a warm-up as long as the run there is no cosine.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return LambdaLR(optimizer, factor)


def make_average(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of the model whose parameters are an exponential moving average; its buffers are copies.

    The decay begins at `(1 + n) / (10 + n)` after n steps, so that the initial weights lose their share soon.
    The average has the dtype that the model has now, also after amp has cast the model.
    """

    def average(mean: Tensor, value: Tensor, steps: Tensor | int) -> Tensor:
        n = int(steps)
        return mean.lerp(value.to(mean.dtype), 1 - min(decay, (1 + n) / (10 + n)))

    return AveragedModel(model, avg_fn=average)
