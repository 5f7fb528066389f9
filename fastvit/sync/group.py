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
from . import cpu_peer, cuda_peer
from .agreement import Agreement, Unavailable, answers_text
from .collective import Collective
from .protocol import Tag, capacity_for
from .transport import Reduce, Way

WISHES = ("auto", "collective", "peer", "symm_mem")
# Ways over memory in common, by device type: place() says where that is, connect() makes one.
PROVIDERS = {"cpu": cpu_peer, "cuda": cuda_peer}

_log = logging.getLogger("fastvit.sync")


@dataclass(frozen=True)
class LayerKey:
    """Which layer calls: `number` tells it from the other layers of this process (0: it has no number)."""

    op: str
    number: int = 0
    momentum: float | None = None


class Group:
    """How the ranks of one group share numbers of one device type, and which layers they have agreed on.

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
        self._way: Way | None = None
        self.why = ""

    @property
    def way(self) -> Way:
        """What the group has chosen, at the first call of a layer."""
        assert self._way is not None
        return self._way

    def moments(self, layer: LayerKey, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        """The moments of x over all ranks, and the tag for the backward."""
        tag = self._next(layer, x.shape[channel_dim], accumulation_dtype(x.dtype))
        return self.way.moments(x, channel_dim, tag), self.way.tag()

    def sums(self, reduce: Reduce, tag: Tensor) -> Tensor:
        """This rank's sums, and those of all ranks."""
        self._enter_backward()
        return self.way.sums(reduce, Tag(*tag.tolist()))

    def share_moments(self, layer: LayerKey, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The same from this rank's moments, `(2C + 2,)`, and sums, `(1, 2C)`."""
        tag = self._next(layer, numbers.numel() // 2 - 1, numbers.dtype)
        return self.way.share(numbers, tag), self.way.tag()

    def share_sums(self, numbers: Tensor, tag: Tensor) -> Tensor:
        self._enter_backward()
        return self.way.share(numbers, Tag(*tag.tolist()))

    def describe(self) -> str:
        return f"group {self.name} ({self._agreement.world} ranks, {self._device.type}): {self.why}"

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process} after that had joined group "
                f"{self.name}: it is no rank of the group; initialise torch.distributed in the child"
            )

    def _next(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> Tag:
        """What the next forward exchange is called.

        One more step is counted after a backward that raised on this rank. It may have raised when the other
        ranks had all they needed of it. They are in the next step then, and the tags differ.
        """
        self._check_process()
        key = (layer.number, layer.op, channels, dtype)
        number = self._layers.get(key)
        if number is None:
            number = self._layers[key] = self._agree(layer, channels, dtype)
        if self._backwards and torch._C._current_graph_task_id() == -1:  # not a forward within a backward
            self._backwards.clear()
            self.way.next_step()
        return Tag(number, self.way.next_step())

    def _enter_backward(self) -> None:
        self._check_process()
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self._backwards:
            self._backwards.add(number)
            end = functools.partial(self._backwards.discard, number)
            torch.autograd.Variable._execution_engine.queue_callback(end)  # unless it raises

    def _agree(self, layer: LayerKey, channels: int, dtype: torch.dtype) -> int:
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
        if self._way is None or not self._way.reserve(channels, dtype):
            self._choose(channels, dtype)
        self._names.append(name)
        return number

    def _name_of(self, tag: Tag, direction: str) -> str:
        name = self._names[tag.layer] if tag.layer < len(self._names) else f"layer {tag.layer}"
        return f"{direction} of {name}, step {tag.step} of group {self.name}"

    def _choose(self, channels: int, dtype: torch.dtype) -> None:
        before = self._way
        self._way, self.why = self._vote(channels, dtype)
        self.way.reserve(channels, dtype)
        if before is not None and getattr(before, "captured", False):
            _captured.append((self, before))
        elif before is not None:
            before.close()
        _log.debug("rank %d, %s", self._agreement.rank, self.describe())

    def _vote(self, channels: int, dtype: torch.dtype) -> tuple[Way, str]:
        wishes = self._agreement.ask("choice of statistics", os.environ.get("FASTVIT_STATISTICS", "auto"))
        if wrong := set(wishes).difference(WISHES):
            raise ValueError(f"FASTVIT_STATISTICS is {sorted(wrong)[0]!r}; {', '.join(WISHES)} expected")
        asked = [wish for wish in ("peer", "symm_mem") if wish in wishes]
        try:
            if "collective" in wishes:
                raise Unavailable("FASTVIT_STATISTICS=collective")
            place = self._place()
            connect = PROVIDERS[self._device.type].connect
            capacity = capacity_for(channels, dtype)
            way = connect(self._agreement, capacity, self._name_of, self._device, asked[-1:])
            return way, f"{way.name}, {place}"
        except Unavailable as reason:
            if asked:
                raise RuntimeError(
                    f"FASTVIT_STATISTICS={asked[-1]}, but group {self.name} cannot: {reason}"
                ) from None
            group = self._group()
            assert group is not None  # whose layer calls
            return Collective(group, self._device, self._name_of), f"Collective: {reason}"

    def _place(self) -> str:
        """Where all ranks are, whose memory may be in common."""
        provider = PROVIDERS.get(self._device.type)
        if provider is None:
            raise Unavailable(f"no memory in common on {self._device.type}")
        place = self._agreement.together("place of the ranks", lambda: provider.place(self._device))
        if len(self._agreement.ask("place of the ranks", place)) > 1:
            raise Unavailable("several hosts")
        return place


_captured: list[tuple[Group, Way]] = []  # what CUDA graphs still use when their group has another way
_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Group]]" = weakref.WeakKeyDictionary()


