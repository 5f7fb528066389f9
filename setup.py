"""Builds the libraries of fastvit with torch.utils.cpp_extension, against torch's stable ABI.

    fastvit/_C.so     schemas and CPU kernels (the kernels once for each instruction set)
    fastvit/_cuda.so  CUDA kernels, with CUDA's runtime inside

Environment variables choose what is built:

    FASTVIT_CPU=native|all  CPU kernels for this machine (default of editable installs), or for every machine
    FASTVIT_CUDA=auto|0|1   auto: CUDA kernels if torch was built for CUDA and there is nvcc; 0: none; 1: CUDA
                            kernels beside any torch, and an error without nvcc
    FASTVIT_KERNELS=0       no library, on any system; the wheel is py3-none-any

MAX_JOBS, CXX, CUDA_HOME and TORCH_CUDA_ARCH_LIST mean what they mean for other extensions of torch. The
libraries load in every torch from 2.11 on, with any Python.
"""

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from shlex import quote, split
from subprocess import getoutput

for package, oldest in ("setuptools", [77, 0]), ("torch", [2, 11]):
    try:
        version = __import__(package).__version__
    except ImportError:
        version = "none"
    if [int(number) for number in re.findall(r"\d+", version)[:2]] < oldest:
        sys.exit(f"fastvit: building needs setuptools>=77 and torch>=2.11; {package} is {version}.")

import setuptools  # noqa: E402
import torch  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

# torch takes a CXX without options. pip does not put the environment's ninja on PATH.
compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")
CXX, *CXX_OPTIONS = [word for word in split(compiler) if os.path.basename(word) != "ccache"]
os.environ["CXX"] = CXX
os.environ["PATH"] = os.pathsep.join([*os.get_exec_path(), os.path.dirname(sys.executable)])

COMMON_FLAGS = ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
COMMON_FLAGS += ["-isystem", f"{os.path.dirname(torch.__file__)}/include"]
CXX_FLAGS = [*COMMON_FLAGS, *"-O2 -fvisibility=hidden -Wno-psabi".split()]
NVCC_FLAGS = [*COMMON_FLAGS, *"-O3 -DUSE_CUDA -Xfatbin -compress-all -ccbin".split(), CXX, "-Xcompiler"]
NVCC_FLAGS += [",".join(["-fPIC", "-fvisibility=hidden", "-Wno-psabi", *CXX_OPTIONS])]
# torch forbids what the kernels do with half types.
FORBIDDEN = "HALF_CONVERSIONS", "HALF_OPERATORS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"
NVCC_FLAGS += [f"-U__CUDA_NO_{name}__" for name in FORBIDDEN]
ISA_FLAGS = {"baseline": []}  # x86's baseline is for CPUs of before 2013.
if platform.machine() == "x86_64":
    ISA_FLAGS["avx2"] = "-mavx2 -mfma -mf16c".split()
    ISA_FLAGS["avx512"] = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512".split()
    ISA_FLAGS["avx512"] += ISA_FLAGS["avx2"]
KERNELS = {*glob("csrc/cpu/kernels/*.cpp")}
# -O3 makes these faster, and the others only larger and slow to compile.
O3_KERNELS = {f"csrc/cpu/kernels/{name}.cpp" for name in ("bn_reduce", "bn_stats", "layer_norm")}
# The default without a visible GPU, less the architectures that nvcc does not know. PTX of the oldest runs on
# GPUs between the listed ones, such as sm_110.
ARCHITECTURES = "7.5+PTX 8.0 9.0 10.0 12.0+PTX".split()


def read_option(name: str, *values: str) -> str:
    """Returns the value of an environment variable; the first of its values is the default."""
    value = os.environ.get(name) or values[0]
    if value not in values:
        sys.exit(f"fastvit: {name} is {value!r}; expected: {', '.join(filter(None, values))}.")
    return value


def select_isas(is_editable: bool) -> list[str]:
    """Returns the instruction sets for which the CPU kernels are compiled."""
    choice = read_option("FASTVIT_CPU", "", "native", "all") or ("native" if is_editable else "all")
    best = torch.backends.cpu.get_cpu_capability().lower()  # or ATEN_CPU_CAPABILITY's
    return list(ISA_FLAGS) if choice == "all" else [best if best in ISA_FLAGS else "baseline"]


