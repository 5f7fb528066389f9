"""Statistics between GPUs that see each other's memory: no collective, and no kernels but the layers' own.

The host never waits: when an exchange has failed, the GPU writes a report into memory of the host, which the
next call raises as an error. Memory comes from handles of CUDA's, sent through the group's store, or where
FASTVIT_STATISTICS=symm_mem asks for it from torch's symmetric memory.
"""

import torch
from torch import Tensor

from .. import _library, ops
from .agreement import Agreement, Unavailable, process_space
from .peer import Peer, arena_bytes, meeting
from .protocol import MOST_RANKS, Describe, Kind, Tag
from .transport import Reduce

_ops = torch.ops.fastvit
_TRIALS, _TRIAL_SECONDS = 4, 10.0
# Of the group's timeout: a GPU gives up first, so that its report and not NCCL's watchdog ends the process.
_SHARE_OF_TIMEOUT = 0.8


class DeviceMemory(Peer):
    """Statistics over ranks that have each other's arenas mapped.

    One stream at a time: when the caller's stream changes, the new one waits for the one before. What is
    captured into a CUDA graph exchanges anew at every replay; on which stream is for the caller to order.
    """

    _stream = None
    captured = False  # a graph may hold the arenas' addresses for as long as the process lives

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        self._begin()
        if self._capturing():
            self.captured = True
        elif self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        return op(self._exchange.of(tag))

    def close(self) -> None:
        if not self.captured:
            self._arenas = []


def place(device: torch.device) -> str:
    """The same on all ranks whose GPUs may see each other's memory; OSError where that cannot be."""
    if not _library.HAS_CUDA:
        raise OSError(f"no CUDA kernels: {_library.CUDA_STATUS}")
    return process_space()


def connect(
    agreement: Agreement, capacity: int, describe: Describe, device: torch.device, asked: list[str]
) -> DeviceMemory:
    """Arenas that all ranks have opened and tried. Raises Unavailable, on all alike, where there are none.

    Two ranks on one GPU do it only when asked: where a service lets their kernels run at once (MPS) they
    share its multiprocessors too.
    """
    if agreement.world > MOST_RANKS:
        raise Unavailable(f"{agreement.world} ranks, more than {MOST_RANKS}")
    symmetric = asked == ["symm_mem"]
    provide = symmetric_memory if symmetric else ipc_memory
    arenas = provide(agreement, arena_bytes(agreement.world, capacity), device, bool(asked))
    name = "SymmMem" if symmetric else "CudaIpc"
    return trial(name, arenas, agreement, capacity, describe)


def ipc_memory(agreement: Agreement, size: int, device: torch.device, asked: bool) -> list[Tensor]:
    """Memory of each rank's GPU, opened by all."""
    made = agreement.together("memory of a GPU", lambda: _ops.ipc_memory(size, device.index or 0))
    own, handle = made
    said = f"{agreement.rank}|{_gpu(device)}|{bytes(handle.tolist()).hex()}"
    by_rank = [answer.split("|") for answer in agreement.ask("handle of a GPU's memory", said)]
    handles = {int(rank): bytearray.fromhex(handle) for rank, _, handle in by_rank}
    gpus = {gpu for _, gpu, _ in by_rank}
    if len(gpus) < agreement.world and not asked:
        raise Unavailable(f"{agreement.world} ranks on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")

    def opened(rank: int) -> Tensor:
        if rank == agreement.rank:
            return own
        return _ops.ipc_memory(size, device.index or 0, torch.frombuffer(handles[rank], dtype=torch.uint8))[0]

    return agreement.together(
        "memory of the peers' GPUs", lambda: [opened(rank) for rank in range(agreement.world)]
    )


def _gpu(device: torch.device) -> str:
    """Tells the GPU from all others of the host, whatever CUDA_VISIBLE_DEVICES calls it."""
    return str(torch.cuda.get_device_properties(device).uuid)


_symmetric: list[tuple[Tensor, object]] = []  # never freed: a peer may still write to it


