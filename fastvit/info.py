"""`python -m fastvit.info`: what was built, what this machine offers, and how statistics are shared."""

import os
import platform
import subprocess

import torch
import torch.distributed as dist

import fastvit

from . import _library


def _architectures() -> str:
    """GPU architectures inside _cuda.so, when the toolkit's cuobjdump is at hand."""
    try:
        command = ["cuobjdump", "--list-elf", "--list-ptx", str(_library.FOLDER / "_cuda.so")]
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = {
        name for word in listing.split() for name in word.split(".") if name.startswith(("sm_", "compute_"))
    }
    return ", for " + ", ".join(sorted(found)) if found else ""


def facts() -> dict[str, str]:
    """Name and value of everything `python -m fastvit.info` prints."""
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        gpu = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    else:
        gpu = "none"
    backends = []
    if dist.is_available():
        backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    return {
        "fastvit": fastvit.__version__,
        "library": str(_library.FOLDER),
        "CPU kernels": f"{torch.ops.fastvit.cpu_capability()}, {torch.get_num_threads()} threads",
        "CUDA kernels": _library.CUDA_STATUS
        + (_architectures() if (_library.FOLDER / "_cuda.so").exists() else ""),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "GPUs": gpu,
        "process groups": ", ".join(backends) or "none",
        "statistics": "one process: local; several: one packed collective each way",
    }


def main() -> None:
    values = facts()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
