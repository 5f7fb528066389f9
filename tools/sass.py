"""Compiles the CUDA kernels and prints their costs: registers, stack, spills, shared memory, and instructions
of the loop.

    python tools/sass.py [--arch 80 90]  # default: those of a wheel; on two cores five minutes each

Exits with 1 if a kernel spills or keeps a stack frame, if a loop takes more instructions than its budget, or
if from sm_90 on a kernel accesses memory before it has waited for the previous one (csrc/cuda/launch.cuh).
Compiled files are cached in build/sass until csrc changes. Needs nvcc, cuobjdump and nvdisasm.

A pass of a loop is a way through its blocks that performs all of its 16-byte accesses and works on what they
load: to copy it or store it as it came is no work. So the way around an activation that the kernel was not
compiled with is no pass. `least` are a warp's instructions per access in the shortest one: the activation
that costs nothing. `most` are those in the longest: the activation that costs most, with both sides of what
may diverge in turn. Inner loops count once.
"""

import argparse
import functools
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from operator import add
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
RESOURCES = dict(registers="registers", stack="bytes stack", spills="bytes spill", shared="bytes smem")
COLUMNS = ("kernel", "sm", "registers", "stack", "spills", "shared", "least", "most")
# Instructions of a warp per access of 16 bytes a thread. 132 multiprocessors issue about 110 in the time that
# memory takes for the 512 bytes (an H200: 4 a cycle at 1.75 GHz, 4.3 TB/s): a loop whose cheapest activation
# stays within half of that is bound by memory. Local ops also put what they read into shared memory. Of
# transcendental activations elu is the cheapest, in place with its inverse. Statistics have no activation;
# `most` counts what they do every 32 values in every pass. The backward of LayerNorm computes twice with what
# it reads, and its 8-byte accesses to 16-bit dy beside float x are not counted.
BUDGET, LOCAL_BUDGET, TRANSCENDENTAL_BUDGET, STATS_BUDGET = 55, 65, 135, 75

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
PARTS = re.compile(r"(?:@(!?U?P\w+)\s+)?(\S+)(.*)")
TABLES = ("BRX", "BRXU")  # jumps by a table, the second with the same for the whole warp
MOST_WAYS = 64  # to a block, of which the best go on: n conditions on packets would give 2^n
REGISTER = re.compile(r"\bR(\d+)\b")
# Of integers, comparisons and conversions: half as many a cycle as of products and sums of floats.
HALF_RATE = tuple(
    "IADD LOP3 SHF ISETP PRMT SEL FSEL IMNMX VIMNMX FMNMX FSETP F2FP LEA PLOP3 R2P IABS".split()
)


class Count(NamedTuple):  # of one pass
    loads: int = 0  # of 16 bytes
    stores: int = 0
    instructions: int = 0
    half: int = 0  # of them, those of HALF_RATE
    packets: int = 0  # of an exchange that are loaded

    @property
    def slots(self) -> int:  # cycles of a scheduler
        return max(self.instructions, 2 * self.half)

    @property
    def accesses(self) -> int:
        return self.loads + self.stores


class Loop(NamedTuple):
    begin: int  # addresses
    end: int
    least: Count
    most: Count


class _Step:
    """An instruction: where it leads, and what it does to registers."""

    def __init__(self, address: int, text: str):
        predicate, opcode, rest = PARTS.match(text).groups()
        self.address, self.kind, self.maybe = address, opcode.split(".")[0], predicate is not None
        self.target = int(re.findall(r"0x([0-9a-f]+)", rest)[-1], 16) if self.kind == "BRA" else None
        may_not = self.maybe or (self.kind == "BRA" and re.search(r"\bU?P\d", rest))
        self.goes_on = may_not or self.kind not in ("BRA", *TABLES, "EXIT", "RET")
        first, _, others = rest.partition(",")
        stores = opcode.startswith(("STG", "STS", "STL", "RED"))
        target = None if stores else REGISTER.match(first.strip())
        # Of 64 bits are doubles, products of addresses and the like.
        words = 4 if ".128" in opcode else 2 if re.search(r"\.64|WIDE|^D[AFM]|F64\.", opcode) else 1
        self.copies = opcode.startswith(("MOV", "IMAD.MOV"))
        self.loads = opcode.startswith(("LDG", "LDS")) and ".128" in opcode
        packet = self.kind == "LDG" and self.loads and ".STRONG.SYS" in opcode
        self.writes = range(int(target[1]), int(target[1]) + words) if target else range(0)
        read = others if target else "" if opcode.startswith("STG") else rest
        self.reads = {int(number) for number in REGISTER.findall(read)}
        load, store = (opcode.startswith(kind) and ".128" in opcode for kind in ("LDG", "STG"))
        half = opcode.startswith(HALF_RATE)
        self.count = load and not packet, store, opcode != "NOP", half, packet

    def through(self, held: frozenset) -> tuple[frozenset, int]:
        """What is loaded and not worked on yet behind it, (register, address of the load) each, and how many
        loads are worked on in it.
        """
        if not held and not self.loads:
            return held, 0
        now, read = set(held), {load for register, load in held if register in self.reads}
        if read and not self.copies:
            now = {(register, load) for register, load in held if load not in read}
        if not self.maybe:
            now = {(register, load) for register, load in now if register not in self.writes}
        if self.copies and self.writes:
            now |= {(self.writes[0], load) for load in read}
        if self.loads:
            now |= {(register, self.address) for register in self.writes}
        return frozenset(now), 0 if self.copies else len(read)


