"""Predicts what an exchange adds to a kernel whose peers' packets have arrived; predict.py prints it.

One block waits and merges (csrc/sync/cuda_peer.cuh). The L2 answers its loads, 8 packets at a time: of 8
ranks, of 4 for two channels, or of 2 for four. Those of a thread's next batch depend on the one before.

    batches       of the slowest thread
    instructions  of a warp per batch
    us            finding the last block, the headers, trips to the L2 before and behind; per batch one
                  trip, and the instructions of all warps of a scheduler
"""

from dataclasses import dataclass

from gpu_waits import CHANNELS, WORLDS
from predict_kernels import H200, THREADS, Gpu

IN_FLIGHT = 8  # packets of a thread: csrc/sync/cuda_peer.cuh, kInFlight of float
KERNELS = {
    "moments": "stats_kernel<float, true, true, 4>",
    "sums": "reduce_kernel<float, true, (Activations)1, true, 4, (Source)0>",
}
TRIPS = 4  # the own header to the L2 and back, the first packets, the stores of the result
HEADER_NS = 800.0  # of a barrier each before and behind the headers, and double divisions of counts; assumed
SCHEDULERS = 4  # of a multiprocessor
CYCLES = (
    2.0  # per instruction: 2 for arithmetic of doubles, 8 for conversions to them, else 1 (programming guide)
)


@dataclass(frozen=True)
class Exchange:
    what: str
    world: int
    channels: int
    batches: int
    instructions: float
    us: float


def predict(what: str, world: int, channels: int, loops: list, gpu: Gpu = H200) -> Exchange:
    """`loops` of the kernel's exchange, from 8 ranks in flight down to 2."""
    together = next(ranks for ranks in (2, 4, 8) if world <= ranks)
    instructions = loops[(8, 4, 2).index(together)].most.instructions
    batches = -(-channels // (THREADS * IN_FLIGHT // together))
    warps = min(THREADS, channels) / 32 / SCHEDULERS
    batch = gpu.l2_ns + max(1.0, warps) * instructions * CYCLES / gpu.clock_GHz
    once = gpu.last_ns + HEADER_NS + TRIPS * gpu.l2_ns
    return Exchange(what, world, channels, batches, instructions, (once + batches * batch) / 1e3)


def predict_all(rows: list[dict]) -> list[Exchange]:
    """`rows` are of tools/sass.py."""
    loops = {row["kernel"]: row["exchange"] for row in rows}
    for kernel in KERNELS.values():
        if len(loops[kernel]) != 3:
            raise SystemExit(f"predict: {kernel}: {len(loops[kernel])} loops over packets; 3 expected")
    return [
        predict(what, world, channels, loops[kernel])
        for what, kernel in KERNELS.items()
        for world in WORLDS
        for channels in CHANNELS
    ]
