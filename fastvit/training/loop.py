"""Trains one epoch, whose ranks compare every step and so end together, and evaluates a model."""

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
from .loaders import STOP_SIGNALS, combine_seeds
from .train_state import TrainState

# In every step a rank sends one of these numbers, or the number of a stop signal, to the other ranks.
NO_SIGNAL, DATA_FAILED = 0, -1


@dataclass
class Progress:
    """The finished steps of an epoch, and sums over them. Checkpoints have these fields as keys."""

    step: int = 0  # finished steps of the optimizer
    loss: float = 0.0  # sum of the mean loss of all ranks
    gradient_norm: float = 0.0  # sum of gradient norms
    gradient_norms: int = 0  # number of steps with finite gradients, which amp does not skip

    @property
    def mean_loss(self) -> float:
        return self.loss / self.step


def read_batches(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches of a loader. Turns its errors into an OSError with a message of one line."""
    try:
        yield from loader
    except (OSError, RuntimeError, ValueError) as error:  # Workers' errors and timeouts are of these types.
        # A worker's error is a traceback, whose last line is the message.
        message = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if os.strerror(errno.ENOSPC) in message or "shared memory" in message:  # Reading needs no space.
            message += (
                "; the workers pass batches through /dev/shm, which is full: --workers 0 needs no workers"
            )
        raise OSError(f"cannot read the data: {message}") from error


class BatchFeed:
    """Yields batches, and records the seconds spent waiting for them and the error that ended them.

    After an error the feed yields zeros: the rank still takes part in the step, and the step tells all ranks
    of the error.
    """

    def __init__(self, loader: Iterable[tuple[Tensor, Tensor]], shape: tuple[int, ...]) -> None:
        self.batches, self.shape = read_batches(loader), shape
        self.seconds_waited = 0.0
        self.error: str | None = None

    def next_batch(self) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        try:
            if self.error is None:
                return next(self.batches)
        except OSError as error:
            self.error = str(error)
        finally:
            self.seconds_waited += time.perf_counter() - start
        return torch.zeros(self.shape), torch.zeros(self.shape[0], dtype=torch.int64)


def record_stop_signals(exit_stack: ExitStack) -> list[int]:
    """Returns a list to which the stop signals that this rank receives are added, until the stack is closed.

    A scheduler and the launcher may both send a signal. If one rank receives a signal, all ranks stop at the
    same step.
    """
    received_signals: list[int] = []
    for number in STOP_SIGNALS:
        old_handler = signal.signal(number, lambda number, _: received_signals.append(number))
        exit_stack.callback(signal.signal, number, old_handler)
    return received_signals


def train_one_epoch(
    train_state: TrainState,
    loader: DataLoader,
    shape: tuple[int, int, int],
    epoch: int,
    progress: Progress,
    received_signals: list[int],
) -> tuple[dict[str, float], int]:
    """Trains on the remaining batches of an epoch. Rank 0 shows a progress bar.

    A loss or a gradient that is not finite, data that cannot be read and a stop signal on one rank end the
    epoch on every rank at the same step.

    Args:
        loader: its sampler begins at the first batch after `progress`, which is updated.
        shape: C, H, W of an image.
        epoch: counted from 1.
        received_signals: the stop signals of this rank, as `record_stop_signals` returns them.

    Returns:
        `images_per_second` of all ranks, and `data_wait`, the fraction of the time in which this rank waited
        for a batch; the number of the stop signal that some rank received, or 0.
    """
    from tqdm import tqdm

    config, num_batches, stop_signal = train_state.config, 0, NO_SIGNAL
    steps = math.ceil(len(loader) / config.accumulate)
    feed = BatchFeed(loader, (config.batch_size, *shape))
    train_state.ddp_model.train()
    start = time.perf_counter()
    bar_options = {"desc": f"[epoch {epoch}]", "leave": False, "mininterval": 0.5, "dynamic_ncols": True}
    bar_options |= {"total": steps, "initial": progress.step, "disable": not distributed.is_main_process()}
    with tqdm(**bar_options) as bar:
        while progress.step < steps and not stop_signal:
            for group in train_state.optimizer.param_groups:
                group["lr"] = train_state.schedule((epoch - 1) * steps + progress.step)
            num_micro_batches = min(config.accumulate, len(loader) - progress.step * config.accumulate)
            stop_signal = _train_step(train_state, feed, num_micro_batches, epoch, progress, received_signals)
            num_batches += num_micro_batches
            bar.set_description(f"[epoch {epoch}] mean loss {progress.mean_loss:.4f}", refresh=False)
            bar.update()
        bar.refresh()  # tqdm skips updates within mininterval, but the last update must show.
    if train_state.device.type == "cuda":
        torch.cuda.synchronize(train_state.device)
        sync.check()  # A failed exchange must raise before the weights are saved.
    seconds = time.perf_counter() - start
    images = num_batches * config.batch_size * distributed.get_world_size()
    return {"images_per_second": images / seconds, "data_wait": feed.seconds_waited / seconds}, stop_signal


def _train_step(
    train_state: TrainState,
    feed: BatchFeed,
    num_micro_batches: int,
    epoch: int,
    progress: Progress,
    received_signals: list[int],
) -> int:
    """Makes one step and adds it to `progress`. Returns the stop signal that some rank received, or 0.

    The ranks compare loss, gradients and signals before the optimizer changes the weights.
    """
    # Dropout's seed differs between ranks and, by the 1, from augmentation's, and is the same after a resume.
    torch.manual_seed(combine_seeds(train_state.config.seed, epoch, distributed.get_rank(), progress.step, 1))
    loss = _accumulate_gradients(train_state, feed, num_micro_batches)
    norm = _clip_gradients(train_state)
    signal_number = DATA_FAILED if feed.error else received_signals[0] if received_signals else NO_SIGNAL
    local_numbers = torch.stack([loss, norm.float(), loss.new_tensor(signal_number)])
    losses, norms, signal_numbers = distributed.all_gather_numbers(local_numbers)
    if DATA_FAILED in signal_numbers:
        distributed.raise_on_all_ranks(feed.error)
    progress.step += 1
    _check_finite(train_state, losses, norms[0], f"epoch {epoch}, step {progress.step}")
    progress.loss += sum(losses) / len(losses)
    if math.isfinite(norms[0]):
        progress.gradient_norm += norms[0]
        progress.gradient_norms += 1
    _optimizer_step(train_state)
    return int(max(signal_numbers))


def _accumulate_gradients(train_state: TrainState, feed: BatchFeed, num_micro_batches: int) -> Tensor:
    """Adds up the gradients of several batches, averaged over the ranks. Returns this rank's mean loss."""
    ddp_model, total = train_state.ddp_model, torch.zeros((), device=train_state.device)
    for micro_batch in range(num_micro_batches):
        images, labels = train_state.to_device(*feed.next_batch())
        is_last = micro_batch == num_micro_batches - 1
        # DDP averages the gradients in the last backward alone.
        with nullcontext() if is_last or ddp_model is train_state.model else ddp_model.no_sync():
            with train_state.autocast():
                logits = ddp_model(images)
            smoothing = train_state.config.label_smoothing
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing) / num_micro_batches
            total = total + loss.detach()
            with amp.scale_loss(loss, train_state.optimizer, delay_unscale=not is_last) as scaled_loss:
                scaled_loss.backward()
    return total


