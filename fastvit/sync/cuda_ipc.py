"""Statistics between GPUs that see each other's memory: no collective, and no additional kernels.

The host never waits. When an exchange fails, the GPU writes a report to host memory, and the next call raises
the error. The ranks share memory by CUDA IPC handles, which they send through the group's store.
"""

import torch
from torch import Tensor

from .. import _library, ops
from .backend import ExchangeOp, PeerBackend
from .process_watch import pid_namespace_id
from .protocol import DescribeExchange, Tag
from .store_consensus import BackendUnavailable, StoreConsensus

_ops = _library.fastvit_ops
_NUM_TRIAL_EXCHANGES = 4  # Each of the two slots is used twice.
_TRIAL_SECONDS = 10.0  # A trial exchange that takes longer fails.
# After this fraction of the group's timeout a GPU abandons an exchange and reports a fault. NCCL's watchdog
# would end the process after the whole timeout.
_TIMEOUT_FRACTION = 0.8
_WARM_UP_CAPACITY = 2 * 9  # Packets of float64 moments of 8 channels, the widest in `warm_up_kernels`.
_WARM_UP_TAG = Tag(0, 0)


class CudaIpcBackend(PeerBackend):
    """Statistics over ranks that have mapped each other's arenas.

    Exchanges run on one stream at a time: when the current stream changes, the new stream waits for the old
    stream. A captured CUDA graph exchanges at every replay; the caller orders the streams of replays.
    """

    name = "CudaIpc"
    _stream = None  # The stream of the last exchange, None before the first.

    @staticmethod
    def host_name(device: torch.device) -> str:
        """Returns a name that is equal on ranks whose GPUs may see each other's memory.

        Raises OSError if the CUDA kernels cannot run on the device.
        """
        if problem := _library.gpu_problem(device):
            raise OSError(problem)
        return pid_namespace_id()

    @classmethod
    def connect(
        cls,
        consensus: StoreConsensus,
        capacity: int,
        describe: DescribeExchange,
        device: torch.device,
        may_share_gpu: bool,
    ) -> "CudaIpcBackend":
        """Returns a backend over arenas that all ranks have opened and verified.

        Two ranks may share a GPU only with FASTVIT_STATISTICS=peer. Their kernels must run at the same time,
        which needs MPS, and the ranks divide the GPU's multiprocessors.

        Raises:
            BackendUnavailable: on all ranks, if a rank cannot open or verify the arenas.
        """
        size = _ops.arena_bytes(consensus.world_size, capacity)
        local_memory, arenas = allocate_and_open(consensus, size, device, may_share_gpu)
        return verify_arenas(local_memory, arenas, consensus, capacity, describe)

    def _run_exchange(self, op: ExchangeOp, tag: Tag) -> Tensor:
        if self._device.type == "cuda" and not self._is_capturing():
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        return super()._run_exchange(op, tag)


def allocate_and_open(
    consensus: StoreConsensus, size: int, device: torch.device, may_share_gpu: bool
) -> tuple[Tensor, list[int]]:
    """Allocates `size` bytes on each rank's GPU, and opens the memory of all ranks.

    Returns:
        This rank's memory, and the addresses of all ranks' memory, in rank order.
    """
    local_memory, local_handle = consensus.run_on_all_ranks(
        "memory of a GPU", lambda: _ops.ipc_allocate(size, device.index or 0)
    )
    answer = f"{consensus.rank}|{_gpu_uuid(device)}|{bytes(local_handle.tolist()).hex()}"
    answers = consensus.gather_answers("handle of a GPU's memory", answer)
    fields = [answer.split("|") for answer in answers]
    handles = {int(rank): bytearray.fromhex(handle) for rank, _, handle in fields}
    gpus = {gpu for _, gpu, _ in fields}
    if len(gpus) < consensus.world_size and not may_share_gpu:
        raise BackendUnavailable(
            f"{consensus.world_size} ranks on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
        )

    def open_arena(rank: int) -> int:
        if rank == consensus.rank:
            return local_memory.data_ptr()
        return _ops.ipc_open(torch.frombuffer(handles[rank], dtype=torch.uint8), device.index or 0)

    arenas = consensus.run_on_all_ranks(
        "memory of the peers' GPUs", lambda: [open_arena(rank) for rank in range(consensus.world_size)]
    )
    return local_memory, arenas


