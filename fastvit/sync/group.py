"""The backend by which a process group shares statistics, and the agreement of its ranks on their layers.

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
from ..ops import accumulation_dtype
from . import cpu_peer, cuda_peer
from .agreement import Agreement, Failed, Unavailable, answers_text
from .collective import Direct, Packed
from .protocol import LEAST_PACKETS, MOST_RANKS, Tag, packets
from .transport import Backend, Reduce

SETTINGS = ("auto", "collective", "peer")
# Backends over peer memory, by device type. host_of() names the ranks' host, connect() makes a backend.
PROVIDERS = {"cpu": cpu_peer, "cuda": cuda_peer}

_NO_P2P = "NCCL_P2P_DISABLE=1"  # a user whose GPUs cannot access each other's memory sets it

_log = logging.getLogger("fastvit.sync")


class LayerKey(NamedTuple):
    """A layer. `number` is unique among the layers of this process; 0 for a layer without one."""

    op: str
    number: int = 0
    momentum: float | None = None


class Group:
    """A process group on one device of each rank: its backend, and the layers that its ranks have agreed on.

    At the first call of a layer the ranks compare channels, dtype, momentum and order. Each exchange carries
    the layer's number in the group and the count of forward exchanges.
    """

    def __init__(self, process_group: "dist.ProcessGroup", device: torch.device):
        self._process_group, self._device = weakref.ref(process_group), device
        self.name = process_group.group_name
        self._process = os.getpid()
        self._agreement = Agreement.of(process_group, device.type)
        self._layers: dict[tuple, int] = {}
        self._names: list[str] = []
        self._backwards: set[int] = set()  # ids of autograd's graph tasks that exchange sums
        self._backends: list[Backend] = []  # the last is in use; a CUDA graph may use those before it
        self.why = ""

    @property
    def backend(self) -> Backend:
        """The backend that the group chose at the first call of a layer."""
        return self._backends[-1]

    def moments(self, layer: LayerKey, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        """The moments of x over all ranks, and the tag for the backward."""
        tag = self._next(layer, x.shape[channel_dim], accumulation_dtype(x.dtype))
        return self.backend.moments(x, channel_dim, tag), self.backend.tag()

    def sums(self, reduce: Reduce, tag: Tensor) -> Tensor:
        """This rank's sums, and those of all ranks."""
        self._enter_backward()
        return self.backend.sums(reduce, Tag(*tag.tolist()))

    def share_moments(self, layer: LayerKey, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """`moments` of a rank that has formed its own already, `(2C + 2,)`."""
        tag = self._next(layer, numbers.numel() // 2 - 1, numbers.dtype)
        return self.backend.share(numbers, tag), self.backend.tag()

    def share_sums(self, numbers: Tensor, tag: Tensor) -> Tensor:
        self._enter_backward()
        return self.backend.share(numbers, Tag(*tag.tolist()))

    def describe(self) -> str:
        return f"group {self.name} ({self._agreement.world} ranks, {self._device.type}): {self.why}"

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process}, which is a rank of group "
                f"{self.name}; the child is not: initialise torch.distributed in the child"
            )

    def _next(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> Tag:
        """The tag of the next forward exchange.

        If a backward raised on this rank only, the other ranks may have received all its packets and continue
        with the next step. So this rank counts one more step, and the tags differ.
        """
        self._check_process()
        key = (layer.number, layer.op, channels, dtype)
        number = self._layers.get(key)
        if number is None:
            number = self._layers[key] = self._agree(layer, channels, dtype)
        if self._backwards and torch._C._current_graph_task_id() == -1:  # not a forward within a backward
            self._backwards.clear()
            self.backend.next_step()
        return Tag(number, self.backend.next_step())

    def _enter_backward(self) -> None:
        self._check_process()
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self._backwards:
            self._backwards.add(number)
            end = functools.partial(self._backwards.discard, number)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # not called if the backward raises

    def _agree(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> int:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first call of a layer ({layer.op}, {channels} channels) that shares statistics cannot "
                "be captured into a CUDA graph, because the ranks compare it and allocate; run a step before"
            )
        if self._backends:
            self.backend.check_usable()
        number = len(self._names)
        momentum = "cumulative" if layer.momentum is None else f"{layer.momentum:g}"
        name = f"layer {number} ({layer.op}, {channels} channels)"
        answers = self._agreement.ask(
            f"first call of {name}", f"{layer.op}, {channels} channels, {dtype}, momentum {momentum}"
        )
        if len(answers) > 1:
            raise RuntimeError(
                f"rank {self._agreement.rank}: the ranks of group {self.name} differ in their layer "
                f"{number}: {answers_text(answers)}"
            )
        if not self._backends or not self.backend.reserve(channels, dtype):
            self._choose(channels, dtype)
        self._names.append(name)
        return number

    def _name_of(self, tag: Tag, direction: str) -> str:
        name = self._names[tag.layer] if tag.layer < len(self._names) else f"layer {tag.layer}"
        return f"{direction} of {name}, step {tag.forward_index} of group {self.name}"

    def _choose(self, channels: int, dtype: torch.dtype) -> None:
        backend, self.why, level = self._vote(channels, dtype)
        backend.reserve(channels, dtype)
        if self._device.type == "cpu":
            self._backends.clear()  # unmaps what no graph uses
        self._backends.append(backend)
        _log.log(level, "statistics of rank %d, %s", self._agreement.rank, self.describe())

    def _vote(self, channels: int, dtype: torch.dtype) -> tuple[Backend, str, int]:
        """The backend, why, and the level at which to say so."""
        setting = os.environ.get("FASTVIT_STATISTICS") or "auto"
        if setting == "auto" and self._device.type == "cuda" and os.environ.get("NCCL_P2P_DISABLE") == "1":
            setting = _NO_P2P
        settings = self._agreement.ask("choice of statistics", setting)
        if wrong := set(settings).difference(SETTINGS, [_NO_P2P]):
            raise ValueError(f"FASTVIT_STATISTICS is {sorted(wrong)[0]!r}; {', '.join(SETTINGS)} expected")
        peer_required = "peer" in settings
        try:
            if "collective" in settings:
                raise Unavailable("FASTVIT_STATISTICS=collective")
            if _NO_P2P in settings and not peer_required:
                raise Unavailable(_NO_P2P)
            if self._agreement.world > MOST_RANKS:
                raise Unavailable(f"{self._agreement.world} ranks, more than {MOST_RANKS}")
            host = self._host()
            connect = PROVIDERS[self._device.type].connect
            capacity = max(LEAST_PACKETS, packets(channels, dtype))
            peer = connect(self._agreement, capacity, self._name_of, self._device, peer_required)
            return peer, f"{peer.name}, {host}", logging.DEBUG
        except Unavailable as reason:
            if peer_required:
                raise RuntimeError(
                    f"FASTVIT_STATISTICS=peer, but group {self.name} cannot: {reason}"
                ) from None
            process_group = self._process_group()
            assert process_group is not None  # the calling layer holds it
            other = (Direct if self._device.type == "cpu" else Packed)(
                process_group, self._agreement, self._device, self._name_of
            )
            warns = isinstance(reason, Failed) and self._agreement.rank == 0
            return other, f"{other.name}: {reason}", logging.WARNING if warns else logging.DEBUG

    def _host(self) -> str:
        """The host of all ranks. Raises Unavailable where they have several, or none with peer memory."""
        provider = PROVIDERS.get(self._device.type)
        if provider is None:
            raise Unavailable(f"no peer memory on {self._device.type}")
        host = self._agreement.together("host of the ranks", lambda: provider.host_of(self._device))
        if not self._agreement.same("host of the ranks", host):
            raise Unavailable("several hosts")
        return host


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Group]]" = (
    weakref.WeakKeyDictionary()
)


