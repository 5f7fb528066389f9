"""Measures the bytes that a function leaves allocated, and its peak, by the allocator.

Saved-tensor hooks would count other numbers: hooks hide each other, a tensor that is saved twice or alive for
another reason is counted wrongly, and recompute_scope() works by hooks itself.
"""

import gc
import itertools
from collections.abc import Callable

import torch

__all__ = ["live_bytes", "peak_bytes"]


def live_bytes(work: Callable[[], object], *devices: str | torch.device) -> tuple[int, object]:
    """Returns `(bytes, result)`: bytes allocated minus bytes freed by `work()`, while its result is held.

    For a training forward these are the saved tensors, the result, and new state. On the CUDA devices among
    `devices` the number is the caching allocator's count of bytes in use; without any it is the sum of the
    events that torch's allocator for the CPU reports to the profiler. Call `work` once before, so that
    one-time caches are not counted.
    """
    gpus = [device for device in map(torch.device, devices) if device.type == "cuda"]
    gc.collect()
    if not gpus:
        changes, result = _changes(work)
        return sum(changes), result
    before = sum(map(torch.cuda.memory_allocated, gpus))
    result = work()
    gc.collect()
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

    Raises:
        RuntimeError: a profiler of torch is running; this one would end it.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "fastvit.memory: a running profiler of torch would end where bytes on the CPU are counted; "
            "measure before or after it"
        )
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
