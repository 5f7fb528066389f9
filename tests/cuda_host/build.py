"""Builds the CUDA sources for the CPU model of CUDA: python tests/cuda_host/build.py [plain|contract ...]

    plain     an index past an array of known size ends the process
    asan      kernels and engine run under the address and undefined-behaviour sanitizers
    race      kernels run under the happens-before race checker
    contract  the compiler fuses products and sums, as nvcc does; only built if it is named, since
              the processor must have FMA

Each mode has a folder in build/cuda_host: _cuda_host.so is a Python module, and `seeded` is a program whose
kernels have seeded bugs.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build/cuda_host"
MODES = ("plain", "asan", "race")  # the modes that are built by default

# The flags allow what device code does: 16-byte loads of other types' memory, and static thread_local
# variables in templates, one set for each library, which the engine swaps for each block.
COMMON_FLAGS = (
    "-std=c++20 -g1 -fPIC -fno-strict-aliasing -fno-gnu-unique -fno-omit-frame-pointer -ffp-contract=off "
    "-DTORCH_TARGET_VERSION=0x020b000000000000 -DUSE_CUDA -Wall -Wextra -Wno-unknown-pragmas "
    "-Wno-unused-parameter -Wno-maybe-uninitialized -Wno-attributes"
)
SANITIZER_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr"
BOUNDS_FLAGS = "-fsanitize=bounds -fsanitize-undefined-trap-on-error"
RACE_FLAGS = "-fsanitize=thread --param tsan-instrument-func-entry-exit=0"
CONTRACT_FLAGS = "-fexpensive-optimizations -ffp-contract=fast -mfma"  # -O1 alone fuses nothing
KERNEL_FLAGS = {
    "plain": f"-O1 -g0 {BOUNDS_FLAGS}",
    "asan": f"-O1 {SANITIZER_FLAGS}",
    "race": f"-O1 {RACE_FLAGS}",
    "contract": f"-O1 -g0 {BOUNDS_FLAGS} {CONTRACT_FLAGS}",
}
ENGINE_FLAGS = {
    "plain": "-O2",
    "asan": f"-O1 {SANITIZER_FLAGS}",
    "race": "-O2 -DCUDA_HOST_RACE",
    "contract": "-O2",
}
LINK_FLAGS = {"plain": "", "asan": SANITIZER_FLAGS, "race": "", "contract": ""}


def format_build_file() -> str:
    """Returns the text of build.ninja."""
    import torch

    torch_folder = Path(torch.__file__).parent
    cxx = os.environ.get("CXX") or "g++"
    includes = f"-I{HERE} -isystem {torch_folder}/include -isystem {sysconfig.get_paths()['include']}"
    libraries = f"-L{torch_folder}/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,{torch_folder}/lib"
    lines = [
        f"rule cxx\n command = {cxx} {COMMON_FLAGS} {includes} $flags -x c++ -MMD -MF $out.d -c $in -o $out\n"
        " depfile = $out.d\n deps = gcc",
        f"rule library\n command = {cxx} -shared -Wl,-Bsymbolic $flags $in {libraries} -o $out",
        f"rule program\n command = {cxx} -rdynamic $flags $in -ldl -o $out",
    ]

    def add_object(name, source, flags):
        """Adds the rule for an object, and returns the object's path."""
        lines.append(f"build {name}.o: cxx {source}\n flags = {flags}")
        return f"{name}.o"

    library_names = "binding", "register", "torch_shims"
    library_objects = [add_object(name, HERE / f"{name}.cpp", "-O1") for name in library_names]
    for mode in KERNEL_FLAGS:
        engine = [add_object(f"{mode}/engine", HERE / "engine.cpp", ENGINE_FLAGS[mode])]
        if mode == "race":
            engine.append(add_object(f"{mode}/race", HERE / "race.cpp", ENGINE_FLAGS[mode]))
        kernels = [
            # nvcc includes cuda_runtime.h, too.
            add_object(f"{mode}/{source.stem}", source, f"{KERNEL_FLAGS[mode]} -include cuda_runtime.h")
            for source in sorted((ROOT / "csrc").rglob("*.cu"))
            if source.stem not in ("register_cuda", "ipc")  # ipc needs several processes on one GPU
        ]
        bugs = [
            add_object(
                f"{mode}/bugs",
                HERE / "selftest/bugs.cu",
                f"{KERNEL_FLAGS[mode]} -Wno-aggressive-loop-optimizations",
            )
        ]
        for target, rule, objects in (
            ("_cuda_host.so", "library", kernels + engine + library_objects),
            ("seeded", "program", bugs + engine),
        ):
            lines.append(f"build {mode}/{target}: {rule} {' '.join(objects)}\n flags = {LINK_FLAGS[mode]}")
    return "\n".join(lines) + "\n"


def build(*targets: str) -> None:
    """Brings files of build/cuda_host up to date, such as "plain/_cuda_host.so" or "race/seeded"."""
    from ninja import BIN_DIR

    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "build.ninja").write_text(format_build_file())
    ninja = [os.path.join(BIN_DIR, "ninja"), "-C", str(OUT), *targets]
    result = subprocess.run(ninja, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)


if __name__ == "__main__":
    build(*(f"{mode}/{name}" for mode in sys.argv[1:] or MODES for name in ("_cuda_host.so", "seeded")))
