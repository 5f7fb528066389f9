"""Detects the launcher of this process: torchrun, torch.distributed.launch, srun, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .config import ConfigError

__all__ = ["Launch", "find_launch"]


@dataclass(frozen=True)
class Launch:
    """This process's rank, and the address of rank 0."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    launcher: str  # "torchrun" or "srun"


def find_launch(local_rank: int | None = None, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables that launchers set; None when this process runs alone.

    RANK and WORLD_SIZE are torchrun's and torch.distributed.launch's. SLURM_PROCID and
    SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) are srun's; then rank 0's host is the first of the node list and
    the port follows from the job's number, unless MASTER_ADDR and MASTER_PORT say otherwise.

    Args:
        local_rank: the flag that torch.distributed.launch passes without `--use_env`.

    Raises:
        ConfigError: the variables are incomplete or are not whole numbers.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(local_rank, environment)
    if "SLURM_PROCID" in environment:
        name = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        tasks = _number(environment, name, "1")
        return _from_slurm(tasks, environment) if tasks > 1 else None
    return None


def _from_torchrun(local_rank: int | None, environment: Mapping[str, str]) -> Launch:
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if "LOCAL_RANK" in environment:
        local_rank = _number(environment, "LOCAL_RANK")
    if local_rank is None or local_rank < 0:
        raise ConfigError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not; start the ranks with torchrun, "
            "or give --local-rank"
        )
    local_world = _number(environment, "LOCAL_WORLD_SIZE", str(world))
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    port = _number(environment, "MASTER_PORT", "29500")
    return Launch(rank, world, local_rank, local_world, address, port, "torchrun")


def _from_slurm(world: int, environment: Mapping[str, str]) -> Launch:
    rank = _number(environment, "SLURM_PROCID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # 8(x2),4: eight tasks on each of two nodes, four on the next.
    per_node = [
        int(count)
        for count, repeat in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(repeat or 1))
    ]
    node = _number(environment, "SLURM_NODEID", "0")
    local_world = per_node[node] if node < len(per_node) else world
    local_rank = _number(environment, "SLURM_LOCALID", str(rank % local_world))
    address = environment.get("MASTER_ADDR") or _first_host(nodes)
    default_port = 20000 + _number(environment, "SLURM_JOB_ID", "0") % 10000
    port = _number(environment, "MASTER_PORT", str(default_port))
    return Launch(rank, world, local_rank, local_world, address, port, "srun")


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
        raise ConfigError(f"environment variable {name} must be a whole number, got {text!r}") from None
