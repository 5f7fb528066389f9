"""Waits with a time limit: for a function in another thread, and for a condition that is polled."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_MAX_PAUSE_SECONDS = 0.02  # between two polls


def run_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Runs `function()` in another thread and returns its result.

    Raises TimeoutError after `timeout` seconds; the thread continues. A request to a store needs this: when
    the process that holds the store is frozen or unreachable, the request waits in C++ without a timeout and
    ignores signals.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"no answer within {timeout:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may include None


def poll_with_backoff(timeout: float) -> Iterator[float]:
    """Yields the seconds since its start, with growing pauses, until `timeout` seconds have passed."""
    begin, pause = time.monotonic(), 1e-4
    while (waited := time.monotonic() - begin) <= timeout:
        yield waited
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
