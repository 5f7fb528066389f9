"""The set-up of peer memory between GPUs, and what all ranks do when the set-up fails; on CPU memory.

Each rank is a thread, and stand-ins replace the functions of CUDA and torch that map memory of another
process. Tests of exchanges are in tests/cuda_host and tests/gpu.
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


class SimulatedGpus:
    """Stand-ins for the ops of all ranks. `failing_calls` has, by rank, the call that raises."""

    def __init__(self, world: int, failing_calls: dict[int, str], gpu_count: int | None = None):
        self.world, self.failing_calls, self.gpu_count = world, failing_calls, gpu_count or world
        self.arenas = {}
        self.thread, self.barrier, self.sent = threading.local(), threading.Barrier(world), {}
        self.loaded_ranks: list[int] = []

    def raise_if_failing(self, call: str, text: str) -> None:
        if self.failing_calls.get(self.rank) == call:
            raise RuntimeError(f"CUDA error: {text}\nmore")

    @property
    def rank(self) -> int:
        return self.thread.rank

    # The ops of torch.ops.fastvit
    arena_bytes = staticmethod(torch.ops.fastvit.arena_bytes)

    def ipc_open(self, handle, device):
        self.raise_if_failing("open", "peer access is not supported")
        assert handle[1:].tolist() == [7, 255]
        return self.arenas[int(handle[0])].data_ptr()

    def ipc_allocate(self, size, device):
        self.raise_if_failing("memory", "out of memory")
        self.arenas[self.rank] = torch.zeros(size, dtype=torch.uint8)
        return self.arenas[self.rank], torch.tensor([self.rank, 7, 255], dtype=torch.uint8)

    def load(self):
        self.raise_if_failing("load", "invalid image")
        if self.rank == 0:
            time.sleep(0.3)  # from a slow disk
        self.loaded_ranks.append(self.rank)

    def merge_over_ranks(self, backend, numbers, tag):
        assert sorted(self.loaded_ranks) == list(range(self.world))  # no GPU waits for a rank that loads
        descriptor = backend._exchange.descriptor
        addresses = backend._exchange.tensor[-descriptor.world :].tolist()
        assert addresses == [self.arenas[rank].data_ptr() for rank in range(descriptor.world)]
        self.sent[self.rank] = numbers.clone()
        self.barrier.wait(20)
        rows = torch.cat([self.sent[rank] for rank in range(self.world)])
        self.barrier.wait(20)
        if self.failing_calls.get(self.rank) == "lose":
            rows[-1, 5] += 1
        return torch.stack([numbers[0], sum(rows)])


def connect_ranks(monkeypatch, gpus: SimulatedGpus, may_share_gpu: bool = False) -> list:
    """Returns the backend or the error of each rank."""
    consensuses = make_consensuses(gpus.world)
    monkeypatch.setattr(cuda_ipc, "_ops", gpus)
    monkeypatch.setattr(cuda_ipc, "warm_up_kernels", lambda device: gpus.load())
    monkeypatch.setattr(
        CudaIpcBackend, "merge_over_ranks", lambda *arguments: gpus.merge_over_ranks(*arguments)
    )
    monkeypatch.setattr(cuda_ipc, "_gpu_uuid", lambda device: f"GPU-{gpus.rank % gpus.gpu_count}")

    def connect(rank):
        gpus.thread.rank = rank
        try:
            arguments = MIN_ARENA_PACKETS, describe_tag, CPU, may_share_gpu
            return CudaIpcBackend.connect(consensuses[rank], *arguments)
        except BackendUnavailable as reason:
            return str(reason)

    with ThreadPoolExecutor(gpus.world) as pool:
        return list(pool.map(connect, range(gpus.world)))


def test_all_ranks_open_all_memory(monkeypatch):
    gpus = SimulatedGpus(3, {})
    for backend in connect_ranks(monkeypatch, gpus):
        assert backend.name == "CudaIpc" and backend.try_reserve(2048, torch.float32)
        assert not backend.try_reserve(2049, torch.float32)
        assert backend.next_forward_index() == 1  # the trial's are not counted
        assert backend.timeout < 20  # its report comes before anything else gives up


def test_kernels_on_a_gpu_with_a_display_wait_less(monkeypatch):
    """The driver would end the process of a kernel that waits as long as the group may."""
    monkeypatch.setattr(_library, "max_kernel_seconds", lambda device: 2.0)
    assert [backend.timeout for backend in connect_ranks(monkeypatch, SimulatedGpus(2, {}))] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("rank", "call", "text"),
    [
        (1, "open", "CUDA error: peer access is not supported"),
        (2, "memory", "CUDA error: out of memory"),
        (1, "load", "CUDA error: invalid image"),
        (0, "lose", "numbers arrived changed"),
    ],
    ids=["open", "memory", "load", "lose"],
)
def test_one_rank_that_cannot_decides_for_all(monkeypatch, rank, call, text):
    gpus = SimulatedGpus(3, {rank: call})
    assert connect_ranks(monkeypatch, gpus) == [f"rank {rank}: {text}"] * 3


def test_ranks_share_a_gpu_only_when_asked(monkeypatch):
    assert set(connect_ranks(monkeypatch, SimulatedGpus(3, {}, gpu_count=2))) == {"3 ranks on 2 GPUs"}
    backends = connect_ranks(monkeypatch, SimulatedGpus(2, {}, gpu_count=1), may_share_gpu=True)
    assert [backend.name for backend in backends] == ["CudaIpc"] * 2


def test_no_cuda_kernels_means_no_gpu_exchange(monkeypatch):
    monkeypatch.setattr(_library, "HAS_CUDA_KERNELS", False)
    with pytest.raises(OSError, match="the CUDA kernels are "):
        CudaIpcBackend.host_name(CPU)
