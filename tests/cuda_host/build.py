"""Builds the CUDA sources for the CPU model of CUDA: python tests/cuda_host/build.py [plain|contract ...]

    plain     kernels end at an index past an array of known size
    asan      kernels and engine under the address and undefined-behaviour sanitizers
    race      kernels under the happens-before race checker
    contract  the compiler fuses products and sums, as nvcc does; only built when it is named, since it needs
              a processor with FMA

Each mode has a folder in build/cuda_host: _cuda_host.so is a Python module, and `seeded` a program of seeded
bugs.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build/cuda_host"
MODES = ("plain", "asan", "race")

# The flags allow what device code does: 16-byte loads of other types' memory, and static thread_local
# variables in templates, one set for each library, which the engine swaps for each block.
COMMON = (
    "-std=c++20 -g1 -fPIC -fno-strict-aliasing -fno-gnu-unique -fno-omit-frame-pointer -ffp-contract=off "
    "-DTORCH_TARGET_VERSION=0x020b000000000000 -DUSE_CUDA -Wall -Wextra -Wno-unknown-pragmas "
    "-Wno-unused-parameter -Wno-maybe-uninitialized -Wno-attributes"
)
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr"
BOUNDS = "-fsanitize=bounds -fsanitize-undefined-trap-on-error"
RACE = "-fsanitize=thread --param tsan-instrument-func-entry-exit=0"
CONTRACT = "-fexpensive-optimizations -ffp-contract=fast -mfma"  # -O1 alone fuses nothing
KERNELS = {
    "plain": f"-O1 -g0 {BOUNDS}",
    "asan": f"-O1 {SANITIZE}",
    "race": f"-O1 {RACE}",
    "contract": f"-O1 -g0 {BOUNDS} {CONTRACT}",
}
ENGINE = {"plain": "-O2", "asan": f"-O1 {SANITIZE}", "race": "-O2 -DCUDA_HOST_RACE", "contract": "-O2"}
LINK = {"plain": "", "asan": SANITIZE, "race": "", "contract": ""}


def write_rules() -> str:
    """Returns the text of build.ninja."""
    import torch

    torch_folder = Path(torch.__file__).parent
    cxx = os.environ.get("CXX", "g++")
    includes = f"-I{HERE} -isystem {torch_folder}/include -isystem {sysconfig.get_paths()['include']}"
    libraries = f"-L{torch_folder}/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,{torch_folder}/lib"
    lines = [
        f"rule cxx\n command = {cxx} {COMMON} {includes} $flags -x c++ -MMD -MF $out.d -c $in -o $out\n"
        " depfile = $out.d\n deps = gcc",
        f"rule library\n command = {cxx} -shared -Wl,-Bsymbolic $flags $in {libraries} -o $out",
        f"rule program\n command = {cxx} -rdynamic $flags $in -ldl -o $out",
    ]

    def add_object(name, source, flags):
        lines.append(f"build {name}.o: cxx {source}\n flags = {flags}")
        return f"{name}.o"

    shared = [add_object(s, HERE / f"{s}.cpp", "-O1") for s in ("binding", "register", "torch_shims")]
    for mode in KERNELS:
        engine = [add_object(f"{mode}/engine", HERE / "engine.cpp", ENGINE[mode])]
        if mode == "race":
            engine.append(add_object(f"{mode}/race", HERE / "race.cpp", ENGINE[mode]))
        kernels = [
            add_object(f"{mode}/{source.stem}", source, f"{KERNELS[mode]} -include cuda_runtime.h")  # as nvcc
            for source in sorted((ROOT / "csrc").rglob("*.cu"))
            if source.stem not in ("register_cuda", "ipc")  # which needs several processes on one GPU
        ]
        bugs = [
            add_object(
                f"{mode}/bugs", HERE / "bugs.cu", f"{KERNELS[mode]} -Wno-aggressive-loop-optimizations"
            )
        ]
        for target, rule, objects in (
            ("_cuda_host.so", "library", kernels + engine + shared),
            ("seeded", "program", bugs + engine),
        ):
            lines.append(f"build {mode}/{target}: {rule} {' '.join(objects)}\n flags = {LINK[mode]}")
    return "\n".join(lines) + "\n"


def build(*targets: str) -> None:
    """Brings files under build/cuda_host/ up to date, such as "plain/_cuda_host.so" or "race/seeded"."""
    from ninja import BIN_DIR

    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "build.ninja").write_text(write_rules())
    ninja = [os.path.join(BIN_DIR, "ninja"), "-C", str(OUT), *targets]
    result = subprocess.run(ninja, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)


if __name__ == "__main__":
    build(*(f"{mode}/{name}" for mode in sys.argv[1:] or MODES for name in ("_cuda_host.so", "seeded")))
