"""A process group's way of sharing statistics: chosen once by all its ranks, and what its layers agree on.

FASTVIT_STATISTICS=auto|collective|peer|symm_mem, read when a group is first used: `auto` takes memory in
common where all ranks are CPU processes of one host, or have a GPU of one host each, else collectives;
`collective` always takes those; `peer` raises where no memory is in common, and lets ranks share a GPU;
`symm_mem` does so over torch's symmetric memory of GPUs. One rank that says `collective` decides for all.
"""

import functools
import logging
import os
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library
from ..ops import accumulation_dtype
from . import cuda_ipc, shared_memory, symm_mem
from .agreement import Agreement, answers_text
from .collective import Collective
from .device_memory import DeviceMemory
from .exchange import PendingSum, Tag

WISHES = ("auto", "collective", "peer", "symm_mem")
# Ways to exchange without a collective, by device type: host() says where, connect() makes one.
PROVIDERS = {"cpu": shared_memory, "cuda": cuda_ipc}
SYMM_MEM = {"cuda": symm_mem}  # those of FASTVIT_STATISTICS=symm_mem, where they are others

_log = logging.getLogger("fastvit.statistics")


@dataclass(frozen=True)
class Layer:
    """Which layer calls: `number` tells it from the other layers of this process (0: it has no number)."""

    op: str
    number: int = 0
    momentum: float | None = None


class GroupStatistics:
    """How the ranks of one group exchange tensors of one device type, and which layers they have agreed on.

    A layer's first call makes the ranks compare channels, dtype, momentum and order; each exchange carries
    the layer's number in the group and the count of forward exchanges so far.
    """

    def __init__(self, group: "dist.ProcessGroup", device: torch.device):
        self._group, self._device = weakref.ref(group), device
        self.name = group.group_name
        self._process = os.getpid()
        self._agreement = Agreement(group, device.type)
        self._layers: dict[tuple, int] = {}
        self._names: list[str] = []
        self._backwards: set[int] = set()  # by autograd's number: have exchanged sums and not ended
        self.transport, self.why = None, ""

    def gather(self, layer: Layer, moments: Tensor) -> tuple[Tensor, Tag]:
        """All ranks' moments, `(world_size, 2C + 2)`, and the tag for the backward."""
        tag = self._next(layer, (moments.numel() - 2) // 2, moments.dtype)
        return self.transport.gather(moments, tag), tag

    def begin(self, layer: Layer, x: Tensor, channel_dim: int) -> tuple[Tensor, Tag] | None:
        """`exchange` for a layer's ops, and the tag; None where the ops cannot exchange by themselves."""
        if self.transport is not None and not isinstance(self.transport, DeviceMemory):
            return None
        number = self._number(layer, x.shape[channel_dim], accumulation_dtype(x.dtype))
        if not isinstance(self.transport, DeviceMemory):
            return None
        tag = Tag(number, self._step())
        return self.transport.exchange(tag), tag

    def begin_sum(self, tag: Tag) -> Tensor | None:
        """The same for a layer's backward."""
        self._enter_backward()
        if not isinstance(self.transport, DeviceMemory):
            return None
        return self.transport.exchange(tag)

    def start_sum(self, sums: Tensor, tag: Tag) -> PendingSum:
        """Starts adding up `sums`, `(2C,)`, over ranks."""
        self._enter_backward()
        return self.transport.start_sum(sums, tag)

    def describe(self) -> str:
        return f"group {self.name} ({self._agreement.world} ranks, {self._device.type}): {self.why}"

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process} after that had joined group "
                f"{self.name}: it is no rank of the group; initialise torch.distributed in the child"
            )

    def _next(self, layer: Layer, channels: int, dtype: torch.dtype) -> Tag:
        number = self._number(layer, channels, dtype)
        return Tag(number, self._step())

    def _step(self) -> int:
        """The step of a forward exchange. One more is counted after a backward that raised on this rank.

        It may have raised when the other ranks had all they needed of it. They are in the next step then, and
        the tags differ.
        """
        if self._backwards and torch._C._current_graph_task_id() == -1:  # not a forward within a backward
            self._backwards.clear()
            self.transport.next_step()
        return self.transport.next_step()

    def _enter_backward(self) -> None:
        self._check_process()
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self._backwards:
            self._backwards.add(number)
            end = functools.partial(self._backwards.discard, number)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # unless it raises

    def _number(self, layer: Layer, channels: int, dtype: torch.dtype) -> int:
        self._check_process()
        key = (layer.number, layer.op, channels, dtype)
        number = self._layers.get(key)
        if number is None:
            number = self._layers[key] = self._agree(layer, channels, dtype)
        return number

    def _agree(self, layer: Layer, channels: int, dtype: torch.dtype) -> int:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first call of a layer ({layer.op}, {channels} channels) that shares statistics cannot "
                "be captured into a CUDA graph: the ranks agree on it, and allocate; run a step before"
            )
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
        if self.transport is None or not self.transport.reserve(channels, dtype):
            self._choose(channels, dtype)
        self._names.append(name)
        return number

    def _name_of(self, tag: Tag, direction: str) -> str:
        name = self._names[tag.layer] if tag.layer < len(self._names) else f"layer {tag.layer}"
        return f"{direction} of {name}, step {tag.step} of group {self.name}"

    def _choose(self, channels: int, dtype: torch.dtype) -> None:
        self.transport, self.why = self._vote(channels, dtype)
        self.transport.reserve(channels, dtype)
        _log.debug("rank %d, %s", self._agreement.rank, self.describe())

    def _vote(self, channels: int, dtype: torch.dtype) -> tuple[object, str]:
        wishes = self._agreement.ask("choice of statistics", os.environ.get("FASTVIT_STATISTICS", "auto"))
        if wrong := set(wishes).difference(WISHES):
            raise ValueError(f"FASTVIT_STATISTICS is {sorted(wrong)[0]!r}; {', '.join(WISHES)} expected")
        asked = [wish for wish in ("peer", "symm_mem") if wish in wishes]
        if "collective" in wishes:
            reason = "FASTVIT_STATISTICS=collective"
        else:
            connected, reason = self._connect(channels, dtype, asked)
            if connected is not None:
                return connected, f"{connected.name}, {reason}"
        if asked:
            raise RuntimeError(f"FASTVIT_STATISTICS={asked[-1]}, but group {self.name} cannot: {reason}")
        return Collective(self._group(), self._device, self._name_of), f"Collective: {reason}"

    def _connect(self, channels: int, dtype: torch.dtype, asked: list[str]) -> tuple[object | None, str]:
        """A way over memory in common, and where that is; or None, and why not."""
        providers = PROVIDERS | SYMM_MEM if "symm_mem" in asked else PROVIDERS
        provider = providers.get(self._device.type)
        place = provider.host(self._device) if provider else f"no memory in common on {self._device.type}"
        places = self._agreement.ask("place of the ranks", place)
        if len(places) > 1:
            away = [place for place in places if place.startswith("no ")]
            return None, away[0] if away else "several hosts"
        if place.startswith("no "):
            return None, place
        arguments = (self._agreement, channels, dtype, self._name_of, self._device, bool(asked))
        connected = provider.connect(*arguments)
        return (None, connected) if isinstance(connected, str) else (connected, place)


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupStatistics]]" = (
    weakref.WeakKeyDictionary()
)


