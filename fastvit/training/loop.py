"""One epoch of training and what ends it on all ranks, and one pass of evaluation."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import sync
from ..compat.apex import amp
from . import distributed
from .config import TrainingError
from .loaders import STOP_SIGNALS, seed_of
from .train_state import TrainState

FAILED = -1  # what a rank tells the others in a step, as it tells the number of a signal that it received


@dataclass
class Progress:
    """The finished steps of an epoch, and sums over them; part of a checkpoint within an epoch."""

    step: int = 0  # finished steps of the optimizer
    loss: float = 0.0  # sum of the mean loss of all ranks
    gradient_norm: float = 0.0  # sum of gradient norms
    gradient_norms: int = 0  # steps with finite gradients, which amp does not skip

    @property
    def mean_loss(self) -> float:
        return self.loss / self.step


def read_batches(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader; what it raises becomes an OSError with a message of one line."""
    try:
        yield from loader
    except (OSError, RuntimeError, ValueError) as error:  # workers' and timeouts' among them
        # A worker's error is a traceback, whose last line is the message.
        message = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if os.strerror(errno.ENOSPC) in message or "shared memory" in message:  # reading needs no space
            message += (
                "; the workers pass batches through /dev/shm, which is full: --workers 0 does without them"
            )
        raise OSError(f"cannot read the data: {message}") from error


class Feed:
    """Batches, the time spent waiting for them, and the error that ended them.

    Zeros follow an error, so that the rank takes part in the step, in which all ranks learn of the error.
    """

    def __init__(self, loader: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> None:
        self.batches, self.shape = read_batches(loader), shape
        self.waited = 0.0
        self.error: str | None = None

    def next(self) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        try:
            if self.error is None:
                return next(self.batches)
        except OSError as error:
            self.error = str(error)
        finally:
            self.waited += time.perf_counter() - start
        return torch.zeros(self.shape), torch.zeros(self.shape[0], dtype=torch.int64)


def stop_requests(until: ExitStack) -> list[int]:
    """The signals received so far that ask to end the run at the next step with a checkpoint.

    A scheduler and the launcher may both send one. All ranks stop at the same step when one receives it.
    """
    received: list[int] = []
    for number in STOP_SIGNALS:
        before = signal.signal(number, lambda number, _: received.append(number))
        until.callback(signal.signal, number, before)
    return received


def train_one_epoch(
    train_state: TrainState,
    loader: DataLoader,
    shape: tuple[int, int, int],
    epoch: int,
    progress: Progress,
    stop: list[int],
) -> tuple[dict[str, float], int]:
    """Train on the remaining batches of an epoch; rank 0 shows a progress bar.

    The ranks compare a step before the optimizer changes the weights. A loss or a gradient that is not
    finite, data that cannot be read and a signal to stop on one rank end the epoch on every rank at one step.

    Args:
        loader: its sampler begins at the first batch after `progress`, which is updated.
        shape: C, H, W of an image.
        epoch: counted from 1.

    Returns:
        `images_per_second` of all ranks, and `data_wait`, the share of the time in which this rank waited for
        a batch; the number of the stop signal that a rank received, or 0.
    """
    from tqdm import tqdm

    config, batches, stopped = train_state.config, 0, 0
    steps = math.ceil(len(loader) / config.accumulate)
    feed = Feed(loader, (config.batch_size, *shape))
    train_state.parallel.train()
    start = time.perf_counter()
    shown = {"desc": f"[epoch {epoch}]", "leave": False, "mininterval": 0.5, "dynamic_ncols": True}
    with tqdm(total=steps, initial=progress.step, disable=not distributed.is_main_process(), **shown) as bar:
        while progress.step < steps and not stopped:
            for group in train_state.optimizer.param_groups:
                group["lr"] = train_state.schedule((epoch - 1) * steps + progress.step)
            parts = min(config.accumulate, len(loader) - progress.step * config.accumulate)
            # Dropout differs between ranks and from augmentation (by the 1), and is the same after a resume.
            torch.manual_seed(seed_of(config.seed, epoch, distributed.get_rank(), progress.step, 1))
            loss = _backward(train_state, feed, parts)
            norm = _clip_gradients(train_state)
            flag = loss.new_tensor(FAILED if feed.error else stop[0] if stop else 0)
            losses, norms, flags = distributed.gather_numbers(torch.stack([loss, norm.float(), flag]))
            if FAILED in flags:
                distributed.raise_together(feed.error)
            progress.step += 1
            _check_finite(train_state, losses, norms[0], f"epoch {epoch}, step {progress.step}")
            progress.loss += sum(losses) / len(losses)
            if math.isfinite(norms[0]):
                progress.gradient_norm += norms[0]
                progress.gradient_norms += 1
            _step(train_state)
            batches += parts
            stopped = int(max(flags))
            bar.set_description(f"[epoch {epoch}] mean loss {progress.mean_loss:.4f}", refresh=False)
            bar.update()
        bar.refresh()  # draws the last state, within mininterval too
    if train_state.device.type == "cuda":
        torch.cuda.synchronize(train_state.device)
        sync.check()  # before the weights are written to a checkpoint
    seconds = time.perf_counter() - start
    images = batches * config.batch_size * distributed.get_world_size()
    return {"images_per_second": images / seconds, "data_wait": feed.waited / seconds}, stopped


def _backward(train_state: TrainState, feed: Feed, parts: int) -> Tensor:
    """The mean loss of `parts` batches on this rank; its gradients are averaged over the ranks."""
    parallel, total = train_state.parallel, torch.zeros((), device=train_state.device)
    for part in range(parts):
        images, labels = train_state.to_device(*feed.next())
        last = part == parts - 1
        # Gradients are reduced in the last backward alone.
        with nullcontext() if last or parallel is train_state.model else parallel.no_sync():
            with train_state.autocast():
                logits = parallel(images)
            smoothing = train_state.config.label_smoothing
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing) / parts
            total = total + loss.detach()
            with amp.scale_loss(loss, train_state.optimizer, delay_unscale=not last) as scaled:
                scaled.backward()
    return total


