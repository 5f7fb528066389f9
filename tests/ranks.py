"""Several ranks over gloo for tests: a pool of processes, started once, that runs functions as a group.

Every wait is bounded: a rank that does not answer fails the test, and a new pool is started.
"""

import contextlib
import datetime
import gc
import os
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_TIMEOUT = 20
both_ways = pytest.mark.parametrize("statistics", ["collective", "peer"])


def _serve(connection) -> None:
    import torch._dynamo  # noqa: F401, which DDP and optimizers import

    torch.set_num_threads(1)
    gc.freeze()  # a collection after each job looks at what the job has left alone
    connection.send("ready")
    while True:
        job = connection.recv()
        if job is None:
            return
        function, rank, world, arguments, store, timeout, statistics, breaks = job
        os.environ["FASTVIT_STATISTICS"] = statistics
        try:
            torch.manual_seed(0)
            place = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
            dist.init_process_group("gloo", **place, timeout=datetime.timedelta(seconds=timeout))
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
    """`run(world, function, *arguments)` calls `function(rank, world, *arguments)` in `world` processes."""

    def __init__(self):
        self.workers = []

    def _grow(self, world: int) -> None:
        context, new = mp.get_context("spawn"), []
        for rank in range(world):
            if rank < len(self.workers) and self.workers[rank][0].is_alive():
                continue
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers[rank : rank + 1] = [(process, ours)]
            new.append(ours)
        for connection in new:  # a group's timeout begins when all can come
            if not connection.poll(60) or connection.recv() != "ready":
                raise AssertionError("a rank's process did not start within 60 s")

    def run(
        self,
        world: int,
        function,
        *arguments,
        group_timeout: float = GROUP_TIMEOUT,
        limit: float = 60,
        statistics: str = "auto",
        breaks: bool = False,
    ) -> list:
        """Returns the results by rank. A rank's exception or death fails the test with all tracebacks.

        `statistics` is FASTVIT_STATISTICS: auto and peer take shared memory here. With `breaks` the group is
        of no use afterwards, and a rank may die, which gives None.
        """
        self._grow(world)
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
