"""Reads the variables of a launcher: torchrun, torch.distributed.launch, srun or mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .config import ConfigError

# The variables of mpirun, in this order: rank, number of ranks, rank on this host, ranks on this host
MPI_VARIABLES = {
    "Open MPI": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}
DEFAULT_MASTER_PORT = 29500  # torchrun has the same default.


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process, and the address at which all ranks meet."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    run_id: str = ""  # equal on the ranks of one run, and different in every other run


def detect_launcher(environment: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    """Reads the variables that launchers set. Returns None when this process runs alone.

    torchrun comes first, since torchrun may run inside a SLURM job, whose variables are set too.
    """
    for read_launcher in (_from_torchrun, _from_slurm, _from_mpi):
        if (info := read_launcher(environment)) is not None:
            return info
    for name, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in environment:
            raise ConfigError(
                f"{name} is set, but not {missing}; start every rank by a launcher, which sets both, or "
                f"unset {name} to train alone"
            )
    return None


def _from_torchrun(environment: Mapping[str, str]) -> LaunchInfo | None:
    """Reads the variables of torchrun and torch.distributed.launch."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    return _read_info(environment, ["RANK", "WORLD_SIZE", "LOCAL_RANK"], run_id=run_id)


def _from_slurm(environment: Mapping[str, str]) -> LaunchInfo | None:
    """Reads the variables of srun. The port follows from the numbers of the job and the step."""
    rank = environment.get("SLURM_PROCID")
    tasks = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    # A batch script has SLURM_PROCID=0 too, although srun did not start it.
    if not rank or _read_number(environment, tasks, 1 if rank == "0" else "") < 2:
        return None
    nodes = _read_number(environment, "SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", 1))
    hint = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    job, step = (_read_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _read_info(
        environment,
        ["SLURM_PROCID", tasks, "SLURM_LOCALID"],
        address_hint=hint if nodes > 1 else "",
        port=20000 + (job + 1009 * step) % 10000,
        run_id=f"{job}.{step}",
    )


def _from_mpi(environment: Mapping[str, str]) -> LaunchInfo | None:
    """Reads the variables of mpirun, of Open MPI or MPICH."""
    for rank, world_size, local_rank, local_size in MPI_VARIABLES.values():
        if rank in environment and _read_number(environment, world_size) > 1:
            is_multi_node = _read_number(environment, local_size) < _read_number(environment, world_size)
            hint = "mpirun -x MASTER_ADDR=... or -genv MASTER_ADDR ..., and MASTER_PORT if 29500 is in use"
            names = [rank, world_size, local_rank]
            return _read_info(environment, names, address_hint=hint if is_multi_node else "")
    return None


def _read_info(
    environment: Mapping[str, str],
    names: list[str],
    address_hint: str = "",
    port: int = DEFAULT_MASTER_PORT,
    run_id: str = "",
) -> LaunchInfo:
    """Reads rank, world size and local rank from the variables `names`, and the address of rank 0.

    srun and mpirun do not set the host of rank 0, so with several hosts the user sets MASTER_ADDR;
    `address_hint` says how.
    """
    address = environment.get("MASTER_ADDR", "")
    if address_hint and not address:
        raise ConfigError(
            f"the ranks are on several hosts; set MASTER_ADDR to the host of rank 0: {address_hint}"
        )
    rank, world_size, local_rank = (_read_number(environment, name) for name in names)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{names[0]}: the rank must be below the number of ranks, got {rank} of {world_size}; "
            "the launcher sets both"
        )
    port = _read_number(environment, "MASTER_PORT", port)
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT must be a port, 1 to 65535, got {port}")
    return LaunchInfo(rank, world_size, local_rank, address or "127.0.0.1", port, run_id)


def _read_number(environment: Mapping[str, str], name: str, default: int | str = "") -> int:
    try:
        return int(environment.get(name, default))
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be a whole number, got {environment.get(name)!r}; "
            "the launcher sets it"
        ) from None