def group_of(group: "dist.ProcessGroup", device: torch.device) -> Group:
    """The group's way for tensors of this device type; made at the first call, by all ranks."""
    by_device = _groups.get(group)
    if by_device is None:
        by_device = _groups[group] = {}
    if device.type not in by_device:
        by_device[device.type] = Group(group, device)
    return by_device[device.type]


def _ways() -> list[tuple[Group, Way]]:
    return [(one, one._way) for by_device in _groups.values() for one in by_device.values() if one._way]


def taken() -> list[str]:
    """For each group of this process that has exchanged statistics: which way it took, and why."""
    return [one.describe() for one, _ in _ways()]


def check(wait: bool = False) -> None:
    """Raises what GPUs have reported about exchanges that failed, of any group.

    Every forward and backward that shares statistics does this, and every evaluation of such a layer; without
    `wait` the host waits for nothing, and what happened to the last of them is known when the GPU is done.

    Args:
        wait: for the GPUs first. For loops that must know before they use what a step has made, when nothing
            else follows that would say so: a bare optimizer step, a replay of a CUDA graph.
    """
    for _, way in _captured + _ways():
        way.check(wait)


def possible() -> str:
    """What a group made on this machine would take."""
    wish = os.environ.get("FASTVIT_STATISTICS", "auto")
    ways = {"CPU": "SharedMemory on one host", "CUDA": "CudaIpc on one host with peer access, a GPU per rank"}
    if wish == "peer":
        ways["CUDA"] = "CudaIpc on one host with peer access"
    if wish == "symm_mem":
        ways["CUDA"] = "SymmMem where torch maps it"
    try:
        cpu_peer.place(torch.device("cpu"))
    except OSError:
        ways["CPU"] = "Collective"
    if not _library.HAS_CUDA:
        ways["CUDA"] = "Collective"
    if wish == "collective":
        ways = dict.fromkeys(ways, "Collective")
    text = ", ".join(f"{name} {way}" for name, way in ways.items())
    elsewhere = "otherwise an error" if wish in ("peer", "symm_mem") else "otherwise Collective"
    return f"FASTVIT_STATISTICS={wish}: {text}, {elsewhere}"
