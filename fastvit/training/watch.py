"""Batches, requests to stop, and the progress of an epoch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
        raise OSError(f"cannot read the data: {message}") from error


class Feed:
    """Batches, the time spent waiting for them, and the error that ended them.

    After an error it returns zeros as images, so that the rank takes part in the step, in which all ranks
    learn of the error.
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
    """Inside `with`, SIGTERM is a request to end the run at the next step with a checkpoint.

    A scheduler and the launcher may both send it. All ranks stop at the same step when one receives it.
    """

    came = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: Any) -> None:
        self.came = True
