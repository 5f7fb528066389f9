"""Memory of GPUs by torch.distributed's symmetric memory: only when FASTVIT_STATISTICS=symm_mem asks for it.

It maps physical memory (cuMemMap, NVSHMEM or NCCL, as torch.distributed._symmetric_memory.set_backend says)
where handles of CUDA's are not to be had, as for GPUs of other hosts in one NVLink domain. Its API is torch's
own and not yet stable.
"""

from collections.abc import Callable

import torch

from .. import _library
from .agreement import Agreement, answers_text
from .device_memory import MOST_RANKS, DeviceMemory, trial
from .exchange import Tag, room

NAME = "SymmMem"
_ops = torch.ops.fastvit
_arenas: list[tuple[torch.Tensor, object]] = []  # never freed: a peer may still write to them


def host(device: torch.device) -> str:
    """The same on all ranks: torch finds out itself which GPUs see each other's memory; else why not."""
    if not _library.HAS_CUDA:
        return f"no CUDA kernels: {_library.CUDA_STATUS}"
    try:
        backend = _symmetric_memory().get_backend(device)
    except (ImportError, AttributeError) as error:
        return f"no symmetric memory in torch {torch.__version__}: {error}"
    return f"backend {backend}" if backend else f"no symmetric memory for {device.type}"


def connect(
    agreement: Agreement,
    channels: int,
    dtype: torch.dtype,
    describe: Callable[[Tag, str], str],
    device: torch.device,
    asked: bool,
) -> DeviceMemory | str:
    """Arenas that torch has mapped on all ranks, with room for layers of `channels`; or why there are none.

    All ranks get the same kind of answer.
    """
    if agreement.world > MOST_RANKS:
        return f"{agreement.world} ranks, more than {MOST_RANKS}"
    capacity = room(channels, dtype)
    size = _ops.exchange_arena_bytes(agreement.world, capacity)
    own, arenas, result = None, [], "there"
    try:
        own = _symmetric_memory().empty(size, dtype=torch.uint8, device=device).zero_()
    except RuntimeError as error:
        result = str(error).splitlines()[0]
    answers = agreement.ask("symmetric memory", result)  # before a rendezvous, which all must come to
    if list(answers) != ["there"]:
        return answers_text(answers)
    try:
        handle = _symmetric_memory().rendezvous(own, agreement.group_name)
        _arenas.append((own, handle))
        arenas = [
            own if rank == agreement.rank else handle.get_remote_tensor(rank, (size,), torch.uint8)
            for rank in range(agreement.world)
        ]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeros, before anybody sends
    except RuntimeError as error:
        result = str(error).splitlines()[0]
    answers = agreement.ask("symmetric memory of the peers", result)
    if list(answers) != ["there"]:
        return answers_text(answers)
    return trial(NAME, arenas, agreement, capacity, describe)


def _symmetric_memory():
    import torch.distributed._symmetric_memory as module  # which not every build of torch has

    return module
