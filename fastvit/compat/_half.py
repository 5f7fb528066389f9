"""Half precision on the CPU: what FASTVIT_HALF says."""

import os

import torch

HALVES = ("bfloat16", "float16")


def cpu_half() -> torch.dtype:
    """The dtype that stands for CUDA's float16: bfloat16, which needs no loss scaling, or float16.

    Raises:
        ValueError: FASTVIT_HALF is neither.
    """
    name = os.environ.get("FASTVIT_HALF") or HALVES[0]
    if name not in HALVES:
        raise ValueError(f"FASTVIT_HALF takes {' or '.join(HALVES)}, got {name!r}")
    return getattr(torch, name)
