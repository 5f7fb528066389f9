"""Runs nvcc's PTX of the kernels, with the real planner and launchers, on GPGPU-Sim.

    python tools/simulate/run.py --gpgpusim folder [--filter "bf16 rows"] [--mode functional|timing|both]

GPGPU-Sim (https://github.com/accel-sim/gpgpu-sim_distribution, BSD licence) is not part of this project:
`folder` is its work tree, of which nothing is changed. Its simulator, without its own CUDA runtime and power
model, is compiled into build/simulate against the headers of the CUDA toolkit at hand, which it predates:
before_build.h gives it what was removed since, and it is told that CUDA is of version 11.1. Needs nvcc, g++,
flex, bison, ninja, zlib's headers and 2 GB of memory.

functional  every op, block after block. Local ops only where no blocks wait for each other.
timing      local ops whose blocks do, side by side on the multiprocessors.

The GPU that the planner is told of has 16 multiprocessors of 228 KiB, and two blocks of a kernel run on each
(simulated.h). What the simulator does otherwise than a GPU is said in ptx.py. Kernels that wait for other
ranks are not run: the simulator has no %globaltimer.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
import ptx  # noqa: E402

OUT = ROOT / "build/simulate"
SETUP = runpy.run_path(str(ROOT / "setup.py"))
LAUNCHERS = (
    "stats", "forward", "reduce", "backward", "local_forward", "local_backward", "layer_norm_forward",
    "layer_norm_backward", "act",
)  # fmt: skip
CONFIGURATION = "configs/tested-cfgs/SM7_QV100"
SHARED_BYTES = 228 << 10  # as simulated.h
CHANGES = {  # of that configuration: the GPU of simulated.h
    "-gpgpu_n_clusters": 16,
    "-gpgpu_adaptive_cache_config": 0,
    "-gpgpu_shmem_size": SHARED_BYTES,
    "-gpgpu_shmem_sizeDefault": SHARED_BYTES,
    "-gpgpu_shmem_per_block": SHARED_BYTES,
    "-gpgpu_kernel_launch_latency": 0,  # cycles that tell nothing
    "-visualizer_enabled": 0,
}


# Without its power model, which is not built, gpu-sim.cc calls a function that then is not there.
EDITED = "src/gpgpu-sim/gpu-sim.cc", "return m_gpgpusim_wrapper->get_scaling_coeffs();", "return NULL;"


def missing(gpgpusim: Path | None) -> str | None:
    """What is not there, in words."""
    if gpgpusim is None:
        return (
            "GPGPUSIM is not set; it is the folder of GPGPU-Sim's sources, say a clone of "
            "https://github.com/accel-sim/gpgpu-sim_distribution"
        )
    for part in ("src/cuda-sim/ptx.y", "libcuda/gpgpu_context.h", f"{CONFIGURATION}/gpgpusim.config"):
        if not (gpgpusim / part).exists():
            return f"{gpgpusim} is not GPGPU-Sim's sources: it has no {part}"
    tools = [tool for tool in ("g++", "flex", "bison", "ninja") if not shutil.which(tool)]
    if tools:
        return f"{', '.join(tools)} not found (Debian: apt-get install g++ flex bison ninja-build zlib1g-dev)"
    toolkit, why = SETUP["find_cuda"]()
    return None if toolkit else f"nvcc is needed: {why}"


def generated(gpgpusim: Path, folder: Path) -> None:
    """What GPGPU-Sim's own build makes with sed."""
    folder.mkdir(parents=True, exist_ok=True)
    instructions = (gpgpusim / "src/cuda-sim/instructions.cc").read_text()
    heads = [line.split("{")[0] + ";" for line in instructions.splitlines() if "_impl(" in line]
    write(folder / "instructions.h", '#include "ptx_ir.h"\n#pragma once\n' + "\n".join(heads) + "\n")
    write(folder / "math_functions.h", "")  # the toolkit's, of which nothing is used
    source, before, after = EDITED
    write(folder / Path(source).name, (gpgpusim / source).read_text().replace(before, after))
    write(folder / "detailed_version", 'const char *g_gpgpusim_build_string = "";\n')
    grammar, made = gpgpusim / "src/cuda-sim/ptx.y", folder / "ptx.tab.h"
    if not made.exists() or made.stat().st_mtime < grammar.stat().st_mtime:
        command = ["bison", "--warnings=none", "--name-prefix=ptx_", "-d", f"--file-prefix={folder}/ptx"]
        subprocess.run([*command, str(grammar)], check=True)
    tokens = re.findall(r"^\s+([A-Z]\w*)\s*=\s*\d+", made.read_text(), re.M)
    names = [name for name in tokens if not name.startswith("YY")]
    write(folder / "ptx_parser_decode.def", "".join(f'DEF({name},"{name}")\n' for name in names))


