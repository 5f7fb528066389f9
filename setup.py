"""Builds the libraries of fastvit against torch's stable ABI, with ninja.

    fastvit/_C.so     schemas and CPU kernels (the kernels once for each instruction set)
    fastvit/_cuda.so  CUDA kernels

Environment variables choose what is built:

    FASTVIT_CPU=native|all  CPU kernels for this machine (default of editable installs), or for every machine
    FASTVIT_CUDA=auto|0|1   auto: CUDA kernels if there is a toolkit, but none in an editable install with a
                            torch that could not load them; 0: none; 1: an error without a toolkit
    FASTVIT_KERNELS=0       no library, on any system; the wheel is py3-none-any

The build needs no headers of Python, no CUDA headers of torch and no GPU. The libraries load in every torch
from 2.11 on.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def major_minor(version: str) -> list[int]:
    """Returns the first two numbers of a version."""
    return [int(n) for n in re.findall(r"\d+", version)[:2]]


NO_KERNELS_HINT = "FASTVIT_KERNELS=0 installs what needs no kernels: convert, report, verify and compat."
FASTVIT_KERNELS = os.environ.get("FASTVIT_KERNELS") or "1"
if FASTVIT_KERNELS not in ("0", "1"):
    sys.exit(f"fastvit: FASTVIT_KERNELS is {FASTVIT_KERNELS!r}; 0 or 1 expected.")
if FASTVIT_KERNELS == "1" and not sys.platform.startswith("linux"):
    sys.exit(
        f"fastvit: Linux expected, this is {sys.platform}; on Windows, build under WSL. {NO_KERNELS_HINT}"
    )
for name, floor in ("setuptools", "77.0"), ("torch", "2.11"):
    try:
        installed = __import__(name).__version__
    except ImportError:
        installed = "none"
    if major_minor(installed) < major_minor(floor):
        sys.exit(f"fastvit: building needs {name}>={floor}, found {installed}; pip install it first.")

from setuptools import Extension, setup  # noqa: E402
from setuptools.command import bdist_wheel, build_ext  # noqa: E402

ROOT, TORCH = Path(__file__).parent.resolve(), Path(sys.modules["torch"].__file__).parent
TORCH_ABI = "0x020b000000000000"  # 2.11, the oldest torch with all functions of the stable ABI that are used
# The default without a visible GPU, less the architectures that nvcc does not know. PTX of the oldest runs on
# GPUs between the listed ones, such as sm_110.
ARCHITECTURES = "7.5+PTX;8.0;9.0;10.0;12.0+PTX"
MIN_NVCC_VERSION = "12.4"  # the oldest with which the kernels were compiled
FASTVIT_CUDA = os.environ.get("FASTVIT_CUDA", "auto")
FASTVIT_CPU = os.environ.get("FASTVIT_CPU", "")
DISABLED_WARNINGS = "-Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized -Wno-unknown-warning-option"
# The compiler's flags for each instruction set. x86's baseline is for CPUs of before 2013. -O3 makes kernels
# with sums (O3_SOURCES) faster, and others only larger.
CPU_CAPABILITY_FLAGS = {"baseline": f"-O2 -Wall -Wextra {DISABLED_WARNINGS}"}
if os.uname().machine == "x86_64":
    CPU_CAPABILITY_FLAGS["avx2"] = "$baseline -mavx2 -mfma -mf16c"
    CPU_CAPABILITY_FLAGS["avx512"] = (
        "$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"
    )
WIDEST_CAPABILITIES = list(CPU_CAPABILITY_FLAGS)[-2:]
O3_SOURCES = ("cpu/kernels/bn_stats", "cpu/kernels/bn_reduce", "cpu/kernels/layer_norm")


def native_capability() -> str:
    """Returns the best instruction set of this machine, or ATEN_CPU_CAPABILITY's."""
    capability = sys.modules["torch"].backends.cpu.get_cpu_capability().lower()
    return capability if capability in CPU_CAPABILITY_FLAGS else "baseline"


def cpu_capabilities(editable: bool) -> list[str]:
    """Returns the instruction sets for which the CPU kernels are compiled."""
    if FASTVIT_CPU not in ("", "native", "all"):
        sys.exit(f"fastvit: FASTVIT_CPU is {FASTVIT_CPU!r}; native or all expected.")
    is_native = FASTVIT_CPU == "native" or (editable and not FASTVIT_CPU)
    return [native_capability()] if is_native else list(CPU_CAPABILITY_FLAGS)


