"""How ranks come to have each other's GPU memory open, or to agree that they cannot; the memory is the CPU's.

Each rank is a thread, and what CUDA or torch does between processes is made up here. What is exchanged
through it: tests/cuda_host/test_cuda_host_exchange.py, and tests/test_cuda.py on a GPU.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fastvit import _library
from fastvit.statistics import cuda_ipc, device_memory, symm_mem
from fastvit.statistics.agreement import Agreement, Watch

raw = torch.ops.fastvit
CPU = torch.device("cpu")
PROVIDERS = pytest.mark.parametrize("provider", [cuda_ipc, symm_mem], ids=lambda p: p.NAME)


class Gpus:
    """The ops of all ranks. `fails` names, by rank, what it refuses."""

    def __init__(self, world: int, fails: dict[int, str], gpus: int | None = None):
        self.world, self.fails, self.gpus = world, fails, gpus or world
        self.arenas, self.handles = {}, []
        self.thread, self.barrier, self.sent = threading.local(), threading.Barrier(world), {}

    def may(self, what: str, text: str) -> None:
        if self.fails.get(self.rank) == what:
            raise RuntimeError(f"CUDA error: {text}\nmore")

    @property
    def rank(self) -> int:
        return self.thread.rank

    # torch.ops.fastvit
    exchange_arena_bytes = staticmethod(raw.exchange_arena_bytes)

    def ipc_memory(self, size, device):
        self.may("memory", "out of memory")
        self.arenas[self.rank] = torch.zeros(size, dtype=torch.uint8)
        return self.arenas[self.rank], torch.tensor([self.rank, 7, 255], dtype=torch.uint8)

    def ipc_open(self, handle, size, device):
        self.may("open", "peer access is not supported")
        assert handle[1:].tolist() == [7, 255]
        return self.arenas[int(handle[0])]

    def exchange_push(self, fields, numbers, kind):
        world = int(fields[1])
        assert fields[8:].tolist() == [self.arenas[rank].data_ptr() for rank in range(world)]
        self.sent[self.rank] = numbers.clone()

    def exchange_poll(self, fields, numbers, kind, add):
        self.barrier.wait(20)
        rows = torch.stack([self.sent[rank] for rank in range(self.world)])
        self.barrier.wait(20)
        if self.fails.get(self.rank) == "lost":
            rows[-1, 5] += 1
        return rows.sum(0) if add else rows

    # torch.distributed._symmetric_memory
    def get_backend(self, device):
        return "CUDA"

    def empty(self, size, *, dtype, device):
        self.may("memory", "out of memory")
        self.arenas[self.rank] = torch.full((size,), 255, dtype=dtype)
        return self.arenas[self.rank]

    def rendezvous(self, tensor, group):
        assert group == "the group" and tensor is self.arenas[self.rank] and not tensor.any()
        self.barrier.wait(20)  # all ranks come, or this would hang
        self.may("open", "peer access is not supported")
        return self

    def get_remote_tensor(self, peer, sizes, dtype):
        assert peer != self.rank and self.arenas[peer].shape == sizes and dtype == torch.uint8
        return self.arenas[peer]


def connect(monkeypatch, provider, gpus: Gpus, asked: bool = False) -> list:
    """What the provider's connect gives on each rank."""
    store = dist.HashStore()
    monkeypatch.setattr(cuda_ipc, "_ops", gpus)
    monkeypatch.setattr(device_memory, "_ops", gpus)
    monkeypatch.setattr(cuda_ipc, "_gpu", lambda device: f"GPU-{gpus.rank % gpus.gpus}")
    monkeypatch.setattr(symm_mem, "_symmetric_memory", lambda: gpus)

    def run(rank):
        gpus.thread.rank = rank
        agreement = Agreement.__new__(Agreement)  # the store of a group, without the group
        agreement.__dict__.update(
            rank=rank, world=gpus.world, timeout=20.0, group_name="the group", _store=store, _asked=0
        )
        agreement.watch = Watch(store, rank)
        describe = lambda tag, direction: f"{direction}, step {tag.step}"  # noqa: E731
        return provider.connect(agreement, 8, torch.float32, describe, CPU, asked)

    with ThreadPoolExecutor(gpus.world) as pool:
        return list(pool.map(run, range(gpus.world)))


@PROVIDERS
def test_all_ranks_open_all_memory(monkeypatch, provider):
    gpus = Gpus(3, {})
    for member in connect(monkeypatch, provider, gpus):
        assert member.name == provider.NAME and member.reserve(2048, torch.float32)
        assert not member.reserve(2049, torch.float32)
        assert [a.data_ptr() for a in member._arenas] == [gpus.arenas[r].data_ptr() for r in range(3)]
        assert member.next_step() == 1  # the trial's are not counted


@PROVIDERS
@pytest.mark.parametrize(
    "fails,text",
    [
        ({1: "open"}, "peer access is not supported"),
        ({2: "memory"}, "CUDA error: out of memory"),
        ({0: "lost"}, "rank 0: does not work: numbers arrived changed"),
    ],
)
def test_one_rank_that_cannot_decides_for_all(monkeypatch, provider, fails, text):
    answers = connect(monkeypatch, provider, Gpus(3, fails))
    assert len(set(answers)) == 1 and text in answers[0], answers


def test_ranks_share_a_gpu_only_when_asked(monkeypatch):
    assert set(connect(monkeypatch, cuda_ipc, Gpus(3, {}, gpus=2))) == {"3 ranks on 2 GPUs"}
    members = connect(monkeypatch, cuda_ipc, Gpus(2, {}, gpus=1), asked=True)
    assert [member.name for member in members] == ["CudaIpc"] * 2


@PROVIDERS
def test_too_many_ranks(provider):
    many = Agreement.__new__(Agreement)
    many.__dict__.update(rank=0, world=17)
    answer = provider.connect(many, 8, torch.float32, None, CPU, False)
    assert answer == "17 ranks, more than 16"


def test_where_symmetric_memory_is_missing(monkeypatch):
    assert cuda_ipc.host(CPU).startswith("no CUDA kernels") or _library.HAS_CUDA
    monkeypatch.setattr(_library, "HAS_CUDA", True)
    assert symm_mem.host(CPU) == "no symmetric memory for cpu"  # by torch itself, which has it for CUDA alone

    def missing():
        raise ImportError("no module")

    monkeypatch.setattr(symm_mem, "_symmetric_memory", missing)
    assert symm_mem.host(CPU) == f"no symmetric memory in torch {torch.__version__}: no module"
