"""The planner of the CUDA kernels (csrc/cuda/plan.h itself, compiled here) from Python."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes import DTYPES, Case

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    Path(__file__).with_suffix(".cpp"),
    *(
        ROOT / "csrc" / name
        for name in ("cuda/plan.h", "cuda/row_plan.h", "cuda/threads.h", "layout.h", "macros.h")
    ),
]
WORDS = (
    "rows vector lanes teams fold tile tiles slices segment segments units slots resident "
    "dependent_loads dependent_merges levels"
).split()
MOST_DIMS = 5


class _Request(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MOST_DIMS),
        ("strides", ctypes.c_int64 * MOST_DIMS),
        *(
            (name, ctypes.c_int64)
            for name in (
                "channel_dim",
                "operands",
                "element_size",
                "cached",
                "multiprocessors",
                "smem_cache_bytes",
            )
        ),
        ("resident", ctypes.c_int64 * 4),
    ]


class _Answer(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in WORDS), ("tail_nanoseconds", ctypes.c_double)]


@dataclass(frozen=True)
class Plan:
    """The Plan of csrc/cuda/plan.h; `resident` blocks per multiprocessor. The last block merges slices for
    `tail_nanoseconds`, with this number of sequential loads and merges, and is found `levels` times.
    """

    rows: int
    vector: int
    lanes: int
    teams: int
    fold: int
    tile: int
    tiles: int
    slices: int
    segment: int
    segments: int
    units: int
    slots: int
    resident: int
    dependent_loads: int
    dependent_merges: int
    levels: int
    tail_nanoseconds: float

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
        command = [
            compiler,
            "-std=c++20",
            "-O3",
            "-shared",
            "-fPIC",
            "-I",
            str(ROOT / "csrc"),
            "-o",
            str(new),
        ]
        subprocess.run([*command, str(SOURCES[0])], check=True)
        new.rename(library)  # several processes may compile it at once
    loaded = ctypes.CDLL(str(library))
    loaded.fastvit_plan_nanoseconds.restype = ctypes.c_double
    return loaded


def _request(
    case: Case,
    operands: int,
    cached: int,
    resident: dict[tuple[bool, bool], int],
    multiprocessors: int,
    smem: int,
) -> _Request:
    x = torch.empty(case.shape, device="meta")
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    pad = [0] * (MOST_DIMS - x.dim())
    return _Request(
        x.dim(),
        (ctypes.c_int64 * MOST_DIMS)(*x.shape, *pad),
        (ctypes.c_int64 * MOST_DIMS)(*x.stride(), *pad),
        case.channel_dim,
        operands,
        DTYPES[case.dtype].itemsize,
        cached,
        multiprocessors,
        smem,
        (ctypes.c_int64 * 4)(*(resident[rows, wide] for rows in (False, True) for wide in (False, True))),
    )


def plan(*request) -> Plan:
    """The plan of one op for contiguous, aligned operands of a case.

    (case, operands, cached, resident, multiprocessors, smem): the number of operands of the kernel; of those
    that it reads and may hold in shared memory (0: it merges no slices); the blocks per multiprocessor by
    (rows, packets); the bytes of shared memory of a block for packets.
    """
    answer = _Answer()
    _library().fastvit_plan(ctypes.byref(_request(*request)), ctypes.byref(answer))
    return Plan(**{name: getattr(answer, name) for name, _ in _Answer._fields_})


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
