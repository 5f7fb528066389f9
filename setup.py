"""Builds the libraries of fastvit against torch's stable ABI, with ninja:
fastvit/_C.so     schemas and CPU kernels (the kernels once per instruction set)
fastvit/_cuda.so  CUDA kernels; FASTVIT_CUDA=auto|0|1 (1: no toolkit is an error; auto: with a toolkit, but in
                  an editable install not for a torch without CUDA, which could not load them)
FASTVIT_CPU=native|all: CPU kernels for this machine alone (an editable install's default) or for all.
Neither needs Python's headers, torch's CUDA headers or a GPU, and both load in every torch from 2.11 on.
FASTVIT_KERNELS=0: neither, on any system; the wheel is py3-none-any.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)[:2]]


WITHOUT = "FASTVIT_KERNELS=0 installs what needs no kernels: convert, report, verify and compat."
KERNELS = os.environ.get("FASTVIT_KERNELS") or "1"
if KERNELS not in ("0", "1"):
    sys.exit(f"fastvit: FASTVIT_KERNELS is {KERNELS!r}; 0 or 1 expected.")
if KERNELS == "1" and not sys.platform.startswith("linux"):
    sys.exit(f"fastvit: Linux expected, this is {sys.platform}; on Windows it builds under WSL. {WITHOUT}")
for name, floor in ("setuptools", "77.0"), ("torch", "2.11"):
    try:
        found = __import__(name).__version__
    except ImportError:
        found = "none"
    if numbers(found) < numbers(floor):
        sys.exit(f"fastvit: building needs {name}>={floor}, found {found}; pip install it first.")

from setuptools import Extension, setup  # noqa: E402
from setuptools.command import bdist_wheel, build_ext  # noqa: E402

ROOT, TORCH = Path(__file__).parent.resolve(), Path(sys.modules["torch"].__file__).parent
TORCH_ABI = "0x020b000000000000"  # 2.11: the oldest torch whose stable ABI has all functions used here
# Where no GPU is visible, as far as nvcc knows them. The oldest's PTX is for GPUs between them, say sm_110.
ARCHITECTURES = "7.5+PTX;8.0;9.0;10.0;12.0+PTX"
OLDEST_NVCC = "12.4"  # the oldest with which the kernels were compiled
CUDA = os.environ.get("FASTVIT_CUDA", "auto")
CPU = os.environ.get("FASTVIT_CPU", "")
QUIET = "-Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized -Wno-unknown-warning-option"
# The compiler's flags for each instruction set. -O3 makes kernels with sums faster, and others only larger.
# x86's baseline is for CPUs of before 2013.
CAPABILITIES = {"baseline": f"-O2 -Wall -Wextra {QUIET}"}
if os.uname().machine == "x86_64":
    CAPABILITIES["avx2"] = "$baseline -mavx2 -mfma -mf16c"
    CAPABILITIES["avx512"] = "$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"
WIDEST = list(CAPABILITIES)[-2:]
WITH_SUMS = ("cpu/kernels/bn_stats", "cpu/kernels/bn_reduce", "cpu/kernels/layer_norm")


def native() -> str:
    """The best instruction set of this machine, or ATEN_CPU_CAPABILITY's."""
    found = sys.modules["torch"].backends.cpu.get_cpu_capability().lower()
    return found if found in CAPABILITIES else "baseline"


def instruction_sets(editable: bool) -> list[str]:
    """Those that the CPU kernels are compiled for."""
    if CPU not in ("", "native", "all"):
        sys.exit(f"fastvit: FASTVIT_CPU is {CPU!r}; native or all expected.")
    return [native()] if CPU == "native" or (editable and not CPU) else list(CAPABILITIES)


