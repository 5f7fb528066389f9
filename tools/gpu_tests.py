"""A plugin of pytest for tests on one GPU, whose run is cut at a time limit; for tools/gpu.py.

It orders the tests (see `informative`), prints each failure at once, and ends a worker of xdist whose GPU a
fault has spoiled: xdist starts another. pytest-timeout ends a worker whose test hangs.
"""

import hashlib
import os
import sys

import pytest

SPOILED = 70  # exit status of a process whose GPU takes no more work


def informative(items: list) -> list:
    """Orders tests so that every prefix covers much: first those in which a parameter of a test function has
    a new value, all functions in turn; then the others, mixed.
    """
    functions: dict[str, list] = {}
    for item in items:
        functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    ranked = []
    for place, tests in enumerate(functions.values()):
        seen: set[tuple[str, str]] = set()
        turn = 0
        for item in sorted(tests, key=_mixed):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            values = {(name, repr(value)) for name, value in parameters.items()} or {("", "")}
            if values - seen:
                ranked.append(((0, turn, place, ""), item))
                turn += 1
            else:
                ranked.append(((1, 0, 0, _mixed(item)), item))
            seen |= values
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def _mixed(item) -> str:
    """A fixed pseudo-random order, equal on every machine."""
    return hashlib.md5(item.nodeid.encode()).hexdigest()


def pytest_collection_modifyitems(items: list) -> None:
    items[:] = informative(items)


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
