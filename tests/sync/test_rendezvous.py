"""Ranks that meet again over a store in which earlier attempts have left their keys."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fastvit.sync.launcher_rendezvous import agree_on_attempt_name, open_rendezvous_store, rendezvous


def agree_on_names(store, ranks, world, timeout=20.0, run="mine"):
    """Returns the name that each rank gets, or its error."""

    def agree(rank):
        try:
            return agree_on_attempt_name(store, rank, world, timeout, run)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(agree, ranks))


def missing_rank_0_message(rank):
    return (
        f"rank {rank}: rank 0 did not join the rendezvous in time; check that rank 0 runs, and that "
        "MASTER_ADDR and MASTER_PORT are its host and a port there"
    )


def test_every_attempt_has_a_name_of_its_own():
    store, names = dist.HashStore(), []
    for _ in range(3):
        (name,) = set(agree_on_names(store, (2, 0, 1), 3))
        names.append(name)
        # An attempt in which a rank dies before it comes, or rank 0, which leaves no answer.
        errors = agree_on_names(store, (0, 1), 3, timeout=0.2)
        assert errors[0].endswith("did not join the rendezvous in time")
        errors = agree_on_names(store, (1, 2), 3, timeout=0.2)
        assert errors == [missing_rank_0_message(1), missing_rank_0_message(2)]
    assert len(set(names)) == 3
    assert len({*agree_on_names(store, (0, 1), 2), *agree_on_names(store, (0,), 1)}) == 2


def test_ranks_that_do_not_come_are_named():
    expected = ["ranks 1, 3 did not join the rendezvous in time", missing_rank_0_message(2)]
    assert agree_on_names(dist.HashStore(), (0, 2), 4, timeout=0.2) == expected


def test_a_rank_of_another_run_does_not_join():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        names = pool.submit(agree_on_names, store, (0, 1), 2)
        (error,) = agree_on_names(store, (1,), 2, run="other")
        assert error == "rank 0 is of run 'mine' and rank 1 of run 'other'"
        first, second = names.result()
    assert first == second and len(first) == 32


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_anew_is_answered_anew(rank):
    """The others are still waiting: only the rank that was started again has another name."""
    store = dist.HashStore()
    assert "did not join" in agree_on_names(store, (1 - rank,), 3, timeout=0.1)[0]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(agree_on_names, store, (rank,), 3)
        late = agree_on_names(store, (1 - rank, 2), 3)
    assert {*late, *early.result()} == {late[0]} and len(late[0]) == 32


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"], ids=["IPv4", "IPv6"])
def test_ranks_meet_by_both_families_of_addresses_or_give_up_in_time(address, port):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            pytest.skip(f"this host has no {address}")
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: open_rendezvous_store(rank, 2, address, port, 20.0), (1, 0)))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 did not join the rendezvous in time"):
        open_rendezvous_store(0, 2, address, port, 0.5)
    assert time.monotonic() - begin < 5


def test_a_script_without_a_launcher_is_told_the_missing_variables(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="rendezvous: RANK, MASTER_ADDR must be set, as by torchrun"):
        rendezvous(1.0)
