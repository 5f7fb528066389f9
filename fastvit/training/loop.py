"""One epoch of training, and one pass of evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import sync
from .config import TrainingError
from .distributed import get_world_size, on_every, reduce_value
from .train_state import TrainState
from .watch import Feed, Progress, StopRequest, Watch, read_batches

NORM_EVERY = 10  # steps between two norms of the gradients, where clipping does not measure every one


def train_one_epoch(
    train_state: TrainState,
    loader: DataLoader,
    shape: tuple[int, int, int],
    epoch: int,
    progress: Progress,
    stop: StopRequest,
    after_step: Callable[[], Any] = lambda: None,
) -> tuple[dict[str, float], bool]:
    """Train on the remaining batches of an epoch; rank 0 shows a progress bar.

    A loss or a gradient that is not finite, data that cannot be read and SIGTERM on one rank end the epoch on
    every rank at the same step; `Watch` says when.

    Args:
        loader: its sampler begins at the first batch after `progress`.
        shape: C, H, W of an image.
        epoch: counted from 1, for messages.
        progress: the finished steps of the epoch; updated.
        stop: read in every step, on every rank.
        after_step: called after every step.

    Returns:
        `images_per_second` of all ranks, and `data_wait`, the share of the time in which this rank waited for
        a batch; whether a rank received SIGTERM.

    Raises:
        TrainingError: on every rank, with the step and the value that was not finite, or the rank that could
            not read its data. Weights that are not finite are an error at the end.
        RuntimeError: on a rank that detected a failed exchange of statistics.
    """
    config, device, batches = train_state.config, train_state.device, 0
    steps = math.ceil(len(loader) / config.accumulate)
    feed = Feed(loader, (config.batch_size, *shape))
    train_state.parallel.train()
    start = time.perf_counter()
    with Watch(feed, stop, train_state.precision, f"epoch {epoch}", progress, steps) as watch:
        for step in range(progress.step, steps):
            parts = min(config.accumulate, len(loader) - step * config.accumulate)
            loss = _backward(train_state, feed, parts)
            watch.report(loss, _clip_gradients(train_state, step))
            _step(train_state)
            after_step()
            batches += parts
            if watch.stop_asked:
                break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        sync.check()  # before the weights are written to a checkpoint
    on_every(_check_weights, train_state.model, f"epoch {epoch}, step {progress.step}")
    seconds = time.perf_counter() - start
    images = batches * config.batch_size * get_world_size()
    return {"images_per_second": images / seconds, "data_wait": feed.waited / seconds}, watch.stop_asked


def _backward(train_state: TrainState, feed: Feed, parts: int) -> Tensor:
    """The mean loss of `parts` batches on this rank; its gradients are averaged over the ranks."""
    total = torch.zeros((), device=train_state.device)
    for part in range(parts):
        images, labels = train_state.to_device(*feed.next())
        last = part == parts - 1
        with train_state.no_sync(local=not last):
            with train_state.precision.forward():
                logits = train_state.parallel(images)
            smoothing = train_state.config.label_smoothing
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing) / parts
            total = total + loss.detach()
            train_state.precision.backward(loss, train_state.optimizer, last)
    return total


def _clip_gradients(train_state: TrainState, step: int) -> Tensor:
    """Clip the gradients, if there is a limit; returns their norm from before, or -1, not measured."""
    clip_norm = train_state.config.clip_norm
    if not clip_norm and step % NORM_EVERY:
        return torch.tensor(-1.0)
    holders = train_state.precision.gradient_holders(train_state.optimizer)
    return nn.utils.clip_grad_norm_(holders, clip_norm or math.inf)


def _check_weights(model: nn.Module, where: str) -> None:
    # The last step before a checkpoint may not have measured its gradients.
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise TrainingError(f"{where}: {name} is not finite; training stopped before a checkpoint has it")


def _step(train_state: TrainState) -> None:
    train_state.optimizer.step()
    train_state.optimizer.zero_grad(set_to_none=True)
    train_state.scheduler.step()
    if train_state.average is not None:  # of the optimizer's masters of half parameters
        model, master = train_state.model, train_state.precision.master
        masters = SimpleNamespace(buffers=model.buffers, parameters=lambda: map(master, model.parameters()))
        train_state.average.update_parameters(masters)  # type: ignore[arg-type]


@torch.no_grad()
def evaluate(train_state: TrainState, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over the test images of all ranks, each counted once.

    Args:
        model: without DistributedDataParallel, whose forward would wait for all ranks in every batch.

    Raises:
        TrainingError: on every rank, when one could not read its images.
    """
    model.eval()
    sums = on_every(_sums, train_state, model, loader)
    loss, correct, count = reduce_value(sums, average=False).tolist()
    return loss / count, correct / count


def _sums(train_state: TrainState, model: nn.Module, loader: DataLoader) -> Tensor:
    """The loss, the correct images and all images of this rank."""
    sums = torch.zeros(3, dtype=torch.float64, device=train_state.device)
    for batch in read_batches(loader):
        images, labels = train_state.to_device(*batch)
        with train_state.precision.forward():
            logits = model(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums
