"""How many bytes a piece of work leaves alive, asked of the allocator.

Counting in saved-tensor hooks would measure something else: hooks hide each other, a tensor saved twice or
alive for another reason is counted wrongly, and what recompute_scope() does is itself done by hooks.
"""

import gc
from collections.abc import Callable

import torch


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
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without, although there is one cycle only
    ) as profile:
        result = work()
        gc.collect()
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()), result
