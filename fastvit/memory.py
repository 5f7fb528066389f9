"""Measures the bytes that a function leaves allocated, and its peak, by the allocator.

Saved-tensor hooks would count other numbers: hooks hide each other, a tensor that is saved twice or alive for
another reason is counted wrongly, and recompute_scope() works by hooks itself.
"""

import ctypes
import gc
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

__all__ = ["held_bytes", "live_bytes", "peak_bytes"]

_PROBE = 2**22


def live_bytes(work: Callable[[], object], device: str | torch.device = "cpu") -> tuple[int, object]:
    """Returns `(bytes, result)`: bytes allocated minus bytes freed by `work()`, while its result is held.

    For a training forward these are the saved tensors, the result, and new state. On CUDA the number is the
    caching allocator's count of bytes in use; on the CPU it is the sum of the events that torch's allocator
    reports to the profiler. Call `work` once before, so that one-time caches are not counted.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = work()
        gc.collect()
        return torch.cuda.memory_allocated(device) - before, result
    changes, result = _changes(work)
    return sum(changes), result


def held_bytes(work: Callable[[], object], devices: Sequence[torch.device]) -> tuple[int, object]:
    """As `live_bytes`, by what the allocators of `devices` say before and after; `work` runs as elsewhere.

    On the CPU glibc tells what the process holds, which includes autograd's graph, objects of Python and what
    other threads allocate meanwhile. Where another allocator is in use, the result is that of `live_bytes`.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus and not _glibc_counts():
        return live_bytes(work)

    def count() -> int:
        gc.collect()
        return sum(map(torch.cuda.memory_allocated, gpus)) if gpus else _glibc_bytes()

    before = count()
    result = work()
    return count() - before, result


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`, from 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _glibc_bytes() -> int:
    """Bytes that malloc has given out, in all arenas, and in mapped memory."""
    counts = _mallinfo2()()
    return counts.uordblks + counts.hblkhd


@lru_cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    return function


@lru_cache
def _glibc_counts() -> bool:
    """Whether torch's tensors are in glibc's memory: there are other C libraries, and other allocators."""
    try:
        before = _glibc_bytes()
        probe = torch.empty(_PROBE, dtype=torch.uint8)
        return 0 <= _glibc_bytes() - before - probe.nbytes < _PROBE // 8
    except (AttributeError, OSError, TypeError):
        return False


def peak_bytes(work: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """The largest number of bytes that `work()` has allocated at a time, above those allocated before."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    return max(itertools.accumulate(_changes(work)[0], initial=0))


def _changes(work: Callable[[], object]) -> tuple[list[int], object]:
    """The allocations (positive) and frees (negative) of torch's CPU allocator in order; and the result."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without it
    ) as profile:
        result = work()
        gc.collect()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    cpu = torch.autograd.DeviceType.CPU
    return [event.nbytes() for event in events if event.device_type() == cpu], result