def _clip_gradients(train_state: TrainState) -> Tensor:
    """Clips the gradients, if --clip-norm is not 0. Returns the norm of the gradients before the clipping."""
    groups = train_state.optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, train_state.config.clip_norm or math.inf)


def _check_finite(train_state: TrainState, losses: list[float], gradient_norm: float, position: str) -> None:
    bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad_ranks:
        ranks = f"rank {bad_ranks[0]}" if len(bad_ranks) == 1 else f"ranks {', '.join(map(str, bad_ranks))}"
        finding = f"the loss is {losses[bad_ranks[0]]} on {ranks}"
    elif not math.isfinite(gradient_norm) and not train_state.uses_loss_scaling:
        finding = f"the norm of the gradients is {gradient_norm}"
    else:
        return
    sync.check()  # A failed exchange of statistics has a better message.
    raise TrainingError(
        f"{position}: {finding}; training stopped before this step reached a checkpoint (try a smaller --lr "
        "or a longer --warmup-epochs)"
    )


def _optimizer_step(train_state: TrainState) -> None:
    train_state.optimizer.step()
    train_state.optimizer.zero_grad(set_to_none=True)
    if train_state.ema_model is not None:
        train_state.ema_model.update_parameters(train_state.model)


@torch.no_grad()
def evaluate(train_state: TrainState, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Returns the mean cross-entropy and the accuracy over the test images of all ranks, each counted once.

    `model` is not in DistributedDataParallel, whose forward would wait for all ranks in every batch.
    """
    model.eval()
    local_sums = distributed.run_on_all_ranks(_evaluation_sums, train_state, model, loader)
    loss, correct, count = distributed.average_over_ranks(local_sums).tolist()
    return loss / count, correct / count


def _evaluation_sums(train_state: TrainState, model: nn.Module, loader: DataLoader) -> Tensor:
    """Returns the sum of the losses, the number of correct images and the number of images on this rank."""
    sums = torch.zeros(3, dtype=torch.float64, device=train_state.device)
    for batch in read_batches(loader):
        images, labels = train_state.to_device(*batch)
        with train_state.autocast():
            logits = model(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums
