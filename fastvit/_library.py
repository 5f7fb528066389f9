"""Loads the compiled libraries: `_C.so` (schemas, CPU kernels) and, where it was built, `_cuda.so`.

Without `_C.so`, and with FASTVIT_KERNELS=0, the package has no ops: what needs none works (convert, report,
verify, recompute_scope, compat's amp and optimizers), and a fused layer raises at construction.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent


@functools.cache
def version() -> str:
    """`fastvit.__version__`: the release, and a checksum of the sources, as in 0.1.0+1a2b3c4d.

    Two checkouts have different versions unless their sources are equal, with or without git. The sources are
    the Python files, and the C++ files that the kernels were built from, whose checksum is in the library.
    """
    try:
        release = importlib.metadata.version("fastvit")
    except importlib.metadata.PackageNotFoundError:  # a source tree that was built in place
        release = "0+unknown"
    compiled = "" if NOT_BUILT else re.sub(r".*sources ", "", ops.cuda_build())
    found = hashlib.sha256(compiled.encode())
    for path in sorted(FOLDER.rglob("*.py")):
        found.update(f"{path.relative_to(FOLDER)} {path.stat().st_size} ".encode() + path.read_bytes())
    return f"{release}{'.' if '+' in release else '+'}{found.hexdigest()[:8]}"


def installed_without_kernels() -> bool:
    """Whether the installed fastvit has no kernels on purpose: then its wheel is for any system."""
    try:
        wheel = importlib.metadata.distribution("fastvit").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return False
    return "Root-Is-Purelib: true" in (wheel or "")


def driver_version() -> int:
    """The CUDA version that the driver supports, as 13000 for 13.0; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def longest_wait(device: torch.device) -> float:
    """Seconds that a kernel may wait: where a GPU has a display, its driver ends work that takes more."""
    watched = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(watched), 17, device.index or 0)
    return 2.0 if watched.value else math.inf  # 17: CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


def driver_problem(built: str) -> str:
    """What is wrong with the driver for a library that was `built` with a CUDA runtime inside; "" if nothing.

    A runtime needs a driver of its major version; torch may be content with an older one.
    """
    needed = re.search(r"CUDA (\d+)", built)
    driver = driver_version() // 1000
    if needed is None or not 0 < driver < int(needed[1]):
        return ""
    known = " (580 or later)" if needed[1] == "13" else ""
    return f"they need a driver for CUDA {needed[1]}{known}, this one is for CUDA {driver}"


def covers(built: str, capability: tuple[int, int]) -> bool:
    """Whether kernels that were `built` for some targets run on a GPU.

    Machine code runs on GPUs of the same major version and of the same or a later minor one, PTX on all later
    GPUs. Code for a target with a letter, such as sm_90a, runs on that version alone.
    """
    major, minor = capability
    for kind, digits, letter in re.findall(r"\b(sm|compute)_(\d+)([af]?)", built):
        target, gpu = int(digits), 10 * major + minor
        if target == gpu or (target < gpu and not letter and (kind == "compute" or target // 10 == major)):
            return True
    return False


@functools.cache
def _lacks_code(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if covers(ops.cuda_build(), capability):
        return ""
    number = ".".join(map(str, capability))
    older = " and a toolkit before CUDA 13" if capability < (7, 5) else ""
    return (
        f"the CUDA kernels have no code for this {torch.cuda.get_device_name(device)}, of compute capability "
        f"{number}; build fastvit with TORCH_CUDA_ARCH_LIST={number}{older}. They are {CUDA_STATUS}"
    )


def gpu_problem(device: torch.device) -> str:
    """Why there are no kernels for a GPU; "" if there are."""
    if not HAS_CUDA:
        return f"the CUDA kernels are {CUDA_STATUS}"
    # The tracer of torch.compile cannot ask; the launchers say it then.
    return "" if torch.compiler.is_compiling() or not torch.cuda.is_available() else _lacks_code(device)


class NoOps:
    """In the place of `torch.ops.fastvit` where there is no library."""

    def __getattr__(self, op: str):
        check_built(f"fastvit.ops.{op}")


def check_built(name: str) -> None:
    """Raises ImportError where there is no library; `name` is what needs one."""
    if NOT_BUILT:
        raise ImportError(f"{name} needs fastvit's kernels, but {NOT_BUILT}")


def bump_versions(*tensors: torch.Tensor | None) -> None:
    """Raises autograd's version counters of tensors that an op has written, which ops do not."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def load() -> tuple[str, bool, str]:
    """Loads the libraries that exist.

    Returns why there is none, or ""; whether the CUDA kernels are loaded; and a reason.
    """
    cpu, cuda = FOLDER / "_C.so", FOLDER / "_cuda.so"
    wish = os.environ.get("FASTVIT_KERNELS") or "1"
    if wish not in ("0", "1"):
        raise ImportError(f"fastvit: FASTVIT_KERNELS is {wish!r}; 0 or 1 expected")
    if wish == "0":
        return "FASTVIT_KERNELS=0 says that none are loaded", False, "not loaded: FASTVIT_KERNELS=0"
    if not cpu.exists() and installed_without_kernels():
        why = (
            "this fastvit was installed with FASTVIT_KERNELS=0; `pip install .` in its sources without that "
            "variable builds them, on Linux with a C++ compiler"
        )
        return why, False, "not built: FASTVIT_KERNELS=0"
    if not cpu.exists():
        why = (
            f"{cpu} is missing; build it with `make install` or `pip install .`, on Linux with a C++ "
            "compiler, and import the latter from a folder without these sources"
        )
        return why, False, "not built"
    torch.ops.load_library(str(cpu))
    built = torch.ops.fastvit.cuda_build()
    if not cuda.exists():
        return "", False, built if built.startswith("not built") else f"missing from {FOLDER}; {built}"
    if torch.version.cuda is None:  # a CPU build of torch lacks the stream function that it needs
        return "", False, f"not loaded, because this torch is a CPU build; {built}"
    if problem := driver_problem(built):
        warnings.warn(f"fastvit: the CUDA kernels are not loaded: {problem}", stacklevel=2)
        return "", False, f"not loaded: {problem}; {built}"
    torch.ops.load_library(str(cuda))
    return "", True, f"loaded; {built}"


NOT_BUILT, HAS_CUDA, CUDA_STATUS = load()
ops: Any = NoOps() if NOT_BUILT else torch.ops.fastvit
