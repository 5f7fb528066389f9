"""Measures the bytes that a function leaves allocated, and its peak, by the allocator.

Saved-tensor hooks would count other numbers: hooks hide each other, a tensor that is saved twice or alive for
another reason is counted wrongly, and recompute_scope() works by hooks itself.
"""

import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["live_bytes", "peak_bytes"]

_SILENT = 99  # a log level of Kineto above all of its messages


def live_bytes(work: Callable[[], object], *devices: str | torch.device) -> tuple[int, object]:
    """Returns `(bytes, result)`: bytes allocated minus bytes freed by `work()`, while its result is held.

    For a training forward these are the saved tensors, the result, and new state. On the CUDA devices among
    `devices` the number is the caching allocator's count of bytes in use; without any it is the sum of the
    events that torch's allocator for the CPU reports to the profiler, where frees of what was allocated
    before `work()` do not count. Call `work` once before, so that one-time caches are not counted.
    """
    gpus = [device for device in map(torch.device, devices) if device.type == "cuda"]

    def collected() -> object:
        result = work()
        gc.collect()
        return result

    gc.collect()
    if not gpus:
        changes, result = _changes(collected)
        return sum(changes), result
    before = sum(map(torch.cuda.memory_allocated, gpus))
    result = collected()
    return sum(map(torch.cuda.memory_allocated, gpus)) - before, result


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
    """The allocations (positive) and frees (negative) of torch's CPU allocator in order; and the result.

    Frees of blocks that were allocated before do not count. Torch reports some of them with the size of
    another block, which an earlier profile has seen at the same address.

    Raises:
        RuntimeError: a profiler of torch is running; this one would end it.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "fastvit.memory: a running profiler of torch would end where bytes on the CPU are counted; "
            "measure before or after it"
        )
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without it
    )
    level = _log_level_of_kineto()
    usual, level.value = level.value, _SILENT
    try:
        profile.prepare_trace()
        if level.value != _SILENT:  # the first profile of a process sets the level
            usual, level.value = level.value, _SILENT
        profile.start_trace()
        try:
            result = work()
        finally:
            profile.stop_trace()
    finally:
        level.value = usual
    results: Any = profile.profiler  # which the types of torch do not know
    events, parents = [], results.kineto_results.experimental_event_tree()
    while parents:
        events += parents
        parents = [child for event in parents for child in event.children]
    events.sort(key=lambda event: event.start_time_ns)
    blocks = [event.typed[1] for event in events if event.name == "[memory]"]
    changes: list[int] = []
    held: set[int] = set()  # the addresses of blocks that `work` has allocated and not freed
    for block in blocks:
        if block.device.type != "cpu":
            continue
        if block.alloc_size > 0:
            held.add(block.ptr)
        elif block.ptr in held:
            held.remove(block.ptr)
        else:
            continue
        changes.append(block.alloc_size)
    return changes, result


def _log_level_of_kineto() -> ctypes.c_int:
    """The log level of Kineto, by which torch profiles, in torch's library; a number alone where it has none.

    Kineto writes a line to stderr when a profile starts and when it stops, and one where a torch with CUDA
    finds no GPU. These read as errors of the program that calls fastvit. Kineto reads KINETO_LOG_LEVEL only
    once in a process, so the variable would hide messages of other profiles too.
    """
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "_ZN9libkineto6Logger14severityLevel_E")
    except (OSError, ValueError):
        return ctypes.c_int()