def write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def ninja_file(gpgpusim: Path, cuda: Path, torch: Path) -> str:
    made = OUT / "generated"
    folders = ["src", "src/cuda-sim", "src/gpgpu-sim", "src/cuda-sim/decuda_pred_table"]
    network = sorted({path.parent for path in (gpgpusim / "src/intersim2").rglob("*.hpp")})
    paths = [made, *(gpgpusim / folder for folder in [*folders, "libcuda"]), *network]
    includes = " ".join(f"-I{path}" for path in paths)
    old = (
        f"-std=gnu++17 -O2 -w -fpermissive -fPIC -include {HERE}/before_build.h -DCUDART_VERSION=11010 "
        f"-DCREATE_LIBRARY -DTRACING_ON=0 -DDEBUG=0 {includes} -isystem {cuda}/include"
    )
    ours = (
        f"-std=c++20 -O2 -DUSE_CUDA -DTORCH_TARGET_VERSION={SETUP['TORCH_ABI']} -isystem {torch}/include "
        f"-isystem {cuda}/include -I{HERE} -I{ROOT}/csrc"
    )
    depends = "-MMD -MF $out.d -c $in -o $out\n depfile = $out.d\n deps = gcc"
    lines = [
        f"rule old\n command = g++ {old} -x c++ {depends}",
        f"rule new\n command = g++ {ours} {depends}",
        f"rule nvcc\n command = mkdir -p $out.keep && {cuda}/bin/nvcc {ours} -O3 -Xcompiler -Wno-psabi "
        f"--keep --keep-dir $out.keep -gencode=arch=compute_80,code=compute_80 {depends}",
        "rule flex\n command = flex $flags --outfile=$out $in",
        f"rule bison\n command = bison --warnings=none $flags --file-prefix={made}/$name $in",
        "rule library\n command = g++ -shared -Wl,-Bsymbolic $in -lz -lpthread -o $out",
        f"rule program\n command = g++ $in -Wl,-rpath,{OUT} -lpthread -o $out",
        f"build {made}/lex.ptx_.c: flex {gpgpusim}/src/cuda-sim/ptx.l",
        f"build {made}/lex.ptxinfo_.c: flex {gpgpusim}/src/cuda-sim/ptxinfo.l",
        f"build {made}/lex.yy.c: flex {gpgpusim}/src/intersim2/config.l",
    ]
    for name, source, flags in (
        ("ptxinfo", "src/cuda-sim/ptxinfo.y", "--name-prefix=ptxinfo_ -d"),
        ("y", "src/intersim2/config.y", "-y -d"),
    ):
        lines.append(f"build {made}/{name}.tab.c {made}/{name}.tab.h: bison {gpgpusim}/{source}")
        lines.append(f" name = {name}\n flags = {flags}")
    sources = [made / f"{name}.tab.c" for name in ("ptx", "ptxinfo", "y")]
    sources += [made / f"lex.{name}.c" for name in ("ptx_", "ptxinfo_", "yy")]
    for folder in folders:
        sources += sorted((gpgpusim / folder).glob("*.cc"))
    sources = [made / path.name if path == gpgpusim / EDITED[0] else path for path in sources]
    sources += sorted((gpgpusim / "src/intersim2").rglob("*.cpp"))
    objects = []
    for source in sources:
        if source.stem == "power_interface":
            continue
        objects.append(f"old/{source.parent.name}.{source.name}.o")
        parsers = " ".join(str(made / f"{name}.tab.h") for name in ("ptxinfo", "y"))
        lines.append(f"build {objects[-1]}: old {source} || {parsers}")
    lines.append(f"build libgpgpusim.so: library {' '.join(objects)}")
    launchers = [f"{name}.o" for name in LAUNCHERS]
    lines += [f"build {name}.o: nvcc {ROOT}/csrc/cuda/{name}.cu" for name in LAUNCHERS]
    lines.append(f"build runtime.o: old {HERE}/runtime.cpp")
    lines.append(f"build driver.o: new {HERE}/driver.cpp")
    lines.append(f"build torch_shims.o: new {ROOT}/tests/cuda_host/torch_shims.cpp")
    parts = ["driver.o", "runtime.o", "torch_shims.o", *launchers, "libgpgpusim.so"]
    lines.append(f"build driver: program {' '.join(parts)}")
    return "\n".join(lines) + "\n"


