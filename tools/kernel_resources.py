"""Compiles the CUDA kernels, prints the resources of each, and checks resources and code: `make sass`.

    python tools/kernel_resources.py [--arch 80 90] [--only layer_norm]

The default is all sources, for the architectures of a wheel.

The program exits with 1 if a kernel spills or keeps a stack frame, or if a kernel for sm_90 has more
registers than MIN_BLOCKS allows, or code in which `find_code_faults` or `compare_single_launch` finds a
fault. It needs nvcc, and takes minutes for each architecture. nvdisasm, which reads the code, comes with
CUDA's toolkit, triton and the package nvidia-cuda-nvdisasm.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PTXAS_COLUMNS = {  # a column of the table -> the words of ptxas after the number
    "registers": "registers",
    "stack": "bytes stack",
    "spills": "bytes spill",
    "shared": "bytes smem",
}
ARCHITECTURES = "75 80 90 100 120".split()  # of a wheel
CHECKED_ARCH = "90"  # Registers and code are checked for this architecture, the H100's.
THREADS_PER_BLOCK = 256  # kThreads in plan.h
REGISTERS_PER_SM = 65536
# The number of blocks for which the registers of a multiprocessor must suffice, by the beginning of a
# kernel's name. The first row that matches counts. Template arguments are T, kHasExchange (reduce, stats),
# kRows and V; LayerNorm's are T, G and V.
MIN_BLOCKS = {
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
    r"bn_\w+_single_launch_kernel": 2,  # Shared memory has no room for three.
    r"bn_reduce_kernel<(?!double)\w+, false, \w+, 1,": 3,
    r"bn_reduce_kernel": 2,
    r"exchange_merge_kernel": 1,  # This kernel is launched with one block.
    r"bn_stats_kernel<(?!double)\w+, false, true, 8": 2,
    r"bn_stats_kernel<(?!double)\w+, false": 4,
    r"bn_stats_kernel": 2,
    r"add_rows_kernel": 3,
}
GLOBAL_ACCESS = r"(LDG|STG|LD|ST|ATOMG?|REDG?|LDGSTS|UBLK\w+|UTMA\w+|CCTL)\b"
MIN_ADDITIONS = 12  # A block of code that computes an activation has at least so many.

KernelCode = list[list[str]]  # the instructions of each basic block


def demangle(text: str) -> str:
    """Returns a text with readable names of kernels, without fastvit's namespace and types of constants."""
    names = subprocess.run(["c++filt", "-p"], input=text, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\bvoid |fastvit::|\(anonymous namespace\)::|\(int\)|\(bool\)", "", names)


def parse_ptxas(log: str) -> dict[str, dict[str, int]]:
    """Returns the resources of each kernel, from the output of ptxas -v."""
    resources = {}
    for block in log.split("Compiling entry function '")[1:]:
        name = block[: block.index("'")]
        resources[name] = {
            k: sum(map(int, re.findall(rf"(\d+) {v}", block))) for k, v in PTXAS_COLUMNS.items()
        }
    return resources


def parse_opcode(instruction: str) -> str:
    """Returns the opcode of an instruction with its modifiers and without a predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def parse_disassembly(text: str) -> dict[str, KernelCode]:
    """Returns the basic blocks of each kernel, from the output of nvdisasm -c."""
    kernels: dict[str, KernelCode] = {}
    blocks: KernelCode = [[]]
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.([^,]+)", line):
            blocks = kernels[section[1]] = [[]]
        elif re.match(r"\S+:$", line) and blocks[-1]:
            blocks.append([])
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            blocks[-1].append(instruction[1])
            if re.match(r"(BRA|BRX|BSYNC|CALL|EXIT|RET)\b", parse_opcode(instruction[1])):
                blocks.append([])
    return dict(zip(demangle("\n".join(kernels)).splitlines(), kernels.values(), strict=True))


def max_blocks(registers: int) -> int:
    """Returns the number of blocks that a multiprocessor has registers for; threads get a multiple of 8."""
    return REGISTERS_PER_SM // (THREADS_PER_BLOCK * -(-registers // 8) * 8)


def find_row(kernel: str) -> str | None:
    """Returns the key of MIN_BLOCKS for a kernel, or None."""
    return next((row for row in MIN_BLOCKS if re.match(row, kernel)), None)


def check_registers(kernel: str, registers: int) -> list[str]:
    """Returns a fault if a kernel has too many registers."""
    if (row := find_row(kernel)) is None:
        return ["has no row in MIN_BLOCKS"]
    if (blocks := max_blocks(registers)) >= MIN_BLOCKS[row]:
        return []
    return [f"{registers} registers leave room for {blocks} blocks, and MIN_BLOCKS demands {MIN_BLOCKS[row]}"]


def find_code_faults(kernel: str, code: KernelCode) -> list[str]:
    """Returns the faults in the code of a kernel."""
    return _find_order_faults(kernel, code) + _find_access_faults(kernel, code)


def _find_order_faults(kernel: str, code: KernelCode) -> list[str]:
    """Returns the faults in how a kernel waits for the kernel before it, and lets the next one begin."""
    faults = []
    opcodes = [parse_opcode(instruction) for block in code for instruction in block]
    accesses = [op for op in opcodes if re.match(GLOBAL_ACCESS, op)]
    # A wait with a predicate or behind a branch might not run.
    if "ACQBULK" not in code[0]:
        faults.append("does not begin with griddepcontrol.wait (ACQBULK)")
    elif any(re.match(GLOBAL_ACCESS, op) for op in opcodes[: opcodes.index("ACQBULK")]):
        faults.append(f"accesses global memory before griddepcontrol.wait: {accesses[0]}")
    # collective_message.cu's merge kernel reports faults to the host, and waits for no peer.
    has_exchange = any(".SYS" in op for op in accesses) and not kernel.startswith("merge_messages_kernel")
    if has_exchange and "PREEXIT" in opcodes:
        faults.append("exchanges with peers, and lets the next kernel begin (PREEXIT)")
    if not has_exchange and "PREEXIT" not in opcodes:
        faults.append("lacks griddepcontrol.launch_dependents (PREEXIT), which lets the next kernel begin")
    return faults


def _find_access_faults(kernel: str, code: KernelCode) -> list[str]:
    """Returns a fault for local memory, and for loads or stores of single values in a kernel of vectors."""
    faults = []
    opcodes = [parse_opcode(instruction) for block in code for instruction in block]
    if any(re.match(r"(LDL|STL)\b", op) for op in opcodes):
        faults.append("accesses local memory")
    if (vector_size := re.search(r", (\d+)\b", kernel)) and vector_size[1] != "1":
        # The packets of an exchange have 16 bytes in every kernel. LayerNorm of float may return half.
        vector_opcodes = {op[:3] for op in opcodes if ".128" in op and ".SYS" not in op}
        if kernel.startswith("layer_norm_forward_kernel<float, __") and "STG.E.64" in opcodes:
            vector_opcodes.add("STG")
        if "LDG" not in vector_opcodes:
            faults.append("has no vector load (LDG.128)")
        if "STG" not in vector_opcodes and not re.match("bn_reduce|bn_stats", kernel):
            faults.append("has no vector store (STG.128)")
    return faults


def count_large_blocks(code: KernelCode) -> Counter[tuple[int, ...]]:
    """Counts large blocks by their numbers of additions, fused or not, and special functions.

    Products are not counted, since nvcc may move them to another block. If nvcc fuses a product with an
    addition, the numbers of both kinds of additions change.
    """
    counts = (Counter(parse_opcode(instruction).split(".")[0] for instruction in block) for block in code)
    return Counter(
        (n["FADD"], n["FFMA"], n["MUFU"]) for n in counts if n["FADD"] + n["FFMA"] >= MIN_ADDITIONS
    )


def compare_single_launch(kernel: str, kernels: dict[str, KernelCode]) -> list[str]:
    """Returns a fault if a single launch computes otherwise than the kernel that must return the same bits.

    Kernels of double are not compared: nvcc spreads a quotient or an exponential, many DFMA, over blocks.
    """
    other = kernel.replace("_single_launch", "")
    if other == kernel or other not in kernels or "<double" in kernel:
        return []
    expected = count_large_blocks(kernels[other])
    if not expected:
        return [f"cannot be compared: {other} has no block of {MIN_ADDITIONS} additions"]
    missing = expected - count_large_blocks(kernels[kernel])
    return [
        f"lacks {n} of {other}'s blocks with FADD, FFMA, MUFU {numbers}" for numbers, n in missing.items()
    ]


def find_program(name: str) -> str | None:
    """Returns the path of a program of CUDA's toolkit, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    packages = Path(sysconfig.get_path("purelib"))
    folders = [*(f"{home}/bin" for home in homes), *os.get_exec_path(), "/usr/local/cuda/bin"]
    folders += [*packages.glob("nvidia/cu*/bin"), *packages.glob("triton/backends/nvidia/bin")]
    return shutil.which(name, path=os.pathsep.join(map(str, folders)))


def compile_source(
    nvcc: str, source: Path, arch: str, nvdisasm: str | None
) -> tuple[dict, dict[str, KernelCode]]:
    """Returns resources by kernel and architecture; and code by kernel, if the architecture is checked."""
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *"-O3 -std=c++20 -DUSE_CUDA -Xptxas -v".split()]
    command += ["-isystem", f"{sysconfig.get_path('purelib')}/torch/include"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/{source.stem}.cubin"
        result = subprocess.run([*command, str(source), "-o", cubin], capture_output=True, text=True)
        if result.returncode:
            output = result.stdout + result.stderr
            sys.exit(f"kernel_resources: nvcc failed on {source.name} for sm_{arch}:\n{output}")
        resources = {(name, arch): row for name, row in parse_ptxas(demangle(result.stderr)).items()}
        if not nvdisasm or arch != CHECKED_ARCH or not resources:
            return resources, {}
        text = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return resources, parse_disassembly(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="architectures, as 80 90")
    parser.add_argument("--only", default="", help="compile only sources whose names have this part")
    options = parser.parse_args()
    nvcc, nvdisasm = find_program("nvcc"), find_program("nvdisasm")
    if not nvcc:
        sys.exit("kernel_resources: nvcc is needed: put it on PATH")
    sources = [source for source in sorted(ROOT.glob("csrc/cuda/*.cu")) if options.only in source.name]
    tasks = [(nvcc, source, arch, nvdisasm) for arch in options.arch for source in sources]
    rows: dict[tuple[str, str], dict[str, int]] = {}
    kernels: dict[str, KernelCode] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source_rows, code in pool.map(lambda task: compile_source(*task), tasks):
            rows |= source_rows
            kernels |= code
    faults = []
    registers = {name: row["registers"] for (name, arch), row in rows.items() if arch == CHECKED_ARCH}
    print("sm", *PTXAS_COLUMNS, "kernel", sep="\t")
    for (name, arch), row in rows.items():
        print(arch, *row.values(), name, sep="\t")
        kernel_faults = ["spills or has a stack frame"] if row["spills"] or row["stack"] else []
        if arch == CHECKED_ARCH:
            kernel_faults += check_registers(name, row["registers"])
            if nvdisasm:
                kernel_faults += find_code_faults(name, kernels[name]) + compare_single_launch(name, kernels)
        faults += [f"{name} sm_{arch}: {fault}" for fault in kernel_faults]
    print("blocks", "demanded", "registers", f"row of MIN_BLOCKS (sm_{CHECKED_ARCH})", sep="\t")
    for pattern, demanded in MIN_BLOCKS.items():
        if matching := [n for name, n in registers.items() if find_row(name) == pattern]:
            print(max_blocks(max(matching)), demanded, max(matching), pattern, sep="\t")
    print(f"{len(rows)} kernels, {len(faults)} faults", *faults, sep="\n")
    verdict = f"checked in {len(kernels)} kernels" if nvdisasm else "not checked: there is no nvdisasm"
    print(f"The machine code for sm_{CHECKED_ARCH} was {verdict}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
