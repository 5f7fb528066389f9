"""Loads the compiled libraries: `_C.so` (schemas, CPU kernels) and, where it was built, `_cuda.so`.

Without `_C.so`, and with FASTVIT_KERNELS=0, the package has no ops. convert, report, verify, recompute_scope
and compat's amp and optimizers need none. A fused layer raises at construction.
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
from typing import Any, NamedTuple

import torch

PACKAGE_DIR = Path(__file__).parent
_KERNEL_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


@functools.cache
def version() -> str:
    """`fastvit.__version__`: the release, and a checksum of the sources, as in 0.1.0+1a2b3c4d.

    Two checkouts have different versions unless their sources are equal, with or without git. The sources are
    the Python files, and the C++ files that the kernels were built from, whose checksum is in the library.
    """
    try:
        release = importlib.metadata.version("fastvit")
    except importlib.metadata.PackageNotFoundError:  # A source tree that was built in place.
        release = "0+unknown"
    compiled = "" if NOT_BUILT_REASON else re.sub(r".*sources ", "", fastvit_ops.cuda_build())
    checksum = hashlib.sha256(compiled.encode())
    for path in sorted(PACKAGE_DIR.rglob("*.py")):
        checksum.update(
            f"{path.relative_to(PACKAGE_DIR)} {path.stat().st_size} ".encode() + path.read_bytes()
        )
    return f"{release}{'.' if '+' in release else '+'}{checksum.hexdigest()[:8]}"


def installed_without_kernels() -> bool:
    """Returns whether fastvit was installed with FASTVIT_KERNELS=0: its wheel is then for any system."""
    try:
        wheel = importlib.metadata.distribution("fastvit").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return False
    return "Root-Is-Purelib: true" in (wheel or "")


def driver_cuda_version() -> int:
    """Returns the CUDA version that the driver supports, 13000 for 13.0, or 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def max_kernel_seconds(device: torch.device) -> float:
    """Returns how long a kernel may wait: the driver of a GPU with a display ends work after some seconds."""
    has_display_timeout = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
            ctypes.byref(has_display_timeout), _KERNEL_EXEC_TIMEOUT, device.index or 0
        )
    return 2.0 if has_display_timeout.value else math.inf


def driver_problem(build_info: str) -> str:
    """Returns why the driver cannot run the CUDA library, or "".

    The library has a CUDA runtime inside, which needs a driver of its major version. torch may be content
    with an older one.
    """
    needed = re.search(r"CUDA (\d+)", build_info)
    driver = driver_cuda_version() // 1000
    if needed is None or not 0 < driver < int(needed[1]):
        return ""
    release = " (580 or later)" if needed[1] == "13" else ""
    return (
        f"the CUDA kernels need a driver for CUDA {needed[1]}{release}; this driver supports CUDA {driver}; "
        "update the driver, or build fastvit with an older toolkit"
    )


