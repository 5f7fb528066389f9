"""Predicts the time of each op on a GPU from the plan and the machine code of its kernel.

    python benchmarks/predict.py [--out benchmarks/results]

The plan is that of csrc/cuda/plan.h (planner.py), instructions are counted in what nvcc makes of csrc/cuda
(tools/sass.py, which needs nvcc and cuobjdump). For every op, shape and dtype:

    bytes      that the op must read and write
    waves      blocks over those that run at once, by the kernel's registers and shared memory
    stream     the longest of: bytes over what a copy reaches, latencies of batches that follow each other;
               of ops on chip, first that of their reads, then that of their writes
    issue      issue slots over what the multiprocessors have
    prologue   the table of channels, or of columns, before a block's first values
    tail       merging in a block, finding the last block, merging of slices; nothing overlaps with it
    us         stream and issue, which overlap (see OVERLAP), prologue and tail, and the grid's start and end,
               alone: one that begins while another ends (csrc/cuda/launch.cuh) has a shorter start
    share      bytes / us over what a large copy reaches
    costliest  us with the costliest activation, or the longest way through the loop

Ops without moments or sums have rows where the tensor fits on chip; elsewhere they are two of the others.
Activations and gates are predicted for the MLP of bench_vit_ops.py, LayerNorm for tokens of ViTs, and what
an exchange adds for packets that have arrived: up to 8 blocks merge a part of the channels each, and the last
of them ends the exchange (csrc/sync/cuda_peer.cuh). The L2 answers a thread's 8 packets and headers at once.

compare.py sets a GPU's tables beside all this: where they differ by more than 15 % the model needs a
correction. Writes predicted_h200.csv, predicted_exchange_h200.csv and predicted_h200.md.
"""

import sys
from collections import namedtuple
from pathlib import Path

import planner
from gpu_kernels import FIT_ON_CHIP, FOUR_OPS
from gpu_waits import CHANNELS, WORLDS
from harness import command_line, commit, markdown, write_csv
from predict_kernels import ALL, CHEAP, H200, OPS, THREADS, TRANSCENDENTAL, TYPES, Kernel
from shapes import DTYPES, MLP, NORMS, Case, cases

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import sass  # noqa: E402

OVERLAP = 4  # (stream^4 + issue^4)^(1/4): the longer, and 19 % more where both take the same; assumed
IN_FLIGHT = 8  # packets of a thread in an exchange: csrc/sync/cuda_peer.cuh, kInFlight of float
EXCHANGES = {
    "moments": "stats_kernel<float, true, true, 4>",
    "sums": "reduce_kernel<float, true, (Activations)1, true, 4, (Source)0>",
}
TRIPS = 2  # of an exchange to the L2, beside the packets': the rank's epoch, the stores of the result
HEADER_NS = 800.0  # of a barrier each before and behind the headers, and double divisions of counts; assumed
MOST_PARTS, MULTIPROCESSORS_OF_PART = 8, 16  # csrc/sync/cuda_peer.cuh: the blocks that wait
# Per instruction: 2 for arithmetic of doubles, 8 for conversions to them, else 1 (programming guide)
CYCLES = 2.0


Prediction = namedtuple(  # of an op on a tensor; MB is of the activation
    "Prediction",
    "op shape layout dtype MB bytes_MB blocks resident waves stream_us issue_us prologue_us tail_us us share "
    "us_costliest",
)


def predict(op: str, case: Case, kernels: dict[str, Kernel]) -> Prediction | None:
    """`kernels` by the names that OPS gives them. None for an op on chip whose tensor does not fit, and for
    an op that takes another dtype.
    """
    what = OPS[op]
    if what.cases is NORMS:
        return _of_rows(op, case, kernels) if case.dtype == "fp32" or not what.to else None
    # Sets of activations differ in registers, and so in their plans.
    cheap, costly = (_of_set(op, case, kernels, which) for which in (CHEAP, TRANSCENDENTAL))
    return cheap and cheap._replace(us_costliest=costly.us_costliest)


def _prediction(
    op: str, case: Case, total: int, blocks: int, resident: int, stream: float,
    issue: tuple[float, float], prologue: float, tail: float,
) -> Prediction:  # fmt: skip
    """`total` bytes; `issue` of the cheapest and of the costliest activation."""
    us, costliest = (
        (stream**OVERLAP + slots**OVERLAP) ** (1 / OVERLAP) + (prologue + tail) + H200.ends_us
        for slots in issue
    )
    return Prediction(
        op, case.size, case.layout, case.dtype, case.nbytes / 1e6, total / 1e6, blocks, resident,
        blocks / (H200.multiprocessors * resident), stream, issue[0], prologue, tail,
        us, total / H200.copy_GB_s / 1e3 / us, costliest,
    )  # fmt: skip


