"""The planner of the CUDA kernels (csrc/cuda/plan.h and row_plan.h, compiled here) from Python."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
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
    "Plan", "rows vector lanes teams blocks slices segment units slots resident levels tail_nanoseconds"
)


@functools.cache
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
    return ctypes.CDLL(str(library))


def _answer(function: str, numbers: int, request: list[int], repeats: int = 1) -> tuple[list[int], float]:
    """What a function of planner.cpp says, and the least nanoseconds of four times that it takes."""
    call = getattr(_library(), function)
    call.restype = ctypes.c_double
    given, answer = (ctypes.c_int64 * len(request))(*request), (ctypes.c_int64 * numbers)()
    took = min(call(given, answer, ctypes.c_int64(repeats)) for _ in range(4 if repeats > 1 else 1))
    return list(answer), took


def _request(case: Case, operands: int, cached: int, resident: dict, multiprocessors: int, smem: int):
    x = torch.empty(case.shape, device="meta")
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    blocks = [resident[rows, wide] for rows in (False, True) for wide in (False, True)]
    rest = [0] * (MOST_DIMS - x.dim())
    operand = [x.dim(), *x.shape, *rest, *x.stride(), *rest, case.channel_dim]
    return [*operand, operands, DTYPES[case.dtype].itemsize, cached, multiprocessors, smem, *blocks]


def plan(*request) -> Plan:
    """The plan of one op for contiguous, aligned operands of a case.

    (case, operands, cached, resident, multiprocessors, smem): the number of operands of the kernel; of those
    that it reads and may hold in shared memory (0: it merges no slices); the blocks per multiprocessor by
    (rows, packets); the bytes of shared memory of a block for packets.
    """
    return Plan(*_answer("fastvit_plan", len(Plan._fields), _request(*request))[0])


def row_plan(rows: int, columns: int, width: int, backward=False, half=False) -> tuple[int, ...]:
    """Lanes of a team, parts of a row and packets of a lane, for a LayerNorm in packets of `width`."""
    return tuple(_answer("fastvit_row_plan", 3, [rows, columns, width, backward, half])[0])


def nanoseconds(*request, repeats: int = 200_000) -> float:
    """Of one layout and plan on this host, by the arguments of `plan` or `row_plan`."""
    if isinstance(request[0], Case):
        return _answer("fastvit_plan", len(Plan._fields), _request(*request), repeats // 4)[1]
    return _answer("fastvit_row_plan", 3, [*request, False], repeats // 4)[1]


def constant(name: str) -> int:
    """Of csrc/cuda/plan.h."""
    return int(re.search(rf"constexpr int {name} = (\d+);", (ROOT / "csrc/cuda/plan.h").read_text())[1])
