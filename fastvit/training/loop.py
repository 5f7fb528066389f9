"""One epoch of training, and one pass of evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .. import sync
from .distributed import StepReport, get_world_size, is_main_process, raise_together, reduce_value
from .errors import TrainingError
from .signals import StopRequest
from .train_state import TrainState

__all__ = ["EpochResult", "Progress", "evaluate", "train_one_epoch"]

STOP, FAILED = 1, 2  # flags in the ranks' reports
UNREADABLE = (OSError, RuntimeError, ValueError)  # errors of a loader, of workers and their timeouts
EXCHANGES = ("fastvit-sync", "inplace-abn-sync")  # norms whose failed exchanges a GPU reports later
NORM_EVERY = 10  # steps between two gradient norms, where clipping does not measure every one
PIPELINE_STEPS = {"cuda": 1}  # steps that a device may be behind the host


@dataclass
class Progress:
    """The finished steps of an epoch, and sums over them; part of a checkpoint within an epoch."""

    step: int = 0  # finished steps of the optimizer
    loss: float = 0.0  # sum of the mean loss of all ranks
    norm: float = 0.0  # sum of gradient norms
    norms: int = 0  # number of gradient norms in the sum


@dataclass(frozen=True)
class EpochResult:
    """The result of one epoch of training; equal on every rank, except for the times."""

    progress: Progress
    images: int  # of all ranks, in this start
    seconds: float
    data_wait: float  # share of the seconds in which this rank waited for a batch
    complete: bool  # every step of the epoch is done
    stop_asked: bool  # a rank received SIGTERM

    @property
    def loss(self) -> float:
        return self.progress.loss / self.progress.step

    @property
    def gradient_norm(self) -> float:
        return self.progress.norm / max(1, self.progress.norms)


class _Feed:
    """Batches, the time spent waiting for them, and the error that ended them.

    After an error it returns zeros as images, so that the rank takes part in the step and reports the error
    in its `StepReport`.
    """

    def __init__(self, loader: DataLoader, shape: tuple[int, ...]) -> None:
        self.loader, self.shape = loader, shape
        self.iterator: Iterator[tuple[Tensor, Tensor]] | None = None
        self.waited = 0.0
        self.error: str | None = None

    def next(self) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        try:
            if self.error is None:
                self.iterator = self.iterator or iter(self.loader)
                return next(self.iterator)
        except UNREADABLE as error:
            self.error = f"cannot read the data: {_last_line(error)}"
        finally:
            self.waited += time.perf_counter() - start
        return torch.zeros(self.shape), torch.zeros(self.shape[0], dtype=torch.int64)


def _last_line(error: Exception) -> str:
    # A worker's error is a traceback, whose last line is the message.
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _check_finite(losses: list[float], norm: float, epoch: int, step: int) -> None:
    bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        where = f"rank {bad[0]}" if len(bad) == 1 else "ranks " + ", ".join(map(str, bad))
        what = f"the loss is {losses[bad[0]]} on {where}"
    elif not math.isfinite(norm):
        sync.check()  # a failed exchange in the backward has a better message
        what = f"the norm of the gradients is {norm}"
    else:
        return
    raise TrainingError(
        f"epoch {epoch}, step {step}: {what}; training stopped before it reached a checkpoint "
        f"(try a smaller --lr or a longer --warmup-epochs)"
    )


def train_one_epoch(
    train_state: TrainState,
    loader: DataLoader,
    shape: tuple[int, int, int],
    epoch: int,
    progress: Progress,
    stop: StopRequest,
    after_step: Callable[[], Any] = lambda: None,
) -> EpochResult:
    """Train on the remaining batches of an epoch; rank 0 shows a progress bar.

    The ranks share their losses in every step, so all of them stop at the same step when one has a loss that
    is not finite. On the CPU this is before the optimizer changes the weights. On a GPU it is one step later,
    because the host launches a step before the previous one has ended.

    The norm of the gradients is checked likewise, where the loss is not scaled: in every step with
    `--clip-norm`, else in every tenth. On a GPU with layers of fastvit that share statistics it is checked in
    every step, because the host sees a failed exchange of a backward late; torch's optimizers skip such a
    step by a flag on the device.

    Args:
        loader: its sampler begins at the first batch after `progress`.
        shape: C, H, W of an image.
        epoch: counted from 1, for messages.
        progress: the finished steps of the epoch; updated.
        stop: read in every step, on every rank.
        after_step: called after every step.

    Raises:
        TrainingError: on every rank, with the step and the value that was not finite, or the rank that could
            not read its data.
        RuntimeError: on a rank that detected a failed exchange of statistics.
    """
    from tqdm import tqdm

    config, accumulate = train_state.config, train_state.config.accumulate
    train_state.parallel.train()
    feed = _Feed(loader, (config.batch_size, *shape))
    batches = len(loader)
    steps = math.ceil(batches / accumulate)
    behind = PIPELINE_STEPS.get(train_state.device.type, 0)
    late_errors = bool(behind) and config.norm in EXCHANGES
    norm_every = 1 if config.clip_norm or late_errors else NORM_EVERY
    reports: list[StepReport] = []
    scaled = train_state.precision.scales_loss
    start, first, asked = time.perf_counter(), progress.step, False
    bar = tqdm(
        total=steps, initial=first, desc=f"[epoch {epoch}]", leave=False, disable=not is_main_process(),
        mininterval=0.5, dynamic_ncols=True,
    )  # fmt: skip

    def settle(report: StepReport) -> None:
        nonlocal asked
        losses, flags, norm = report.read()
        if FAILED in flags:
            raise_together(feed.error)
        progress.step += 1
        _check_finite(losses, 0.0 if norm is None or scaled else norm, epoch, progress.step)
        progress.loss += sum(losses) / len(losses)
        if norm is not None and math.isfinite(norm):
            progress.norm, progress.norms = progress.norm + norm, progress.norms + 1
        asked = asked or STOP in flags
        bar.set_description(f"[epoch {epoch}] mean loss {progress.loss / progress.step:.4f}", refresh=False)
        bar.update()

    with bar:
        for step in range(first, steps):
            parts = min(accumulate, batches - step * accumulate)
            loss = _backward(train_state, feed, parts)
            norm = _gradient_norm(train_state) if step % norm_every == 0 else None
            flag = FAILED if feed.error else STOP if stop.came else 0
            reports.append(StepReport(loss, flag, norm))
            while len(reports) > behind:
                settle(reports.pop(0))
            if late_errors and not scaled:
                assert norm is not None  # norm_every is 1 then
                _skip_if_not_finite(train_state.optimizer, norm)
            _step(train_state)
            after_step()
            if asked:
                break
        while reports:
            settle(reports.pop(0))
        bar.refresh()  # draws the last state, within mininterval too
    if train_state.device.type == "cuda":
        torch.cuda.synchronize(train_state.device)
        sync.check()  # before the weights are written to a checkpoint
    seconds = time.perf_counter() - start
    trained = min(progress.step * accumulate, batches) - first * accumulate
    return EpochResult(
        progress,
        trained * config.batch_size * get_world_size(),
        seconds,
        feed.waited / seconds,
        progress.step == steps,
        asked,
    )


def _backward(train_state: TrainState, feed: _Feed, parts: int) -> Tensor:
    """The mean loss of `parts` batches on this rank; its gradients are averaged over the ranks."""
    total = torch.zeros((), device=train_state.device)
    for part in range(parts):
        images, labels = train_state.to_device(*feed.next())
        last = part == parts - 1
        with train_state.no_sync(local=not last):
            with train_state.precision.forward():
                logits = train_state.parallel(images)
            loss = (
                F.cross_entropy(logits.float(), labels, label_smoothing=train_state.config.label_smoothing)
                / parts
            )
            total = total + loss.detach()
            train_state.precision.backward(loss, train_state.optimizer, last)
    return total


def _gradient_norm(train_state: TrainState) -> Tensor:
    """Norm of all gradients together, before they are clipped if there is a limit."""
    holders = list(train_state.precision.gradient_holders(train_state.optimizer))
    if train_state.config.clip_norm:
        return nn.utils.clip_grad_norm_(holders, train_state.config.clip_norm)
    return nn.utils.get_total_norm([holder.grad for holder in holders if holder.grad is not None])


class _Masters:
    """A model for the moving average: its parameters are the optimizer's masters of half parameters."""

    def __init__(self, train_state: TrainState) -> None:
        self.buffers = train_state.model.buffers
        self.parameters = lambda: map(train_state.precision.master, train_state.model.parameters())