def find_cuda(editable: bool = False) -> tuple[Path | None, str]:
    """Returns the toolkit's folder, which has include/cuda_runtime.h, or None; and the reason."""
    if FASTVIT_CUDA not in ("auto", "0", "1"):
        sys.exit(f"fastvit: FASTVIT_CUDA is {FASTVIT_CUDA!r}; auto, 0 or 1 expected.")
    if FASTVIT_CUDA == "0":
        return None, "FASTVIT_CUDA=0"
    if editable and FASTVIT_CUDA == "auto" and not sys.modules["torch"].version.cuda:
        return None, "this torch is a CPU build, which cannot load CUDA kernels; FASTVIT_CUDA=1 builds them"
    if sys.modules["torch"].version.hip:
        return None, "this torch is a ROCm build; the kernels are CUDA's"
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):  # nvcc may be a wrapper script, so --dryrun names the folder.
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
        folders += re.findall(r"^#\$ TOP=(.*)$", dryrun.stderr, re.M)
        folders.append(str(Path(nvcc).parents[1]))  # Debian has /usr/bin/nvcc and /usr/include.
    for folder in (Path(f).resolve() for f in [*folders, "/usr/local/cuda"] if f):
        if (folder / "include/cuda_runtime.h").exists() and (folder / "bin/nvcc").exists():
            version = cuda_version(folder)
            if version != "unknown" and major_minor(version) < major_minor(MIN_NVCC_VERSION):
                sys.exit(
                    f"fastvit: {folder} has CUDA {version}, and the kernels need {MIN_NVCC_VERSION} or "
                    "later; set CUDA_HOME to a newer toolkit, or FASTVIT_CUDA=0."
                )
            return folder, f"toolkit at {folder}"
    if FASTVIT_CUDA == "1":
        sys.exit("fastvit: FASTVIT_CUDA=1, but there is no CUDA toolkit; set CUDA_HOME or put nvcc on PATH.")
    return None, "no CUDA toolkit found (CUDA_HOME, nvcc on PATH, /usr/local/cuda)"


def cpp_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cpp"))


def cuda_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cu"))


def cuda_version(cuda: Path) -> str:
    """Returns the version of a toolkit's runtime, which becomes a part of the library, or "unknown"."""
    header = cuda / "include/cuda_runtime_api.h"
    match = re.search(r"define CUDART_VERSION +(\d+)(\d\d)\d", header.read_text() if header.exists() else "")
    return f"{match[1]}.{int(match[2])}" if match else "unknown"