def loops(code: list[tuple[int, str]]) -> list[Loop]:
    """Loops with 16-byte accesses, in the order of their ends: inner ones come first."""
    steps = [_Step(*one) for one in code]
    number = {step.address: k for k, step in enumerate(steps)}
    follows = [[number[step.target]] if step.target in number else [] for step in steps]
    for k, step in enumerate(steps[:-1]):
        follows[k] += [k + 1] if step.goes_on else []
    # A jump by a table leads to the instructions behind it that nothing else leads to.
    known, table = {k for targets in follows for k in targets}, None
    for k, step in enumerate(steps):
        if table is not None and k not in known:
            follows[table].append(k)
        table = k if step.kind in TABLES else table
    found = []
    for tail, targets in enumerate(follows):
        for head in targets:
            if head <= tail:
                least, most = (_way(steps, follows, head, tail, sign) for sign in (1, -1))
                if least and least.accesses + least.packets:
                    found.append(Loop(steps[head].address, steps[tail].address, least, most))
    return sorted(found, key=lambda loop: (loop.end, -loop.begin))


def _way(steps: list[_Step], follows: list[list[int]], head: int, tail: int, sign: int) -> Count | None:
    """From head to tail without going back: most accesses first, then most loads that are worked on, then
    least (or most) instructions.
    """

    def rank(found: tuple[int, ...]) -> tuple[int, int, int]:
        loads, stores, instructions, _, packets, worked = found
        return -loads - stores - packets, -worked, sign * instructions

    best: dict[int, dict[frozenset, tuple[int, ...]]] = {head: {frozenset(): (0, 0, 0, 0, 0, 0)}}
    ends = []
    for k in range(head, tail + 1):
        ways = list(best.pop(k, {}).items())
        if len(ways) > MOST_WAYS:
            ways = sorted(ways, key=lambda way: rank(way[1]))[:MOST_WAYS]
        for held, before in ways:
            after, worked = steps[k].through(held)
            found = tuple(map(add, before, (*steps[k].count, worked)))
            if k == tail:
                ends.append(found)
            for n in follows[k]:
                if k < n <= tail:
                    others = best.setdefault(n, {})
                    others[after] = min(others.get(after, found), found, key=rank)
    return Count(*min(ends, key=rank)[:5]) if ends else None


def functions(text: str) -> dict[str, list[tuple[int, str]]]:
    """The instructions of each function, with their addresses."""
    return {
        block.split("\n", 1)[0].strip(): [(int(at, 16), step) for at, step in INSTRUCTION.findall(block)]
        for block in text.split("Function : ")[1:]
    }


