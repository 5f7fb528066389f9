"""How a group chooses the backend that exchanges statistics, and how it describes the choice."""

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

import fastvit
from fastvit import _library, info, sync
from fastvit.sync import shared_memory
from fastvit.sync.statistics_group import StatisticsGroup, get_statistics_group
from sync.layer_steps import run_step


def raise_no_space(file, offset, size):
    raise OSError(errno.ENOSPC, "No space left on device")


CHOICES = {  # by FASTVIT_STATISTICS of the two ranks, and what breaks
    ("auto auto", "nothing"): "group 0 (2 ranks, cpu): SharedMemory, host",
    ("auto peer", "nothing"): "group 0 (2 ranks, cpu): SharedMemory, host",
    ("peer collective", "nothing"): "cannot use peer memory: FASTVIT_STATISTICS=collective",
    ("auto collective", "nothing"): "group 0 (2 ranks, cpu): Collective: FASTVIT_STATISTICS=collective",
    ("auto auto", "mapping of rank 1"): "Collective: rank 1: [Errno 2] No such file",
    ("auto auto", "space"): "Collective: rank 0: [Errno 28] No space left on device",
    ("auto auto", "folder"): "group 0 (2 ranks, cpu): Collective: ",
    ("auto peer", "mapping of rank 0"): "=peer, but group 0 cannot use peer memory: rank 0: [Errno 2]",
    ("auto shm", "nothing"): "FASTVIT_STATISTICS is 'shm'; auto, collective, peer expected",
}


@on_ranks(2)
@pytest.mark.parametrize(("settings", "broken"), CHOICES)
def test_all_ranks_choose_the_same(rank, world, settings, broken):
    records, handler, log = [], logging.Handler(), logging.getLogger("fastvit.sync")
    handler.emit = records.append
    log.addHandler(handler), log.setLevel(logging.DEBUG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTVIT_STATISTICS", settings.split()[rank])
        if broken == f"mapping of rank {rank}":
            patch.setattr(shared_memory, "_map_segment", lambda *_: os.open("/nowhere", os.O_RDONLY))
        elif broken == "space":
            patch.setattr(os, "posix_fallocate", raise_no_space)
        elif broken == "folder":
            patch.setattr(shared_memory, "SHM_DIR", Path("/proc"))  # where nothing can be made
        try:
            run_step(fastvit.SyncBatchNorm(6))
        except (RuntimeError, ValueError) as error:
            return str(error)
        finally:
            log.removeHandler(handler)
    (record,) = records
    choice = get_statistics_group(dist.group.WORLD, torch.device("cpu")).describe()
    assert choice in record.getMessage() and choice in info.facts()["statistics"]
    # A failure is a warning, of one rank; the user's wish is not.
    assert (record.levelname == "WARNING") == (broken != "nothing" and rank == 0)
    return choice


@test_all_ranks_choose_the_same.check
def _(results, settings, broken):
    assert sorted(results[0]) == sorted(results[1])  # which rank answered first may differ
    assert CHOICES[settings, broken] in results[0]


@pytest.mark.parametrize(
    ("variable", "world", "reason"),
    [("NCCL_P2P_DISABLE", 2, "NCCL_P2P_DISABLE=1"), ("_", 65, "65 ranks, more than 64")],
    ids=["NCCL_P2P_DISABLE", "65 ranks"],
)
def test_gpus_without_peer_memory_use_collectives(monkeypatch, variable, world, reason):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(
        "fastvit.sync.statistics_group.GpuCollectiveBackend", lambda *_: SimpleNamespace(name="Collective")
    )
    group = StatisticsGroup.__new__(StatisticsGroup)  # of GPUs, without a process group
    consensus = SimpleNamespace(
        rank=0, world_size=world, gather_answers=lambda question, answer: {answer: [0, 1]}
    )
    group.__dict__.update(_device=torch.device("cuda"), _consensus=consensus, _process_group=lambda: group)
    assert group._negotiate_backend(6, torch.float32)[1:] == (f"Collective: {reason}", logging.DEBUG)


PEER_BACKENDS = "CPU SharedMemory on one host, CUDA CudaIpc on one host with peer access"
SHARED_MEMORY_ONLY = "CPU SharedMemory on one host, CUDA Collective"
NO_PEER_BACKEND = "CPU Collective, CUDA Collective"


@pytest.mark.parametrize(
    ("setting", "has_cuda_kernels", "has_shared_memory", "expected"),
    [
        pytest.param(None, True, True, f"auto: {PEER_BACKENDS}, otherwise Collective", id="default"),
        pytest.param("auto", False, True, f"auto: {SHARED_MEMORY_ONLY}, otherwise Collective", id="no CUDA"),
        pytest.param("auto", False, False, f"auto: {NO_PEER_BACKEND}, otherwise Collective", id="no memory"),
        pytest.param(
            "collective", True, True, f"collective: {NO_PEER_BACKEND}, otherwise Collective", id="collective"
        ),
        pytest.param("peer", True, True, f"peer: {PEER_BACKENDS}, otherwise an error", id="peer"),
    ],
)
def test_available_backends_follow_setting_and_system(
    monkeypatch, setting, has_cuda_kernels, has_shared_memory, expected
):
    monkeypatch.delenv("FASTVIT_STATISTICS", raising=False)
    if setting:
        monkeypatch.setenv("FASTVIT_STATISTICS", setting)
    monkeypatch.setattr(_library, "HAS_CUDA_KERNELS", has_cuda_kernels)

    def host_name(device):
        if not has_shared_memory:
            raise OSError("no /dev/shm")

    monkeypatch.setattr(shared_memory.SharedMemoryBackend, "host_name", host_name)
    assert sync.available_backends() == f"FASTVIT_STATISTICS={expected}"


def test_one_process_has_no_group():
    assert sync.default_group(None) is None
    assert "FASTVIT_STATISTICS=" in sync.available_backends() and not sync.describe_groups()
