"""Loads the compiled libraries: `_C.so` (schemas, CPU kernels) and, where it was built, `_cuda.so`."""

from pathlib import Path

import torch

FOLDER = Path(__file__).parent


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
    torch.ops.load_library(str(cuda))
    return True, f"loaded; {built}"


HAS_CUDA, CUDA_STATUS = load()
