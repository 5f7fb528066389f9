"""Compiles the CUDA kernels and prints their costs: registers, stack, spills, shared memory, widths of
accesses, and instructions of the loop.

    python tools/sass.py [--arch 80 90] [--filter forward]

Exits with 1 if a kernel spills or keeps a stack frame, or if a loop takes more instructions than its budget.
Widths are in bits, of the widest load and store of global memory, except packets to other ranks. `least` and
`most` are instructions of a warp per 16-byte access of its threads (see sass_loops.py), for the cheapest and
the most expensive activation. Compiled files are cached in build/sass until csrc or the compiler changes.
Needs nvcc, cuobjdump and nvdisasm.
"""

import argparse
import hashlib
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sass_loops import Loop, disassemble, disassembler, kernels  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
COLUMNS = ("kernel", "sm", "registers", "stack", "spills", "shared", "load", "store", "least", "most")
# Instructions of a warp per access of 16 bytes a thread. 132 multiprocessors issue about 110 in the time that
# memory takes for the 512 bytes (4 a cycle at 1.75 GHz, 4.3 TB/s): a loop whose cheapest activation stays
# within half of that is bound by memory. Local ops also put what they read into shared memory. Kernels of
# transcendental activations have elu as their cheapest, in place with its inverse, which takes more than the
# 110. Statistics have no activation; `most` counts what they do every 32 values in every pass. The
# backward of LayerNorm computes twice with what it reads, and its 8-byte accesses to 16-bit dy beside float x
# are not counted.
BUDGET, LOCAL_BUDGET, TRANSCENDENTAL_BUDGET, STATS_BUDGET = 55, 65, 135, 75


