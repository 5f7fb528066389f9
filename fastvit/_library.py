"""Loads the compiled libraries: `_C.so` (schemas, CPU kernels) and, where it was built, `_cuda.so`."""

import contextlib
import ctypes
import functools
import math
import re
import warnings
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


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
    """What is wrong with the driver for a library that was `built` with a CUDA runtime inside; or nothing.

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

    Machine code runs on GPUs of its major version with the same minor one or a later, PTX on all later ones.
    That of a target with a letter, such as sm_90a, runs on that version alone.
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
    if covers(torch.ops.fastvit.cuda_build(), capability):
        return ""
    number = ".".join(map(str, capability))
    older = " and a toolkit before CUDA 13" if capability < (7, 5) else ""
    return (
        f"the CUDA kernels have no code for this {torch.cuda.get_device_name(device)}, of compute capability "
        f"{number}; build fastvit with TORCH_CUDA_ARCH_LIST={number}{older}. They are {CUDA_STATUS}"
    )


def gpu_problem(device: torch.device) -> str:
    """Why there are no kernels for a GPU; or nothing."""
    if not HAS_CUDA:
        return f"the CUDA kernels are {CUDA_STATUS}"
    # The tracer of torch.compile cannot ask; the launchers say it then.
    return "" if torch.compiler.is_compiling() or not torch.cuda.is_available() else _lacks_code(device)


def load() -> tuple[bool, str]:
    """Loads the libraries that exist. Returns whether the CUDA kernels are loaded, and a reason."""
    cpu, cuda = FOLDER / "_C.so", FOLDER / "_cuda.so"
    if not cpu.exists():
        raise ImportError(
            f"fastvit: {cpu} is missing: this is a source tree that was not built. "
            "Run `make install`, or `pip install .` and import it from another folder."
        )
    torch.ops.load_library(str(cpu))
    built = torch.ops.fastvit.cuda_build()
    if not cuda.exists():
        return False, built if built.startswith("not built") else f"missing from {FOLDER}; {built}"
    if torch.version.cuda is None:  # a CPU build of torch lacks the stream function that it needs
        return False, f"not loaded, because this torch is a CPU build; {built}"
    if problem := driver_problem(built):
        warnings.warn(f"fastvit: the CUDA kernels are not loaded: {problem}", stacklevel=2)
        return False, f"not loaded: {problem}; {built}"
    torch.ops.load_library(str(cuda))
    return True, f"loaded; {built}"


HAS_CUDA, CUDA_STATUS = load()
