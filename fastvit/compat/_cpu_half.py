"""Half precision on the CPU, which the environment variable FASTVIT_HALF chooses."""

import os

import torch

CPU_HALF_NAMES = ("bfloat16", "float16")


def cpu_half() -> torch.dtype:
    """Returns the dtype that replaces CUDA's float16: bfloat16, which needs no loss scaling, or float16.

    Raises:
        ValueError: FASTVIT_HALF is neither of these names.
    """
    name = os.environ.get("FASTVIT_HALF") or CPU_HALF_NAMES[0]
    if name not in CPU_HALF_NAMES:
        raise ValueError(f"FASTVIT_HALF takes {' or '.join(CPU_HALF_NAMES)}, got {name!r}")
    return getattr(torch, name)