def gencode_flags(cuda: Path) -> list[str]:
    """Returns nvcc's -gencode options for TORCH_CUDA_ARCH_LIST, the visible GPUs, or ARCHITECTURES."""
    torch = sys.modules["torch"]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    result = subprocess.run([cuda / "bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True)
    nvcc_archs = re.findall(r"compute_(\d+)", result.stdout)  # empty if nvcc lacks the option
    requested_archs = ";".join(filter(None, re.split(r"[; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))))
    if requested_archs in ("", "native") and not torch.cuda.is_available():
        if requested_archs:
            sys.exit("fastvit: TORCH_CUDA_ARCH_LIST=native, but torch sees no GPU; name one, such as 8.6.")
        numbered_archs = [(arch, re.sub(r"\D", "", arch)) for arch in ARCHITECTURES.split(";")]
        known_archs = (arch for arch, n in numbered_archs if n in nvcc_archs or not nvcc_archs)
        requested_archs = ";".join(known_archs)
    os.environ["TORCH_CUDA_ARCH_LIST"] = requested_archs
    try:
        flags = _get_cuda_arch_flags()
    except ValueError as error:
        sys.exit(f"fastvit: TORCH_CUDA_ARCH_LIST={requested_archs}: {error}.")
    version = cuda_version(cuda)
    for arch in re.findall(r"arch=compute_(\d+)", " ".join(flags)):
        if nvcc_archs and arch not in nvcc_archs:
            sys.exit(
                f"fastvit: {requested_archs} has compute_{arch}, which nvcc {version} does not know; "
                f"it knows {', '.join(nvcc_archs)}. Set TORCH_CUDA_ARCH_LIST, such as 8.6 for an RTX 3090."
            )
    return list(dict.fromkeys(flags))


def build_ninja_text(
    cxx: str, cuda: Path | None, reason: str, capabilities: list[str], gencode: list[str]
) -> str:
    """Returns the text of build.ninja. The library stores its CUDA targets, or why it has none."""
    build_info = f"not built: {reason}"
    if cuda:
        codes = re.findall(r",code=(\w+)", " ".join(gencode))
        build_info = f"built for {', '.join(codes)} with CUDA {cuda_version(cuda)}"
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "csrc").rglob("*.*"))))
    build_info += f"; sources {sources.hexdigest()[:8]}"  # fastvit.__version__ ends with this checksum.
    compiler, *flags = [word for word in shlex.split(cxx) if Path(word).name != "ccache"]
    cache = "ccache " if shutil.which("ccache") else ""
    cxx = cache + shlex.join([compiler, *flags])
    host_options = (
        f"-ccbin {compiler} -Xcompiler '{shlex.join([*flags, '-fPIC', '-fvisibility=hidden', '-Wno-psabi'])}'"
    )
    common = f"-O3 -std=c++20 -DTORCH_TARGET_VERSION={TORCH_ABI} -isystem '{TORCH}/include' -MMD -MF $out.d"
    fpic, depends = "-fPIC -fvisibility=hidden", "depfile = $out.d\n deps = gcc\n description = $out"
    lines = [
        f"rule cxx\n command = {cxx} {common} {fpic} $flags -c $in -o $out\n {depends}",
        f"rule nvcc\n command = {cache}'{cuda}/bin/nvcc' {common} {' '.join(gencode)} -Xfatbin -compress-all "
        f"{host_options} -DUSE_CUDA -c $in -o $out\n {depends}",
        f"rule link\n command = {cxx} -shared $in -Wl,--discard-all,--no-as-needed -L'{TORCH}/lib' -ltorch "
        "-ltorch_cpu -lc10 $libs -o $out\n description = $out",
    ]
    lines += [f"{name} = {flags}" for name, flags in {"csrc": ROOT / "csrc", **CPU_CAPABILITY_FLAGS}.items()]
    objects = []
    for path in cpp_sources():
        source = str(path.relative_to(ROOT / "csrc").with_suffix(""))
        is_for_any_cpu = not source.startswith("cpu/kernels/")
        for name in ["baseline"] if is_for_any_cpu else capabilities:
            objects.append(f"{source}.{name}.o")
            lines.append(f"build {objects[-1]}: cxx $csrc/{source}.cpp")
            o3 = " -O3 -fno-unswitch-loops" if source in O3_SOURCES and name in WIDEST_CAPABILITIES else ""
            lines.append(f" flags = ${name}{o3} -DFASTVIT_ISA={name}")
            if source == "cpu/kernel_table":
                lines[-1] += "".join(f" -DFASTVIT_HAS_{isa.upper()}" for isa in capabilities)
            if source == "ops":
                lines[-1] += " " + shlex.quote(f'-DFASTVIT_CUDA_BUILD="{build_info}"').replace("$", "$$")
    kernels = [str(path.relative_to(ROOT / "csrc").with_suffix("")) for path in cuda_sources() if cuda]
    lines += [f"build {source}.o: nvcc $csrc/{source}.cu" for source in kernels]
    lines.append(f"build _C.so: link {' '.join(objects)}")
    lines.append(f"build _cuda.so: link glibc.baseline.o {' '.join(f'{source}.o' for source in kernels)}")
    # Toolkits of NVIDIA, pip and conda have their libraries in different folders.
    lib_flags = " ".join(f"-L'{cuda}/{folder}'" for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))
    lines.append(f" libs = {lib_flags} -lcudart_static -ldl -lrt -lpthread")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext.build_ext):
    def get_ext_filename(self, fullname):
        return fullname.replace(".", os.sep) + ".so"

    def build_extensions(self):
        cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        ninja = shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable))
        if not cxx or not shutil.which(shlex.split(cxx)[0]):
            print(NO_KERNELS_HINT, file=sys.stderr)
            sys.exit("fastvit: there is no C++ compiler; install g++ (>= 11) or clang++, or set CXX.")
        ninja or sys.exit("fastvit: building needs ninja; pip install ninja.")
        cuda, reason = find_cuda(self.editable_mode)
        gencode = gencode_flags(cuda) if cuda else []
        architectures = f"for {os.environ['TORCH_CUDA_ARCH_LIST']}" if cuda else "not built"
        print(f"fastvit: CUDA kernels {architectures}: {reason}", flush=True)
        capabilities = cpu_capabilities(self.editable_mode)
        print(f"fastvit: CPU kernels for {', '.join(capabilities)}", flush=True)
        if self.editable_mode:  # setuptools would compile everything in a new folder each time.
            self.build_temp = ROOT / f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        os.makedirs(folder := Path(self.build_temp).resolve(), exist_ok=True)
        (folder / "build.ninja").write_text(build_ninja_text(cxx, cuda, reason, capabilities, gencode))
        targets = {}
        for library, is_built in ("_C.so", True), ("_cuda.so", cuda is not None):
            target = Path(self.get_ext_fullpath(f"fastvit.{library[:-3]}"))
            os.makedirs(target.parent, exist_ok=True)
            old_library = ROOT / "fastvit" / library if self.editable_mode else target
            # A process may have mapped the old file, so the file is replaced and not overwritten.
            old_library.unlink(missing_ok=True)
            if is_built:
                targets[library] = target
        jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
        if subprocess.run([ninja, "-C", str(folder), *jobs, *targets]).returncode:
            hint = " FASTVIT_CUDA=0 builds without the CUDA kernels, CXX=g++-12 with another compiler."
            hint = hint if cuda else ""
            sys.exit(f"fastvit: compiling the kernels failed; the compiler's messages are above.{hint}")
        for library, target in targets.items():
            shutil.copy2(folder / library, target)


class AbiIndependentWheel(bdist_wheel.bdist_wheel):
    def get_tag(self):  # The libraries do not use Python's ABI.
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("fastvit._C", []), Extension("fastvit._cuda", [], optional=True)]
        if FASTVIT_KERNELS == "1"
        else [],
        cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AbiIndependentWheel},
    )
