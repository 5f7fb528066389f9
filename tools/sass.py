"""Compiles the CUDA kernels, prints resources of each, and checks them and the machine code.

    python tools/sass.py [--arch 80 90] [--only layer_norm]  # default: the targets of a wheel, all sources

Exits with 1 if a kernel spills or keeps a stack frame, or if one for sm_90 has more registers than BLOCKS
allows, or code to which `faults` or `inequality` object. Needs nvcc; minutes for each architecture. nvdisasm,
which reads the code, comes with CUDA's toolkit, triton and the package nvidia-cuda-nvdisasm.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COLUMNS = {"registers": "registers", "stack": "bytes stack", "spills": "bytes spill", "shared": "bytes smem"}
CHECKED = "90"  # the architecture whose registers and code are checked
THREADS, REGISTERS = 256, 65536  # of a block (kThreads in plan.h), and of a multiprocessor
# The blocks that the registers of a multiprocessor must suffice for, by the beginning of a kernel's name. The
# first row that matches counts. Arguments: T, kHasExchange (reduce, stats), kRows, V; of LayerNorm: T, G, V.
BLOCKS = {
    r"act_kernel<\w+, \w+, 1,": 3,
    r"act_kernel<\w+, \w+, \d, false, false": 3,
    r"act_kernel": 2,
    r"bn_backward_kernel<(?!double)\w+, \w+, 1,": 3,
    r"bn_backward_kernel<float, false": 3,
    r"bn_backward_kernel": 2,
    r"bn_forward_kernel": 3,
    r"layer_norm_backward_kernel": 2,
    r"layer_norm_forward_kernel<__half": 3,
    r"layer_norm_forward_kernel": 4,
    r"(merge_messages|pack_message)_kernel": 4,
    r"bn_\w+_single_launch_kernel": 2,  # shared memory has room for no more
    r"bn_reduce_kernel<(?!double)\w+, false, \w+, 1,": 3,
    r"bn_reduce_kernel": 2,
    r"exchange_merge_kernel": 1,  # launched with one block
    r"bn_stats_kernel<(?!double)\w+, false, true, 8": 2,
    r"bn_stats_kernel<(?!double)\w+, false": 4,
    r"bn_stats_kernel": 2,
    r"add_rows_kernel": 3,
}
GLOBAL = r"(LDG|STG|LD|ST|ATOMG?|REDG?|LDGSTS|UBLK\w+|UTMA\w+|CCTL)\b"
LARGE = 12  # additions of a basic block that computes an activation; smaller blocks merge other sums

Code = list[list[str]]  # basic blocks of instructions


def demangled(text: str) -> str:
    names = subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\bvoid |fastvit::|\(anonymous namespace\)::|\(int\)|\(bool\)", "", names)


def resources(log: str) -> dict[str, dict[str, int]]:
    """Resources by kernel, from the output of ptxas -v."""
    found = {}
    for block in log.split("Compiling entry function '")[1:]:
        name = block[: block.index("'")]
        found[name] = {k: sum(map(int, re.findall(rf"(\d+) {v}", block))) for k, v in COLUMNS.items()}
    return found


def opcode(instruction: str) -> str:
    """The opcode with its modifiers and without a predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def code_of(text: str) -> dict[str, Code]:
    """Basic blocks by kernel, from the output of nvdisasm -c."""
    kernels: dict[str, Code] = {}
    blocks: Code = [[]]
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^,]+)", line):
            blocks = kernels[section[1]] = [[]]
        elif re.match(r"\S+:$", line) and blocks[-1]:
            blocks.append([])
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            blocks[-1].append(instruction[1])
            if re.match(r"(BRA|BRX|BSYNC|CALL|EXIT|RET)\b", opcode(instruction[1])):
                blocks.append([])
    return dict(zip(demangled("\n".join(kernels)).splitlines(), kernels.values(), strict=True))


def blocks_of(registers: int) -> int:
    """Blocks that the registers of a multiprocessor suffice for; a thread gets a multiple of 8."""
    return REGISTERS // (THREADS * -(-registers // 8) * 8)


def row_of(kernel: str) -> str | None:
    """The row of BLOCKS for a kernel."""
    return next((row for row in BLOCKS if re.match(row, kernel)), None)


def crowding(kernel: str, registers: int) -> list[str]:
    """Whether a kernel has too many registers."""
    if (row := row_of(kernel)) is None:
        return ["has no row in BLOCKS"]
    if (blocks := blocks_of(registers)) >= BLOCKS[row]:
        return []
    return [f"{registers} registers leave room for {blocks} blocks, and BLOCKS demands {BLOCKS[row]}"]