def _of_set(op: str, case: Case, kernels: dict[str, Kernel], activations: int) -> Prediction | None:
    what, wide = OPS[op], 16 // DTYPES[case.dtype].itemsize

    def kernel(rows: bool, packets: bool) -> Kernel:
        packets = packets or what.local
        words = {"T": TYPES[case.dtype], "rows": str(rows).lower(), "V": wide if packets else 1}
        return kernels[what.kernel.format(**words, set=activations if packets else ALL)]

    found = {(rows, packets): kernel(rows, packets) for rows in (False, True) for packets in (False, True)}
    plan = planner.plan(
        case, what.operands, what.reads if what.merges else 0,
        {choice: H200.resident(k.registers, k.shared) for choice, k in found.items()},
        H200.multiprocessors, H200.smem_cache_bytes,
    )  # fmt: skip
    if what.local and not plan.slots:
        return None
    code = found[bool(plan.rows), bool(plan.vector)]

    # Batches of a thread, one after the other; `deep` of them in a plane.
    teams = plan.slices * plan.teams
    if plan.rows:
        deep, batches = 1, -(-plan.units // (teams * what.batch))
    else:
        packets = -(-plan.segment // (wide if plan.vector else 1))
        deep = -(-packets // (plan.lanes * what.batch))
        batches = deep * -(-plan.units // teams)
    at_once = H200.multiprocessors * plan.resident
    total = what.operands * case.nbytes
    full, rest = divmod(plan.blocks, at_once)
    bound = batches * H200.latency_ns / 1e3  # microseconds of a wave, however few its blocks

    def wave(blocks: int) -> float:
        return max(bound, total * blocks / plan.blocks / H200.copy_GB_s / 1e3) if blocks else 0.0

    stream, tail = full * wave(at_once) + wave(rest), plan.tail_nanoseconds / 1e3
    if what.local:  # one wave, which reads everything before it writes anything
        stream = max(bound, what.reads * case.nbytes / H200.copy_GB_s / 1e3)
        stream += what.writes * case.nbytes / H200.copy_GB_s / 1e3
        tail += 2 * H200.latency_ns / 1e3 * (plan.slices > 1)  # publishing totals and reading them: assumed
    if what.merges:
        merging = plan.teams * (plan.fold if plan.rows else plan.lanes)
        tail += (H200.merge_ns * (merging - 1).bit_length() + H200.last_ns * plan.levels) / 1e3
    prologue = (H200.table_ns + H200.l2_ns - H200.latency_ns) / 1e3 if what.tabled else 0.0
    warps = plan.blocks * THREADS / 32

    def issue(inner: float, outer: float, again: float) -> float:
        of_batch = inner + (outer - inner) / deep * (not plan.rows)
        return H200.issue_us(warps * batches * (of_batch + again))

    issues = tuple(map(issue, code.inner, code.outer, code.again))
    return _prediction(op, case, total, plan.blocks, plan.resident, stream, issues, prologue, tail)


def _of_rows(op: str, case: Case, kernels: dict[str, Kernel]) -> Prediction:
    """Of a LayerNorm: blocks stay, and take the rows in turns, each a batch of loads and the sums over it.

    The longest way through the loop is that of rows in parts, which read weight and bias for every row.
    """
    what, to = OPS[op], OPS[op].to or case.dtype
    wide, narrow = DTYPES[case.dtype].itemsize, DTYPES[to].itemsize
    width, backward = 16 // wide, what.reads > 1
    columns, rows = case.shape[-1], case.nbytes // wide // case.shape[-1]
    lanes, parts, held = planner.row_plan(rows, columns, width, backward, case.dtype == "fp16")
    code = kernels[what.kernel.format(T=TYPES[case.dtype], G=TYPES[to], V=width, K=held)]
    teams, resident = THREADS // lanes, H200.resident(code.registers, code.shared)
    blocks = min(-(-rows // teams), resident * H200.multiprocessors)
    turns = -(-rows // (blocks * teams)) * parts
    total = rows * columns * (wide * what.reads + narrow)
    sums = 2 * columns * blocks * 4 if backward else 0  # two numbers a column and block
    over_lanes = H200.shuffle_ns * (min(lanes, 32) - 1).bit_length() + 2 * H200.barrier_ns * (lanes > 32)
    turn = (H200.latency_ns + (1 if backward else 2) * over_lanes) / 1e3
    stream = max(turns * turn, (total + sums) / H200.copy_GB_s / 1e3)
    # A second grid adds the sums of the blocks: 32 rows at a time, and 16 times as many in flight.
    tail = H200.ends_us - H200.early_us + -(-blocks // 512) * H200.latency_ns / 1e3 if backward else 0.0
    accesses = blocks * THREADS / 32 * turns * held * what.operands
    issue = tuple(H200.issue_us(accesses * count / (code.accesses or 1)) for count in code.inner)
    return _prediction(op, case, total, blocks, resident, stream, issue, H200.fill_ns / 1e3, tail)


def exchange(what: str, world: int, channels: int, loops: list) -> dict:
    """What an exchange adds. `loops` of the kernel's exchange, from 8 ranks in flight down to 2."""
    together = next(ranks for ranks in (2, 4, 8) if world <= ranks)
    instructions = loops[(8, 4, 2).index(together)].most.instructions  # of a warp per batch
    at_once = THREADS * IN_FLIGHT // together  # channels of a block
    parts = min(-(-channels // at_once), MOST_PARTS, H200.multiprocessors // MULTIPROCESSORS_OF_PART)
    warps = min(THREADS, -(-channels // parts)) / 32 / H200.issue
    batch = H200.l2_ns + max(1.0, warps) * instructions * CYCLES / H200.clock_GHz
    last = H200.last_ns * (1 + (parts > 1))  # of the tiles, and of the parts
    once = last + HEADER_NS + TRIPS * H200.l2_ns
    return {
        "what": what, "world": world, "channels": channels, "parts": parts,
        "instructions": instructions, "us": (once + batch) / 1e3,
    }  # fmt: skip


def exchanges(compiled: list[dict]) -> list[dict]:
    """`compiled` are rows of tools/sass.py."""
    loops = {row["kernel"]: row["exchange"] for row in compiled}
    for kernel in EXCHANGES.values():
        if len(loops[kernel]) != 3:
            raise SystemExit(f"predict: {kernel}: {len(loops[kernel])} loops over packets; 3 expected")
    return [
        exchange(what, world, channels, loops[kernel])
        for what, kernel in EXCHANGES.items() for world in WORLDS for channels in CHANNELS
    ]  # fmt: skip


def exchange_table(found: list[dict]) -> str:
    """Markdown: us by ranks and channels."""
    lines: dict[tuple[str, int], list[object]] = {}
    for one in found:
        lines.setdefault((one["what"], one["world"]), [one["what"], one["world"]]).append(f"{one['us']:.1f}")
    header = ["exchange", "ranks", *(f"C = {c}" for c in sorted({one["channels"] for one in found}))]
    return "\n".join(["us that an exchange adds:", "", *markdown(header, lines.values()), ""])


def table(rows: list[Prediction]) -> str:
    """Markdown: us and share of all cases, in a table for each kind of ops."""
    tables: dict[tuple[str, ...], dict[tuple, dict[str, str]]] = {}
    for row in rows:
        kind = OPS[row.op].local, OPS[row.op].cases
        ops = tuple(op for op, what in OPS.items() if (what.local, what.cases) == kind)
        found = tables.setdefault(ops, {}).setdefault((row.shape, row.layout, row.dtype), {})
        found[row.op] = f"{row.us:.1f} ({row.share:.2f})"
    gpu, said = H200, "Nothing here was measured: these are predictions of a model that no GPU has confirmed."
    text = [
        f"Predicted for an {gpu.name} at commit {commit()} by benchmarks/predict.py. {said}",
        "",
        f"{gpu.multiprocessors} multiprocessors, a copy at {gpu.copy_GB_s:.0f} of {gpu.peak_GB_s:.0f} GB/s,",
        f"{gpu.issue} instructions a cycle at {gpu.clock_GHz} GHz, {gpu.latency_ns:.0f} ns of latency under",
        f"load, {gpu.ends_us:.0f} us for a grid's start and end; the program says where these are from.",
        f"Behind another kernel of its stream an op takes {gpu.early_us} us less, assumed from sm_90 on.",
        "What each figure is made of is in predicted_h200.csv.",
        "",
        "us (share of the copy), cheapest activation:",
        "",
    ]
    for ops, by_case in tables.items():
        shares = [[*key, *(found.get(op, "") for op in ops)] for key, found in by_case.items()]
        text += [*markdown(["shape", "layout", "dtype", *ops], shares), ""]
    return "\n".join(text)


def main() -> None:
    out = command_line(__doc__, device=None).parse_args().out
    compiled = sass.measured("90")
    kernels = {row["kernel"]: Kernel.of(row) for row in compiled}
    every = tuple(dict.fromkeys([*FOUR_OPS, *cases(), *FIT_ON_CHIP]))
    found = [
        predict(op, case, kernels)
        for case in dict.fromkeys((*every, *MLP, *NORMS))
        for op, what in OPS.items() if case in (what.cases or every)
    ]  # fmt: skip
    rows, added = [row for row in found if row], exchanges(compiled)
    write_csv("predicted_h200", [row._asdict() for row in rows], out)
    write_csv("predicted_exchange_h200", added, out)
    text = f"{table(rows)}\n{exchange_table(added)}"
    (out / "predicted_h200.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
