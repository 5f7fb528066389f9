"""What the ranks tell each other in every step of training, and what ends it on all of them."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import sync
from .config import TrainingError
from .distributed import StepReport, is_main_process, raise_together
from .precision import Precision

STOP, FAILED = 1, 2  # flags in the ranks' reports
PIPELINE_STEPS = {"cuda": 1}  # steps that a device may be behind the host


@dataclass
class Progress:
    """The finished steps of an epoch, and sums over them; part of a checkpoint within an epoch."""

    step: int = 0  # finished steps of the optimizer
    loss: float = 0.0  # sum of the mean loss of all ranks
    gradient_norm: float = 0.0  # sum of gradient norms
    gradient_norms: int = 0  # number of gradient norms in the sum

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
        raise OSError(f"cannot read the data: {message}") from error


class Feed:
    """Batches, the time spent waiting for them, and the error that ended them.

    After an error it returns zeros as images, so that the rank takes part in the step and reports the error
    in its `StepReport`.
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


class StopRequest:
    """Records SIGTERM, the request to end the run at the next step with a checkpoint, inside `with`.

    A scheduler and the launcher may both send it. The ranks share the flag in every step, so all of them stop
    at the same step when one receives it.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None  # the previous handler

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self.came = True


class Watch:
    """Shares losses, gradient norms and requests to stop, and shows a progress bar on rank 0.

    On the CPU a step is checked before the optimizer changes the weights. On a GPU the check is one step
    late, so that the host need not wait for the device; a run that ends by it writes no checkpoint.

    Args:
        feed: whose error ends the epoch.
        stop: read in every step, on every rank.
        precision: its scale of the loss may cause gradients that are not finite; amp skips such a step.
        name: of the epoch, for messages and the bar.
        progress: the finished steps of the epoch; updated.
        steps: of the whole epoch.
    """

    def __init__(
        self, feed: Feed, stop: StopRequest, precision: Precision, name: str, progress: Progress, steps: int
    ) -> None:
        from tqdm import tqdm

        self.feed, self.request, self.scales_loss = feed, stop, precision.scales_loss
        self.name, self.progress, self.stop_asked = name, progress, False
        self.behind = PIPELINE_STEPS.get(precision.device.type, 0)
        self.reports: deque[StepReport] = deque()
        self.bar = tqdm(
            total=steps, initial=progress.step, desc=f"[{name}]", leave=False, disable=not is_main_process(),
            mininterval=0.5, dynamic_ncols=True,
        )  # fmt: skip

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self.bar:
            while self.reports and kind is None:
                self._settle(self.reports.popleft())
            self.bar.refresh()  # draws the last state, within mininterval too

    def report(self, loss: Tensor, gradient_norm: Tensor) -> None:
        """Send this rank's numbers and check those of all ranks; called before the optimizer's step.

        Raises:
            TrainingError: on every rank, with the step and the value that was not finite, or the rank that
                could not read its data.
        """
        flag = FAILED if self.feed.error else STOP if self.request.came else 0
        self.reports.append(StepReport(loss, gradient_norm, flag))
        while len(self.reports) > self.behind:
            self._settle(self.reports.popleft())

    def _settle(self, report: StepReport) -> None:
        losses, gradient_norm, flags = report.read()
        progress = self.progress
        if FAILED in flags:
            raise_together(self.feed.error)
        progress.step += 1
        self._check_finite(losses, gradient_norm)
        progress.loss += sum(losses) / len(losses)
        if 0 <= gradient_norm < math.inf:  # amp skips a step with another one
            progress.gradient_norm += gradient_norm
            progress.gradient_norms += 1
        self.stop_asked = self.stop_asked or STOP in flags
        self.bar.set_description(f"[{self.name}] mean loss {progress.mean_loss:.4f}", refresh=False)
        self.bar.update()

    def _check_finite(self, losses: list[float], gradient_norm: float) -> None:
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            where = f"rank {bad[0]}" if len(bad) == 1 else "ranks " + ", ".join(map(str, bad))
            what = f"the loss is {losses[bad[0]]} on {where}"
        elif not math.isfinite(gradient_norm) and not self.scales_loss:
            what = f"the norm of the gradients is {gradient_norm}"
        else:
            return
        sync.check()  # an exchange of statistics that failed has a better message
        raise TrainingError(
            f"{self.name}, step {self.progress.step}: {what}; training stopped before it reached a "
            f"checkpoint (try a smaller --lr or a longer --warmup-epochs)"
        )