def faults(kernel: str, code: Code) -> list[str]:
    """What is wrong or missing in the code of a kernel."""
    found = []
    opcodes = [opcode(instruction) for block in code for instruction in block]
    accesses = [op for op in opcodes if re.match(GLOBAL, op)]
    # A wait with a predicate or behind a branch might not run.
    if "ACQBULK" not in code[0]:
        found.append("does not begin with griddepcontrol.wait (ACQBULK)")
    elif any(re.match(GLOBAL, op) for op in opcodes[: opcodes.index("ACQBULK")]):
        found.append(f"accesses global memory before griddepcontrol.wait: {accesses[0]}")
    # collective_message.cu's merge kernel reports faults to the host, and waits for no peer.
    exchanges = any(".SYS" in op for op in accesses) and not kernel.startswith("merge_messages_kernel")
    if exchanges and "PREEXIT" in opcodes:
        found.append("exchanges with peers, and lets the next kernel begin (PREEXIT)")
    if not exchanges and "PREEXIT" not in opcodes:
        found.append("lacks griddepcontrol.launch_dependents (PREEXIT), which lets the next kernel begin")
    if any(re.match(r"(LDL|STL)\b", op) for op in opcodes):
        found.append("accesses local memory")
    if (V := re.search(r", (\d+)\b", kernel)) and V[1] != "1":
        # The packets of an exchange have 16 bytes in every kernel. LayerNorm of float may return half.
        wide = [op[:3] for op in accesses if ".128" in op and ".SYS" not in op]
        if kernel.startswith("layer_norm_forward_kernel<float, __") and "STG.E.64" in accesses:
            wide.append("STG")
        if "LDG" not in wide:
            found.append("has no vector load (LDG.128)")
        if "STG" not in wide and not re.match("bn_reduce|bn_stats", kernel):
            found.append("has no vector store (STG.128)")
    return found


def additions(code: Code) -> Counter[tuple[int, ...]]:
    """Large blocks by their numbers of additions, fused or not, and special functions.

    nvcc may move a product to another block. If it fuses one with an addition, both opcodes' numbers change.
    """
    counts = (Counter(opcode(instruction).split(".")[0] for instruction in block) for block in code)
    return Counter((n["FADD"], n["FFMA"], n["MUFU"]) for n in counts if n["FADD"] + n["FFMA"] >= LARGE)


def inequality(kernel: str, kernels: dict[str, Code]) -> list[str]:
    """How a single launch's arithmetic differs from that of the two kernels which must return the same bits.

    Kernels of double are not compared: nvcc spreads a quotient or an exponential, many DFMA, over blocks.
    """
    other = kernel.replace("_single_launch", "")
    if other == kernel or other not in kernels or "<double" in kernel:
        return []
    expected = additions(kernels[other])
    if not expected:
        return [f"cannot be compared: {other} has no block of {LARGE} additions"]
    missing = expected - additions(kernels[kernel])
    return [
        f"lacks {n} of {other}'s blocks with FADD, FFMA, MUFU {numbers}" for numbers, n in missing.items()
    ]


def find_disassembler(toolkit: Path) -> str | None:
    packages = Path(sysconfig.get_path("purelib"))
    folders = [toolkit / "bin", *os.get_exec_path(), *packages.glob("nvidia/cu*/bin")]
    folders += packages.glob("triton/backends/nvidia/bin")
    return shutil.which("nvdisasm", path=os.pathsep.join(map(str, folders)))


def compiled(nvcc: str, source: Path, arch: str, nvdisasm: str | None) -> tuple[dict, dict[str, Code]]:
    """Resources by kernel and architecture, and the code that is checked by kernel."""
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *"-O3 -std=c++20 -DUSE_CUDA -Xptxas -v".split()]
    command += [f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}", "-isystem", f"{SETUP['TORCH']}/include"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/{source.stem}.cubin"
        result = subprocess.run([*command, str(source), "-o", cubin], capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"sass: {source.name} for sm_{arch}:\n{result.stdout}{result.stderr}")
        found = {(name, arch): row for name, row in resources(demangled(result.stderr)).items()}
        if not nvdisasm or arch != CHECKED or not found:
            return found, {}
        text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return found, code_of(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [arch.replace(".", "") for arch in re.findall(r"\d+\.\d", SETUP["ARCHITECTURES"])]
    parser.add_argument("--arch", nargs="+", default=default)
    parser.add_argument("--only", default="", help="sources with this in their names")
    options = parser.parse_args()
    toolkit, why = SETUP["find_cuda"]()
    if not toolkit:
        sys.exit(f"sass: nvcc is needed: {why}")
    nvcc, nvdisasm = str(toolkit / "bin/nvcc"), find_disassembler(toolkit)
    sources = [source for source in SETUP["cuda_sources"]() if options.only in source.name]
    tasks = [(nvcc, source, arch, nvdisasm) for arch in options.arch for source in sources]
    rows: dict[tuple[str, str], dict[str, int]] = {}
    kernels: dict[str, Code] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part, code in pool.map(lambda task: compiled(*task), tasks):
            rows |= part
            kernels |= code
    bad, registers = [], {name: row["registers"] for (name, arch), row in rows.items() if arch == CHECKED}
    print("sm", *COLUMNS, "kernel", sep="\t")
    for (name, arch), row in rows.items():
        print(arch, *row.values(), name, sep="\t")
        found = ["spills or has a stack frame"] if row["spills"] or row["stack"] else []
        if arch == CHECKED:
            found += crowding(name, row["registers"])
            found += faults(name, kernels[name]) + inequality(name, kernels) if nvdisasm else []
        bad += [f"{name} sm_{arch}: {what}" for what in found]
    print("blocks", "demanded", "registers", f"row of BLOCKS (sm_{CHECKED})", sep="\t")
    for pattern, demanded in BLOCKS.items():
        if matching := [n for name, n in registers.items() if row_of(name) == pattern]:
            print(blocks_of(max(matching)), demanded, max(matching), pattern, sep="\t")
    print(f"{len(rows)} kernels, {len(bad)} faults", *bad, sep="\n")
    checked = f"checked in {len(kernels)} kernels" if nvdisasm else "not checked: there is no nvdisasm"
    print(f"The machine code for sm_{CHECKED} was {checked}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