def group_of(process_group: "dist.ProcessGroup", device: torch.device) -> Group:
    """The `Group` for tensors of this device; all ranks make theirs at the first call, in the same order."""
    by_device = _groups.get(process_group)
    if by_device is None:
        by_device = _groups[process_group] = {}
    if device not in by_device:
        by_device[device] = Group(process_group, device)
    return by_device[device]


def _all_groups() -> list[Group]:
    return [one for by_device in _groups.values() for one in by_device.values() if one._backends]


def describe_groups() -> list[str]:
    """For each group that has exchanged statistics: its backend, and the reason."""
    return [one.describe() for one in _all_groups()]


def check(wait: bool = False) -> None:
    """Raises errors that GPUs have reported about exchanges of any group.

    Every forward, backward and evaluation of a layer that shares statistics calls this. Without `wait` the
    host does not wait, so an error of an exchange that still runs is raised by a later call.

    Args:
        wait: waits for the GPUs first. For loops that use the result of a step before another call of such a
            layer: an optimizer step, a replay of a CUDA graph.

    Raises:
        RuntimeError: an exchange failed; the message names the ranks, the layers and the step.
    """
    for one in _all_groups():
        for backend in one._backends:
            backend.check(wait)


def available_backends() -> str:
    """The backends that new groups on this machine would choose, as text."""
    setting = os.environ.get("FASTVIT_STATISTICS") or "auto"
    cpu, cuda = "SharedMemory on one host", "CudaIpc on one host with peer access"
    try:
        cpu_peer.host_of(torch.device("cpu"))
    except OSError:
        cpu = "Collective"
    if not _library.HAS_CUDA_KERNELS:
        cuda = "Collective"
    if setting == "collective":
        cpu = cuda = "Collective"
    elsewhere = "otherwise an error" if setting == "peer" else "otherwise Collective"
    return f"FASTVIT_STATISTICS={setting}: CPU {cpu}, CUDA {cuda}, {elsewhere}"
