"""Builds the two libraries of fastvit against torch's stable ABI, with ninja.

fastvit/_C.so     schemas and CPU kernels (the kernels once per instruction set)
fastvit/_cuda.so  CUDA kernels; FASTVIT_CUDA=auto|0|1 (auto: when a toolkit is found; 1: any failure is fatal)

Neither needs Python's headers, torch's CUDA headers or a GPU, and both load in every torch from 2.11 on.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TORCH_ABI = "0x020b000000000000"  # 2.11: the oldest torch whose stable ABI has all that is used here
ARCHITECTURES = "8.0;9.0+PTX"  # without TORCH_CUDA_ARCH_LIST; torch's own detection needs a GPU
CAPABILITIES = {"baseline": ""}
if platform.machine() in ("x86_64", "AMD64"):
    avx2 = "-mavx2 -mfma -mf16c"
    avx512 = f"{avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"
    CAPABILITIES |= {"avx2": avx2, "avx512": avx512}

try:
    import torch
except ImportError:
    sys.exit("fastvit: building needs torch>=2.11; install it first, or drop --no-build-isolation.")
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
    sys.exit(f"fastvit: building needs torch>=2.11, found {torch.__version__}; upgrade torch first.")
TORCH = Path(torch.__file__).parent


def find_cuda() -> tuple[Path | None, str]:
    """The toolkit's folder (the one that holds include/cuda_runtime.h), or None, and why."""
    choice = os.environ.get("FASTVIT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        sys.exit(f"fastvit: FASTVIT_CUDA is {choice!r}; auto, 0 or 1 expected.")
    if choice == "0":
        return None, "FASTVIT_CUDA=0"
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):  # may be a wrapper script, so ask it rather than its path
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
        candidates += re.findall(r"^#\$ TOP=(.*)$", dryrun, re.M)
    for folder in filter(None, [*candidates, "/usr/local/cuda"]):
        if (Path(folder) / "include/cuda_runtime.h").exists() and (Path(folder) / "bin/nvcc").exists():
            return Path(folder).resolve(), f"toolkit at {Path(folder).resolve()}"
    if choice == "1":
        sys.exit("fastvit: FASTVIT_CUDA=1, but there is no CUDA toolkit; set CUDA_HOME or put nvcc on PATH.")
    return None, "no CUDA toolkit found (CUDA_HOME, nvcc on PATH, /usr/local/cuda)"


def gencode() -> str:
    flags = []
    for name in re.split(r"[; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES):
        arch, ptx = name.replace("+PTX", "").replace(".", ""), name.endswith("+PTX")
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        flags += [f"-gencode=arch=compute_{arch},code=compute_{arch}"] * ptx
    return " ".join(flags)


class NinjaBuild(build_ext):
    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self):
        cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if not cxx:
            sys.exit("fastvit: there is no C++ compiler; install g++ (>= 11) or clang++, or set CXX.")
        try:
            from ninja import BIN_DIR

            ninja = os.path.join(BIN_DIR, "ninja")
        except ImportError:
            ninja = shutil.which("ninja") or sys.exit("fastvit: building needs ninja; pip install ninja.")
        cuda, why = find_cuda()
        print(f"fastvit: CUDA kernels {'for ' + gencode() if cuda else 'not built'}: {why}", flush=True)
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(self.rules(cxx, cuda))
        subprocess.run([ninja, "-C", str(folder), "_C.so"], check=True)
        if cuda:
            result = subprocess.run([ninja, "-C", str(folder), "_cuda.so"])
            if result.returncode and os.environ.get("FASTVIT_CUDA") == "1":
                sys.exit("fastvit: FASTVIT_CUDA=1, but the CUDA kernels did not compile (see above).")
            if result.returncode:
                print("fastvit: CUDA kernels did not compile (see above); going on with the CPU's alone.")
        for extension in self.extensions:
            target, built = Path(self.get_ext_fullpath(extension.name)), folder / f"{extension.name[8:]}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # never a stale library; and a running process keeps its own
            if built.exists() and (cuda or extension.name == "fastvit._C"):
                shutil.copy2(built, target)

    def rules(self, cxx, cuda) -> str:
        common = f"-O3 -std=c++20 -DTORCH_TARGET_VERSION={TORCH_ABI} -isystem {TORCH}/include"
        warnings = "-Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized"
        x86 = "-DFASTVIT_X86" if "avx2" in CAPABILITIES else ""
        torch_libs = f"-Wl,--no-as-needed -L{TORCH}/lib -ltorch -ltorch_cpu -lc10"
        lines = [
            f"rule cxx\n command = {cxx} {common} {warnings} {x86} -fPIC -fvisibility=hidden -MMD -MF $out.d "
            "$flags -c $in -o $out\n depfile = $out.d\n deps = gcc",
            f"rule link\n command = {cxx} -shared $in {torch_libs} $libs -o $out",
        ]
        objects = []
        for source in [ROOT / "csrc/ops.cpp", *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]:
            kernels = source.parent.name == "cpu" and source.stem != "backend"
            for name, flags in CAPABILITIES.items() if kernels else [("baseline", "")]:
                objects.append(f"{source.stem}.{name}.o")
                lines.append(f"build {objects[-1]}: cxx {source}\n flags = {flags} -DFASTVIT_CAPABILITY={name}")
        lines.append(f"build _C.so: link {' '.join(objects)}")
        if cuda:
            lines.append(f"rule nvcc\n command = {cuda}/bin/nvcc {common} -DUSE_CUDA {gencode()} -ccbin {cxx} "
                         "-Xcompiler -fPIC,-fvisibility=hidden,-Wno-psabi -MMD -MF $out.d -c $in -o $out\n"
                         " depfile = $out.d\n deps = gcc")
            sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
            lines += [f"build cuda.{source.stem}.o: nvcc {source}" for source in sources]
            libs = f"-L{cuda}/lib64 -lcudart_static -ldl -lrt -lpthread"
            lines.append(f"build _cuda.so: link {' '.join(f'cuda.{s.stem}.o' for s in sources)}\n libs = {libs}")
        return "\n".join(lines) + "\n"


class AnyPython(bdist_wheel):  # the libraries do not touch Python's ABI
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("fastvit._C", []), Extension("fastvit._cuda", [], optional=True)],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPython},
)
