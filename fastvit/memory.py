"""Measures the bytes that a function leaves allocated, and its peak, by the allocator.

Saved-tensor hooks would count wrongly: inner hooks hide outer ones, and a tensor that is saved twice is
counted twice. recompute_scope() works by hooks itself.
"""

import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._deprecation import renamed_arguments

__all__ = ["LiveBytes", "live_bytes", "peak_bytes"]

_SILENT = 99  # A log level of Kineto above that of all its messages.


class LiveBytes(NamedTuple):
    """The result of `live_bytes`."""

    nbytes: int  # Bytes that are still allocated.
    result: object  # The return value of the function.


@renamed_arguments(work="function")
def live_bytes(
    function: Callable[[], object], *devices: str | torch.device, device: str | torch.device | None = None
) -> LiveBytes:
    """Returns the bytes that `function()` has allocated and not freed, while its result is held.

    After a training forward these are the saved tensors, the result, and new state. Call `function` once
    before, so that one-time caches are not counted.

    Args:
        devices, device: where to count. On CUDA devices the number is the caching allocator's count of bytes
            in use. Without any it is the sum of the events that torch's allocator for the CPU reports to the
            profiler; frees of blocks that were allocated before `function()` do not count.

    Returns:
        `(nbytes, result)`, with what `function()` returned.

    Raises:
        RuntimeError: a profiler of torch is running; on the CPU this measurement would end it.
    """
    devices = devices if device is None else (*devices, device)
    gpus = [device for device in map(torch.device, devices) if device.type == "cuda"]

    def run_and_collect() -> object:
        result = function()
        gc.collect()
        return result

    gc.collect()
    if not gpus:
        changes, result = _record_allocation_events(run_and_collect)
        return LiveBytes(sum(changes), result)
    bytes_before = sum(map(torch.cuda.memory_allocated, gpus))
    result = run_and_collect()
    return LiveBytes(sum(map(torch.cuda.memory_allocated, gpus)) - bytes_before, result)


@renamed_arguments(work="function")
def peak_bytes(function: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Returns the largest number of bytes that `function()` has allocated at a time.

    Bytes that were allocated before do not count. Errors are as in `live_bytes`.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        bytes_before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - bytes_before
    return max(itertools.accumulate(_record_allocation_events(function)[0], initial=0))


def _record_allocation_events(function: Callable[[], object]) -> tuple[list[int], object]:
    """Returns the allocations (positive) and frees (negative) of torch's CPU allocator, and the result.

    Frees of blocks that were allocated before do not count. torch reports some of them with the size of
    another block, which an earlier profile has seen at the same address.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "fastvit.memory: a profiler of torch is running, and counting bytes on the CPU would end it; "
            "measure before or after the profile"
        )
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without this argument.
    )
    level = _log_level_of_kineto()
    usual, level.value = level.value, _SILENT
    try:
        profile.prepare_trace()
        results: Any = profile.profiler  # torch's types lack the attributes that are used here.
        if level.value != _SILENT:  # The first profile of a process sets the level.
            usual, level.value = level.value, _SILENT
        # Else torch makes an object of each event when the trace ends, half of a measurement's time.
        results.acc_events = False
        profile.start_trace()
        try:
            result = function()
        finally:
            profile.stop_trace()
    finally:
        level.value = usual
    events, parents = [], results.kineto_results.experimental_event_tree()
    while parents:
        events += parents
        parents = [child for event in parents for child in event.children]
    events.sort(key=lambda event: event.start_time_ns)
    blocks = [event.typed[1] for event in events if event.name == "[memory]"]
    changes: list[int] = []
    live_addresses: set[int] = set()  # Blocks that `function` has allocated and not freed.
    for block in blocks:
        if block.device.type != "cpu":
            continue
        if block.alloc_size > 0:
            live_addresses.add(block.ptr)
        elif block.ptr in live_addresses:
            live_addresses.remove(block.ptr)
        else:
            continue
        changes.append(block.alloc_size)
    return changes, result


def _log_level_of_kineto() -> ctypes.c_int:
    """Returns the variable in torch's library with the log level of Kineto, torch's profiler.

    Kineto writes a line to stderr when a profile starts, when it stops, and when a torch with CUDA finds no
    GPU. These lines read as errors of the program that calls fastvit. Kineto reads KINETO_LOG_LEVEL only once
    in a process, so that environment variable would hide messages of other profiles too. A number without
    effect is returned where the library has no such variable.
    """
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "_ZN9libkineto6Logger14severityLevel_E")
    except (OSError, ValueError):
        return ctypes.c_int()
