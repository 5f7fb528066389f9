"""`python -m fastvit.info`: what was built, what this machine offers, and how statistics are shared."""

import os
import platform
import struct

import torch
import torch.distributed as dist

import fastvit

from . import _library, sync

FATBIN_MAGIC = bytes.fromhex("50ed55ba")


def architectures(library: bytes) -> list[str]:
    """What GPUs a library holds code for: `sm_90` is machine code, `compute_90` PTX for later ones.

    Read from the headers that nvcc puts before each piece of device code: a container (magic, version, header
    size, size) of entries (kind 1 PTX or 2 machine code, ..., header size, size, ..., architecture).
    """
    found, at = set(), 0
    while (at := library.find(FATBIN_MAGIC, at)) >= 0:
        _, header, size = struct.unpack_from("<HHQ", library, at + 4)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            found.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}")
            entry += header + size
        at = end
    return sorted(found)


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
    cuda = _library.FOLDER / "_cuda.so"
    built_for = f" for {', '.join(architectures(cuda.read_bytes()))}" if cuda.exists() else ""
    return {
        "fastvit": fastvit.__version__,
        "library": str(_library.FOLDER),
        "CPU kernels": f"{torch.ops.fastvit.cpu_capability()}, {torch.get_num_threads()} threads",
        "CUDA kernels": _library.CUDA_STATUS + built_for,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "GPUs": gpu,
        "process groups": ", ".join(backends) or "none",
        "statistics": "; ".join([sync.possible(), *sync.taken()]),
    }


def main() -> None:
    values = facts()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