def statistics_of(group: "dist.ProcessGroup", device: torch.device) -> GroupStatistics:
    """The group's way for tensors of this device type; made at the first call, by all ranks."""
    by_device = _groups.get(group)
    if by_device is None:
        by_device = _groups[group] = {}
    if device.type not in by_device:
        by_device[device.type] = GroupStatistics(group, device)
    return by_device[device.type]


def taken() -> list[str]:
    """For each group of this process that has exchanged statistics: which way it took, and why."""
    return [one.describe() for by_device in _groups.values() for one in by_device.values() if one.transport]


def check() -> None:
    """Raises what GPUs have reported about exchanges that failed, of any group; the host waits for nothing.

    Every forward and backward that shares statistics does this, and every evaluation of such a layer. What
    happened to the last of them is known when the GPU is done: after torch.cuda.synchronize().
    """
    for by_device in _groups.values():
        for one in by_device.values():
            if one.transport is not None:
                one.transport.check()


def possible() -> str:
    """What a group made on this machine would take."""
    wish = os.environ.get("FASTVIT_STATISTICS", "auto")
    ways = {"CPU": "SharedMemory on one host", "CUDA": "CudaIpc on one host with peer access, a GPU per rank"}
    if wish == "peer":
        ways["CUDA"] = "CudaIpc on one host with peer access"
    if wish == "symm_mem":
        ways["CUDA"] = "SymmMem where torch maps it"
    if shared_memory.host(torch.device("cpu")).startswith("no "):
        ways["CPU"] = "Collective"
    if not _library.HAS_CUDA:
        ways["CUDA"] = "Collective"
    if wish == "collective":
        ways = dict.fromkeys(ways, "Collective")
    text = ", ".join(f"{name} {way}" for name, way in ways.items())
    elsewhere = "otherwise an error" if wish in ("peer", "symm_mem") else "otherwise Collective"
    return f"FASTVIT_STATISTICS={wish}: {text}, {elsewhere}"
