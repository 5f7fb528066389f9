"""Ranks on two hosts, which are namespaces of this machine with a network between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_hosts import SimulatedHosts
from training.runs import COMMON

from sync.hosts.worker import TIMEOUT_SECONDS

HERE = Path(__file__).parent
LIMIT = 55  # seconds
TRAINING = ["--epochs", "2", "--batch-size", "256", "--timeout", "20"]


@pytest.fixture
def two():
    try:
        hosts = SimulatedHosts(2, delay=2e-4)
    except OSError as error:
        pytest.skip(f"no hosts here: {error}")
    with hosts:
        yield hosts


def start(hosts, world, *command, of_rank=None, **options):
    """Starts the ranks, half of them on each host; rank 0 is known by the name of its host."""
    each, ranks = world // 2, []
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": str(world)}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}"}
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % each)}
        ranks.append(
            hosts.start(
                rank // each, [sys.executable, *command, *(of_rank[rank] if of_rank else [])],
                env=os.environ | variables | own, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
            )
        )  # fmt: skip
    return ranks


def ranks_of(hosts, world, *arguments):
    # A user's script needs GLOO_SOCKET_IFNAME; fastvit's trainer finds the interface itself.
    return start(hosts, world, "-m", "host_rank", *arguments, cwd=HERE, of_rank=None)


def results(ranks):
    ends = [rank.communicate(timeout=LIMIT) for rank in ranks]
    return [json.loads(out.splitlines()[-1]) if "[" in out else err for out, err in ends]


@pytest.fixture(autouse=True)
def interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")


def test_hosts_equal_one_big_batch(two):
    got = results(ranks_of(two, 4, "exact"))
    for error, running, said in got:
        assert error < 1e-13 and running == got[0][1]
        assert said == "group 0 (4 ranks, cpu): Collective: several hosts"


@pytest.mark.parametrize("kind", ["kill", "cut", "first"])
def test_a_killed_rank_and_a_cut_link_are_errors(two, kind):
    """The link is cut in a step, or before the first call of a layer, which asks the store on host 0."""
    ranks = ranks_of(two, 4 if kind == "kill" else 2, "fault", kind)
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n", rank.stderr.read()
    if kind != "kill":
        two.set_network_down(True)
    for rank, (message, seconds, *_) in enumerate(results(ranks[:-1] if kind == "kill" else ranks)):
        if kind == "kill":
            assert "nothing from rank 3" in message and seconds < TIMEOUT_SECONDS
            continue
        assert TIMEOUT_SECONDS - 0.5 < seconds < TIMEOUT_SECONDS + 3
        if kind == "cut":
            assert f"step 2 of group 0: nothing from rank {1 - rank}: " in message
        elif rank == 0:
            assert "first call of layer 1 (sync_batch_norm, 5 channels): rank 1 did not answer" in message
        else:
            assert "first call of layer 1" in message and "the store of the ranks" in message


def test_options_that_differ(two, monkeypatch, tmp_path):
    """The name of rank 0's host means 127.0.1.1 there."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    told = [["--lr", "0.001"], ["--lr", "0.01"]]
    ranks = start(two, 2, *COMMON, *TRAINING, "--out", str(tmp_path / "run"), of_rank=told)
    ends = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "--lr differs: rank 0: 0.001; rank 1: 0.01" in ends[0][1], ends
