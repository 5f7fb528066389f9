"""`StatisticsGroup` has a process group's backend, and the layers on which the group's ranks have agreed.

FASTVIT_STATISTICS (docs/sharing-statistics.md) is read when a group is first used.
"""

import functools
import logging
import os
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from .._deprecation import renamed_arguments, warn_renamed
from ..ops import accumulation_dtype
from .backend import Backend, ExchangeOp, PeerBackend
from .collective import CollectiveBackend, CpuCollectiveBackend, GpuCollectiveBackend
from .cuda_ipc import CudaIpcBackend
from .protocol import MAX_RANKS, MIN_ARENA_PACKETS, Tag, num_packets
from .shared_memory import SharedMemoryBackend
from .store_consensus import BackendSetupFailed, BackendUnavailable, StoreConsensus, format_answers

STATISTICS_SETTINGS = ("auto", "collective", "peer")  # values of FASTVIT_STATISTICS
PEER_BACKENDS: dict[str, type[PeerBackend]] = {"cpu": SharedMemoryBackend, "cuda": CudaIpcBackend}

_NO_P2P = "NCCL_P2P_DISABLE=1"  # Users set this variable if GPUs cannot access each other's memory.

_log = logging.getLogger("fastvit.sync")


class LayerKey(NamedTuple):
    """Identifies a layer. `layer_id` is unique among the layers of this process; 0 stands for none."""

    op: str
    layer_id: int = 0
    momentum: float | None = None

    @property
    def number(self) -> int:
        warn_renamed("LayerKey.number", "LayerKey.layer_id")
        return self.layer_id


LayerKey.__new__ = renamed_arguments(number="layer_id")(LayerKey.__new__)  # type: ignore[method-assign]