def find_nvcc() -> tuple[str | None, str]:
    """Returns the path of nvcc, or None and why no CUDA kernels are built."""
    choice = read_option("FASTVIT_CUDA", "auto", "0", "1")
    if choice == "0" or torch.version.hip:
        return None, "this torch is a ROCm build" if torch.version.hip else "FASTVIT_CUDA=0"
    if choice == "auto" and torch.version.cuda is None:
        return None, "this torch cannot load CUDA kernels; FASTVIT_CUDA=1 builds them"
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [
        *(os.path.abspath(f"{home}/bin") for home in homes),
        *os.get_exec_path(),
        "/usr/local/cuda/bin",
    ]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if choice == "1" and nvcc is None:
        sys.exit("fastvit: FASTVIT_CUDA=1, but there is no nvcc; set CUDA_HOME, or put nvcc on PATH.")
    return nvcc, "there is no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda"


def select_architectures(nvcc: str) -> tuple[str, list[str]]:
    """Returns the version of nvcc, and its options for the architectures of the CUDA kernels."""
    version = re.search(r"release (\d+)\.(\d+)", getoutput(f"{quote(nvcc)} --version"))
    if not version or [int(number) for number in version.groups()] < [12, 4]:
        sys.exit(f"fastvit: {nvcc} is not of CUDA 12.4 or later; set CUDA_HOME, or FASTVIT_CUDA=0.")
    nvcc_archs = re.findall(r"compute_(\d+)", getoutput(f"{quote(nvcc)} --list-gpu-arch"))
    archs = list(filter(None, re.split("[; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))))
    if archs in ([], ["native"]) and not torch.cuda.is_available():
        archs = [arch for arch in ARCHITECTURES if re.sub(r"\D", "", arch) in nvcc_archs]
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(archs)
    flags = cpp_extension._get_cuda_arch_flags()
    if missing_archs := {*re.findall(r"arch=compute_(\d+)", " ".join(flags))} - {*nvcc_archs}:
        message = f"nvcc knows {', '.join(nvcc_archs)} and not {', '.join(missing_archs)}"
        sys.exit(f"fastvit: {message}; set TORCH_CUDA_ARCH_LIST, such as 8.6 for an RTX 3090.")
    return ".".join(version.groups()), flags


class BuildLibraries(cpp_extension.BuildExtension):
    """Compiles the kernels of a library with flags of their own, then its other sources, and links it."""

    def build_extensions(self):
        if not shutil.which(CXX):
            sys.exit(f"fastvit: there is no C++ compiler {CXX}; install g++ (>= 11) or clang++, or set CXX.")
        if not cpp_extension.is_ninja_available():
            sys.exit("fastvit: building needs ninja; pip install ninja.")
        self.isas, (self.nvcc, reason) = select_isas(self.editable_mode), find_nvcc()
        self.cuda_build = f"not built: {reason}"
        if self.nvcc:
            version, self.gencode = select_architectures(self.nvcc)
            targets = re.findall(r",code=(\w+)", " ".join(self.gencode))
            self.cuda_build = f"built for {', '.join(targets)} with CUDA {version}"
        print(f"fastvit: CPU kernels for {', '.join(self.isas)}; CUDA kernels {self.cuda_build}", flush=True)
        sources = b"".join(path.read_bytes() for path in sorted(Path("csrc").rglob("*.*")))
        self.checksum = hashlib.sha256(sources).hexdigest()[:8]
        self.extensions = self.extensions if self.nvcc else self.extensions[1:]
        if self.editable_mode:  # setuptools would compile everything in a new folder each time.
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        folder = "fastvit" if self.editable_mode else os.path.dirname(self.get_ext_fullpath("fastvit._C"))
        for library in glob(f"{folder}/_*.so"):  # An earlier build may have made one more.
            os.remove(library)
        # Else flags of Python's build and of the environment, such as -march, would be in all objects.
        # _cuda.so finds symbols of torch's CUDA libraries by libtorch.so, of which it uses no symbol.
        linker = [CXX, "-shared", "-Wl,--no-as-needed"]
        self.compiler.set_executables(compiler_so=[CXX, "-fPIC"], linker_so_cxx=linker)
        try:
            super().build_extensions()
        except RuntimeError:
            hint = "FASTVIT_CUDA=0 builds without CUDA kernels, CXX=g++-12 with another compiler."
            sys.exit(f"fastvit: compiling failed; the compiler's messages are above. {hint}")

    def build_extension(self, ext):
        if ext.name == "fastvit._C":
            define = f'-DFASTVIT_BUILD_INFO="{self.cuda_build}; sources {self.checksum}"'
            self.compile_group(ext, "build_info", ["csrc/build_info.cpp"], [*CXX_FLAGS, define])
            for isa in self.isas:
                ext.extra_compile_args["cxx"] += [f"-DFASTVIT_HAS_{isa.upper()}"]
                flags = [*CXX_FLAGS, *ISA_FLAGS[isa], f"-DFASTVIT_ISA={isa}"]
                self.compile_group(ext, isa, KERNELS - O3_KERNELS, flags)
                self.compile_group(ext, f"{isa}-O3", O3_KERNELS, [*flags, "-O3", "-fno-unswitch-loops"])
        else:
            ccache = "ccache " if shutil.which("ccache") else ""
            os.environ["PYTORCH_NVCC"] = ccache + quote(self.nvcc)  # A torch without CUDA looks for no nvcc.
            # The build.ninja of a torch without CUDA knows no headers of CUDA sources.
            folder = "cuda" if torch.version.cuda else f"cuda-{self.checksum}"
            self.compile_group(ext, folder, glob("csrc/cuda/*.cu"), [*NVCC_FLAGS, *self.gencode])
            # nvcc, which may be a script elsewhere, says where the runtime is.
            dryrun = getoutput(f"{quote(self.nvcc)} --dryrun -c x.cu")
            ext.library_dirs += re.findall(r'"-L([^"]*)', dryrun)
        super().build_extension(ext)

    def compile_group(self, ext, folder: str, sources: Iterable[str], flags: list[str]) -> None:
        """Compiles sources into a folder of objects, and adds these objects to a library."""
        folder, options = f"{self.build_temp}/{folder}", {"cxx": [*flags, *CXX_OPTIONS], "nvcc": flags}
        ext.extra_objects += self.compiler.compile(sorted(sources), folder, extra_postargs=options)


def read_description() -> str:
    """Returns README.md with absolute links, into the repository at the tag of this version."""
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    version, source = (re.search(rf'^{key} = "(.+)"$', project, re.M)[1] for key in ("version", "Source"))
    readme = Path("README.md").read_text(encoding="utf-8")
    readme = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1{source}/raw/v{version}/", readme)  # images
    return re.sub(r"\]\((?!\w+:|#)", f"]({source}/blob/v{version}/", readme)


class AbiIndependentWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


extensions = []
if read_option("FASTVIT_KERNELS", "1", "0") == "1":
    if not sys.platform.startswith("linux"):
        sys.exit(f"fastvit: kernels need Linux, this is {sys.platform}; FASTVIT_KERNELS=0 installs the rest.")
    sources = {*glob("csrc/**/*.cpp", recursive=True)} - KERNELS - {"csrc/build_info.cpp"}
    options = {"extra_compile_args": {"cxx": [*CXX_FLAGS, "-DFASTVIT_ISA=baseline", *CXX_OPTIONS]}}
    options |= {"extra_link_args": ["-Wl,--discard-all", *CXX_OPTIONS], "py_limited_api": True}
    runtime = {"libraries": ["cudart_static", "dl", "rt", "pthread"]}
    extensions = [
        cpp_extension.CppExtension("fastvit._cuda", ["csrc/glibc.cpp"], **runtime, **options),
        cpp_extension.CppExtension("fastvit._C", sorted(sources), **options),
    ]
build_ext = BuildLibraries.with_options(no_python_abi_suffix=True)
commands = {"build_ext": build_ext, "bdist_wheel": AbiIndependentWheel}
setuptools.setup(
    ext_modules=extensions,
    cmdclass=commands,
    long_description=read_description(),
    long_description_content_type="text/markdown",
)
