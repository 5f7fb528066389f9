"""Loads the compiled libraries: `_C.so` (schemas, CPU kernels) and, where it was built, `_cuda.so`."""

import ctypes
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