def has_code_for(build_info: str, capability: tuple[int, int]) -> bool:
    """Returns whether the kernels have code for a GPU of a compute capability.

    Machine code runs on GPUs of the same major version and of the same or a later minor one, PTX on all later
    GPUs. Code for a target with a letter, such as sm_90a, runs on that version alone.
    """
    major, minor = capability
    for kind, digits, letter in re.findall(r"\b(sm|compute)_(\d+)([af]?)", build_info):
        target, gpu = int(digits), 10 * major + minor
        if target == gpu or (target < gpu and not letter and (kind == "compute" or target // 10 == major)):
            return True
    return False


@functools.cache
def _missing_code_message(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if has_code_for(fastvit_ops.cuda_build(), capability):
        return ""
    number = ".".join(map(str, capability))
    older = " and a toolkit before CUDA 13" if capability < (7, 5) else ""
    return (
        f"the CUDA kernels have no code for this {torch.cuda.get_device_name(device)}, of compute capability "
        f"{number}; build fastvit with TORCH_CUDA_ARCH_LIST={number}{older}. The kernels are {CUDA_STATUS}"
    )


def gpu_problem(device: torch.device) -> str:
    """Returns why there are no kernels for a GPU, or ""."""
    if not HAS_CUDA_KERNELS:
        return f"the CUDA kernels are {CUDA_STATUS}"
    # Under torch.compile the capability cannot be read; the kernels' launchers raise instead.
    return (
        ""
        if torch.compiler.is_compiling() or not torch.cuda.is_available()
        else _missing_code_message(device)
    )


class MissingOps:
    """Replaces `torch.ops.fastvit` where there is no library: every op raises ImportError."""

    def __getattr__(self, op: str):
        require_kernels(f"fastvit.ops.{op}")


def require_kernels(name: str) -> None:
    """Raises ImportError where there is no library. The error says that `name` needs one."""
    if NOT_BUILT_REASON:
        raise ImportError(f"{name} needs fastvit's kernels, but {NOT_BUILT_REASON}")


def increment_versions(*tensors: torch.Tensor | None) -> None:
    """Increments the version counters of tensors that an op has written. Ops leave them as they are."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


class LibraryStatus(NamedTuple):
    """The libraries that `load_libraries` has loaded."""

    missing_reason: str  # Why there is no library; "" if there is one.
    has_cuda_kernels: bool
    cuda_status: str  # For which GPUs the CUDA kernels were built, or why they are not loaded.


def load_libraries() -> LibraryStatus:
    """Loads the libraries that exist.

    Raises:
        ImportError: FASTVIT_KERNELS is neither 0 nor 1.
    """
    cpu, cuda = PACKAGE_DIR / "_C.so", PACKAGE_DIR / "_cuda.so"
    setting = os.environ.get("FASTVIT_KERNELS") or "1"
    if setting not in ("0", "1"):
        raise ImportError(f"fastvit: FASTVIT_KERNELS is {setting!r}; 0 or 1 expected")
    if setting == "0":
        reason = "FASTVIT_KERNELS=0 says that none are loaded"
        return LibraryStatus(reason, False, "not loaded: FASTVIT_KERNELS=0")
    if not cpu.exists() and installed_without_kernels():
        reason = (
            "this fastvit was installed with FASTVIT_KERNELS=0; `pip install .` in its sources without that "
            "variable builds them, on Linux with a C++ compiler"
        )
        return LibraryStatus(reason, False, "not built: FASTVIT_KERNELS=0")
    if not cpu.exists():
        reason = (
            f"{cpu} is missing; build it with `make install` or `pip install .`, on Linux with a C++ "
            "compiler, and import the latter from a folder without these sources"
        )
        return LibraryStatus(reason, False, "not built")
    torch.ops.load_library(str(cpu))
    status = _load_cuda_library(cuda, torch.ops.fastvit.cuda_build())
    return LibraryStatus("", status.startswith("loaded"), status)


def _load_cuda_library(cuda: Path, build_info: str) -> str:
    """Loads the CUDA library, and returns its status: "loaded" and the build, or why it is not loaded."""
    if not cuda.exists():
        return (
            build_info if build_info.startswith("not built") else f"missing from {PACKAGE_DIR}; {build_info}"
        )
    if torch.version.cuda is None:  # A CPU build of torch lacks the stream function that the library needs.
        return f"not loaded, because this torch is a CPU build; {build_info}"
    if problem := driver_problem(build_info):
        warnings.warn(f"fastvit: the CUDA kernels are not loaded: {problem}", stacklevel=3)
        return f"not loaded: {problem}; {build_info}"
    torch.ops.load_library(str(cuda))
    return f"loaded; {build_info}"


NOT_BUILT_REASON, HAS_CUDA_KERNELS, CUDA_STATUS = load_libraries()
fastvit_ops: Any = MissingOps() if NOT_BUILT_REASON else torch.ops.fastvit