def _gpu_uuid(device: torch.device) -> str:
    """Returns the UUID of the GPU, which does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def verify_arenas(
    local_memory: Tensor,
    arenas: list[int],
    consensus: StoreConsensus,
    capacity: int,
    describe: DescribeExchange,
) -> CudaIpcBackend:
    """Tests opened arenas by exchanges of known numbers, and returns a backend over them. All ranks call it.

    A path between two GPUs may be blocked although their memory can be opened. In that case
    packets do not arrive, and the GPU abandons the exchange after a few seconds, before training begins.
    """
    rank, world_size, device = consensus.rank, consensus.world_size, local_memory.device
    max_kernel_seconds = _library.max_kernel_seconds(device)
    seconds = min(_TRIAL_SECONDS, consensus.timeout / 2, max_kernel_seconds)
    trial_backend = CudaIpcBackend(local_memory, arenas, rank, capacity, seconds, describe)
    # All ranks load kernels before the trial. Otherwise a GPU might time out while a peer loads kernels.
    consensus.run_on_all_ranks("kernels of the layers", lambda: warm_up_kernels(device))

    def run_trial_exchanges() -> None:
        numbers = torch.arange(2 * capacity, device=device).float()[None]
        # A rank that finds wrong numbers continues to the last exchange, so that no peer waits for this rank.
        has_wrong_numbers = False
        for index in range(1, _NUM_TRIAL_EXCHANGES + 1):
            local_sums = numbers + (rank + index)
            merged = trial_backend.merge_over_ranks(local_sums, Tag(0, index))
            expected_sums = torch.stack([numbers[0] + (peer + index) for peer in range(world_size)]).sum(0)
            has_wrong_numbers |= not torch.equal(merged, torch.stack([local_sums[0], expected_sums]))
            trial_backend.raise_reported_fault()
        if has_wrong_numbers:
            raise RuntimeError("numbers arrived changed")

    consensus.run_on_all_ranks(f"trial of {CudaIpcBackend.name}", run_trial_exchanges)
    seconds = min(_TIMEOUT_FRACTION * consensus.timeout, max_kernel_seconds)
    return CudaIpcBackend(local_memory, arenas, rank, capacity, seconds, describe)


def warm_up_kernels(device: torch.device) -> None:
    """Runs the layers' kernels once, over a group of this rank alone.

    CUDA loads a kernel at its first launch, and the load may wait until the GPU is idle. A load behind an
    exchange that waits for a peer is a deadlock if the peer waits for a later kernel of this rank.
    """
    backend = _self_backend(device)
    shapes = (2, 8), (2, 3), (2, 1, 64), (2, 1, 3)  # Rows and planes, each with and without 16-byte vectors
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for shape in shapes:
            _run_every_kernel(backend, torch.zeros(shape, dtype=dtype, device=device))
    numbers = torch.zeros(6, device=device)
    for moments_or_sums in (numbers, numbers[None]):
        backend.merge_over_ranks(moments_or_sums, _WARM_UP_TAG)


def _self_backend(device: torch.device) -> CudaIpcBackend:
    """Returns a backend of a group that has this rank alone."""
    arena = torch.zeros(_ops.arena_bytes(1, _WARM_UP_CAPACITY), dtype=torch.uint8, device=device)
    return CudaIpcBackend(arena, [arena.data_ptr()], 0, _WARM_UP_CAPACITY, _TRIAL_SECONDS, lambda *_: "")


def _run_every_kernel(backend: CudaIpcBackend, x: Tensor) -> None:
    """Runs a layer three times: without options, with a residual, and in place."""
    moments = backend.compute_moments(x, 1, _WARM_UP_TAG)
    for residual, inplace in ((None, False), (x, False), (None, True)):
        _run_layer(backend, x, moments, residual, inplace)


def _run_layer(
    backend: CudaIpcBackend, x: Tensor, moments: Tensor, residual: Tensor | None, inplace: bool
) -> None:
    """Runs the ops of a layer's forward, after the moments, and of its backward."""
    options = {"residual": residual, "from_output": inplace}
    forward = ops.bn_forward_inplace if inplace else ops.bn_forward
    result = forward(x, residual=residual, moments=moments)
    saved = result if inplace else result[1]
    _, global_sums = backend.compute_sums(
        lambda exchange: ops.bn_reduce(x, x, saved, **options, exchange=exchange), _WARM_UP_TAG
    )
    ops.bn_backward(x, x, saved, **options, global_sums=global_sums)