def compile_source(nvcc: str, source: Path, arch: str, folder: Path) -> Path:
    """The folder with a source's cubin, its PTX and ptxas' report of the kernels."""
    import torch

    kept = folder / f"{source.stem}.sm_{arch}"
    if (kept / "log").exists():
        return kept
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", *"-O3 -std=c++20 -DUSE_CUDA -Xptxas -v --keep".split()]
    command += [
        f"-DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']}",
        "-isystem",
        f"{Path(torch.__file__).parent}/include",
    ]
    command += [str(source), "--keep-dir", str(kept), "-o", str(kept / "kernels.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    for file in kept.iterdir():
        if file.suffix not in (".ptx", ".cubin"):
            file.unlink()
    (kept / "sass").write_text(disassemble(kept / "kernels.cubin"))
    (kept / "log").write_text(result.stderr)  # last: all is there
    return kept


def cache(nvcc: str) -> Path:
    """The cache folder for these sources and this compiler."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    files = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".h"))
    digest = hashlib.sha256(version)
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    folder = ROOT / "build/sass" / digest.hexdigest()[:16]
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)  # of sources that have changed since
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resources(log: str, arch: str) -> list[dict]:
    """One row per kernel from the output of ptxas -v."""
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


def main_loop(found: list[Loop], by_row: bool = False) -> tuple[Loop, Loop] | None:
    """The loop over a kernel's values, and the one around it, over planes, or the same again: the first loop
    in the code with as many loads as any; what comes behind it ends an exchange. `by_row`: of a LayerNorm,
    the longest loop, which is that over rows.
    """
    loads = [loop for loop in found if loop.least.loads]
    if not loads:
        return None
    if by_row:
        return (max(loads, key=lambda loop: loop.end - loop.begin),) * 2
    first = min(loads, key=lambda loop: loop.begin)
    inner = next(loop for loop in loads if loop.begin >= first.begin and loop.end <= first.end)
    return inner, first


def second_loop(found: list[Loop]) -> Loop | None:
    """The inner loop of a local op's second walk, which stores what the first has loaded."""
    main = main_loop(found)
    behind = [loop for loop in found if main and loop.begin > main[1].end and loop.least.stores]
    return behind[0] if behind else None


def exchange_loops(found: list[Loop]) -> list[Loop]:
    """The loops over channels that end an exchange, each of which loads 8 packets: for up to 8 ranks in
    flight, 4 and 2. A loop around another one has the same accesses.
    """
    main = main_loop(found)
    behind = [loop for loop in found if main and loop.begin > main[1].end and loop.least.loads == 8]
    return [
        loop for loop in behind
        if not any(o is not loop and o.begin <= loop.begin and loop.end <= o.end for o in behind)
    ]  # fmt: skip


def measured(arch: str, stems: tuple[str, ...] = ()) -> list[dict]:
    """A row per kernel of the sources of csrc (or of those named), compiled for an architecture."""
    toolkit, why = SETUP["find_cuda"]()
    if not toolkit:
        sys.exit(f"sass: nvcc is needed: {why}")
    if disassembler() is None:
        disassemble(Path())  # which says what to install, before minutes of compiling
    nvcc = str(toolkit / "bin/nvcc")
    folder = cache(nvcc)
    sources = [source for source in SETUP["cuda_sources"]() if source.stem not in ("register", "cuda_ipc")]
    sources = [source for source in sources if not stems or source.stem in stems]
    with ThreadPoolExecutor(2) as pool:
        kept = list(pool.map(lambda source: compile_source(nvcc, source, arch, folder), sources))
    rows = []
    for source, place in zip(sources, kept, strict=True):
        found = widths((place / f"{source.stem}.ptx").read_text())
        code = kernels((place / "sass").read_text())
        for row in resources((place / "log").read_text(), arch):
            loops = code[row["symbol"]]
            by_row = "layer_norm" in row["symbol"]
            row |= found[row["symbol"]] | {"loops": main_loop(loops, by_row), "second": second_loop(loops)}
            row["exchange"] = exchange_loops(loops)
            least, most = per_access(row)
            rows.append(row | {"least": least, "most": most})
    for row, name in zip(rows, demangled([row["symbol"] for row in rows]), strict=True):
        row["kernel"] = name
    return rows


def per_access(row: dict) -> tuple[float | str, float | str]:
    """Instructions of the inner loop; none where a kernel has no loop of wide accesses."""
    if row["loops"] is None or row["load"] < 128:
        return "", ""
    inner, _ = row["loops"]
    return tuple(round(count.instructions / count.accesses, 1) for count in (inner.least, inner.most))


def over_budget(row: dict) -> bool:
    kernel = row["kernel"]
    if kernel.startswith(("stats_kernel", "local_forward_kernel")):
        count, budget = row["most"], STATS_BUDGET
    elif "(Activations)2" in kernel:
        count, budget = row["least"], TRANSCENDENTAL_BUDGET
    else:
        twice = kernel.startswith(("local_", "layer_norm_backward_kernel"))
        count, budget = row["least"], LOCAL_BUDGET if twice else BUDGET
    return count != "" and "double" not in kernel and count > budget


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=["80", "90"])
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    options = parser.parse_args()
    rows = [row for arch in options.arch for row in measured(arch) if options.filter in row["kernel"]]
    rows.sort(key=lambda row: (row["sm"], row["kernel"]))
    wide = max([len(row["kernel"]) for row in rows], default=6)
    print("  ".join(column.ljust(wide) if column == "kernel" else column.rjust(9) for column in COLUMNS))
    for row in rows:
        print("  ".join(str(row[c]).ljust(wide) if c == "kernel" else str(row[c]).rjust(9) for c in COLUMNS))
    bad = [row for row in rows if row["spills"] or row["stack"]]
    dear = [row for row in rows if over_budget(row)]
    print(f"{len(rows)} kernels, {len(bad)} with spills or a stack frame, {len(dear)} over the budget")
    for row in dear:
        print(f"over the budget: {row['kernel']} sm_{row['sm']}: {row['least']} to {row['most']}")
    sys.exit(1 if bad or dear else 0)


if __name__ == "__main__":
    main()