def build(gpgpusim: Path) -> None:
    import torch

    cuda, _ = SETUP["find_cuda"]()
    generated(gpgpusim, OUT / "generated")
    write(OUT / "build.ninja", ninja_file(gpgpusim, cuda, Path(torch.__file__).parent))
    result = subprocess.run(["ninja", "-C", str(OUT), "driver"], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout[-20000:] + result.stderr)


def configure(gpgpusim: Path, folder: Path) -> None:
    """A folder to run in: the simulator reads its configuration from where it is started."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(gpgpusim / CONFIGURATION, folder)
    text = (folder / "gpgpusim.config").read_text()
    for option, value in CHANGES.items():
        text = re.sub(rf"^{option}\s.*\n", "", text, flags=re.M) + f"\n{option} {value}\n"
    (folder / "gpgpusim.config").write_text(text)


def run(gpgpusim: Path, timing: bool, filter_: str) -> tuple[bool, bool]:
    """Whether all passed, and whether there was anything."""
    name = "timing" if timing else "functional"
    folder, kernels = OUT / name, OUT / f"{name}.ptx"
    configure(gpgpusim, folder)
    shutil.rmtree(kernels, ignore_errors=True)
    kernels.mkdir()
    for launcher in LAUNCHERS:
        text = (OUT / f"{launcher}.o.keep/{launcher}.ptx").read_text()
        for kernel, spelled in ptx.spell(text, timing).items():
            (kernels / f"{kernel}.ptx").write_text(spelled)
    environment = os.environ | {"SIMULATE_PTX": str(kernels)} | ({"SIMULATE_TIMING": "1"} if timing else {})
    begin = time.monotonic()
    with (folder / "simulator.log").open("w") as log:
        command = [str(OUT / "driver"), filter_]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.PIPE, text=True
        )
        lines = []
        for line in process.stderr:
            lines.append(line)
            if not line.startswith("ok  "):
                print(f"{name}: {line}", end="", flush=True)
        status = process.wait()
    (folder / "results.txt").write_text("".join(lines))
    known = len(list(kernels.iterdir()))
    seconds = time.monotonic() - begin
    print(f"{name}: of {known} kernels; {seconds:.0f} s; every check in {folder}/results.txt")
    if status < 0:
        print(f"{name}: the simulator was ended by signal {-status}; see {folder}/simulator.log")
    return status == 0, any(line.startswith("ok  ") for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpgpusim", type=Path, default=os.environ.get("GPGPUSIM") or None)
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    parser.add_argument("--mode", choices=("functional", "timing", "both"), default="both")
    options = parser.parse_args()
    folder = options.gpgpusim.resolve() if options.gpgpusim else None
    if what := missing(folder):
        sys.exit(f"simulate: {what}")
    OUT.mkdir(parents=True, exist_ok=True)
    build(folder)
    modes = ("functional", "timing") if options.mode == "both" else (options.mode,)
    passed, made = zip(*(run(folder, mode == "timing", options.filter) for mode in modes), strict=True)
    if all(passed) and not any(made):
        sys.exit(f"simulate: no case's name contains '{options.filter}'")
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
