"""Compiles the CUDA kernels, and prints registers, stack, spills and static shared memory of each.

    python tools/sass.py [--arch 80 90] [--only layer_norm]  # default: the targets of a wheel, all sources

Exits with 1 if a kernel spills or keeps a stack frame. Needs nvcc; minutes for each architecture.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COLUMNS = {"registers": "registers", "stack": "bytes stack", "spills": "bytes spill", "shared": "bytes smem"}


def resources(log: str) -> dict[str, dict[str, int]]:
    """Resources by kernel, from the output of ptxas -v."""
    found = {}
    for block in log.split("Compiling entry function '")[1:]:
        name = block[: block.index("'")]
        found[name] = {k: sum(map(int, re.findall(rf"(\d+) {v}", block))) for k, v in COLUMNS.items()}
    return found


def compiled(nvcc: str, source: Path, arch: str) -> dict[tuple[str, str], dict[str, int]]:
    """Resources by kernel and architecture."""
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *"-O3 -std=c++20 -DUSE_CUDA -Xptxas -v".split()]
    command += [f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}", "-isystem", f"{SETUP['TORCH']}/include"]
    result = subprocess.run([*command, str(source), "-o", os.devnull], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"sass: {source.name} for sm_{arch}:\n{result.stdout}{result.stderr}")
    names = subprocess.run(["c++filt", "-p"], input=result.stderr, capture_output=True, text=True, check=True)
    return {(name, arch): found for name, found in resources(names.stdout).items()}


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
    sources = [source for source in SETUP["cuda_sources"]() if options.only in source.name]
    tasks = [(str(toolkit / "bin/nvcc"), source, arch) for arch in options.arch for source in sources]
    rows: dict[tuple[str, str], dict[str, int]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(lambda task: compiled(*task), tasks):
            rows |= part
    bad = [f"{name} sm_{arch}" for (name, arch), row in rows.items() if row["spills"] or row["stack"]]
    print("sm", *COLUMNS, "kernel", sep="\t")
    for (name, arch), row in rows.items():
        kernel = re.sub(r"^void |fastvit::|\(anonymous namespace\)::|\(int\)|\(bool\)", "", name)
        print(arch, *row.values(), kernel, sep="\t")
    print(f"{len(rows)} kernels, {len(bad)} spill or have a stack frame", *bad, sep="\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
