"""Compiles the CUDA kernels and prints what each costs: registers, stack, spills, shared memory, widths.

    python tools/sass.py [--arch 80 90] [--filter forward]

Exits with 1 if a kernel spills or keeps a stack frame. Widths are in bits, of the widest load and store of
global memory, packets to other ranks aside.
"""

import argparse
import re
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COLUMNS = ("kernel", "sm", "registers", "stack", "spills", "shared", "load", "store")


def compile_source(nvcc: str, source: Path, arch: str, folder: Path) -> tuple[str, str]:
    """The PTX of a source, and what ptxas says of the kernels it makes of it."""
    import torch

    kept = folder / f"{source.stem}.sm_{arch}"
    kept.mkdir()
    command = [
        *(nvcc, "-cubin", f"-arch=sm_{arch}", "-O3", "-std=c++20", "-DUSE_CUDA", "-Xptxas", "-v"),
        *(
            f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}",
            "-isystem",
            f"{Path(torch.__file__).parent}/include",
        ),
        *(str(source), "--keep", "--keep-dir", str(kept), "-o", str(kept / "kernels.cubin")),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return (kept / f"{source.stem}.ptx").read_text(), result.stderr


def resources(log: str, arch: str) -> list[dict]:
    """One row per kernel from what ptxas -v says."""
    rows = []
    for block in re.split(r"Compiling entry function '", log)[1:]:
        number = lambda pattern: int(m.group(1)) if (m := re.search(pattern, block)) else 0  # noqa: B023, E731
        rows.append({
            "symbol": block[: block.index("'")],
            "sm": arch,
            "registers": number(r"Used (\d+) registers"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "shared": number(r"(\d+) bytes smem"),
        })  # fmt: skip
    return rows


def widths(ptx: str) -> dict[str, dict]:
    """Widest global load and store of each kernel."""
    found = {}
    for block in re.split(r"\.entry\s+", ptx)[1:]:
        symbol = re.match(r"\w+", block).group()
        found[symbol] = {}
        for kind, opcode in (("load", "ld"), ("store", "st")):
            accesses = re.findall(rf"\b{opcode}\.global(?:\.nc)?(?:\.v(\d))?\.[bfsu](\d+)", block)
            found[symbol][kind] = max((int(n or 1) * int(bits) for n, bits in accesses), default=0)
    return found


def demangled(symbols: list[str]) -> list[str]:
    names = subprocess.run(
        ["c++filt", "-p"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    noise = r"^void |fastvit::|\(anonymous namespace\)::|\(int\)|\(bool\)"
    return [re.sub(noise, "", name) for name in names.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["80", "90"])
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    toolkit, why = SETUP["find_cuda"]()
    if not toolkit:
        sys.exit(f"nvcc is needed: {why}")
    nvcc = str(toolkit / "bin/nvcc")
    sources = [source for source in SETUP["cuda_sources"]() if source.stem not in ("register", "cuda_ipc")]
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(source, arch) for arch in options.arch for source in sources]
        compiled = pool.map(lambda job: compile_source(nvcc, *job, Path(folder)), jobs)
        for (_, arch), (ptx, log) in zip(jobs, compiled, strict=True):
            found = widths(ptx)
            rows += [row | found[row["symbol"]] for row in resources(log, arch)]
    for row, name in zip(rows, demangled([row["symbol"] for row in rows]), strict=True):
        row["kernel"] = name
    rows = sorted(
        (row for row in rows if options.filter in row["kernel"]), key=lambda r: (r["sm"], r["kernel"])
    )
    wide = max([len(row["kernel"]) for row in rows], default=6)
    print("  ".join(column.ljust(wide) if column == "kernel" else column.rjust(9) for column in COLUMNS))
    for row in rows:
        print("  ".join(str(row[c]).ljust(wide) if c == "kernel" else str(row[c]).rjust(9) for c in COLUMNS))
    bad = [row for row in rows if row["spills"] or row["stack"]]
    print(f"{len(rows)} kernels, {len(bad)} with spills or a stack frame")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
