"""Predicts the time of each op on a GPU from the plan and the machine code of its kernel.

    python benchmarks/predict.py [--out benchmarks/results]

The plan is that of csrc/cuda/plan.h (planner.py), instructions are counted in what nvcc makes of csrc/cuda
(tools/sass.py, which needs nvcc and cuobjdump). For every op, shape and dtype:

    bytes      that the op must read and write
    waves      blocks over those that run at once, by the kernel's registers and shared memory
    packet     issue slots of a warp per 16-byte access: of the cheapest activation, and of the costliest
    in flight  KB of loads that a multiprocessor has under way; memory's latency times its bandwidth is 26
    stream     the longest of: bytes over what a copy reaches, latencies of batches that follow each other;
               of local ops, first that of their reads, then that of their writes
    issue      issue slots over what the multiprocessors have
    prologue   the table of channels, or of columns, before a block's first values
    tail       merging in a block, finding the last block, merging of slices; nothing overlaps with it
    us         stream and issue, which overlap (see OVERLAP), prologue and tail, and the grid's start and end

    share      bytes / us over what a large copy reaches; in brackets with the costliest activation, or the
               longest way through the loop
    equal      likewise, over a copy of as many bytes, which has a start and an end too

Local ops have rows where the tensor fits on chip. Elsewhere they are two of the other ops. Activations and
gates are predicted for the MLP of bench_vit_ops.py, LayerNorm for tokens of ViTs.

predict_exchange.py predicts what an exchange adds. compare.py sets a GPU's tables beside all this: where they
differ by more than 15 % the model needs a correction.

Writes predicted_h200.csv, predicted_exchange_h200.csv and predicted_h200.md.
"""

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import planner
import predict_exchange
from gpu_kernels import FIT_ON_CHIP, FOUR_OPS
from harness import RESULTS, commit, write_csv
from predict_kernels import (
    ALL,
    CHEAP,
    H200,
    OPS,
    SOURCES,
    THREADS,
    TRANSCENDENTAL,
    TYPES,
    Gpu,
    Kernel,
)
from shapes import DTYPES, MLP, NORMS, Case, cases

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
import sass  # noqa: E402

OVERLAP = 4  # (stream^4 + issue^4)^(1/4): the longer, and 19 % more where both take the same; assumed


@dataclass(frozen=True)
class Prediction:
    op: str
    shape: str
    layout: str
    dtype: str
    MB: float  # of the activation
    bytes_MB: float
    blocks: int
    resident: int
    waves: float
    packet: float
    packet_costliest: float
    in_flight_KB: float
    stream_us: float
    issue_us: float
    loads_in_a_row: int
    merges_in_a_row: int
    prologue_us: float
    tail_us: float
    us: float
    share: float
    equal: float
    us_costliest: float
    share_costliest: float


def predict(op: str, case: Case, kernels: dict[str, Kernel], gpu: Gpu = H200) -> Prediction | None:
    """`kernels` by the names that OPS gives them. None for a local op whose tensor does not fit on chip, and
    for an op that takes another dtype.
    """
    if OPS[op].by_row:
        return _of_rows(op, case, kernels, gpu)
    cheapest = _of_set(op, case, kernels, gpu, CHEAP)
    costliest = _of_set(op, case, kernels, gpu, TRANSCENDENTAL)
    return cheapest and replace(
        cheapest, packet_costliest=costliest.packet_costliest, us_costliest=costliest.us_costliest,
        share_costliest=costliest.share_costliest,
    )  # fmt: skip


def _taken(stream: float, issue: float, rest: float, total: float, gpu: Gpu) -> tuple[float, float, float]:
    """us, and the share of a large and of an equal copy of `total` bytes; `rest` overlaps with nothing."""
    us = (stream**OVERLAP + issue**OVERLAP) ** (1 / OVERLAP) + rest + gpu.ends_us
    copy = total / gpu.copy_GB_s / 1e3
    return us, copy / us, (copy + gpu.ends_us) / us


