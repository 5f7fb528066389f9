"""The planner of the CUDA kernels (csrc/cuda/plan.h and row_plan.h, compiled here) from Python."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
from collections import namedtuple
from pathlib import Path

import torch
from shapes import DTYPES, Case

ROOT = Path(__file__).resolve().parents[1]
HEADERS = "cuda/plan.h cuda/row_plan.h layout.h macros.h".split()
SOURCES = [Path(__file__).with_suffix(".cpp"), *(ROOT / "csrc" / name for name in HEADERS)]
MOST_DIMS = 5
# Of csrc/cuda/plan.h; `resident` blocks per multiprocessor. The last block merges slices for
# `tail_nanoseconds`, and is found `levels` times.
Plan = namedtuple(
    "Plan", "rows vector lanes teams fold blocks slices segment units slots resident levels tail_nanoseconds"
)


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled planner, cached for these sources."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    library = ROOT / "build/planner" / f"{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "c++").split()[-1]
        command = [compiler, *"-std=c++20 -O3 -shared -fPIC -I".split(), str(ROOT / "csrc"), "-o", str(new)]
        subprocess.run([*command, str(SOURCES[0])], check=True)
        new.rename(library)  # several processes may compile it at once
    return ctypes.CDLL(str(library))


def _answer(function: str, numbers: int, *request: int) -> list[int]:
    """What a function of planner.cpp says."""
    given, answer = (ctypes.c_int64 * len(request))(*request), (ctypes.c_int64 * numbers)()
    getattr(_library(), function)(given, answer)
    return list(answer)


def plan(case: Case, operands: int, cached: int, resident: dict, multiprocessors: int, smem: int) -> Plan:
    """The plan of one op for contiguous, aligned operands of a case.

    `operands` of the kernel; `cached` of those, which it reads and may hold in shared memory (0: it merges no
    slices); `resident` blocks per multiprocessor by (rows, packets); `smem` bytes of a block for packets.
    """
    x = torch.empty(case.shape, device="meta")
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    blocks = [resident[rows, wide] for rows in (False, True) for wide in (False, True)]
    rest = [0] * (MOST_DIMS - x.dim())
    request = [x.dim(), *x.shape, *rest, *x.stride(), *rest, case.channel_dim]
    request += [operands, DTYPES[case.dtype].itemsize, cached, multiprocessors, smem, *blocks]
    return Plan(*_answer("fastvit_plan", len(Plan._fields), *request))


def row_plan(rows: int, columns: int, width: int, backward=False, half=False) -> tuple[int, ...]:
    """Lanes of a team, parts of a row and packets of a lane, for a LayerNorm in packets of `width`."""
    return tuple(_answer("fastvit_row_plan", 3, rows, columns, width, backward, half))


def constant(name: str) -> int:
    """Of csrc/cuda/plan.h."""
    return int(re.search(rf"constexpr int {name} = (\d+);", (ROOT / "csrc/cuda/plan.h").read_text())[1])
