"""Memory of GPUs that the processes of one host open by handles of CUDA's, sent through the group's store."""

from collections.abc import Callable
from pathlib import Path

import torch

from .. import _library
from .agreement import Agreement, answers_text
from .device_memory import MOST_RANKS, DeviceMemory, trial
from .exchange import Tag, room

NAME = "CudaIpc"
_ops = torch.ops.fastvit


def host(device: torch.device) -> str:
    """The same on all ranks whose GPUs may see each other's memory; else why not."""
    if not _library.HAS_CUDA:
        return f"no CUDA kernels: {_library.CUDA_STATUS}"
    try:
        return f"host {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError as error:
        return f"no name of the host: {error}"


def connect(
    agreement: Agreement,
    channels: int,
    dtype: torch.dtype,
    describe: Callable[[Tag, str], str],
    device: torch.device,
    asked: bool,
) -> DeviceMemory | str:
    """Arenas that all ranks have opened and tried, with room for layers of `channels`; or why there are none.

    All ranks get the same kind of answer. Two ranks on one GPU do it only when asked: where a service lets
    their kernels run at once (MPS), those of one may wait in every multiprocessor for those of the other.
    """
    if agreement.world > MOST_RANKS:
        return f"{agreement.world} ranks, more than {MOST_RANKS}"
    capacity = room(channels, dtype)
    size = _ops.exchange_arena_bytes(agreement.world, capacity)
    try:
        own, handle = _ops.ipc_memory(size, device.index)
        answer = f"{_gpu(device)}|{bytes(handle.tolist()).hex()}"
    except RuntimeError as error:
        own, answer = None, f"no memory: {str(error).splitlines()[0]}"
    answers = agreement.ask("memory of a GPU", f"{agreement.rank}|{answer}")
    by_rank = dict(answer.split("|", 1) for answer in answers)
    if failed := {a: [int(r)] for r, a in by_rank.items() if a.startswith("no ")}:
        return answers_text(failed)
    gpus = {answer.split("|")[0] for answer in by_rank.values()}
    if len(gpus) < agreement.world and not asked:
        return f"{agreement.world} ranks on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    result = "opened"
    try:
        arenas = [
            own if rank == agreement.rank else _open(by_rank[str(rank)].split("|")[1], size, device)
            for rank in range(agreement.world)
        ]
    except RuntimeError as error:
        result = str(error).splitlines()[0]
    answers = agreement.ask("memory of the peers' GPUs", result)
    if list(answers) != ["opened"]:
        return answers_text(answers)
    return trial(NAME, arenas, agreement, capacity, describe)


def _gpu(device: torch.device) -> str:
    """Tells the GPU from all others of the host, whatever CUDA_VISIBLE_DEVICES calls it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _open(handle: str, size: int, device: torch.device) -> torch.Tensor:
    name = torch.tensor(list(bytes.fromhex(handle)), dtype=torch.uint8, device="cpu")
    return _ops.ipc_open(name, size, device.index)