def find_cuda(editable: bool = False) -> tuple[Path | None, str]:
    """The toolkit's folder, which has include/cuda_runtime.h, or None; and the reason."""
    if CUDA not in ("auto", "0", "1"):
        sys.exit(f"fastvit: FASTVIT_CUDA is {CUDA!r}; auto, 0 or 1 expected.")
    if CUDA == "0":
        return None, "FASTVIT_CUDA=0"
    if editable and CUDA == "auto" and not sys.modules["torch"].version.cuda:
        return None, "this torch is a CPU build, which cannot load them; FASTVIT_CUDA=1 builds them"
    if sys.modules["torch"].version.hip:
        return None, "this torch is a ROCm build; the kernels are CUDA's"
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):  # nvcc may be a wrapper script, so its path does not tell
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
        folders += re.findall(r"^#\$ TOP=(.*)$", dryrun.stderr, re.M)
        folders.append(str(Path(nvcc).parents[1]))  # Debian's: /usr/bin/nvcc, /usr/include
    for folder in (Path(f).resolve() for f in [*folders, "/usr/local/cuda"] if f):
        if (folder / "include/cuda_runtime.h").exists() and (folder / "bin/nvcc").exists():
            if numbers(found := version_of(folder)) < numbers(OLDEST_NVCC) and found != "unknown":
                sys.exit(
                    f"fastvit: {folder} has CUDA {found}, and the kernels need {OLDEST_NVCC} or later; "
                    "set CUDA_HOME to a newer toolkit, or FASTVIT_CUDA=0."
                )
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