def _skip_if_not_finite(optimizer: Optimizer, norm: Tensor) -> None:
    """Make the next step a no-op if `norm` is not finite, without waiting on the host.

    torch.amp.GradScaler sets the same flag for torch's fused optimizers. FusedAdam would wait for it.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]


def _step(train_state: TrainState) -> None:
    train_state.optimizer.step()
    train_state.optimizer.zero_grad(set_to_none=True)
    train_state.scheduler.step()
    if train_state.average is not None:
        train_state.average.update_parameters(_Masters(train_state))  # type: ignore[arg-type]


@torch.no_grad()
def evaluate(train_state: TrainState, model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Mean cross-entropy and accuracy over the test images of all ranks, each counted once.

    Args:
        model: without DistributedDataParallel, whose forward would wait for all ranks in every batch.

    Raises:
        TrainingError: on every rank, when one could not read its images.
    """
    model.eval()
    sums = torch.zeros(
        4, dtype=torch.float64, device=train_state.device
    )  # loss, correct, images, failed ranks
    failed = None
    try:
        for batch in loader:
            images, labels = train_state.to_device(*batch)
            with train_state.precision.forward():
                logits = model(images)
            sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    except UNREADABLE as error:
        failed = f"cannot read the data: {_last_line(error)}"
        sums[3] = 1
    loss, correct, count, failures = reduce_value(sums, average=False).tolist()
    if failures:
        raise_together(failed)
    return loss / count, correct / count
