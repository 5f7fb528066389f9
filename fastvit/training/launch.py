"""The launcher of this process: torchrun, torch.distributed.launch, srun, mpirun, or none."""

from __future__ import annotations

import os
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
    run: str = ""  # a name that is equal on the ranks of one run and differs from those of others


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables that launchers set; None when this process runs alone.

    RANK and WORLD_SIZE are torchrun's and torch.distributed.launch's. SLURM_PROCID and
    SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) are srun's; then the port follows from the numbers of job and step,
    unless MASTER_PORT says otherwise. `MPI` has those of mpirun. Neither says what rank 0's host is.
    """

    def number(name: str, default: int | str = "") -> int:
        try:
            return int(environment.get(name, default))
        except ValueError:
            raise ConfigError(
                f"environment variable {name} must be a whole number, got {environment.get(name)!r}; the "
                "launcher sets it"
            ) from None

    port, run, several, how = 29500, "", False, ""
    torchrun = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    slurm = environment.get("SLURM_PROCID")  # "0" in a batch script, which srun did not start
    tasks = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    mpi = [name for name, names in MPI.items() if names[0] in environment and number(names[1]) > 1]
    if len(torchrun) == 2:
        names, run = [*torchrun, "LOCAL_RANK"], environment.get("TORCHELASTIC_RUN_ID", "")
    elif slurm and number(tasks, 1 if slurm == "0" else "") > 1:
        names = ["SLURM_PROCID", tasks, "SLURM_LOCALID"]
        several = number("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", 1)) > 1
        how = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        job, step = number("SLURM_JOB_ID", 0), number("SLURM_STEP_ID", 0)
        run, port = f"{job}.{step}", 20000 + (job + 1009 * step) % 10000  # another one for each step
    elif mpi:
        names = MPI[mpi[0]]
        several = number(names[3]) < number(names[1])
        how = "mpirun -x MASTER_ADDR=... or -genv MASTER_ADDR ..., and MASTER_PORT where 29500 is in use"
    elif torchrun:
        missing = {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK"}[torchrun[0]]
        raise ConfigError(
            f"{torchrun[0]} is set, but not {missing}; start every rank by a launcher, which sets both, or "
            "unset it to train alone"
        )
    else:
        return None
    address = environment.get("MASTER_ADDR", "")
    if several and not address:
        raise ConfigError(f"the ranks are on several hosts; set MASTER_ADDR to the host of rank 0: {how}")
    rank, world, local_rank = map(number, names[:3])
    if not 0 <= rank < world:
        raise ConfigError(f"the rank must be below the number of ranks, got {rank} of {world}")
    port = number("MASTER_PORT", port)
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT must be a port, 1 to 65535, got {port}")
    return Launch(rank, world, local_rank, address or "127.0.0.1", port, run)
