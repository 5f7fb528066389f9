"""Runs pytest's tests on one GPU within a time limit, the most informative tests first; for tools/gpu.py.

`Workers` starts several processes of pytest, with this file as a plugin that divides the tests. It orders
them (see `informative`), records start and outcome of each, and stops at the time limit. A process is killed
when a test exceeds its limit, or when a fault has destroyed its GPU context; another process continues after
that test. pytest-timeout is not needed.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SPOILED = 70  # exit status of a process whose GPU takes no more work
ORDERS = "FASTVIT_GPU_TESTS"  # environment variable of the plugin: its orders, as JSON
MOST_TEXT = 3000  # characters of a failure that are kept


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
            values = {(name, repr(value)) for name, value in _parameters(item).items()} or {("", "")}
            if values - seen:
                ranked.append(((0, turn, place, ""), item))
                turn += 1
            else:
                ranked.append(((1, 0, 0, _mixed(item)), item))
            seen |= values
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _mixed(item) -> str:
    """A fixed pseudo-random order, equal on every machine."""
    return hashlib.md5(item.nodeid.encode()).hexdigest()


class Plugin:
    """In a process of pytest."""

    def __init__(self, orders: dict):
        self.file = Path(orders["record"]).open("a")
        self.worker, self.workers = orders["worker"], orders["workers"]
        self.done, self.deadline = set(orders["done"]), orders["deadline"]

    def _say(self, *words: object) -> None:
        self.file.write(json.dumps([time.time(), *words]) + "\n")
        self.file.flush()

    def pytest_sessionstart(self, session) -> None:
        self.session = session

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self._say("failed", report.nodeid, report.longreprtext[-MOST_TEXT:])

    def pytest_collection_modifyitems(self, items: list) -> None:
        share = informative(items)[self.worker :: self.workers]
        items[:] = [item for item in share if item.nodeid not in self.done]
        self._say("share", len(share))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say("begin", nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self._say("failed", report.nodeid, f"{report.when}: {report.longreprtext[-MOST_TEXT:]}")
        elif report.when == "call" or report.skipped:
            self._say(report.outcome, report.nodeid, "")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say("end", nodeid)
        if time.time() > self.deadline:
            self.session.shouldstop = "the time is over"

    def pytest_exception_interact(self, node, report) -> None:
        """After a failure: whether the GPU still works for this process."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self._say("failed", node.nodeid, f"{report.longreprtext[-MOST_TEXT:]}\nno more work: {error}")
            os._exit(SPOILED)


def pytest_configure(config) -> None:
    config.pluginmanager.register(Plugin(json.loads(os.environ[ORDERS])), "tests on a GPU")


class Worker:
    """One share of the tests, by one process after the other."""

    def __init__(self, number: int, folder: Path):
        self.number = number
        self.process: subprocess.Popen | None = None
        self.record, self.log = folder / f"tests.{number}.jsonl", folder / f"tests.{number}.log"
        for file in (self.record, self.log):
            file.unlink(missing_ok=True)
        self.outcomes: dict[str, str] = {}  # by test: passed, skipped, failed or slow; "" while it runs
        self.texts: dict[str, str] = {}  # of failures
        self.share = 0
        self.running: tuple[str, float] | None = None  # a test, and when it began
        self._read = 0

    def read(self) -> None:
        """What the process has recorded since the last call."""
        text = self.record.read_text() if self.record.exists() else ""
        for line in text[self._read :].splitlines(keepends=True):
            if not line.endswith("\n"):  # it is being written
                break
            self._read += len(line)
            at, what, *rest = json.loads(line)
            if what == "share":
                self.share = rest[0]
            elif what == "begin":
                self.running = rest[0], at
                self.outcomes.setdefault(rest[0], "")
            elif what == "end":
                self.running = None
            elif self.outcomes.get(rest[0]) != "failed":
                self.outcomes[rest[0]] = what
                if what == "failed":
                    self.texts[rest[0]] = rest[1]

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # a driver that hangs may not let it go
            pass
        self.process = None


class Workers:
    """`number` processes side by side in `root`; a test may take `limit` seconds."""

    def __init__(
        self, root: Path, folder: Path, command: list[str], environment: dict, number: int, limit: float
    ):
        self.root, self.command, self.environment, self.limit = root, command, environment, limit
        self.workers = [Worker(i, folder) for i in range(number)]
        self.said: list[str] = []  # what happened to processes

    def run(self, seconds: float) -> None:
        deadline = time.time() + seconds
        for worker in self.workers:
            self._start(worker, deadline)
        while running := [worker for worker in self.workers if worker.process]:
            time.sleep(0.1)
            for worker in running:
                self._watch(worker, deadline)

    def _start(self, worker: Worker, deadline: float) -> None:
        orders = {
            "record": str(worker.record), "worker": worker.number, "workers": len(self.workers),
            "done": list(worker.outcomes), "deadline": deadline,
        }  # fmt: skip
        environment = {**os.environ, **self.environment, ORDERS: json.dumps(orders)}
        paths = [str(Path(__file__).resolve().parent), str(self.root), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with worker.log.open("a") as log:
            worker.process = subprocess.Popen(
                [*self.command, "-p", "gpu_tests", "--continue-on-collection-errors"], cwd=self.root,
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _watch(self, worker: Worker, deadline: float) -> None:
        status = worker.process.poll()
        worker.read()
        now = time.time()
        if status is not None:
            self._ended(worker, status, deadline)
        elif worker.running and now - worker.running[1] > self.limit:
            self._lost(worker, "slow", f"took more than {self.limit:.0f} s", deadline)
        elif now > deadline + 1:
            if worker.running:  # cut short, which is no fault of it
                worker.outcomes.pop(worker.running[0], None)
            worker.end()

    def _ended(self, worker: Worker, status: int, deadline: float) -> None:
        if worker.running:
            why = "left a GPU that takes no more work" if status == SPOILED else f"ended pytest ({status})"
            self._lost(worker, "failed", why, deadline)
            return
        worker.end()
        if status not in (0, 1, 2, 5):  # all passed, some failed, stopped when the time was over, none left
            self.said.append(f"pytest ended with status {status}, see {worker.log.name}")

    def _lost(self, worker: Worker, outcome: str, why: str, deadline: float) -> None:
        """The process ended in a running test: another process continues after that test."""
        name, _ = worker.running
        worker.outcomes[name], worker.running = outcome, None
        self.said.append(f"{name} {why}")
        worker.end()
        if time.time() < deadline:
            self._start(worker, deadline)

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: what for worker in self.workers for name, what in worker.outcomes.items()}

    @property
    def texts(self) -> dict[str, str]:
        return {name: text for worker in self.workers for name, text in worker.texts.items()}

    @property
    def tests(self) -> int:
        return sum(worker.share for worker in self.workers)