class StatisticsGroup:
    """A process group on one device of each rank: its backend, and the layers on which its ranks have agreed.

    At the first call of a layer the ranks compare channels, dtype, momentum and order. Each exchange carries
    the layer's index in the group and the count of forward exchanges.
    """

    def __init__(self, process_group: "dist.ProcessGroup", device: torch.device):
        self._process_group, self._device = weakref.ref(process_group), device
        self.name = process_group.group_name
        self._pid = os.getpid()
        self._consensus = StoreConsensus.for_group(process_group, device.type)
        self._layer_indices: dict[tuple, int] = {}
        self._layer_names: list[str] = []
        self._graph_task_ids: set[int] = set()  # The running or failed backwards that have exchanged sums.
        self._backends: list[Backend] = []  # The last one is in use. CUDA graphs may use earlier ones.
        self.backend_reason = ""

    @property
    def backend(self) -> Backend:
        """The backend that the group chose at the first call of a layer."""
        return self._backends[-1]

    def compute_moments(self, layer: LayerKey, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        """Returns the moments of x over all ranks, `(2C + 2,)`, and the tag for the backward."""
        tag = self._next_tag(layer, x.shape[channel_dim], accumulation_dtype(x.dtype))
        return self.backend.compute_moments(x, channel_dim, tag), self.backend.last_tag_tensor()

    def compute_sums(self, reduce: ExchangeOp, tag: Tensor) -> Tensor:
        """Returns this rank's sums and those of all ranks, `(2, 2C)`."""
        self._register_backward()
        return self.backend.compute_sums(reduce, Tag(*tag.tolist()))

    def merge_moments(self, layer: LayerKey, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `compute_moments` does, from this rank's moments, `(2C + 2,)`."""
        tag = self._next_tag(layer, numbers.numel() // 2 - 1, numbers.dtype)
        return self.backend.merge_over_ranks(numbers, tag), self.backend.last_tag_tensor()

    def merge_sums(self, numbers: Tensor, tag: Tensor) -> Tensor:
        """Returns what `compute_sums` does, from this rank's sums, `(1, 2C)`."""
        self._register_backward()
        return self.backend.merge_over_ranks(numbers, Tag(*tag.tolist()))

    def describe(self) -> str:
        world_size = self._consensus.world_size
        return f"group {self.name} ({world_size} ranks, {self._device.type}): {self.backend_reason}"

    def _check_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._pid}, which is a rank of group "
                f"{self.name}; the child is not: initialise torch.distributed in the child"
            )

    def _next_tag(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> Tag:
        """Returns the tag of the next forward exchange.

        If a backward raised on this rank alone, the other ranks may have received all packets of this rank,
        and continue with the next forward. So this rank counts one more forward exchange: then the tags
        differ, and all ranks raise.
        """
        self._check_not_forked()
        key = (layer.layer_id, layer.op, channels, dtype)
        index = self._layer_indices.get(key)
        if index is None:
            index = self._layer_indices[key] = self._register_layer(layer, channels, dtype)
        # The id is -1 outside of a backward. A reentrant checkpoint runs a forward within a backward.
        if self._graph_task_ids and torch._C._current_graph_task_id() == -1:
            self._graph_task_ids.clear()
            self.backend.next_forward_index()
        return Tag(index, self.backend.next_forward_index())

    def _register_backward(self) -> None:
        """Records that the running backward exchanges sums, until this backward ends without an error."""
        self._check_not_forked()
        task_id = torch._C._current_graph_task_id()
        if task_id != -1 and task_id not in self._graph_task_ids:
            self._graph_task_ids.add(task_id)
            discard_task_id = functools.partial(self._graph_task_ids.discard, task_id)
            # The engine does not call the callback if the backward raises, so the id of a failed one stays.
            torch.autograd.Variable._execution_engine.queue_callback(discard_task_id)

    def _register_layer(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> int:
        """Compares a new layer on all ranks, makes room for it, and returns its index in the group."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first call of a layer ({layer.op}, {channels} channels) over a process group cannot be "
                "captured into a CUDA graph, because the ranks compare the layer and allocate memory; run a "
                "step before"
            )
        if self._backends:
            self.backend.raise_if_failed()
        index = len(self._layer_names)
        momentum = "cumulative" if layer.momentum is None else f"{layer.momentum:g}"
        name = f"layer {index} ({layer.op}, {channels} channels)"
        answers = self._consensus.gather_answers(
            f"first call of {name}", f"{layer.op}, {channels} channels, {dtype}, momentum {momentum}"
        )
        if len(answers) > 1:
            raise RuntimeError(
                f"rank {self._consensus.rank}: the ranks of group {self.name} differ in their layer "
                f"{index}: {format_answers(answers)}"
            )
        if not self._backends or not self.backend.try_reserve(channels, dtype):
            self._choose_backend(channels, dtype)
        self._layer_names.append(name)
        return index

    def _describe_exchange(self, tag: Tag, direction: str) -> str:
        is_known = tag.layer < len(self._layer_names)
        name = self._layer_names[tag.layer] if is_known else f"layer {tag.layer}"
        return f"{direction} of {name}, step {tag.forward_index} of group {self.name}"

    def _choose_backend(self, channels: int, dtype: torch.dtype) -> None:
        backend, self.backend_reason, log_level = self._negotiate_backend(channels, dtype)
        backend.try_reserve(channels, dtype)
        if self._device.type == "cpu":
            self._backends.clear()  # Unmaps segments of shared memory. No CUDA graph uses them.
        self._backends.append(backend)
        _log.log(log_level, "statistics of rank %d, %s", self._consensus.rank, self.describe())

    def _negotiate_backend(self, channels: int, dtype: torch.dtype) -> tuple[Backend, str, int]:
        """Returns the backend on which all ranks agree, the reason, and the log level for the reason."""
        settings = self._gather_settings()
        peer_required = "peer" in settings
        try:
            backend, host = self._connect_peer_backend(settings, channels, dtype)
            return backend, f"{backend.name}, {host}", logging.DEBUG
        except BackendUnavailable as reason:
            if peer_required:
                raise RuntimeError(
                    f"FASTVIT_STATISTICS=peer, but group {self.name} cannot use peer memory: {reason}"
                ) from None
            collective_backend = self._create_collective_backend()
            is_warning = isinstance(reason, BackendSetupFailed) and self._consensus.rank == 0
            log_level = logging.WARNING if is_warning else logging.DEBUG
            return collective_backend, f"{collective_backend.name}: {reason}", log_level

    def _gather_settings(self) -> set[str]:
        """Returns the values of FASTVIT_STATISTICS on all ranks, and _NO_P2P for a rank that sets it."""
        setting = os.environ.get("FASTVIT_STATISTICS") or "auto"
        if setting == "auto" and self._device.type == "cuda" and os.environ.get("NCCL_P2P_DISABLE") == "1":
            setting = _NO_P2P
        settings = set(self._consensus.gather_answers("choice of statistics", setting))
        if invalid := settings.difference(STATISTICS_SETTINGS, [_NO_P2P]):
            expected = ", ".join(STATISTICS_SETTINGS)
            raise ValueError(f"FASTVIT_STATISTICS is {min(invalid)!r}; {expected} expected")
        return settings

    def _connect_peer_backend(
        self, settings: set[str], channels: int, dtype: torch.dtype
    ) -> tuple[PeerBackend, str]:
        """Returns a backend over peer memory, and the host of all ranks. May raise BackendUnavailable."""
        peer_required = "peer" in settings
        if "collective" in settings:
            raise BackendUnavailable("FASTVIT_STATISTICS=collective")
        if _NO_P2P in settings and not peer_required:
            raise BackendUnavailable(_NO_P2P)
        if self._consensus.world_size > MAX_RANKS:
            raise BackendUnavailable(f"{self._consensus.world_size} ranks, more than {MAX_RANKS}")
        backend_class = PEER_BACKENDS.get(self._device.type)
        if backend_class is None:
            raise BackendUnavailable(f"no peer memory on {self._device.type}")
        host = self._common_host(backend_class)
        capacity = max(MIN_ARENA_PACKETS, num_packets(channels, dtype))
        backend = backend_class.connect(
            self._consensus, capacity, self._describe_exchange, self._device, peer_required
        )
        return backend, host

    def _common_host(self, backend_class: type[PeerBackend]) -> str:
        """Returns the host of all ranks. Raises BackendUnavailable if there are several hosts, or no name."""
        host = self._consensus.run_on_all_ranks(
            "host of the ranks", lambda: backend_class.host_name(self._device)
        )
        if not self._consensus.all_ranks_equal("host of the ranks", host):
            raise BackendUnavailable("several hosts")
        return host

    def _create_collective_backend(self) -> CollectiveBackend:
        process_group = self._process_group()
        assert process_group is not None  # The calling layer keeps the group alive.
        backend_class = CpuCollectiveBackend if self._device.type == "cpu" else GpuCollectiveBackend
        return backend_class(process_group, self._consensus, self._device, self._describe_exchange)


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, StatisticsGroup]]" = (
    weakref.WeakKeyDictionary()
)


def get_statistics_group(process_group: "dist.ProcessGroup", device: torch.device) -> StatisticsGroup:
    """Returns the StatisticsGroup of a process group, for tensors on `device`.

    All ranks create their StatisticsGroups at the first calls, in the same order.
    """
    groups_by_device = _groups.get(process_group)
    if groups_by_device is None:
        groups_by_device = _groups[process_group] = {}
    if device not in groups_by_device:
        groups_by_device[device] = StatisticsGroup(process_group, device)
    return groups_by_device[device]


def _groups_in_use() -> list[StatisticsGroup]:
    groups = [group for groups_by_device in _groups.values() for group in groups_by_device.values()]
    return [group for group in groups if group._backends]


def describe_groups() -> list[str]:
    """Returns a line for each group that has exchanged statistics: its backend, and why it was chosen."""
    return [group.describe() for group in _groups_in_use()]


def check(wait: bool = False) -> None:
    """Raises errors that GPUs have reported about exchanges of any group.

    Every forward, backward and evaluation of a layer over a process group calls this function. Without `wait`
    the host does not wait for GPUs, so a later call raises the error of an exchange that still runs.

    Args:
        wait: whether to wait for the GPUs first. Loops need this if they use the result of a step, as in an
            optimizer step or a replay of a CUDA graph, before they call such a layer again.

    Raises:
        RuntimeError: an exchange failed; the message names the ranks, the layers and the step.
    """
    for group in _groups_in_use():
        for backend in group._backends:
            backend.raise_reported_fault(wait)


def available_backends() -> str:
    """Returns, as text, the backends that new groups on this machine would choose."""
    setting = os.environ.get("FASTVIT_STATISTICS") or "auto"
    cpu_backend, cuda_backend = "SharedMemory on one host", "CudaIpc on one host with peer access"
    try:
        SharedMemoryBackend.host_name(torch.device("cpu"))
    except OSError:
        cpu_backend = "Collective"
    if not _library.HAS_CUDA_KERNELS:
        cuda_backend = "Collective"
    if setting == "collective":
        cpu_backend = cuda_backend = "Collective"
    fallback = "otherwise an error" if setting == "peer" else "otherwise Collective"
    return f"FASTVIT_STATISTICS={setting}: CPU {cpu_backend}, CUDA {cuda_backend}, {fallback}"
