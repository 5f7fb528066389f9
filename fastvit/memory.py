"""How many bytes a piece of work leaves alive, and takes at most, asked of the allocator.

Counting in saved-tensor hooks would measure something else: hooks hide each other, a tensor saved twice or
alive for another reason is counted wrongly, and what recompute_scope() does is itself done by hooks.
"""

import gc
import itertools
from collections.abc import Callable

import torch

__all__ = ["live_bytes", "peak_bytes"]


def live_bytes(work: Callable[[], object], device: str | torch.device = "cpu") -> tuple[int, object]:
    """`(bytes, result)`: bytes allocated less bytes freed while `work()` runs, with its result held.

    For a training forward that is the graph, what it saved, the result, and state made on the way. On CUDA
    the caching allocator's count of what is in use; on the CPU the sum of what torch's allocator reports to
    the profiler, frees outside of any op included. A first call of `work` outside keeps one-time caches out.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = work()
        gc.collect()
        return torch.cuda.memory_allocated(device) - before, result
    changes, result = _changes(work)
    return sum(changes), result


def peak_bytes(work: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Bytes that `work()` has allocated at most at a time, over those allocated before it."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    return max(itertools.accumulate(_changes(work)[0], initial=0))


def _changes(work: Callable[[], object]) -> tuple[list[int], object]:
    """Bytes that torch's allocator on the CPU hands out (takes back: negative) in order; and the result."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without, although there is one cycle only
    ) as profile:
        result = work()
        gc.collect()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    cpu = torch.autograd.DeviceType.CPU
    return [event.nbytes() for event in events if event.device_type() == cpu], result