def gencode_of(cuda: Path) -> list[str]:
    """nvcc's -gencode options: for TORCH_CUDA_ARCH_LIST in torch's forms, for the visible GPUs, or for
    ARCHITECTURES.
    """
    torch = sys.modules["torch"]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    listed = subprocess.run([cuda / "bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True)
    known = re.findall(r"compute_(\d+)", listed.stdout)
    wish = ";".join(filter(None, re.split(r"[; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))))
    if wish in ("", "native") and not torch.cuda.is_available():
        if wish:
            sys.exit("fastvit: TORCH_CUDA_ARCH_LIST=native, but torch sees no GPU; name one, such as 8.6.")
        digits = [(arch, re.sub(r"\D", "", arch)) for arch in ARCHITECTURES.split(";")]
        wish = ";".join(arch for arch, number in digits if number in known or not known)
    os.environ["TORCH_CUDA_ARCH_LIST"] = wish
    try:
        found = _get_cuda_arch_flags()
    except ValueError as error:
        sys.exit(f"fastvit: TORCH_CUDA_ARCH_LIST={wish}: {error}.")
    for arch in re.findall(r"arch=compute_(\d+)", " ".join(found)):
        if known and arch not in known:
            sys.exit(
                f"fastvit: {wish} has compute_{arch}, which nvcc {version_of(cuda)} does not know; it knows "
                f"{', '.join(known)}. Set TORCH_CUDA_ARCH_LIST, such as 8.6 for an RTX 3090."
            )
    return list(dict.fromkeys(found))


def ninja_file(cxx: str, cuda: Path | None, why: str, sets: list[str], gencode: list[str]) -> str:
    """The text of build.ninja. The library has the targets of its CUDA kernels, or `why` there are none."""
    built = f"not built: {why}"
    if cuda:
        codes = re.findall(r",code=(\w+)", " ".join(gencode))
        built = f"built for {', '.join(codes)} with CUDA {version_of(cuda)}"
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "csrc").rglob("*.*"))))
    built += f"; sources {sources.hexdigest()[:8]}"  # a part of fastvit.__version__
    compiler, *flags = [word for word in shlex.split(cxx) if Path(word).name != "ccache"]
    cache = "ccache " if shutil.which("ccache") else ""
    cxx = cache + shlex.join([compiler, *flags])
    host = (
        f"-ccbin {compiler} -Xcompiler '{shlex.join([*flags, '-fPIC', '-fvisibility=hidden', '-Wno-psabi'])}'"
    )
    common = f"-O3 -std=c++20 -DTORCH_TARGET_VERSION={TORCH_ABI} -isystem '{TORCH}/include' -MMD -MF $out.d"
    fpic, depends = "-fPIC -fvisibility=hidden", "depfile = $out.d\n deps = gcc\n description = $out"
    lines = [
        f"rule cxx\n command = {cxx} {common} {fpic} $flags -c $in -o $out\n {depends}",
        f"rule nvcc\n command = {cache}'{cuda}/bin/nvcc' {common} {' '.join(gencode)} -Xfatbin -compress-all "
        f"{host} -DUSE_CUDA -c $in -o $out\n {depends}",
        f"rule link\n command = {cxx} -shared $in -Wl,--discard-all,--no-as-needed -L'{TORCH}/lib' -ltorch "
        "-ltorch_cpu -lc10 $libs -o $out\n description = $out",
    ]
    lines += [f"{name} = {flags}" for name, flags in {"csrc": ROOT / "csrc", **CAPABILITIES}.items()]
    objects = []
    for path in cpp_sources():
        source = str(path.relative_to(ROOT / "csrc").with_suffix(""))
        once = not source.startswith("cpu/kernels/")
        for name in ["baseline"] if once else sets:
            objects.append(f"{source}.{name}.o")
            lines.append(f"build {objects[-1]}: cxx $csrc/{source}.cpp")
            o3 = " -O3 -fno-unswitch-loops" if source in WITH_SUMS and name in WIDEST else ""
            lines.append(f" flags = ${name}{o3} -DFASTVIT_ISA={name}")
            if source == "cpu/kernel_table":
                lines[-1] += "".join(f" -DFASTVIT_HAS_{isa.upper()}" for isa in sets)
            if source == "ops":
                lines[-1] += " " + shlex.quote(f'-DFASTVIT_CUDA_BUILD="{built}"').replace("$", "$$")
    kernels = [str(path.relative_to(ROOT / "csrc").with_suffix("")) for path in cuda_sources() if cuda]
    lines += [f"build {source}.o: nvcc $csrc/{source}.cu" for source in kernels]
    lines.append(f"build _C.so: link {' '.join(objects)}")
    lines.append(f"build _cuda.so: link glibc.baseline.o {' '.join(f'{source}.o' for source in kernels)}")
    lib = " ".join(
        f"-L'{cuda}/{folder}'" for folder in ("lib64", "lib", "targets/x86_64-linux/lib")
    )  # also pip's
    lines.append(f" libs = {lib} -lcudart_static -ldl -lrt -lpthread")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext.build_ext):
    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self):
        cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
        if not cxx or not shutil.which(shlex.split(cxx)[0]):
            print(WITHOUT, file=sys.stderr)
            sys.exit("fastvit: there is no C++ compiler; install g++ (>= 11) or clang++, or set CXX.")
        ninja or sys.exit("fastvit: building needs ninja; pip install ninja.")
        cuda, why = find_cuda(self.editable_mode)
        gencode = gencode_of(cuda) if cuda else []
        architectures = f"for {os.environ['TORCH_CUDA_ARCH_LIST']}" if cuda else "not built"
        print(f"fastvit: CUDA kernels {architectures}: {why}", flush=True)
        sets = instruction_sets(self.editable_mode)
        print(f"fastvit: CPU kernels for {', '.join(sets)}", flush=True)
        if self.editable_mode:  # setuptools would use a new folder each time, and compile everything
            self.build_temp = ROOT / f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        os.makedirs(folder := Path(self.build_temp).resolve(), exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(cxx, cuda, why, sets, gencode))
        targets = {}
        for library, wanted in ("_C.so", True), ("_cuda.so", cuda is not None):
            target = Path(self.get_ext_fullpath(f"fastvit.{library[:-3]}"))
            os.makedirs(target.parent, exist_ok=True)
            stale = ROOT / "fastvit" / library if self.editable_mode else target
            stale.unlink(missing_ok=True)  # not overwritten, since a running process may have it mapped
            if wanted:
                targets[library] = target
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([ninja, "-C", str(folder), *jobs, *targets]).returncode:
            without = (
                " FASTVIT_CUDA=0 builds without the CUDA kernels, CXX=g++-12 with another compiler."
                if cuda
                else ""
            )
            sys.exit(f"fastvit: it did not compile; see the compiler's messages above.{without}")
        for library, target in targets.items():
            shutil.copy2(folder / library, target)


class AnyPython(bdist_wheel.bdist_wheel):
    def get_tag(self):  # the libraries do not touch Python's ABI
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("fastvit._C", []), Extension("fastvit._cuda", [], optional=True)]
        if KERNELS == "1"
        else [],
        cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPython},
    )
