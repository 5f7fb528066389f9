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

pytestmark = pytest.mark.nightly

TESTS = Path(__file__).parents[2]
LIMIT_SECONDS = 55
TRAINING = ["--epochs", "2", "--batch-size", "256", "--timeout", "20"]


@pytest.fixture
def hosts():
    try:
        two_hosts = SimulatedHosts(2, delay=2e-4)
    except OSError as error:
        pytest.skip(f"no hosts here: {error}")
    with two_hosts:
        yield two_hosts


def start_ranks(hosts, world, *command, options_of_ranks=None, **variables):
    """Starts the ranks, half of them on each host; rank 0 is known by the name of its host."""
    per_host, ranks = world // 2, []
    variables |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": str(world)}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    for rank in range(world):
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host)}
        options = options_of_ranks[rank] if options_of_ranks else []
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        arguments = [sys.executable, *command, *options]
        process = hosts.start(rank // per_host, arguments, env=os.environ | variables, text=True, **pipes)
        ranks.append(process)
    return ranks


def start_workers(hosts, world, *arguments):
    # A user's script needs GLOO_SOCKET_IFNAME; fastvit's trainer finds the interface itself.
    return start_ranks(hosts, world, "-m", "sync.hosts.worker", *arguments, GLOO_SOCKET_IFNAME="eth0")


def read_results(ranks):
    outputs = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    return [json.loads(stdout.splitlines()[-1]) if "[" in stdout else stderr for stdout, stderr in outputs]


def test_ranks_on_two_hosts_equal_one_big_batch(hosts):
    results = read_results(start_workers(hosts, 4, "exact"))
    for error, running_var, description in results:
        assert error < 1e-13 and running_var == results[0][1]
        assert description == "group 0 (4 ranks, cpu): Collective: several hosts"


@pytest.mark.parametrize("fault", ["kill", "cut", "first"])
def test_a_killed_rank_and_a_cut_link_are_errors(hosts, fault):
    """The link is cut in a step, or before the first call of a layer, which asks the store on host 0."""
    ranks = start_workers(hosts, 4 if fault == "kill" else 2, "fault", fault)
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n", rank.stderr.read()
    if fault != "kill":
        hosts.set_network_down(True)
    for rank, (message, seconds, *_) in enumerate(read_results(ranks[:-1] if fault == "kill" else ranks)):
        if fault == "kill":
            assert "nothing from rank 3" in message and seconds < TIMEOUT_SECONDS
            continue
        assert TIMEOUT_SECONDS - 0.5 < seconds < TIMEOUT_SECONDS + 3
        if fault == "cut":
            assert f"step 2 of group 0: nothing from rank {1 - rank}: " in message
        elif rank == 0:
            assert "first call of layer 1 (sync_batch_norm, 5 channels): rank 1 did not answer" in message
        else:
            assert "first call of layer 1" in message and "the store of the ranks" in message


def test_options_of_the_trainer_that_differ_are_named(hosts, tmp_path):
    """The name of rank 0's host means 127.0.1.1 there."""
    options = [["--lr", "0.001"], ["--lr", "0.01"]]
    ranks = start_ranks(
        hosts, 2, *COMMON, *TRAINING, "--out", str(tmp_path / "run"), options_of_ranks=options
    )
    outputs = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "--lr differs: rank 0: 0.001; rank 1: 0.01" in outputs[0][1], outputs
