"""Waits with a time limit: for a function in another thread, and for a condition that is polled."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
_MIN_PAUSE_SECONDS = 1e-4  # The time between the first two polls.
_MAX_PAUSE_SECONDS = 0.02  # The longest time between two polls.


def run_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Runs `function()` in another thread and returns its result.

    Raises TimeoutError after `timeout` seconds; the thread continues. A request to a store needs the thread:
    if the process that has the store is frozen or unreachable, the request waits in C++ without a
    timeout, and Python cannot handle signals meanwhile.
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
    """Yields the seconds since the first poll, with growing pauses, until `timeout` seconds have passed."""
    begin, pause_seconds = time.monotonic(), _MIN_PAUSE_SECONDS
    while (seconds_waited := time.monotonic() - begin) <= timeout:
        yield seconds_waited
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