def _clip_gradients(train_state: TrainState) -> Tensor:
    """Clip the gradients, if there is a limit; returns their norm from before."""
    groups = train_state.optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, train_state.config.clip_norm or math.inf)


def _check_finite(train_state: TrainState, losses: list[float], gradient_norm: float, where: str) -> None:
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        ranks = f"rank {bad[0]}" if len(bad) == 1 else "ranks " + ", ".join(map(str, bad))
        what = f"the loss is {losses[bad[0]]} on {ranks}"
    elif not math.isfinite(gradient_norm) and not train_state.scales_loss:
        what = f"the norm of the gradients is {gradient_norm}"
    else:
        return
    sync.check()  # an exchange of statistics that failed has a better message
    raise TrainingError(
        f"{where}: {what}; training stopped before it reached a checkpoint (try a smaller --lr or a longer "
        "--warmup-epochs)"
    )


def _step(train_state: TrainState) -> None:
    train_state.optimizer.step()
    train_state.optimizer.zero_grad(set_to_none=True)
    if train_state.average is not None:
        train_state.average.update_parameters(train_state.model)


@torch.no_grad()
def evaluate(train_state: TrainState, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over the test images of all ranks, each counted once.

    The model is without DistributedDataParallel, whose forward would wait for all ranks in every batch.
    """
    model.eval()
    sums = distributed.on_every(_sums, train_state, model, loader)
    loss, correct, count = distributed.mean_of_ranks(sums).tolist()
    return loss / count, correct / count


def _sums(train_state: TrainState, model: nn.Module, loader: DataLoader) -> Tensor:
    """The loss, the correct images and all images of this rank."""
    sums = torch.zeros(3, dtype=torch.float64, device=train_state.device)
    for batch in read_batches(loader):
        images, labels = train_state.to_device(*batch)
        with train_state.autocast():
            logits = model(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums
