"""Builds the libraries of fastvit against torch's stable ABI, with ninja:
fastvit/_C.so     schemas and CPU kernels (the kernels once per instruction set)
fastvit/_cuda.so  CUDA kernels; FASTVIT_CUDA=auto|0|1 (1: no toolkit is an error; auto: with a toolkit, but in
                  an editable install not for a torch without CUDA, which could not load them)
Neither needs Python's headers, torch's CUDA headers or a GPU, and both load in every torch from 2.11 on.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

for name, floor in ("setuptools", "77.0"), ("torch", "2.11"):
    try:
        found = __import__(name).__version__
    except ImportError:
        found = "none"
    if [int(n) for n in re.findall(r"\d+", found)[:2]] < [int(n) for n in floor.split(".")]:
        sys.exit(f"fastvit: building needs {name}>={floor}, found {found}; pip install it first.")

from setuptools import Extension, setup  # noqa: E402
from setuptools.command import bdist_wheel, build_ext  # noqa: E402

ROOT, TORCH = Path(__file__).parent.resolve(), Path(sys.modules["torch"].__file__).parent
TORCH_ABI = "0x020b000000000000"  # 2.11: the oldest torch whose stable ABI has all functions used here
# The oldest's PTX is for GPUs between those named, say sm_110.
ARCHITECTURES = os.environ.get("TORCH_CUDA_ARCH_LIST") or "7.5+PTX;8.0;9.0;10.0;12.0+PTX"
CUDA = os.environ.get("FASTVIT_CUDA", "auto")
QUIET = "-Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized -Wno-unknown-warning-option"
CAPABILITIES = {"baseline": f"-Wall -Wextra {QUIET}"}
if os.uname().machine == "x86_64":
    CAPABILITIES["avx2"] = "$baseline -mavx2 -mfma -mf16c"
    CAPABILITIES["avx512"] = "$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"


def find_cuda(editable: bool = False) -> tuple[Path | None, str]:
    """The toolkit's folder, which has include/cuda_runtime.h, or None; and the reason."""
    if CUDA not in ("auto", "0", "1"):
        sys.exit(f"fastvit: FASTVIT_CUDA is {CUDA!r}; auto, 0 or 1 expected.")
    if CUDA == "0":
        return None, "FASTVIT_CUDA=0"
    if editable and CUDA == "auto" and not sys.modules["torch"].version.cuda:
        return None, "this torch is a CPU build, which cannot load them; FASTVIT_CUDA=1 builds them"
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):  # nvcc may be a wrapper script, so its path does not tell
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
        folders += re.findall(r"^#\$ TOP=(.*)$", dryrun.stderr, re.M)
    for folder in (Path(f).resolve() for f in [*folders, "/usr/local/cuda"] if f):
        if (folder / "include/cuda_runtime.h").exists() and (folder / "bin/nvcc").exists():
            return folder, f"toolkit at {folder}"
    if CUDA == "1":
        sys.exit("fastvit: FASTVIT_CUDA=1, but there is no CUDA toolkit; set CUDA_HOME or put nvcc on PATH.")
    return None, "no CUDA toolkit found (CUDA_HOME, nvcc on PATH, /usr/local/cuda)"


def cpp_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cpp"))


def cuda_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cu"))


def version_of(cuda: Path) -> str:
    """The version of a toolkit, whose runtime becomes a part of the library."""
    header = cuda / "include/cuda_runtime_api.h"
    found = re.search(r"define CUDART_VERSION +(\d+)(\d\d)\d", header.read_text() if header.exists() else "")
    return f"{found[1]}.{int(found[2])}" if found else "unknown"


def codes() -> list[str]:
    """nvcc's targets for ARCHITECTURES: sm_90 is machine code, compute_90 PTX for later GPUs."""
    pairs = [(re.sub(r"\+PTX|\.", "", a), a.endswith("+PTX")) for a in re.split(r"[; ]+", ARCHITECTURES)]
    return [f"{kind}_{a}" for a, ptx in pairs for kind in ("sm", "compute")[: 1 + ptx]]


def ninja_file(cxx: str, cuda: Path | None, why: str) -> str:
    """The text of build.ninja. The library has the targets of its CUDA kernels, or `why` there are none."""
    built = f"not built: {why}"
    if cuda:
        built = f"built for {', '.join(codes())} with CUDA {version_of(cuda)}"
    gencode = " ".join(f"-gencode=arch=compute_{code.split('_')[1]},code={code}" for code in codes())
    common = f"-O3 -std=c++20 -DTORCH_TARGET_VERSION={TORCH_ABI} -isystem '{TORCH}/include' -MMD -MF $out.d"
    fpic, depends = "-fPIC -fvisibility=hidden", "depfile = $out.d\n deps = gcc\n description = $out"
    lines = [
        f"rule cxx\n command = {cxx} {common} {fpic} $flags -c $in -o $out\n {depends}",
        f"rule nvcc\n command = '{cuda}/bin/nvcc' {common} {gencode} -Xfatbin -compress-all "
        f"-ccbin {cxx.split()[-1]} -Xcompiler '{fpic} -Wno-psabi' -DUSE_CUDA -c $in -o $out\n {depends}",
        f"rule link\n command = {cxx} -shared $in -Wl,--no-as-needed -L'{TORCH}/lib' -ltorch -ltorch_cpu "
        "-lc10 $libs -o $out\n description = $out",
    ]
    lines += [f"{name} = {flags}" for name, flags in {"csrc": ROOT / "csrc", **CAPABILITIES}.items()]
    objects = []
    for path in cpp_sources():
        source = str(path.relative_to(ROOT / "csrc").with_suffix(""))
        once = not source.startswith("cpu/kernels/")
        for name in ["baseline"] if once else CAPABILITIES:
            objects.append(f"{source}.{name}.o")
            lines.append(f"build {objects[-1]}: cxx $csrc/{source}.cpp")
            lines.append(f" flags = ${name} -DFASTVIT_CAPABILITY={name}")
            if source == "ops":
                lines[-1] += " " + shlex.quote(f'-DFASTVIT_CUDA_BUILD="{built}"').replace("$", "$$")
    kernels = [str(path.relative_to(ROOT / "csrc").with_suffix("")) for path in cuda_sources() if cuda]
    lines += [f"build {source}.o: nvcc $csrc/{source}.cu" for source in kernels]
    lines.append(f"build _C.so: link {' '.join(objects)}")
    lines.append(f"build _cuda.so: link glibc.baseline.o {' '.join(f'{source}.o' for source in kernels)}")
    lines.append(f" libs = -L'{cuda}/lib64' -lcudart_static -ldl -lrt -lpthread")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext.build_ext):
    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self):
        cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
        if not cxx or not shutil.which(cxx.split()[0]):
            sys.exit("fastvit: there is no C++ compiler; install g++ (>= 11) or clang++, or set CXX.")
        ninja or sys.exit("fastvit: building needs ninja; pip install ninja.")
        cuda, why = find_cuda(self.editable_mode)
        print(f"fastvit: CUDA kernels {f'for {ARCHITECTURES}' if cuda else 'not built'}: {why}", flush=True)
        if self.editable_mode:  # setuptools would use a new folder each time, and compile everything
            self.build_temp = ROOT / f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        os.makedirs(folder := Path(self.build_temp).resolve(), exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(cxx, cuda, why))
        targets = {}
        for library, wanted in ("_C.so", True), ("_cuda.so", cuda is not None):
            target = Path(self.get_ext_fullpath(f"fastvit.{library[:-3]}"))
            os.makedirs(target.parent, exist_ok=True)
            stale = ROOT / "fastvit" / library if self.editable_mode else target
            stale.unlink(missing_ok=True)  # not overwritten, since a running process may have it mapped
            if wanted:
                targets[library] = target
        if subprocess.run([ninja, "-C", str(folder), *targets]).returncode:
            without = " FASTVIT_CUDA=0 builds without the CUDA kernels." if cuda else ""
            sys.exit(f"fastvit: it did not compile; see the compiler's messages above.{without}")
        for library, target in targets.items():
            shutil.copy2(folder / library, target)


class AnyPython(bdist_wheel.bdist_wheel):
    def get_tag(self):  # the libraries do not touch Python's ABI
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("fastvit._C", []), Extension("fastvit._cuda", [], optional=True)],
        cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPython},
    )
