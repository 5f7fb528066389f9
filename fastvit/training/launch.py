"""The launcher of this process: torchrun, torch.distributed.launch, srun, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .config import ConfigError


@dataclass(frozen=True)
class Launch:
    """This process's rank, and the address of rank 0."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    launcher: str  # "torchrun" or "srun"


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables that launchers set; None when this process runs alone.

    RANK and WORLD_SIZE are torchrun's and torch.distributed.launch's. SLURM_PROCID and
    SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) are srun's; then rank 0's host is the first of the node list and
    the port follows from the job's number, unless MASTER_ADDR and MASTER_PORT say otherwise.

    Raises:
        ConfigError: the variables are incomplete or are not whole numbers.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world, local_rank = (
            _number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        address = environment.get("MASTER_ADDR", "127.0.0.1")
        return Launch(
            rank, world, local_rank, address, _number(environment, "MASTER_PORT", "29500"), "torchrun"
        )
    if "SLURM_PROCID" in environment:
        name = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        tasks = _number(environment, name, "1")
        return _from_slurm(tasks, environment) if tasks > 1 else None
    return None


def _from_slurm(world: int, environment: Mapping[str, str]) -> Launch:
    rank, local_rank = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or _first_host(nodes)
    default_port = 20000 + _number(environment, "SLURM_JOB_ID", "0") % 10000
    port = _number(environment, "MASTER_PORT", str(default_port))
    return Launch(rank, world, local_rank, address, port, "srun")


def _first_host(nodes: str) -> str:
    """`gpu[003-007,9],login1` -> `gpu003`; `a,b` -> `a`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if not found:
        raise ConfigError(
            "SLURM_PROCID is set but SLURM_JOB_NODELIST is not; set MASTER_ADDR to the host of rank 0"
        )
    return found[1] + (found[2] or "") + found[3]


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be a whole number, got {text!r}; torchrun and srun set it"
        ) from None