def find_disassembler() -> None:
    """Puts on PATH cuobjdump, and nvdisasm, which it starts: of the CUDA toolkit, or of a Python package."""
    folders = [os.environ["PATH"], os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    for inside in ("triton/backends/nvidia/bin", "nvidia/cu13/bin", "nvidia/cu12/bin"):
        folders += [f"{place}/{inside}" for place in sys.path]
    os.environ["PATH"] = os.pathsep.join(folders)
    if not shutil.which("cuobjdump"):
        raise SystemExit(
            "sass: it needs cuobjdump: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` or triton, "
            "or the toolkit's packages cuda-cuobjdump and cuda-nvdisasm"
        )


def compile_source(nvcc: str, arch: str, folder: Path, source: Path) -> Path:
    """The folder with a source's machine code and ptxas' report of the kernels."""
    import torch

    kept = folder / f"{source.stem}.sm_{arch}"
    if (kept / "log").exists():
        return kept
    kept.mkdir(parents=True, exist_ok=True)
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *"-O3 -std=c++20 -DUSE_CUDA -Xptxas -v".split()]
    command += [f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}"]
    command += ["-isystem", f"{Path(torch.__file__).parent}/include", str(source), "-o", str(kept / "cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    with (kept / "sass").open("w") as file:
        subprocess.run(["cuobjdump", "-sass", kept / "cubin"], stdout=file, check=True)
    (kept / "log").write_text(result.stderr)  # last: all is there
    return kept


def cache(nvcc: str) -> Path:
    """The cache folder for these sources and this compiler."""
    digest = hashlib.sha256(subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout)
    for file in sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    folder = ROOT / "build/sass" / digest.hexdigest()[:16]
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)  # of sources that have changed since
    return folder


def resources(log: str) -> dict[str, dict[str, int]]:
    """By symbol, from the output of ptxas -v."""
    found = {}
    for block in log.split("Compiling entry function '")[1:]:
        counts = {k: sum(map(int, re.findall(rf"(\d+) {v}", block))) for k, v in RESOURCES.items()}
        found[block[: block.index("'")]] = counts
    return found


def accesses_early(code: list[tuple[int, str]]) -> bool:
    """Whether a kernel accesses memory before it waits for the previous one, or never waits."""
    kinds = [PARTS.match(text).group(2).split(".")[0] for _, text in code]
    before = kinds[: kinds.index("ACQBULK")] if "ACQBULK" in kinds else kinds
    return bool({"LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"} & set(before))


def main_loop(found: list[Loop], by_row: bool = False) -> tuple[Loop, Loop] | None:
    """The loop over a kernel's values, and the one around it, over planes, or the same again: the first loop
    in the code with loads. `by_row`: of a LayerNorm, the longest loop, which is that over rows.
    """
    loads = [loop for loop in found if loop.least.loads]
    if not loads:
        return None
    if by_row:
        return (max(loads, key=lambda loop: loop.end - loop.begin),) * 2
    first = min(loads, key=lambda loop: loop.begin)
    inner = next(loop for loop in loads if loop.begin >= first.begin and loop.end <= first.end)
    return inner, first


def exchange_loops(found: list[Loop]) -> list[Loop]:
    """The loops over channels that end an exchange, each of which loads 8 packets: for up to 8 ranks in
    flight, 4 and 2. A loop around another one has the same accesses.
    """
    loops = [loop for loop in found if loop.least.packets == 8]
    return [
        loop for loop in loops
        if not any(o is not loop and o.begin <= loop.begin and loop.end <= o.end for o in loops)
    ]  # fmt: skip


def measured(arch: str) -> list[dict]:
    """A row per kernel of the sources of csrc, compiled for an architecture."""
    toolkit, why = SETUP["find_cuda"]()
    if not toolkit:
        sys.exit(f"sass: nvcc is needed: {why}")
    find_disassembler()
    nvcc = str(toolkit / "bin/nvcc")
    compiled = functools.partial(compile_source, nvcc, arch, cache(nvcc))
    sources = [source for source in SETUP["cuda_sources"]() if "__global__" in source.read_text()]
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(compiled, sources))
    rows = []
    for place in kept:
        code = functions((place / "sass").read_text())
        for symbol, found in resources((place / "log").read_text()).items():
            of_kernel, row = loops(code[symbol]), {"symbol": symbol, "sm": arch} | found
            row["loops"] = main = main_loop(of_kernel, "layer_norm" in symbol)
            # Of an op on chip: the inner loop of its second walk, which stores what the first has loaded.
            behind = [loop for loop in of_kernel if main and loop.begin > main[1].end]
            row["second"] = next((loop for loop in behind if loop.least.stores), None)
            row["early"] = int(arch) >= 90 and accesses_early(code[symbol])
            row["exchange"] = exchange_loops(of_kernel)
            row["least"], row["most"] = per_access(row)
            rows.append(row)
    symbols = "\n".join(row["symbol"] for row in rows)
    names = subprocess.run(["c++filt", "-p"], input=symbols, capture_output=True, text=True, check=True)
    for row, name in zip(rows, names.stdout.splitlines(), strict=True):
        row["kernel"] = re.sub(r"^void |fastvit::|\(anonymous namespace\)::|\(int\)|\(bool\)", "", name)
    return rows


def per_access(row: dict) -> tuple[float | str, float | str]:
    """Instructions of the inner loop; none where a kernel has no loop of wide accesses."""
    counts = row["loops"][0][2:] if row["loops"] else ()
    return tuple(round(count.instructions / count.accesses, 1) for count in counts) or ("", "")


def over_budget(row: dict) -> bool:
    kernel, count, budget = row["kernel"], row["least"], BUDGET
    if kernel.startswith(("stats_kernel", "local_forward_kernel")):
        count, budget = row["most"], STATS_BUDGET
    elif "(Activations)2" in kernel:
        budget = TRANSCENDENTAL_BUDGET
    elif kernel.startswith(("local_", "layer_norm_backward_kernel")):
        budget = LOCAL_BUDGET
    return count != "" and "double" not in kernel and count > budget


def faults(row: dict) -> list[str]:
    found = {
        "spills or has a stack frame": row["spills"] or row["stack"],
        f"over the budget with {row['least']} to {row['most']}": over_budget(row),
        "accesses memory before it waits for the previous kernel": row["early"],
    }
    return [what for what, is_so in found.items() if is_so]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=re.findall(r"sm_(\d+)", str(SETUP["codes"]())))
    rows = [row for arch in parser.parse_args().arch for row in measured(arch)]
    rows.sort(key=lambda row: (row["sm"], row["kernel"]))
    wide = max(len(row["kernel"]) for row in rows)
    for row in [{name: name for name in COLUMNS}, *rows]:
        print("  ".join(str(row[c]).ljust(wide) if c == "kernel" else str(row[c]).rjust(9) for c in COLUMNS))
    bad = [f"{row['kernel']} sm_{row['sm']}: {fault}" for row in rows for fault in faults(row)]
    print(f"{len(rows)} kernels, {len(bad)} faults", *bad, sep="\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
