"""Statistics between GPUs that see each other's memory: no collective, and no additional kernels.

The host never waits. When an exchange fails, the GPU writes a report to host memory, and the next call raises
it. Memory is shared by CUDA IPC handles, which are sent through the group's store.
"""

import torch
from torch import Tensor

from .. import _library, ops
from .agreement import Agreement, Unavailable, process_space
from .protocol import Describe, NumberKind, Tag
from .transport import Peer, Reduce

_ops = _library.fastvit_ops
_TRIALS, _TRIAL_SECONDS = 4, 10.0
_TIMEOUT_FRACTION = 0.8  # of the group's: a GPU gives up and reports before NCCL's watchdog ends the process


class DeviceMemory(Peer):
    """Statistics over ranks that have mapped each other's arenas.

    One stream at a time: when the current stream changes, the new one waits for the old one. A captured CUDA
    graph exchanges at every replay; the caller orders the streams of replays.
    """

    _stream = None

    def _run(self, op: Reduce, tag: Tag) -> Tensor:
        if self._device.type == "cuda" and not self._capturing():
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        return super()._run(op, tag)


def host_of(device: torch.device) -> str:
    """A name that is equal on ranks whose GPUs may see each other's memory; OSError without CUDA kernels."""
    if problem := _library.gpu_problem(device):
        raise OSError(problem)
    return process_space()


def connect(
    agreement: Agreement, capacity: int, describe: Describe, device: torch.device, may_share_gpu: bool
) -> DeviceMemory:
    """Opens and tests arenas on all ranks. Raises Unavailable on all ranks where that fails on one.

    Two ranks share a GPU only with FASTVIT_STATISTICS=peer, since both must run at the same time (under MPS),
    and they share its multiprocessors then.
    """
    own, arenas = ipc_allocate(agreement, _ops.arena_bytes(agreement.world, capacity), device, may_share_gpu)
    return trial("CudaIpc", own, arenas, agreement, capacity, describe)


def ipc_allocate(
    agreement: Agreement, size: int, device: torch.device, may_share_gpu: bool
) -> tuple[Tensor, list[int]]:
    """Allocates memory on each rank's GPU and opens that of all ranks: the own, and all addresses."""
    own, handle = agreement.together("memory of a GPU", lambda: _ops.ipc_allocate(size, device.index or 0))
    answer = f"{agreement.rank}|{_gpu(device)}|{bytes(handle.tolist()).hex()}"
    by_rank = [answer.split("|") for answer in agreement.ask("handle of a GPU's memory", answer)]
    handles = {int(rank): bytearray.fromhex(handle) for rank, _, handle in by_rank}
    gpus = {gpu for _, gpu, _ in by_rank}
    if len(gpus) < agreement.world and not may_share_gpu:
        raise Unavailable(f"{agreement.world} ranks on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}")

    def opened(rank: int) -> int:
        if rank == agreement.rank:
            return own.data_ptr()
        return _ops.ipc_open(torch.frombuffer(handles[rank], dtype=torch.uint8), device.index or 0)

    arenas = agreement.together(
        "memory of the peers' GPUs", lambda: [opened(rank) for rank in range(agreement.world)]
    )
    return own, arenas


def _gpu(device: torch.device) -> str:
    """The UUID of the GPU, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def trial(
    name: str, own: Tensor, arenas: list[int], agreement: Agreement, capacity: int, describe: Describe
) -> DeviceMemory:
    """Tests arenas that all ranks have opened by exchanges of known numbers, and returns a backend.

    A path between two GPUs may be blocked although their memory can be opened. Packets do not arrive then,
    and the GPU gives up after a few seconds, before training begins.
    """
    rank, world, device = agreement.rank, agreement.world, own.device
    longest = _library.max_kernel_seconds(device)
    seconds = min(_TRIAL_SECONDS, agreement.timeout / 2, longest)
    tested = DeviceMemory(name, own, arenas, rank, capacity, seconds, describe)
    # A rank's GPU does not wait while another rank still loads kernels, which may take long.
    agreement.together("kernels of the layers", lambda: load_kernels(device))

    def works() -> None:
        numbers, changed = torch.arange(2 * capacity, device=device).float()[None], False
        # A rank that finds wrong numbers continues to the last exchange, so that no peer waits for it.
        for step in range(1, _TRIALS + 1):
            both = tested.share(numbers + (rank + step), Tag(0, step))
            want = torch.stack([numbers[0] + (peer + step) for peer in range(world)]).sum(0)
            changed |= not torch.equal(both, torch.stack([numbers[0] + (rank + step), want]))
            tested.check()
        if changed:
            raise RuntimeError("numbers arrived changed")

    agreement.together(f"trial of {name}", works)
    seconds = min(_TIMEOUT_FRACTION * agreement.timeout, longest)
    return DeviceMemory(name, own, arenas, rank, capacity, seconds, describe)


def load_kernels(device: torch.device) -> None:
    """Runs the layers' kernels once, over a group of this rank alone.

    CUDA loads a kernel at its first launch and may wait for the GPU. Behind an exchange that waits for a peer
    this is a deadlock, if the peer waits for a kernel that this rank launches later.
    """
    capacity, tag = 2 * 9, Tag(0, 0)
    arena = torch.zeros(_ops.arena_bytes(1, capacity), dtype=torch.uint8, device=device)
    alone = DeviceMemory("alone", arena, [arena.data_ptr()], 0, capacity, _TRIAL_SECONDS, lambda *_: "")
    shapes = (2, 8), (2, 3), (2, 1, 64), (2, 1, 3)  # rows and planes, with and without 16-byte vectors
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for shape in shapes:
            x = torch.zeros(shape, dtype=dtype, device=device)
            moments = alone.moments(x, 1, tag)
            for residual, inplace in ((None, False), (x, False), (None, True)):
                _run_ops(alone, x, moments, residual, inplace)
    for kind in NumberKind.MOMENTS, NumberKind.SUMS:
        numbers = torch.zeros(6, device=device)
        alone.share(numbers if kind == NumberKind.MOMENTS else numbers[None], tag)


def _run_ops(alone: DeviceMemory, x: Tensor, moments: Tensor, residual: Tensor | None, inplace: bool) -> None:
    """Runs forward and backward of a layer."""
    tag, given = Tag(0, 0), {"residual": residual, "from_output": inplace}
    forward = ops.bn_forward_inplace if inplace else ops.bn_forward
    made = forward(x, residual=residual, moments=moments)
    saved = made if inplace else made[1]
    _, sums = alone.sums(lambda exchange: ops.bn_reduce(x, x, saved, **given, exchange=exchange), tag)
    ops.bn_backward(x, x, saved, **given, global_sums=sums)
