"""Tests whose body runs as the ranks of a gloo group, in a pool of processes.

The processes are started once for all tests. Every wait is bounded: a rank that does not answer fails the
test, and the next test starts new processes.
"""

import contextlib
import datetime
import functools
import gc
import inspect
import os
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT_SECONDS = 20
START_SECONDS = 60
EACH_BACKEND = ("collective", "peer")


def on_ranks(world: int | None = None, *, statistics: str | tuple[str, ...] = "auto", **limits):
    """Makes a test of a function that runs on each rank.

    ::

        @on_ranks(2, statistics=EACH_BACKEND)
        @pytest.mark.parametrize("kind", KINDS)
        def test_ranks_have_equal_statistics(rank, world, kind):
            ...
            return layer.running_mean

        @test_ranks_have_equal_statistics.check
        def _(results, kind): ...

    The function gets its rank, the number of ranks, and those parameters and fixtures of the test that it
    names; they are pickled. `check` registers a function that runs in pytest's process: it gets `results`,
    which are what the ranks returned, and those parameters that it names.

    Args:
        world: The number of ranks. If None, `world` is a parameter of the test.
        statistics: FASTVIT_STATISTICS, or several values, which become the parameter `statistics` of the
            test. A function that names this parameter gives its values itself.
        limits: `group_timeout`, `limit` and `breaks` of `Ranks.run`.
    """

    def decorate(body):
        checks = []

        @functools.wraps(body)
        def test(ranks, **arguments):
            size = world or arguments["world"]
            backend = arguments.get("statistics", statistics)
            named = {name: arguments[name] for name in _names_of(body) - {"rank", "world"}}
            results = ranks.run(size, _run_body, test, named, statistics=backend, **limits)
            for check in checks:
                check(**{name: (arguments | {"results": results})[name] for name in _names_of(check)})

        def register_check(check):
            checks.append(check)
            add_parameters(_names_of(check) - {"results"})
            return check

        def add_parameters(names):
            parameters.update(names)
            keywords = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(parameters)
            ]
            test.__signature__ = inspect.Signature(keywords)  # pytest reads what the test takes

        parameters = {"ranks"}
        add_parameters(_names_of(body) - {"rank"} - ({"world"} if world else set()))
        if not isinstance(statistics, str):
            add_parameters({"statistics"})
            test = pytest.mark.parametrize("statistics", statistics)(test)
        test.body, test.check = body, register_check
        return test

    return decorate


def _names_of(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def _run_body(rank: int, world: int, test, named: dict):
    return test.body(rank, world, **named)


def _serve_jobs(connection) -> None:
    import torch._dynamo  # noqa: F401  DDP and optimizers import it, outside of any test's time limit

    torch.set_num_threads(1)
    gc.freeze()  # the collection after each job skips the objects of imports
    connection.send("ready")
    while True:
        job = connection.recv()
        if job is None:
            return
        function, rank, world, arguments, store, timeout, statistics, breaks = job
        os.environ["FASTVIT_STATISTICS"] = statistics
        try:
            torch.manual_seed(0)
            group_options = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
            dist.init_process_group("gloo", **group_options, timeout=datetime.timedelta(seconds=timeout))
            result = ("ok", function(rank, world, *arguments))
        except BaseException:
            result = ("error", traceback.format_exc())
        with contextlib.suppress(Exception):
            if result[0] == "ok" and not breaks:
                dist.barrier()
            gc.collect()
            dist.destroy_process_group()
        connection.send(result)


class Ranks:
    """The pool: `run(world, function, *arguments)` calls `function(rank, world, *arguments)` on each rank."""

    def __init__(self):
        self.workers = []

    def _start_workers(self, world: int) -> None:
        context, new_connections = mp.get_context("spawn"), []
        for rank in range(world):
            if rank < len(self.workers) and self.workers[rank][0].is_alive():
                continue
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve_jobs, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self.workers[rank : rank + 1] = [(process, parent_end)]
            new_connections.append(parent_end)
        for connection in new_connections:  # The group's timeout begins when all processes run.
            if not connection.poll(START_SECONDS) or connection.recv() != "ready":
                raise AssertionError(f"a rank's process did not start within {START_SECONDS} s")

    def run(
        self,
        world: int,
        function,
        *arguments,
        group_timeout: float = GROUP_TIMEOUT_SECONDS,
        limit: float = 60,
        statistics: str = "auto",
        breaks: bool = False,
    ) -> list:
        """Returns the results by rank. A rank's exception or death fails the test with all tracebacks.

        Args:
            world: The number of ranks.
            function: The function is called with the rank, `world` and `arguments`.
            arguments: The arguments are pickled, as the function is.
            group_timeout: The time limit of the group's collectives in seconds.
            limit: The seconds in which all ranks must have answered.
            statistics: FASTVIT_STATISTICS; auto and peer use shared memory on one host.
            breaks: The function leaves the group unusable. The ranks do not meet at its end, and the result
                of a rank that dies is None.
        """
        self._start_workers(world)
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            for rank, (_, connection) in enumerate(self.workers[:world]):
                connection.send(
                    (function, rank, world, arguments, str(store), group_timeout, statistics, breaks)
                )
            deadline = time.monotonic() + limit
            results = []
            for process, connection in self.workers[:world]:
                try:
                    if not connection.poll(max(0.0, deadline - time.monotonic())):
                        results.append(("error", f"no answer within {limit} s"))
                        continue
                    results.append(connection.recv())
                except (EOFError, ConnectionError):
                    process.join(5)
                    status = ("ok", None) if breaks else ("died", f"exit status {process.exitcode}")
                    results.append(status)
        if any(status != "ok" for status, _ in results):
            self.close()
            text = "\n".join(f"rank {rank} {status}: {value}" for rank, (status, value) in enumerate(results))
            raise AssertionError(text)
        return [value for _, value in results]

    def close(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join(5)
            connection.close()
        self.workers = []
