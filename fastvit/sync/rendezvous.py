"""The store by which the ranks of a launcher meet.

torchrun's ranks use the store of its agent, which outlives them. torch 2.13 gives the ranks of every attempt
the same keys there, so after a restart they read the addresses of ranks that have died. Hence a roll call.
Each rank writes a name that no attempt has used. Rank 0 answers each rank with that rank's name and its own;
rank 0's name is the prefix of this attempt's keys. A rank accepts only an answer with its own name, so an
answer of an earlier attempt is ignored.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from .agreement import answered, polled, ranks_text

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rendezvous(timeout: float = 300.0) -> "tuple[dist.Store, int, int]":
    """Meets the ranks that a launcher has started, after a restart by torchrun too.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, as for torch's `env://`:

        store, rank, world = fastvit.sync.rendezvous()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)

    Args:
        timeout: seconds to wait for the others. `init_process_group` has a timeout of its own, of which gloo
            waits for five where a rank cannot be reached, such as one whose host calls itself 127.0.1.1.
            GLOO_SOCKET_IFNAME=eth0 then names the network interface to use.

    Returns:
        A store without keys of earlier attempts, the rank, and the number of ranks.

    Raises:
        ValueError: a variable is not set.
        RuntimeError: ranks did not come in time; the message of rank 0 names them.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"rendezvous: {', '.join(missing)} must be set, as by torchrun")
    rank, world, address, port = (os.environ[name] for name in _VARIABLES)
    return meet(int(rank), int(world), address, int(port), timeout), int(rank), int(world)


def meet(rank: int, world: int, address: str, port: int, timeout: float, run: str = "") -> "dist.Store":
    """`rendezvous` at an address; the ranks compare `run`, the name of their run."""
    deadline = time.monotonic() + timeout

    def join() -> dist.Store:
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(
            address, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True
        )
        name = roll_call(dist.PrefixStore("fastvit", store), rank, world, deadline - time.monotonic(), run)
        return dist.PrefixStore(f"fastvit/{name}", store)

    return answered(f"rank {rank}", join, timeout)


def roll_call(store: "dist.Store", rank: int, world: int, timeout: float, run: str = "") -> str:
    """A name that the ranks have in common, and that no other call has had.

    Raises:
        RuntimeError: ranks did not come in time, or rank 0 is of another run.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("run", run)
        return _call(store, world, mine, timeout)
    told = False
    for _ in polled(timeout):
        if not told and store.check(["run"]):
            if (other := store.get("run").decode()) != run:
                raise RuntimeError(f"rank 0 is of run {other!r} and rank {rank} of run {run!r}")
            store.set(f"here/{rank}", mine)
            told = True
        if told and store.check([f"answer/{rank}"]):
            to, _, name = store.get(f"answer/{rank}").decode().partition(" ")
            if to == mine:
                store.set(f"{name}/{rank}", "")
                return name
    raise RuntimeError("rank 0 did not come in time")


def _call(store: "dist.Store", world: int, mine: str, timeout: float) -> str:
    """Answers every rank, again where it has written another name, until all have read their answers."""
    others, answers = range(1, world), [""] * world
    for _ in polled(timeout):
        if not others or store.check([f"{mine}/{rank}" for rank in others]):
            return mine
        if store.check(names := [f"here/{rank}" for rank in others]):
            for rank, name in enumerate(store.multi_get(names), 1):
                if answers[rank] != (answer := f"{name.decode()} {mine}"):
                    store.set(f"answer/{rank}", answer)
                    answers[rank] = answer
    absent = [rank for rank in others if not store.check([f"here/{rank}"])]  # these never came
    absent = absent or [rank for rank in others if not store.check([f"{mine}/{rank}"])]
    raise RuntimeError(f"{ranks_text(absent)} did not come in time")
