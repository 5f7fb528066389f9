"""Set-up of peer memory between GPUs, and what all ranks do when the set-up fails; on CPU memory.

Each rank is a thread, and stand-ins replace the functions of CUDA and torch that map memory of another
process. Exchanges: tests/cuda_host/test_cuda_host_exchange.py, and tests/test_cuda.py on a GPU.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastvit import _library
from fastvit.sync import cuda_ipc
from fastvit.sync.cuda_ipc import CudaIpcBackend
from fastvit.sync.protocol import MIN_ARENA_PACKETS
from fastvit.sync.store_consensus import BackendUnavailable
from sync.one_process import describe_tag, make_consensuses

CPU = torch.device("cpu")


class Gpus:
    """Stand-ins for the ops of all ranks. `fails` has, by rank, the call that raises."""

    def __init__(self, world: int, fails: dict[int, str], gpus: int | None = None):
        self.world, self.fails, self.gpus = world, fails, gpus or world
        self.arenas, self.handles = {}, []
        self.thread, self.barrier, self.sent = threading.local(), threading.Barrier(world), {}
        self.loaded: list[int] = []

    def may(self, what: str, text: str) -> None:
        if self.fails.get(self.rank) == what:
            raise RuntimeError(f"CUDA error: {text}\nmore")

    @property
    def rank(self) -> int:
        return self.thread.rank

    # torch.ops.fastvit
    arena_bytes = staticmethod(torch.ops.fastvit.arena_bytes)

    def ipc_open(self, handle, device):
        self.may("open", "peer access is not supported")
        assert handle[1:].tolist() == [7, 255]
        return self.arenas[int(handle[0])].data_ptr()

    def ipc_allocate(self, size, device):
        self.may("memory", "out of memory")
        self.arenas[self.rank] = torch.zeros(size, dtype=torch.uint8)
        return self.arenas[self.rank], torch.tensor([self.rank, 7, 255], dtype=torch.uint8)

    def load(self):
        self.may("load", "invalid image")
        if self.rank == 0:
            time.sleep(0.3)  # from a slow disk
        self.loaded.append(self.rank)

    def merge_over_ranks(self, way, numbers, tag):
        assert sorted(self.loaded) == list(range(self.world))  # no GPU waits for a rank that loads
        descriptor = way._exchange.descriptor
        addresses = way._exchange.tensor[-descriptor.world :].tolist()
        assert addresses == [self.arenas[rank].data_ptr() for rank in range(descriptor.world)]
        self.sent[self.rank] = numbers.clone()
        self.barrier.wait(20)
        rows = torch.cat([self.sent[rank] for rank in range(self.world)])
        self.barrier.wait(20)
        if self.fails.get(self.rank) == "lost":
            rows[-1, 5] += 1
        return torch.stack([numbers[0], sum(rows)])


def connect(monkeypatch, gpus: Gpus, may_share_gpu: bool = False) -> list:
    """The result or the error of `connect` on each rank."""
    made = make_consensuses(gpus.world)
    monkeypatch.setattr(cuda_ipc, "_ops", gpus)
    monkeypatch.setattr(cuda_ipc, "warm_up_kernels", lambda device: gpus.load())
    monkeypatch.setattr(
        CudaIpcBackend, "merge_over_ranks", lambda *arguments: gpus.merge_over_ranks(*arguments)
    )
    monkeypatch.setattr(cuda_ipc, "_gpu_uuid", lambda device: f"GPU-{gpus.rank % gpus.gpus}")

    def run(rank):
        gpus.thread.rank = rank
        try:
            return CudaIpcBackend.connect(made[rank], MIN_ARENA_PACKETS, describe_tag, CPU, may_share_gpu)
        except BackendUnavailable as reason:
            return str(reason)

    with ThreadPoolExecutor(gpus.world) as pool:
        return list(pool.map(run, range(gpus.world)))


def test_all_ranks_open_all_memory(monkeypatch):
    gpus = Gpus(3, {})
    for member in connect(monkeypatch, gpus):
        assert member.name == "CudaIpc" and member.try_reserve(2048, torch.float32)
        assert not member.try_reserve(2049, torch.float32)
        assert member.next_forward_index() == 1  # the trial's are not counted
        assert member.timeout < 20  # its report comes before anything else gives up


def test_a_gpu_with_a_display_waits_less(monkeypatch):
    """The driver would end the process of a kernel that waits as long as the group may."""
    monkeypatch.setattr(_library, "max_kernel_seconds", lambda device: 2.0)
    assert [member.timeout for member in connect(monkeypatch, Gpus(2, {}))] == [2.0, 2.0]


@pytest.mark.parametrize(
    "fails,text",
    [
        ({1: "open"}, "rank 1: CUDA error: peer access is not supported"),
        ({2: "memory"}, "rank 2: CUDA error: out of memory"),
        ({1: "load"}, "rank 1: CUDA error: invalid image"),
        ({0: "lost"}, "rank 0: numbers arrived changed"),
    ],
)
def test_one_rank_that_cannot_decides_for_all(monkeypatch, fails, text):
    assert connect(monkeypatch, Gpus(3, fails)) == [text] * 3


def test_ranks_share_a_gpu_only_when_asked(monkeypatch):
    assert set(connect(monkeypatch, Gpus(3, {}, gpus=2))) == {"3 ranks on 2 GPUs"}
    members = connect(monkeypatch, Gpus(2, {}, gpus=1), may_share_gpu=True)
    assert [member.name for member in members] == ["CudaIpc"] * 2


def test_no_cuda_kernels_means_no_gpu_exchange(monkeypatch):
    monkeypatch.setattr(_library, "HAS_CUDA_KERNELS", False)
    with pytest.raises(OSError, match="the CUDA kernels are "):
        CudaIpcBackend.host_name(CPU)
