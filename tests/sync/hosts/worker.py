"""A program that is one rank of test_hosts.py, on a host of its own.

`python -m sync.hosts.worker exact` and `... fault KIND` print the result as a line of JSON.
"""

import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import fastvit

TIMEOUT_SECONDS = 4.0
ROWS_PER_RANK = (3, 5, 1, 4)


def compare_with_one_batch(rank, world_size):
    """Returns the largest relative error of three steps against one batch, and the bits of running_var."""
    torch.manual_seed(0)
    layer = fastvit.InPlaceABNSync(7, dtype=torch.float64)
    big_batch_norm = torch.nn.BatchNorm1d(7, dtype=torch.float64)
    largest_error, start = 0.0, sum(ROWS_PER_RANK[:rank])
    local = slice(start, start + ROWS_PER_RANK[rank])
    for _ in range(3):
        x, dy = torch.randn(2, sum(ROWS_PER_RANK), 7, dtype=torch.float64) * 2 + 3
        local_leaf, leaf = (t.clone().requires_grad_() for t in (x[local], x))
        local_y = layer(local_leaf.clone())
        local_y.backward(dy[local])
        y = torch.nn.functional.leaky_relu(big_batch_norm(leaf), 0.01)
        y.backward(dy)
        for actual, expected in ((local_y, y[local]), (local_leaf.grad, leaf.grad[local])):
            error = ((actual - expected).abs().max() / expected.abs().max()).item()
            largest_error = max(largest_error, error)
    return [largest_error, [value.hex() for value in layer.running_var.tolist()]]


def run_into_fault(rank, world_size, kind):
    """Returns the error of a step after a fault, and the seconds that the step took."""
    layers = [fastvit.SyncBatchNorm(5) for _ in range(2)]
    x = torch.randn(4, 5)
    layers[0](x)
    print("ready", flush=True)
    if kind == "kill" and rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind != "kill":
        sys.stdin.readline()  # The test writes a line when it has cut the link.
    begin = time.monotonic()
    try:
        layers[kind == "first"](x)
    except RuntimeError as error:
        return [str(error), time.monotonic() - begin]


def main():
    store, rank, world_size = fastvit.sync.rendezvous(30)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    job, *options = sys.argv[1:]
    result = {"exact": compare_with_one_batch, "fault": run_into_fault}[job](rank, world_size, *options)
    print(json.dumps([*result, *fastvit.sync.describe_groups()]), flush=True)
    if job == "exact":
        dist.barrier()
    elif rank == 0:
        time.sleep(2 * TIMEOUT_SECONDS)  # The other ranks still need the store of rank 0.
    os._exit(0)


if __name__ == "__main__":
    main()
