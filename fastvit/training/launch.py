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

    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name, "" if default is None else str(default))
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"environment variable {name} must be a whole number, got {environment.get(name)!r}; the "
                "launcher sets it"
            ) from None

    def launched(names: list[str], address: str, port: int, launcher: str, run: str) -> Launch:
        rank, world, local_rank = map(number, names[:3])
        return Launch(rank, world, local_rank, address, number("MASTER_PORT", port), launcher, run)

    address = environment.get("MASTER_ADDR", "")
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if len(given) == 2:
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        return launched([*given, "LOCAL_RANK"], address or "127.0.0.1", 29500, "torchrun", run)
    if "SLURM_PROCID" in environment:
        tasks = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        if number(tasks, 1 if environment["SLURM_PROCID"] == "0" else None) > 1:
            job, step = number("SLURM_JOB_ID", 0), number("SLURM_STEP_ID", 0)
            port = 20000 + (job + 1009 * step) % 10000  # of the job's steps, and of jobs near it
            names = ["SLURM_PROCID", tasks, "SLURM_LOCALID"]
            return launched(names, address or _first_host(environment), port, "srun", f"{job}.{step}")
    for launcher, names in MPI.items():
        if names[0] in environment and number(names[1]) > 1:
            if not address and number(names[3]) < number(names[1]):
                raise ConfigError(
                    f"{launcher} started ranks on several hosts; set MASTER_ADDR to the host of rank 0 on "
                    "all of them, and MASTER_PORT where 29500 is in use (mpirun -x MASTER_ADDR=... or "
                    "-genv MASTER_ADDR ...)"
                )
            run = environment.get("PMIX_NAMESPACE", "")
            return launched(names, address or "127.0.0.1", 29500, "mpirun", run)
    if given:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise ConfigError(
            f"{given[0]} is set, but not {missing}; start every rank by a launcher, which sets both, or "
            "unset it to train alone"
        )
    return None


def _first_host(environment: Mapping[str, str]) -> str:
    """`gpu[003-007,9],login1` -> `gpu003`; `rack[1-2]node[03-04]` -> `rack1node03`; `a,b` -> `a`."""
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next(filter(None, map(environment.get, lists)), "")
    if not nodes:
        raise ConfigError(
            "SLURM_PROCID is set but SLURM_JOB_NODELIST is not; set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]
