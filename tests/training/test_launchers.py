"""Launchers: their variables, the device of a rank, and how the ranks meet."""

import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from fastvit.sync.teardown import destroy_process_group
from fastvit.training import __main__ as trainer
from fastvit.training import distributed, run
from fastvit.training.__main__ import main
from fastvit.training.config import ConfigError, TrainingError
from fastvit.training.launcher import MPI_VARIABLES, LaunchInfo, detect_launcher

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "MASTER_ADDR": "head",
}  # fmt: skip
TORCHRUN_INFO = LaunchInfo(5, 8, 1, "head", 1234)
SRUN_INFO = LaunchInfo(5, 8, 1, "head", 23456, "123456.0")
LAUNCHERS = {
    "torchrun": (TORCHRUN, TORCHRUN_INFO),
    "its run id": (TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine"}, replace(TORCHRUN_INFO, run_id="mine")),
    "srun": (SRUN, SRUN_INFO),
    "a later step": (SRUN | {"SLURM_STEP_ID": "2"}, LaunchInfo(5, 8, 1, "head", 25474, "123456.2")),
    "a port": (SRUN | {"MASTER_PORT": "9"}, replace(SRUN_INFO, master_port=9)),
    "one host": (
        SRUN | {"MASTER_ADDR": "", "SLURM_STEP_NUM_NODES": "1"},
        replace(SRUN_INFO, master_addr="127.0.0.1"),
    ),
    "torchrun inside a job": (SRUN | TORCHRUN, TORCHRUN_INFO),
    "a variable of a script": (SRUN | {"WORLD_SIZE": "9"}, SRUN_INFO),
    "a step with more tasks than the job": (SRUN | {"SLURM_NTASKS": "1"}, SRUN_INFO),
    "a step of one task": (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "a batch script": ({"SLURM_PROCID": "0"}, None),
    "none": ({}, None),
}


def test_each_launcher_gives_rank_and_address():
    for name, (environment, expected) in LAUNCHERS.items():
        assert detect_launcher(environment) == expected, name


@pytest.mark.parametrize("names", MPI_VARIABLES.values(), ids=MPI_VARIABLES)
def test_mpirun_needs_an_address_for_several_hosts_alone(names):
    several = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    with pytest.raises(ConfigError, match="several hosts; set MASTER_ADDR to the host of rank 0"):
        detect_launcher(several)
    assert detect_launcher(several | {"MASTER_ADDR": "head"}) == LaunchInfo(3, 4, 1, "head", 29500)
    assert detect_launcher(several | {names[3]: "4"}) == LaunchInfo(3, 4, 1, "127.0.0.1", 29500)
    assert detect_launcher(several | {names[1]: "1"}) is None


WRONG_VARIABLES = {
    "RANK is set, but not WORLD_SIZE": {"RANK": "1"},
    "WORLD_SIZE is set, but not RANK": {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "variable LOCAL_RANK must be a whole number, got None": {"RANK": "0", "WORLD_SIZE": "2"},
    "variable SLURM_NTASKS must be a whole number, got None": {"SLURM_PROCID": "3"},
    "SLURM_STEP_NUM_TASKS must be a whole number, got 'many'": SRUN | {"SLURM_STEP_NUM_TASKS": "many"},
    "the rank must be below the number of ranks, got 8 of 8": TORCHRUN | {"RANK": "8"},
    "MASTER_PORT must be a port, 1 to 65535, got 99999": TORCHRUN | {"MASTER_PORT": "99999"},
    "several hosts; set MASTER_ADDR to the host of rank 0: export MASTER_ADDR=": SRUN | {"MASTER_ADDR": ""},
}


def test_wrong_variables_of_a_launcher_are_named():
    for message, environment in WRONG_VARIABLES.items():
        with pytest.raises(ConfigError, match=message):
            detect_launcher(environment)


@pytest.mark.parametrize(
    ("visible", "gpus", "option", "expected"),
    [
        pytest.param(1, "AB", "auto", "cuda:0", id="each rank sees its own"),  # as Kubernetes shows them
        pytest.param(2, "AB", "auto", "cuda:1", id="each rank sees both"),
        pytest.param(1, "AA", "auto", "cpu", id="both see one"),
        pytest.param(1, ["A", ""], "auto", "cpu", id="one rank sees none"),
        pytest.param(
            1, "AA", "cuda", "--device cuda needs one GPU for each rank, got 1 on this host", id="too few"
        ),
    ],
)
def test_a_rank_takes_a_gpu_of_its_own_or_the_cpu(monkeypatch, visible, gpus, option, expected):
    """The rank is the second of two; `gpus` are the UUIDs of the GPUs that the ranks would take."""

    def gather_answers(question, answer):
        return dict.fromkeys([gpus[0] if question == "GPUs" else answer, answer])

    launch_info = detect_launcher(TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"})
    consensus = SimpleNamespace(gather_answers=gather_answers)
    monkeypatch.setattr(distributed, "StoreConsensus", lambda *_: consensus)
    monkeypatch.setattr(distributed, "open_rendezvous_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "_set_gloo_interface", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus[1]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[1]))
    try:
        actual = str(distributed.init_distributed(launch_info, option))
    except ConfigError as error:
        actual = str(error)
    assert actual == expected


@pytest.mark.parametrize(
    ("address", "family"),
    [("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)],
    ids=["IPv6", "IPv4"],
)
def test_gloo_takes_the_interface_that_reaches_rank_0_if_the_own_name_is_of_the_loopback(
    monkeypatch, address, family
):
    """Only the answers of the resolver and of the ranks are made up."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1234))
        except OSError:
            pytest.skip(f"no network of {family.name} here")
    resolved = {socket.gethostname(): "127.0.1.1", "head": "fd77::1"}  # as Debian has it

    def resolve(host, *_, **__):
        return [(family, None, 0, "", (resolved[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    answers = []
    consensus = SimpleNamespace(
        gather_answers=lambda _, answer: answers.append(answer) or {"": [0], address: [1]}
    )
    launch_info = LaunchInfo(1, 2, 0, "head", 1234)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "other")
    distributed._set_gloo_interface(launch_info, consensus)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "other" and answers == ["fd77::1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    distributed._set_gloo_interface(launch_info, consensus)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    resolved[socket.gethostname()] = "fd77::2"  # gloo finds its interface by itself
    distributed._set_gloo_interface(launch_info, consensus)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_one_rank_of_each_host_says_why_all_end(monkeypatch, capsys):
    def fail(*_):
        raise TrainingError("every rank must have the same")

    monkeypatch.setattr(distributed, "init_distributed", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run, "run_training", fail)
    for rank, local_rank in ((0, 0), (1, 1), (4, 0), (5, 1)):
        launch_info = LaunchInfo(rank, 8, local_rank, "head", 1234)
        monkeypatch.setattr(trainer, "detect_launcher", lambda launch_info=launch_info: launch_info)
        assert main([]) == 1
        message = "fastvit-train: error: every rank must have the same\n"
        assert capsys.readouterr().err == ("" if local_rank else message)


def test_ranks_that_do_not_come_are_missed(monkeypatch, capsys, port):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    assert main(["--device", "cpu", "--timeout", "1"]) == 1
    error = capsys.readouterr().err
    assert f"the 2 ranks did not meet at 127.0.0.1:{port} within 1 s: rank 1 did not join the" in error


@on_ranks(2, breaks=True)
@pytest.mark.parametrize(
    ("run_ids", "expected"),
    [
        pytest.param(("7.0", "7.1"), "rank 0 is of run '7.0' and rank 1 of run '7.1'", id="two runs"),
        pytest.param(("7.0", "7.0"), "cpu", id="one run"),
    ],
)
def test_only_ranks_of_one_run_meet(rank, world, port, run_ids):
    destroy_process_group()  # the group of the pool
    begin = time.monotonic()
    launch_info = LaunchInfo(rank, world, rank, "127.0.0.1", port, run_ids[rank])
    try:
        device_or_error = str(distributed.init_distributed(launch_info, "cpu", 3))
    except ConfigError as error:
        device_or_error = str(error)
    return device_or_error, time.monotonic() - begin


@test_only_ranks_of_one_run_meet.check
def _(results, expected):
    device_or_error, seconds = results[1]
    assert expected in device_or_error and seconds < 2.5
