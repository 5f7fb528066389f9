"""`python -m fastvit.info` prints the build, this machine, and how ranks exchange statistics."""

import os
import platform

import torch
import torch.distributed as dist

import fastvit

from . import _library, sync

__all__ = ["facts", "main"]


def facts() -> dict[str, str]:
    """Returns the name and value of each line that `python -m fastvit.info` prints."""
    if torch.cuda.is_available():
        gpus = [_describe_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        gpu = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    else:
        gpu = "none"
    backends = []
    if dist.is_available():
        backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    return {
        "fastvit": fastvit.__version__,
        "library": str(_library.PACKAGE_DIR),
        "CPU kernels": _library.NOT_BUILT_REASON
        or f"{_library.fastvit_ops.cpu_capability()}, {torch.get_num_threads()} threads",
        "CUDA kernels": _library.CUDA_STATUS,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "GPUs": gpu,
        "process groups": ", ".join(backends) or "none",
        "statistics": "; ".join([sync.available_backends(), *sync.describe_groups()]),
    }


def _describe_gpu(device: torch.device) -> str:
    note = ", without kernels" if _library.gpu_problem(device) else ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}{note})"


def main() -> None:
    values = facts()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
