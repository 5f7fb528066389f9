"""How ranks come to have each other's GPU memory open, or to agree that they cannot; the memory is the CPU's.

What is exchanged through it: tests/cuda_host/test_cuda_host_exchange.py, and tests/test_cuda.py on a GPU.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fastvit.statistics import device_memory
from fastvit.statistics.agreement import Agreement

raw = torch.ops.fastvit


class Ipc:
    """One rank's GPU, with the ops that share its memory; `fails` names the one that it refuses."""

    def __init__(self, memory: dict, rank: int, fails: str):
        self._memory, self._rank, self._fails = memory, rank, fails

    exchange_arena_bytes = staticmethod(raw.exchange_arena_bytes)

    def ipc_memory(self, size, device):
        if self._fails == "memory":
            raise RuntimeError("CUDA error: out of memory\nmore")
        self._memory[self._rank] = torch.zeros(size, dtype=torch.uint8)
        return self._memory[self._rank], torch.tensor([self._rank, 7, 255], dtype=torch.uint8)

    def ipc_open(self, handle, size, device):
        if self._fails == "open":
            raise RuntimeError("CUDA error: peer access is not supported\nmore")
        assert handle[1:].tolist() == [7, 255]
        return self._memory[int(handle[0])]


class Ops:
    """torch.ops.fastvit of the rank that the calling thread is."""

    def __init__(self):
        self.rank = threading.local()

    def __getattr__(self, name):
        return getattr(self.rank.ipc, name)


def connect(monkeypatch, world: int, fails: dict[int, str]) -> list:
    """What device_memory.connect gives on each of `world` ranks, which are threads."""
    store, memory, ops = dist.HashStore(), {}, Ops()
    monkeypatch.setattr(device_memory, "_ops", ops)

    def run(rank):
        ops.rank.ipc = Ipc(memory, rank, fails.get(rank, ""))
        agreement = Agreement.__new__(Agreement)  # the store of a group, without the group
        agreement.__dict__.update(rank=rank, world=world, timeout=20.0, _store=store, _asked=0)
        describe = lambda tag, direction: f"{direction}, step {tag.step}"  # noqa: E731
        return device_memory.connect(agreement, 8, torch.float32, describe, torch.device("cpu"))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_all_ranks_open_all_memory(monkeypatch):
    members = connect(monkeypatch, 3, {})
    for member in members:
        assert member.name == "CudaIpc" and member.reserve(2048, torch.float32)
        assert not member.reserve(2049, torch.float32)
        assert [a.data_ptr() for a in member._arenas] == [
            m._arenas[r].data_ptr() for r, m in enumerate(members)
        ]


@pytest.mark.parametrize(
    "fails,text",
    [({1: "open"}, "peer access is not supported"), ({2: "memory"}, "rank 2: no memory: CUDA error: out of")],
)
def test_one_rank_that_cannot_decides_for_all(monkeypatch, fails, text):
    answers = connect(monkeypatch, 3, fails)
    assert len(set(answers)) == 1 and text in answers[0], answers


def test_too_many_ranks(monkeypatch):
    many = Agreement.__new__(Agreement)
    many.__dict__.update(rank=0, world=17)
    answer = device_memory.connect(many, 8, torch.float32, None, torch.device("cpu"))
    assert answer == "17 ranks, more than 16"
