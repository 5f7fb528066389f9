"""The launcher of this process: torchrun, torch.distributed.launch, srun, mpirun, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .config import ConfigError

# mpirun's variables: rank, number of ranks, rank on this host, number of ranks there
MPI = {
    "Open MPI": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}


@dataclass(frozen=True)
class Launch:
    """This process's rank, and the address of rank 0."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    launcher: str  # "torchrun", "srun" or "mpirun"
    run: str = ""  # a name that is equal on the ranks of one run and differs from those of others

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"the rank must be below the number of ranks, got {self.rank} of {self.world}")
        if not 0 < self.port < 2**16:
            raise ConfigError(f"MASTER_PORT must be a port, 1 to 65535, got {self.port}")


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables that launchers set; None when this process runs alone.

    RANK and WORLD_SIZE are torchrun's and torch.distributed.launch's. SLURM_PROCID and
    SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) are srun's; then rank 0's host is the first of the node list and
    the port follows from the numbers of job and step, unless MASTER_ADDR and MASTER_PORT say otherwise. `MPI`
    has those of mpirun, which says nothing of rank 0's host.

    Raises:
        ConfigError: the variables are incomplete or invalid.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if len(given) == 2:
        rank, world, local_rank = (_number(environment, name) for name in (*given, "LOCAL_RANK"))
        address, port = environment.get("MASTER_ADDR", "127.0.0.1"), _port(environment, 29500)
        name = environment.get("TORCHELASTIC_RUN_ID", "")
        return Launch(rank, world, local_rank, address, port, "torchrun", name)
    if "SLURM_PROCID" in environment:
        name = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        tasks = _number(environment, name, "1" if environment["SLURM_PROCID"] == "0" else None)
        if tasks > 1:
            return _from_slurm(tasks, environment)
    for launcher, names in MPI.items():
        if names[0] in environment and (launch := _from_mpi(launcher, names, environment)):
            return launch
    if given:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise ConfigError(
            f"{given[0]} is set, but not {missing}; start every rank by a launcher, which sets both, or "
            "unset it to train alone"
        )
    return None


def _from_slurm(world: int, environment: Mapping[str, str]) -> Launch:
    rank, local_rank = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next(filter(None, map(environment.get, lists)), "")
    address = environment.get("MASTER_ADDR") or _first_host(nodes)
    job, step = (_number(environment, name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _port(environment, 20000 + (job + 1009 * step) % 10000)  # of the job's steps, and of jobs near it
    return Launch(rank, world, local_rank, address, port, "srun", f"{job}.{step}")


def _from_mpi(launcher: str, names: list[str], environment: Mapping[str, str]) -> Launch | None:
    rank, world = (_number(environment, name) for name in names[:2])
    if world == 1:
        return None
    local_rank, here = (_number(environment, name) for name in names[2:])
    address = environment.get("MASTER_ADDR") or ("127.0.0.1" if here == world else None)
    if address is None:
        raise ConfigError(
            f"{launcher} started ranks on several hosts; set MASTER_ADDR to the host of rank 0 on all of "
            "them, and MASTER_PORT where 29500 is in use (mpirun -x MASTER_ADDR=... or -genv MASTER_ADDR ...)"
        )
    name = environment.get("PMIX_NAMESPACE", "")
    return Launch(rank, world, local_rank, address, _port(environment, 29500), "mpirun", name)


def _first_host(nodes: str) -> str:
    """`gpu[003-007,9],login1` -> `gpu003`; `rack[1-2]node[03-04]` -> `rack1node03`; `a,b` -> `a`."""
    if not nodes:
        raise ConfigError(
            "SLURM_PROCID is set but SLURM_JOB_NODELIST is not; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _port(environment: Mapping[str, str], default: int) -> int:
    return _number(environment, "MASTER_PORT", str(default))


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be a whole number, got {text!r}; the launcher sets it"
        ) from None
