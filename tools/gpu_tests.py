"""A plugin of pytest for tests on one GPU, whose run is cut at a time limit; for tools/gpu.py.

It mixes the tests, prints each failure at once, and ends a worker of xdist whose GPU a fault has spoiled:
xdist starts another. pytest-timeout ends a worker whose test hangs.
"""

import hashlib
import os
import sys

import pytest

SPOILED = 70  # exit status of a process whose GPU takes no more work


def pytest_collection_modifyitems(items: list) -> None:
    """A fixed pseudo-random order, so that what runs before the cut covers much of everything."""
    items.sort(key=lambda item: hashlib.md5(item.nodeid.encode()).hexdigest())


def pytest_runtest_logreport(report) -> None:
    """The run may be cut before pytest prints its failures."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n##### {report.nodeid}, {report.when}\n{report.longreprtext[-3000:]}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """After a test that failed: whether the GPU still works for this process."""
    before = item.session.testsfailed
    result = yield
    torch = sys.modules.get("torch")
    if item.session.testsfailed > before and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(SPOILED)
    return result
