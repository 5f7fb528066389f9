"""The store by which the ranks of a launcher meet.

torchrun's ranks use the store of its agent, which outlives them. torch 2.13 gives the ranks of every attempt
the same keys there, so after a restart they would read the addresses of ranks that have died. Therefore rank
0 calls the roll. Each other rank writes a random name, new in each attempt, under `here/<rank>`. Under
`answer/<rank>` rank 0 writes this name and the name of rank 0, which is the prefix of this attempt's keys. A
rank ignores an answer without its own name, because the answer is of an earlier attempt. A rank that accepts
its answer writes the key `<name of rank 0>/<rank>`.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from .store_consensus import format_ranks, run_store_request
from .waiting import poll_with_backoff

_RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rendezvous(timeout: float = 300.0) -> "tuple[dist.Store, int, int]":
    """Meets the ranks that a launcher has started, after a restart by torchrun too.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, as for torch's `env://`:

        store, rank, world = fastvit.sync.rendezvous()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)

    Args:
        timeout: seconds to wait for the other ranks. `init_process_group` has a timeout of its own, and gloo
            waits five times as long if a rank cannot be reached, such as one whose host calls itself
            127.0.1.1; GLOO_SOCKET_IFNAME=eth0 then names the network interface to use.

    Returns:
        A store without keys of earlier attempts, the rank, and the number of ranks.

    Raises:
        ValueError: a variable is not set.
        RuntimeError: ranks did not join in time; the message of rank 0 names them.
    """
    missing_variables = [name for name in _RENDEZVOUS_VARIABLES if name not in os.environ]
    if missing_variables:
        raise ValueError(f"rendezvous: {', '.join(missing_variables)} must be set, as by torchrun")
    rank, world_size, address, port = (os.environ[name] for name in _RENDEZVOUS_VARIABLES)
    store = open_rendezvous_store(int(rank), int(world_size), address, int(port), timeout)
    return store, int(rank), int(world_size)


def open_rendezvous_store(
    rank: int, world_size: int, address: str, port: int, timeout: float, run_id: str = ""
) -> "dist.Store":
    """Returns the store of `rendezvous` at an address; the ranks compare `run_id`, the name of their run."""
    deadline = time.monotonic() + timeout

    def join() -> dist.Store:
        is_store_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(
            address,
            port,
            is_master=is_store_host,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        seconds_left = deadline - time.monotonic()
        prefix_store = dist.PrefixStore("fastvit", store)
        attempt_name = agree_on_attempt_name(prefix_store, rank, world_size, seconds_left, run_id)
        return dist.PrefixStore(f"fastvit/{attempt_name}", store)

    return run_store_request(f"rank {rank}", join, timeout)


def agree_on_attempt_name(
    store: "dist.Store", rank: int, world_size: int, timeout: float, run_id: str = ""
) -> str:
    """Returns the same new name on all ranks: the name of rank 0 in this attempt.

    Raises:
        RuntimeError: ranks did not join in time, or rank 0 belongs to another run.
    """
    own_name = uuid.uuid4().hex
    if rank == 0:
        store.set("run", run_id)
        return _lead_roll_call(store, world_size, own_name, timeout)
    is_announced = False
    for _ in poll_with_backoff(timeout):
        if not is_announced and store.check(["run"]):
            if (run_id_of_rank_0 := store.get("run").decode()) != run_id:
                raise RuntimeError(f"rank 0 is of run {run_id_of_rank_0!r} and rank {rank} of run {run_id!r}")
            store.set(f"here/{rank}", own_name)
            is_announced = True
        if is_announced and store.check([f"answer/{rank}"]):
            recipient, _, name = store.get(f"answer/{rank}").decode().partition(" ")
            if recipient == own_name:
                store.set(f"{name}/{rank}", "")
                return name
    raise RuntimeError(
        f"rank {rank}: rank 0 did not join the rendezvous in time; check that rank 0 runs, and that "
        "MASTER_ADDR and MASTER_PORT are its host and a port there"
    )


def _lead_roll_call(store: "dist.Store", world_size: int, own_name: str, timeout: float) -> str:
    """Answers each rank, and again after a change of its name, until all ranks have accepted an answer."""
    peers, answers = range(1, world_size), [""] * world_size
    for _ in poll_with_backoff(timeout):
        if not peers or store.check([f"{own_name}/{rank}" for rank in peers]):
            return own_name
        if store.check(keys := [f"here/{rank}" for rank in peers]):
            for rank, name in enumerate(store.multi_get(keys), 1):
                if answers[rank] != (answer := f"{name.decode()} {own_name}"):
                    store.set(f"answer/{rank}", answer)
                    answers[rank] = answer
    absent_ranks = [rank for rank in peers if not store.check([f"here/{rank}"])]
    if not absent_ranks:  # Some names are of an earlier attempt, whose ranks accept no answer.
        absent_ranks = [rank for rank in peers if not store.check([f"{own_name}/{rank}"])]
    raise RuntimeError(f"{format_ranks(absent_ranks)} did not join the rendezvous in time")
