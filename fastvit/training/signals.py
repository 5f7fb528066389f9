"""SIGTERM as a request: the run ends at the next step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["StopRequest"]


class StopRequest:
    """Records SIGTERM inside the `with` block; a repeated one has no effect.

    A scheduler and the launcher may both send it. The ranks share the flag in every step, so all of them stop
    at the same step when one receives it.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None  # the previous handler

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
