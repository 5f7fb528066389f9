"""One epoch of training, one pass of evaluation, and what they need: optimizer and schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .distributed import all_losses, get_world_size, is_main_process, reduce_value
from .errors import TrainingError

__all__ = ["EpochResult", "evaluate", "make_optimizer", "make_scheduler", "train_one_epoch"]


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of training gave, equal on every rank but for the time."""

    loss: float  # mean over steps and ranks
    images: int  # of all ranks
    seconds: float


def make_optimizer(model: nn.Module, name: str, lr: float, weight_decay: float) -> Optimizer:
    """``sgd`` (momentum 0.9) or ``adamw``; vectors (biases, gamma, beta) and the position do not decay."""
    decayed, free = [], []
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim < 2 or key.endswith("position") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    if name == "sgd":
        return SGD(groups, lr=lr, momentum=0.9, fused=True)
    return AdamW(groups, lr=lr, fused=True)


def make_scheduler(optimizer: Optimizer, steps: int, warmup: int) -> LambdaLR:
    """Learning rate by step: linear from ``lr / warmup`` to ``lr``, then half a cosine, 0 after ``steps``.

    A warm-up as long as the run leaves no room for the cosine.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return LambdaLR(optimizer, factor)


def _check_finite(losses: list[float], epoch: int, step: int) -> None:
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        where = f"rank {bad[0]}" if len(bad) == 1 else "ranks " + ", ".join(map(str, bad))
        raise TrainingError(
            f"epoch {epoch}, step {step}: the loss is {losses[bad[0]]} on {where}; training stopped before "
            f"it changed the weights (try a smaller --lr or a longer --warmup-epochs)"
        )


def train_one_epoch(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    optimizer: Optimizer,
    scheduler: LambdaLR,
    device: torch.device,
    epoch: int,
) -> EpochResult:
    """Train on every batch of ``loader``; rank 0 shows a progress bar.

    The ranks share their losses in every step while the backward pass runs. All of them see a loss that is
    not finite, on whichever rank it was, and stop at the same step, before the optimizer writes it into the
    weights.

    Args:
        model: the model, in DistributedDataParallel when there are several ranks.
        epoch: counted from 1, for messages.

    Raises:
        TrainingError: on every rank, naming the step and the ranks whose loss was not finite.
    """
    from tqdm import tqdm

    model.train()
    world = get_world_size()
    total, images_seen = 0.0, 0
    start = time.perf_counter()
    quiet = not is_main_process()
    with tqdm(
        loader, f"[epoch {epoch}]", leave=False, disable=quiet, mininterval=0.5, dynamic_ncols=True
    ) as bar:
        for step, (images, labels) in enumerate(bar, start=1):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels)
            losses = all_losses(loss)
            loss.backward()
            shared = losses()
            _check_finite(shared, epoch, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            total += sum(shared) / world
            images_seen += len(images) * world
            bar.set_description(f"[epoch {epoch}] mean loss {total / step:.4f}", refresh=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return EpochResult(total / step, images_seen, time.perf_counter() - start)


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over the test images of all ranks, each counted once.

    Args:
        model: the model without DistributedDataParallel, whose forward would wait for ranks with more
            batches.
    """
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    loss, correct, count = reduce_value(sums, average=False).tolist()
    return loss / count, correct / count
