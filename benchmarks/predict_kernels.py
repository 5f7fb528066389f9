"""What predict.py computes with: a GPU's figures, the ops with their kernels and shapes, and the figures of a
kernel's machine code.
"""

import re
from dataclasses import dataclass

import planner
from shapes import MLP, NORMS, Case

THREADS, BATCH, ON_CHIP_BLOCKS = map(planner.constant, ("kThreads", "kBatch", "kOnChipBlocks"))
GROUP = 32  # values of a channel after which a thread of bn_stats merges: csrc/cuda/stats.cuh, kGroup


@dataclass(frozen=True)
class Gpu:
    name: str = "H200"
    multiprocessors: int = 132  # NVIDIA H200 (SXM), as the H100 SXM: H100 architecture white paper
    peak_GB_s: float = 4800.0  # NVIDIA H200 data sheet
    copy_GB_s: float = 4300.0  # about 0.9 of the peak, as copies reach on HBM3; column copy_GB_s measures it
    clock_GHz: float = 1.75  # sustained; at most 1.98 (nvidia-smi -q -d CLOCK)
    issue: int = 4  # instructions a cycle and multiprocessor: one for each of 4 schedulers, white paper
    shuffle_ns: float = 15.0  # of a step of a sum over lanes: some 25 cycles, assumed
    barrier_ns: float = 75.0  # of a block of 256 threads, assumed
    last_ns: float = 500.0  # of finding the last block: stores and an atomic operation reach the L2, assumed
    merge_ns: float = 65.0  # of a step of merging in a block, as csrc/cuda/plan.h has it
    table_ns: float = 800.0  # of a table of channels: a trip to memory, arithmetic, a barrier, assumed
    fill_ns: float = 300.0  # of weight and bias in shared memory, beside the loads of the first row, assumed
    early_us: float = 1.5  # that a launch before the previous kernel's end saves, assumed
    latency_ns: float = 800.0  # of memory under load; idle some 560 (arXiv:2402.13499, table 4), rest assumed
    l2_ns: float = 200.0  # of a load from the L2: near some 260 cycles (arXiv:2402.13499), far more, assumed
    registers: int = 65536  # of a multiprocessor, as the next two: CUDA programming guide, 9.0
    shared_bytes: int = 228 << 10
    threads: int = 2048
    ends_us: float = 3.0  # first loads and constants of a grid, last stores: assumed

    def resident(self, registers: int, shared: int) -> int:
        """Blocks of a kernel that a multiprocessor holds."""
        of_thread = -(-registers // 8) * 8
        by_shared = self.shared_bytes // (shared + 1024)  # 1 KiB of each block is the system's
        return min(self.threads // THREADS, self.registers // (of_thread * THREADS), by_shared)

    def issue_us(self, instructions: float) -> float:
        """Of so many instructions of warps, spread evenly."""
        return instructions / (self.multiprocessors * self.issue * self.clock_GHz) / 1e3

    @property
    def smem_cache_bytes(self) -> int:
        """The shared memory of a block for packets, as in csrc/cuda/launch.cuh."""
        return self.shared_bytes // ON_CHIP_BLOCKS - (32 << 10)


H200 = Gpu()


@dataclass(frozen=True)
class Op:
    kernel: str  # {T}, {G}, {set}, {rows}, {V}
    reads: int
    writes: int
    merges: bool = False
    local: bool = False  # on chip only
    cases: tuple[Case, ...] | None = None  # instead of those of convolutional nets and of ViTs' norms
    to: str | None = None  # the dtype of y and dy; None: x's

    @property
    def tabled(self) -> bool:
        """Whether blocks make a table of channels before their first loads, which are in the L2 by then."""
        return self.kernel.startswith(("forward", "reduce", "backward", "local_backward"))

    @property
    def operands(self) -> int:
        return self.reads + self.writes

    @property
    def batch(self) -> int:  # packets of an operand that a thread has in flight
        return BATCH if self.operands <= 3 else BATCH // 2


SET = "(Activations){set}, {rows}, {V}"
ROWS = "_kernel<{T}, {G}, {V}, {K}>"
OPS = {
    "bn_stats": Op("stats_kernel<{T}, false, {rows}, {V}>", 1, 0, merges=True),
    "bn_forward": Op(f"forward_kernel<{{T}}, {SET}, false>", 1, 1),
    "abn_forward_": Op(f"forward_kernel<{{T}}, {SET}, false>", 1, 1),
    "bn_reduce": Op(f"reduce_kernel<{{T}}, false, {SET}, (Source)0>", 2, 0, merges=True),
    "abn_reduce": Op(f"reduce_kernel<{{T}}, false, {SET}, (Source)2>", 2, 0, merges=True),
    "bn_backward": Op(f"backward_kernel<{{T}}, {SET}, (Source)0>", 2, 1),
    "abn_backward": Op(f"backward_kernel<{{T}}, {SET}, (Source)2>", 2, 1),
    "bn_forward without moments": Op(f"local_forward_kernel<{{T}}, {SET}, false>", 1, 1, True, True),
    "abn_forward_ without moments": Op(f"local_forward_kernel<{{T}}, {SET}, false>", 1, 1, True, True),
    "bn_backward without sums": Op(f"local_backward_kernel<{{T}}, {SET}, (Source)0>", 2, 1, True, True),
    "abn_backward without sums": Op(f"local_backward_kernel<{{T}}, {SET}, (Source)2>", 2, 1, True, True),
    "act_forward": Op(f"act_kernel<{{T}}, {SET}, false, false>", 1, 1, cases=MLP),
    "act_backward": Op(f"act_kernel<{{T}}, {SET}, true, false>", 2, 1, cases=MLP),
    "glu_forward": Op(f"act_kernel<{{T}}, {SET}, false, true>", 2, 1, cases=MLP),
    "glu_backward": Op(f"act_kernel<{{T}}, {SET}, true, true>", 3, 2, cases=MLP),
    "layer_norm_forward": Op(f"layer_norm_forward{ROWS}", 1, 1, cases=NORMS),
    "layer_norm_forward to bf16": Op(f"layer_norm_forward{ROWS}", 1, 1, cases=NORMS, to="bf16"),
    "layer_norm_backward": Op(f"layer_norm_backward{ROWS}", 2, 1, cases=NORMS),
    "layer_norm_backward from bf16": Op(f"layer_norm_backward{ROWS}", 2, 1, cases=NORMS, to="bf16"),
}
ALL, CHEAP, TRANSCENDENTAL = range(3)  # csrc/cuda/activations.cuh: Activations
TYPES = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half"}


@dataclass(frozen=True)
class Kernel:
    """Figures of one kernel's machine code. Issue slots are of a warp and per batch of its loop."""

    registers: int
    shared: int
    accesses: int = 0  # of 16 bytes, in a batch
    inner: tuple[float, float] = (0, 0)  # least and most
    outer: tuple[float, float] = (0, 0)  # with what is done once per plane around it
    again: tuple[float, float] = (0, 0)  # of the second walk of a local op

    @classmethod
    def of(cls, row: dict) -> "Kernel":
        if row["loops"] is None or row["least"] == "":
            return cls(row["registers"], row["shared"])
        inner, outer = row["loops"]
        accesses, least, most = inner.most.accesses, inner.least.slots, inner.most.slots
        around = outer.most.slots - most
        if row["kernel"].startswith(("stats_kernel", "local_forward_kernel")):
            # The shortest way never ends a group of values, the longest does so in every batch. Over planes a
            # local op's shortest way puts packets into shared memory only: there the longest counts.
            rows, width = re.findall(r"(true|false), (\d+)", row["kernel"])[0]
            values = accesses * (1 if rows == "true" else int(width))
            every = 1 if rows == "false" and "local" in row["kernel"] else max(1, GROUP // values)
            least = most = least + (most - least) / every
        second = row["second"]
        again = (second.least.slots, second.most.slots) if second else (0, 0)
        inside, outside = (least, most), (least + around, most + around)
        return cls(row["registers"], row["shared"], accesses, inside, outside, again)
