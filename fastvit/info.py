"""`python -m fastvit.info`: the build, this machine, and the backends of statistics."""

import os
import platform

import torch
import torch.distributed as dist

import fastvit

from . import _library, sync

__all__ = ["facts", "main"]


def facts() -> dict[str, str]:
    """Name and value of everything `python -m fastvit.info` prints."""
    if torch.cuda.is_available():
        gpus = [_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        gpu = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    else:
        gpu = "none"
    backends = []
    if dist.is_available():
        backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    return {
        "fastvit": fastvit.__version__,
        "library": str(_library.FOLDER),
        "CPU kernels": _library.NOT_BUILT
        or f"{_library.ops.cpu_capability()}, {torch.get_num_threads()} threads",
        "CUDA kernels": _library.CUDA_STATUS,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "GPUs": gpu,
        "process groups": ", ".join(backends) or "none",
        "statistics": "; ".join([sync.available_backends(), *sync.describe_groups()]),
    }


def _gpu(device: torch.device) -> str:
    lacking = ", without kernels" if _library.gpu_problem(device) else ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}{lacking})"


def main() -> None:
    values = facts()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
