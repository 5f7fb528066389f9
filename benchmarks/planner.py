"""The planner of the CUDA kernels (csrc/cuda/plan.h itself, compiled here) from Python."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from shapes import DTYPES, Case

ROOT = Path(__file__).resolve().parents[1]
HEADERS = "cuda/plan.h cuda/row_plan.h layout.h macros.h".split()
SOURCES = [Path(__file__).with_suffix(".cpp"), *(ROOT / "csrc" / name for name in HEADERS)]
WORDS = (
    "rows vector lanes teams fold tile tiles slices segment segments units slots resident "
    "dependent_loads dependent_merges levels"
).split()
MOST_DIMS = 5
Dims = ctypes.c_int64 * MOST_DIMS


class _Request(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_int64), ("sizes", Dims), ("strides", Dims), ("channel_dim", ctypes.c_int64),
        ("operands", ctypes.c_int64), ("element_size", ctypes.c_int64), ("cached", ctypes.c_int64),
        ("multiprocessors", ctypes.c_int64), ("smem_cache_bytes", ctypes.c_int64),
        ("resident", ctypes.c_int64 * 4),
    ]  # fmt: skip


class Plan(ctypes.Structure):
    """The Plan of csrc/cuda/plan.h; `resident` blocks per multiprocessor. The last block merges slices for
    `tail_nanoseconds`, with this number of sequential loads and merges, and is found `levels` times.
    """

    _fields_ = [*((name, ctypes.c_int64) for name in WORDS), ("tail_nanoseconds", ctypes.c_double)]

    @property
    def blocks(self) -> int:
        return self.tiles * self.slices


def _library() -> ctypes.CDLL:
    """The compiled planner, cached for these sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    library = ROOT / "build/planner" / f"{digest}.so"
    if not library.exists():
        candidates = [*os.environ.get("CXX", "").split()[-1:], "c++", "g++", "clang++"]
        compiler = next(filter(shutil.which, candidates), None)
        if compiler is None:
            raise SystemExit("planner: csrc/cuda/plan.h needs a C++ compiler; install g++ or set CXX")
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *"-std=c++20 -O3 -shared -fPIC -I".split(), str(ROOT / "csrc"), "-o", str(new)]
        subprocess.run([*command, str(SOURCES[0])], check=True)
        new.rename(library)  # several processes may compile it at once
    loaded = ctypes.CDLL(str(library))
    loaded.fastvit_plan_nanoseconds.restype = ctypes.c_double
    return loaded


def _request(case: Case, operands: int, cached: int, resident: dict, multiprocessors: int, smem: int):
    x = torch.empty(case.shape, device="meta")
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    blocks = (ctypes.c_int64 * 4)(*(resident[rows, wide] for rows in (False, True) for wide in (False, True)))
    return _Request(
        x.dim(), Dims(*x.shape), Dims(*x.stride()), case.channel_dim, operands, DTYPES[case.dtype].itemsize,
        cached, multiprocessors, smem, blocks,
    )  # fmt: skip


def plan(*request) -> Plan:
    """The plan of one op for contiguous, aligned operands of a case.

    (case, operands, cached, resident, multiprocessors, smem): the number of operands of the kernel; of those
    that it reads and may hold in shared memory (0: it merges no slices); the blocks per multiprocessor by
    (rows, packets); the bytes of shared memory of a block for packets.
    """
    answer = Plan()
    _library().fastvit_plan(ctypes.byref(_request(*request)), ctypes.byref(answer))
    return answer


def row_plan(rows: int, columns: int, width: int, backward: bool = False) -> tuple[int, int, int]:
    """Lanes of a team, parts of a row and packets of a lane, for a LayerNorm in packets of `width`."""
    answer = (ctypes.c_int64 * 3)()
    _library().fastvit_row_plan(*map(ctypes.c_int64, (rows, columns, width, backward)), answer)
    return tuple(answer)


def nanoseconds(*request, repeats: int = 200_000) -> float:
    """Of one layout and plan, on this host."""
    return min(
        _library().fastvit_plan_nanoseconds(ctypes.byref(_request(*request)), ctypes.c_int64(repeats // 4))
        for _ in range(4)
    )


def constants() -> tuple[int, int, int]:
    """Threads of a block, packets in flight per operand and thread, blocks that share on-chip memory."""
    values = [ctypes.c_int64() for _ in range(3)]
    _library().fastvit_plan_constants(*map(ctypes.byref, values))
    return tuple(value.value for value in values)