def _of_set(op: str, case: Case, kernels: dict[str, Kernel], gpu: Gpu, activations: int) -> Prediction | None:
    """For the kernels of one set of activations; sets differ in registers, and so in their plans."""
    what, wide = OPS[op], 16 // DTYPES[case.dtype].itemsize

    def kernel(rows: bool, packets: bool) -> Kernel:
        packets = packets or what.local
        words = {"T": TYPES[case.dtype], "rows": str(rows).lower(), "V": wide if packets else 1}
        words["set"] = activations if packets else ALL
        return kernels[what.kernel.format(**words)]

    choices = [(rows, packets) for rows in (False, True) for packets in (False, True)]
    found = {choice: kernel(*choice) for choice in choices}
    resident = {choice: gpu.resident(k.registers, k.shared) for choice, k in found.items()}
    plan = planner.plan(
        case, what.operands, what.reads if what.merges else 0, resident, gpu.multiprocessors,
        gpu.smem_cache_bytes,
    )  # fmt: skip
    if what.local and not plan.slots:
        return None
    code = found[bool(plan.rows), bool(plan.vector)]

    # Batches of a thread, one after the other, and the share of their packets that exist.
    teams = plan.slices * plan.teams
    if plan.rows:
        deep, batches = 1, -(-plan.units // (teams * what.batch))
        exist = plan.lanes * plan.teams / THREADS
    else:
        packets = -(-plan.segment // (wide if plan.vector else 1))
        deep = -(-packets // (plan.lanes * what.batch))
        batches = deep * -(-plan.units // teams)
        exist = packets * plan.teams / (deep * what.batch * THREADS)
    at_once = gpu.multiprocessors * plan.resident
    loads = what.batch * (16 if plan.vector else DTYPES[case.dtype].itemsize) * what.reads
    in_flight = min(plan.resident, plan.blocks / gpu.multiprocessors) * THREADS * exist * loads

    total = what.operands * case.nbytes
    full, rest = divmod(plan.blocks, at_once)
    bound = batches * gpu.latency_ns / 1e3  # microseconds of a wave, however few its blocks

    def wave(blocks: int) -> float:
        return max(bound, total * blocks / plan.blocks / gpu.copy_GB_s / 1e3) if blocks else 0.0

    stream, tail = full * wave(at_once) + wave(rest), plan.tail_nanoseconds / 1e3
    if what.local:  # one wave, which reads everything before it writes anything
        stream = max(bound, what.reads * case.nbytes / gpu.copy_GB_s / 1e3)
        stream += what.writes * case.nbytes / gpu.copy_GB_s / 1e3
        tail += 2 * gpu.latency_ns / 1e3 * (plan.slices > 1)  # publishing totals and reading them: assumed
    if what.merges:
        merging = plan.teams * (1 if plan.rows else plan.lanes)
        tail += (gpu.merge_ns * (merging - 1).bit_length() + gpu.last_ns * plan.levels) / 1e3
    prologue = (gpu.table_ns + gpu.l2_ns - gpu.latency_ns) / 1e3 if what.tabled else 0.0
    warps = plan.blocks * THREADS / 32

    def issue(which: int) -> float:
        of_batch = code.inner[which] + (code.outer[which] - code.inner[which]) / deep * (not plan.rows)
        of_batch += code.again[which]
        return gpu.issue_us(warps * batches * of_batch)

    us_costliest, share_costliest, _ = _taken(stream, issue(1), prologue + tail, total, gpu)
    each = code.accesses or 1
    return Prediction(
        op, case.size, case.layout, case.dtype, case.nbytes / 1e6, total / 1e6, plan.blocks, plan.resident,
        plan.blocks / at_once, code.inner[0] / each, code.inner[1] / each, in_flight / 1e3, stream, issue(0),
        plan.dependent_loads, plan.dependent_merges, prologue, tail,
        *_taken(stream, issue(0), prologue + tail, total, gpu), us_costliest, share_costliest,
    )  # fmt: skip


def _of_rows(op: str, case: Case, kernels: dict[str, Kernel], gpu: Gpu) -> Prediction | None:
    """Of a LayerNorm: blocks stay, and take the rows in turns, each a batch of loads and the sums over it.

    The longest way through the loop is that of rows in parts, which read weight and bias for every row.
    """
    what, to = OPS[op], OPS[op].to or case.dtype
    wide, narrow = DTYPES[case.dtype].itemsize, DTYPES[to].itemsize
    if what.to and case.dtype != "fp32":
        return None
    width, backward = 16 // wide, what.reads > 1
    columns, rows = case.shape[-1], case.nbytes // wide // case.shape[-1]
    lanes, parts, held = planner.row_plan(rows, columns, width, backward)
    words = {"T": TYPES[case.dtype], "G": TYPES[to], "V": width, "K": held}
    code = kernels[what.kernel.format(**words)]
    teams, resident = THREADS // lanes, gpu.resident(code.registers, code.shared)
    at_once = resident * gpu.multiprocessors
    blocks = min(-(-rows // teams), at_once)
    turns = -(-rows // (blocks * teams)) * parts
    exist = columns / width / (lanes * parts * held)
    each = held * width * (wide + narrow * (what.reads - 1))
    total = rows * columns * (wide * what.reads + narrow)
    sums = 2 * columns * blocks * 4 if backward else 0  # two numbers a column and block
    over_lanes = gpu.shuffle_ns * (min(lanes, 32) - 1).bit_length() + 2 * gpu.barrier_ns * (lanes > 32)
    turn = (gpu.latency_ns + (1 if backward else 2) * over_lanes) / 1e3
    stream = max(turns * turn, (total + sums) / gpu.copy_GB_s / 1e3)
    # A second grid adds the sums of the blocks: 32 rows at a time, and 8 times as many in flight.
    tail = gpu.ends_us - gpu.early_us + -(-blocks // 256) * gpu.latency_ns / 1e3 if backward else 0.0
    prologue = gpu.fill_ns / 1e3
    warps = blocks * THREADS / 32
    in_flight = min(resident, blocks / gpu.multiprocessors) * THREADS * exist * each

    packet, packet_costliest = (count / (code.accesses or 1) for count in code.inner)
    accesses = warps * turns * held * what.operands
    least, most = (gpu.issue_us(accesses * count) for count in (packet, packet_costliest))
    us_costliest, share_costliest, _ = _taken(stream, most, prologue + tail, total, gpu)
    return Prediction(
        op, case.size, case.layout, case.dtype, case.nbytes / 1e6, total / 1e6, blocks, resident,
        blocks / at_once, packet, packet_costliest, in_flight / 1e3, stream, least, 0, 0, prologue, tail,
        *_taken(stream, least, prologue + tail, total, gpu), us_costliest, share_costliest,
    )  # fmt: skip


def _lines(header: list[str], rows: list[list[object]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, row)) + " |" for row in cells]


def exchange_table(found: list[predict_exchange.Exchange]) -> str:
    """Markdown: us by ranks and channels."""
    channels = sorted({one.channels for one in found})
    lines: dict[tuple[str, int], list[object]] = {}
    for one in found:
        lines.setdefault((one.what, one.world), [one.what, one.world]).append(f"{one.us:.1f}")
    header = ["exchange", "ranks", *(f"C = {c}" for c in channels)]
    return "\n".join(["us that an exchange adds:", "", *_lines(header, list(lines.values())), ""])


def table(rows: list[Prediction], gpu: Gpu = H200) -> str:
    """Markdown: what each figure is made of for the first cases, then shares of all."""
    shown = {
        (op, case.size, case.layout, case.dtype)
        for op, what in OPS.items()
        for case in what.cases or (FIT_ON_CHIP if what.local else FOUR_OPS)
    }
    header = "op|shape|layout|dtype|waves|packet|in flight KB|stream us|issue us|prologue us|tail us|us|share"
    header += "|equal"
    lines = []
    for row in rows:
        if (row.op, row.shape, row.layout, row.dtype) not in shown:
            continue
        costly = f" ({row.share_costliest:.2f})" if row.us_costliest > row.us else ""
        line: list[object] = [row.op, row.shape, row.layout, row.dtype, f"{row.waves:.2f}"]
        line += [f"{row.packet:.0f} ({row.packet_costliest:.0f})", f"{row.in_flight_KB:.0f}"]
        times = row.stream_us, row.issue_us, row.prologue_us, row.tail_us
        line += [f"{one:.1f}" for one in times]
        line += [f"{row.us:.1f}", f"{row.share:.2f}{costly}", f"{row.equal:.2f}"]
        lines.append(line)
    tables: dict[tuple[str, ...], dict[tuple, dict[str, str]]] = {}
    for row in rows:
        kind = OPS[row.op].local, OPS[row.op].cases
        ops = tuple(op for op, what in OPS.items() if (what.local, what.cases) == kind)
        by_case = tables.setdefault(ops, {}).setdefault((row.shape, row.layout, row.dtype), {})
        by_case[row.op] = f"{row.us:.1f} ({row.share:.2f})"
    said = "Nothing here was measured: these are predictions of a model that no GPU has confirmed."
    text = [
        f"Predicted for an {gpu.name} at commit {commit()} by benchmarks/predict.py. {said}",
        "",
        f"{gpu.multiprocessors} multiprocessors, a copy at {gpu.copy_GB_s:.0f} of {gpu.peak_GB_s:.0f} GB/s,",
        f"{gpu.issue} instructions a cycle at {gpu.clock_GHz} GHz, {gpu.latency_ns:.0f} ns of latency under",
        f"load, {gpu.ends_us:.0f} us for a grid's start and end; the program says where these are from.",
        "packet: issue slots of a warp per 16-byte access with the cheapest activation (the costliest);",
        "share: of what a large copy reaches, likewise; equal: of a copy of as many bytes.",
        "",
        *_lines(header.split("|"), lines),
        "",
        "us (share of the copy), cheapest activation:",
        "",
    ]
    for ops, by_case in tables.items():
        shares = [[*key, *(found.get(op, "") for op in ops)] for key, found in by_case.items()]
        text += [*_lines(["shape", "layout", "dtype", *ops], shares), ""]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the csv and the table")
    options = parser.parse_args()
    compiled = sass.measured("90", SOURCES)
    kernels = {row["kernel"]: Kernel.of(row) for row in compiled}
    every = tuple(dict.fromkeys([*FOUR_OPS, *cases(), *FIT_ON_CHIP]))
    found = [
        predict(op, case, kernels)
        for case in dict.fromkeys((*every, *MLP, *NORMS))
        for op, what in OPS.items()
        if case in (what.cases or every)
    ]
    rows = [row for row in found if row]
    write_csv("predicted_h200", [asdict(row) for row in rows], options.out)
    exchanges = predict_exchange.predict_all(compiled)
    write_csv("predicted_exchange_h200", [asdict(one) for one in exchanges], options.out)
    text = f"{table(rows)}\n{exchange_table(exchanges)}"
    (options.out / "predicted_h200.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
