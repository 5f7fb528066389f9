"""Runs the tests of the ops over nvcc's PTX of the kernels, with planner and launchers, on GPGPU-Sim.

    python tools/simulate/run.py --gpgpusim folder [-k "bn_ops and bfloat16"]

GPGPU-Sim (https://github.com/accel-sim/gpgpu-sim_distribution, BSD licence) is not part of this project:
`folder` is its work tree, in which nothing is changed. Its simulator, without its own CUDA runtime and power
model and with two sources edited in copies, is compiled into build/simulate against the headers of the CUDA
toolkit at hand, which it predates: before_build.h gives it what was removed since, and it is told that CUDA
is of version 11.1. Needs nvcc, g++, flex, bison, ninja, zlib's headers and 2 GB of memory.

The result takes the place of the model of CUDA in tests/cuda_host: the same tests, whose tensors stay on the
CPU. Only what the model cannot show is new here, the instructions that nvcc makes of the kernels. So the
simulator runs block after block, without its model of time, and kernels whose blocks wait for each other or
for other ranks are not run. What it does otherwise than a GPU is said in ptx.py.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
import ptx  # noqa: E402

OUT = ROOT / "build/simulate"
KERNELS = OUT / "ptx"
SETUP = runpy.run_path(str(ROOT / "setup.py"))
LAUNCHERS = (
    "stats", "forward", "reduce", "backward", "local_forward", "local_backward", "layer_norm_forward",
    "layer_norm_backward", "act",
)  # fmt: skip
TESTS = ("test_ops", "test_local_ops", "test_layer_norm", "test_act")
# One layout of each kind, and one activation of each set of kernels. All tests would take a night.
CHOSEN = (
    "(nchw- or nhwc_c13- or tokens- or cropped- or test_layer_norm and test_ops) "
    "and not (identity or relu6 or silu or hardswish or gelu_tanh)"
)
CONFIGURATION = "configs/tested-cfgs/SM7_QV100"
LIBRARY = ROOT / "build/cuda_host/simulated/_cuda_host.so"  # where redirect.py looks

WIDE = "space.get_type() == shared_space || space.get_type() == local_space ? {0}.u32 : {0}.u64;"
EDITED = {  # by source: what is replaced in a copy of it
    # Without its power model, which is not built, this is a call of a function that is not there.
    "src/gpgpu-sim/gpu-sim.cc": {"return m_gpgpusim_wrapper->get_scaling_coeffs();": "return NULL;"},
    # Addresses have 32 bits there; those of this process have 64.
    "src/cuda-sim/instructions.cc": {
        f"*mem = NULL;\n  addr_t addr = {register}.u32;": "*mem = NULL;\n  addr_t addr = "
        + WIDE.format(register)
        for register in ("src1_data", "addr_reg")
    },
}


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
    for source, changes in EDITED.items():
        text = (gpgpusim / source).read_text()
        for before, after in changes.items():
            if before not in text:
                sys.exit(f"simulate: {source} of this GPGPU-Sim has no {before!r}")
            text = text.replace(before, after)
        write(folder / Path(source).name, text)
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
        f"-isystem {cuda}/include -isystem {sysconfig.get_paths()['include']} -I{ROOT}/csrc"
    )
    depends = "-MMD -MF $out.d -c $in -o $out\n depfile = $out.d\n deps = gcc"
    lines = [
        f"rule old\n command = g++ {old} -x c++ {depends}",
        f"rule new\n command = g++ {ours} -fPIC {depends}",
        f"rule nvcc\n command = mkdir -p $out.keep && {cuda}/bin/nvcc {ours} -O3 -Xcompiler -fPIC,-Wno-psabi "
        f"--keep --keep-dir $out.keep -gencode=arch=compute_80,code=compute_80 {depends}",
        "rule flex\n command = flex $flags --outfile=$out $in",
        f"rule bison\n command = bison --warnings=none $flags --file-prefix={made}/$name $in",
        f"rule library\n command = g++ -shared -Wl,-Bsymbolic $in -lz -lpthread -L{torch}/lib -ltorch_cpu "
        "-o $out",
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
    edited = {gpgpusim / source for source in EDITED}
    sources = [made / path.name if path in edited else path for path in sources]
    sources += sorted((gpgpusim / "src/intersim2").rglob("*.cpp"))
    objects = []
    for source in sources:
        if source.stem == "power_interface":
            continue
        objects.append(f"old/{source.parent.name}.{source.name}.o")
        parsers = " ".join(str(made / f"{name}.tab.h") for name in ("ptxinfo", "y"))
        lines.append(f"build {objects[-1]}: old {source} || {parsers}")
    lines += [f"build {name}.o: nvcc {ROOT}/csrc/cuda/{name}.cu" for name in LAUNCHERS]
    lines.append(f"build runtime.o: old {HERE}/runtime.cpp")
    lines.append(f"build register.o: new {HERE}/register.cpp")
    lines.append(f"build torch_shims.o: new {ROOT}/tests/cuda_host/torch_shims.cpp")
    objects += [f"{name}.o" for name in ("runtime", "register", "torch_shims", *LAUNCHERS)]
    lines.append(f"build {LIBRARY}: library {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build(gpgpusim: Path) -> None:
    import torch

    cuda, _ = SETUP["find_cuda"]()
    generated(gpgpusim, OUT / "generated")
    write(OUT / "build.ninja", ninja_file(gpgpusim, cuda, Path(torch.__file__).parent))
    result = subprocess.run(["ninja", "-C", str(OUT), str(LIBRARY)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout[-20000:] + result.stderr)
    shutil.rmtree(KERNELS, ignore_errors=True)
    KERNELS.mkdir()
    for launcher in LAUNCHERS:
        text = (OUT / f"{launcher}.o.keep/{launcher}.ptx").read_text()
        for kernel, spelled in ptx.spell(text).items():
            (KERNELS / f"{kernel}.ptx").write_text(spelled)


def run(gpgpusim: Path, filter_: str) -> int:
    """The status of the tests; the simulator reads its configuration from where it is started."""
    folder = OUT / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(gpgpusim / CONFIGURATION, folder)
    environment = os.environ | {
        "SIMULATE_PTX": str(KERNELS), "FASTVIT_TEST_DEVICE": "cuda_host", "FASTVIT_CUDA_HOST": "simulated",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command += ["--timeout", "900", "-m", "not slow"]
    tests = [ROOT / f"tests/{name}.py" for name in TESTS]
    status = subprocess.run([*command, *tests, "-k", filter_], cwd=folder, env=environment).returncode
    ran = len(set((KERNELS / "ran").read_text().split())) if (KERNELS / "ran").exists() else 0
    print(f"simulate: {ran} of {len(list(KERNELS.glob('*.ptx')))} kernels ran")
    return status


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpgpusim", type=Path, default=os.environ.get("GPGPUSIM") or None)
    parser.add_argument("-k", dest="filter", default=CHOSEN, help="only these tests, as pytest's -k")
    options = parser.parse_args()
    folder = options.gpgpusim.resolve() if options.gpgpusim else None
    if what := missing(folder):
        sys.exit(f"simulate: {what}")
    OUT.mkdir(parents=True, exist_ok=True)
    build(folder)
    sys.exit(run(folder, options.filter))


if __name__ == "__main__":
    main()