def symmetric_memory(agreement: Agreement, size: int, device: torch.device, asked: bool) -> list[Tensor]:
    """The same by torch.distributed's symmetric memory, whose API is torch's own and not yet stable.

    It maps physical memory (cuMemMap, NVSHMEM or NCCL, as torch.distributed._symmetric_memory.set_backend
    says) where handles of CUDA's are not to be had, as for GPUs of other hosts in one NVLink domain.
    """
    own = agreement.together(  # before a rendezvous, which all must come to
        "symmetric memory",
        lambda: _symmetric_module().empty(size, dtype=torch.uint8, device=device).zero_(),
    )

    def opened() -> list[Tensor]:
        handle = _symmetric_module().rendezvous(own, agreement.group_name)
        _symmetric.append((own, handle))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # zeros, before anybody sends
        return [
            own if rank == agreement.rank else handle.get_remote_tensor(rank, (size,), torch.uint8)
            for rank in range(agreement.world)
        ]

    return agreement.together("symmetric memory of the peers", opened)


def _symmetric_module():
    import torch.distributed._symmetric_memory as module  # which not every build of torch has

    return module


def trial(
    name: str, arenas: list[Tensor], agreement: Agreement, capacity: int, describe: Describe
) -> DeviceMemory:
    """Statistics over arenas that all ranks have opened, after exchanges whose numbers are known.

    Memory that could be opened is not yet memory that works: a path between two GPUs may be blocked, and then
    a peer's packets do not arrive. The GPU gives up after a few seconds, and nobody has trained with it.
    """
    rank, world, device = agreement.rank, agreement.world, arenas[0].device
    seconds = min(_TRIAL_SECONDS, agreement.timeout / 2)
    tested = DeviceMemory(name, arenas, rank, capacity, seconds, describe, lambda said: [said])

    def works() -> None:
        load_kernels(device)
        numbers, changed = torch.arange(2 * capacity, device=device).float()[None], False
        for step in range(1, _TRIALS + 1):  # to the end, unless the peers know: nobody waits for this rank
            both = tested.share(numbers + (rank + step), Tag(0, step))
            want = torch.stack([numbers[0] + (peer + step) for peer in range(world)]).sum(0)
            changed |= not torch.equal(both, torch.stack([numbers[0] + (rank + step), want]))
            tested.check()
        if changed:
            raise RuntimeError("numbers arrived changed")

    agreement.together(f"trial of {name}", works)
    seconds, meet = _SHARE_OF_TIMEOUT * agreement.timeout, meeting(agreement, one_step=False)
    return DeviceMemory(name, arenas, rank, capacity, seconds, describe, meet)


def load_kernels(device: torch.device) -> None:
    """Runs the layers' kernels once, over a group of this rank alone.

    CUDA loads a kernel at its first launch, and may wait for the GPU then: behind an exchange that waits for
    a peer, which may be waiting for what this rank would launch next.
    """
    capacity = 2 * 9
    arena = torch.zeros(arena_bytes(1, capacity), dtype=torch.uint8, device=device)
    alone = DeviceMemory("alone", [arena], 0, capacity, 1.0, lambda *_: "", lambda said: [said])
    tag = Tag(0, 0)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for shape, channel_dim in (((2, 8), 1), ((2, 3), 1), ((2, 1, 64), 1), ((2, 1, 3), 1)):
            x = torch.zeros(shape, dtype=dtype, device=device)
            for z in (None, x):
                moments = alone.moments(x, channel_dim, tag)
                y, saved = ops.bn_forward(x, moments, z=z, channel_dim=channel_dim)
                sums = alone.sums(
                    lambda e, x=x, y=y, z=z, saved=saved, d=channel_dim: ops.bn_reduce(  # type: ignore[misc]
                        x, y, z, saved, channel_dim=d, exchange=e
                    ),
                    tag,
                )
                ops.bn_backward(x, y, z, saved, sums[1], channel_dim=channel_dim)
            saved = ops.abn_forward_(x, moments, channel_dim=channel_dim)
            sums = alone.sums(
                lambda e, x=x, y=y, saved=saved, d=channel_dim: ops.abn_reduce(  # type: ignore[misc]
                    x, y, saved, channel_dim=d, exchange=e
                ),
                tag,
            )
            ops.abn_backward(x, y, saved, sums[1], channel_dim=channel_dim)
    for kind in Kind.MOMENTS, Kind.SUMS:
        numbers = torch.zeros(6, device=device)
        alone.share(numbers if kind == Kind.MOMENTS else numbers[None], tag)
