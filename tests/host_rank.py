"""A rank of tests/test_hosts.py, on a host of its own: `python host_rank.py WHAT` prints what came of it."""

import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import fastvit

TIMEOUT = 4.0
SIZES = (3, 5, 1, 4)


def exact(rank, world):
    """The largest relative error of three steps against one big batch, and the bits of running statistics."""
    torch.manual_seed(0)
    layer = fastvit.InPlaceABNSync(7, dtype=torch.float64)
    whole = torch.nn.BatchNorm1d(7, dtype=torch.float64)
    worst, first = 0.0, sum(SIZES[:rank])
    for _ in range(3):
        x, dy = torch.randn(2, sum(SIZES), 7, dtype=torch.float64) * 2 + 3
        mine = slice(first, first + SIZES[rank])
        leaf, wanted = (t.clone().requires_grad_() for t in (x[mine], x))
        y = layer(leaf.clone())
        y.backward(dy[mine])
        z = torch.nn.functional.leaky_relu(whole(wanted), 0.01)
        z.backward(dy)
        for got, want in ((y, z[mine]), (leaf.grad, wanted.grad[mine])):
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return [worst, [value.hex() for value in layer.running_var.tolist()]]


def fault(rank, world, kind):
    """The error of a step after a fault, and the seconds that it took."""
    layers = [fastvit.SyncBatchNorm(5) for _ in range(2)]
    x = torch.randn(4, 5)
    layers[0](x)
    print("ready", flush=True)
    if kind == "kill" and rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind != "kill":
        sys.stdin.readline()  # the link is cut
    begin = time.monotonic()
    try:
        layers[kind == "first"](x)
    except RuntimeError as error:
        return [str(error), time.monotonic() - begin]


def main():
    store, rank, world = fastvit.sync.rendezvous(30)
    limit = datetime.timedelta(seconds=TIMEOUT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    what, *options = sys.argv[1:]
    result = {"exact": exact, "fault": fault}[what](rank, world, *options)
    print(json.dumps([*result, *fastvit.sync.describe_groups()]), flush=True)
    if what == "exact":
        dist.barrier()
    elif rank == 0:
        time.sleep(2 * TIMEOUT)  # it holds the store
    os._exit(0)


if __name__ == "__main__":
    main()
