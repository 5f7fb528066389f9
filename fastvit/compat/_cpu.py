"""`python -m fastvit.compat --cpu`: runs a script that was written for CUDA on the CPU, to try it.

Devices in the arguments of torch's functions become the CPU, `torch.cuda` answers for it, and NCCL is gloo.
What has no CPU kernel keeps torch's error. Nothing else imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..fuse import convert_syncbn_model
from ..sync_batchnorm import SyncBatchNorm
from ._half import cpu_half

SAID = "python -m fastvit.compat --cpu: CUDA is the CPU here, to try a script and not for its speed"

_CUDA = re.compile(r"cuda(:\d+)?")
_STAY = {Tensor.cuda, Tensor.pin_memory}  # they return their tensor
_CPU = torch.device("cpu")


def _moved(value: Any) -> Any:
    """The CPU in place of a CUDA device, and the type of a CPU tensor in place of a CUDA tensor's."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if _CUDA.fullmatch(value) else value.replace("torch.cuda.", "torch.")
    return value


def _device(value: Any) -> Any:
    """`_moved` of an argument that may be the index of a device."""
    return _CPU if type(value) is int else _moved(value)


class _OnCPU(TorchFunctionMode):
    """Sees every call of a function of torch from Python."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _STAY:
            return args[0]
        if function is torch.device:  # stays what the script says, for `.type` and `.index`
            args = ("cuda", *args) if args and type(args[0]) is int else args
            return function(*args, **(kwargs or {}))
        moved = {name: _moved(value) for name, value in (kwargs or {}).items()}
        if "device" in moved:
            moved["device"] = _device(moved["device"])
        if moved.get("pin_memory"):
            moved["pin_memory"] = False
        if function is Tensor.to:
            args = tuple(map(_device, args))
        return function(*map(_moved, args), **moved)


# torch.cuda


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Event(torch.cpu.Event):
    """The time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class Stream:
    """Work is done when it is asked for, so that a stream has nothing to wait for."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    query = Event.query

    def __enter__(self) -> Stream:
        return self

    synchronize = wait_stream = wait_event = __exit__ = _nothing


_stream, _current = Stream(), 0
_generator = torch.Generator()  # of the GPU: what it is seeded with is kept, and nothing is drawn from it


def _set_device(device: Any) -> None:
    global _current
    index = device if isinstance(device, int) else torch.device(device).index
    _current = _current if index is None else index


def _seed(seed: int | None = None) -> None:
    _generator.seed() if seed is None else _generator.manual_seed(seed)


def _count() -> int:
    """As many GPUs as the launcher starts ranks on this host, or as CUDA_VISIBLE_DEVICES names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(visible)))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _properties(device: Any = None) -> types.SimpleNamespace:
    of_device = {"name": "CPU", "major": 8, "minor": 0, "gcnArchName": ""}
    return types.SimpleNamespace(**of_device, total_memory=_memory(), multi_processor_count=os.cpu_count())


_NOTHING = """
    init synchronize empty_cache ipc_collect set_stream reset_peak_memory_stats reset_max_memory_allocated
    reset_max_memory_cached reset_accumulated_memory_stats set_per_process_memory_fraction
"""
_ZERO = "memory_allocated memory_reserved memory_cached"
_ZERO += " max_memory_allocated max_memory_reserved max_memory_cached"
_TENSORS = "Float Double Half BFloat16 Byte Char Short Int Long Bool"


def _cuda() -> dict[str, Any]:
    """What replaces names of torch.cuda."""

    def answer(value: Any) -> Callable:  # torch.compile wants a function of its own for each name
        return lambda *args, **kwargs: value

    def all_of(names: str, make: Callable, *arguments: Any) -> dict[str, Any]:
        return {name: make(*arguments) for name in names.split()}

    return {
        **all_of(_NOTHING, answer, None),
        **all_of(_ZERO, answer, 0),
        **all_of("is_available is_initialized is_bf16_supported", answer, True),
        **all_of("current_stream default_stream", answer, _stream),
        **all_of("manual_seed manual_seed_all seed seed_all", lambda: lambda seed=None: _seed(seed)),
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSORS.split()},
        **dict.fromkeys(("stream", "device", "device_of"), contextlib.nullcontext),
        "is_current_stream_capturing": answer(False),
        "Stream": Stream,
        "Event": Event,
        "device_count": _count,
        "current_device": lambda: _current,
        "set_device": _set_device,
        "get_device_name": answer("CPU"),
        "get_device_capability": answer((8, 0)),
        "get_device_properties": _properties,
        "get_arch_list": answer([]),
        "mem_get_info": lambda device=None: (_memory(), _memory()),
        "memory_stats": answer(defaultdict(int)),
        "memory_summary": answer(""),
        "initial_seed": _generator.initial_seed,
        "get_rng_state": lambda device=None: _generator.get_state(),
        "get_rng_state_all": lambda: [_generator.get_state()] * _count(),
        "set_rng_state": lambda state, device=None: _generator.set_state(state),
        "set_rng_state_all": lambda states: _generator.set_state(states[0]),
        "cudart": answer(types.SimpleNamespace(cudaProfilerStart=answer(0), cudaProfilerStop=answer(0))),
    }


# What has a device of its own


def _change(owner: Any, name: str, **changes: Any) -> None:
    """Gives `owner.name` the arguments in `changes`: values, or functions of what it was called with."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, change in changes.items():
            given = bound.arguments[argument]
            bound.arguments[argument] = change(given) if callable(change) else change
        return original(*bound.args, **bound.kwargs)

    setattr(owner, name, changed)


def _half(dtype: torch.dtype | None) -> torch.dtype:
    return cpu_half() if dtype is None or dtype == torch.float16 else dtype


def _backend(name: str | None) -> str:
    return "gloo" if name is None or "nccl" in name.lower() else name


def _change_arguments() -> None:
    _change(torch.autocast, "__init__", device_type=_moved, dtype=_half)
    _change(torch.amp.GradScaler, "__init__", device="cpu")
    _change(nn.Module, "to", args=lambda args: tuple(map(_device, args)))
    _change(nn.parallel.DistributedDataParallel, "__init__", device_ids=None, output_device=None)
    _change(torch, "load", map_location="cpu")
    _change(torch.jit, "load", map_location="cpu")
    _change(torch, "set_default_tensor_type", t=_moved)
    _change(torch, "set_default_device", device=_device)
    _change(torch.autograd.profiler.profile, "__init__", use_cuda=False, use_device=None)
    for module in (dist, dist.distributed_c10d):
        _change(module, "init_process_group", backend=_backend, device_id=None)
        _change(module, "new_group", backend=_backend)
        _change(module, "barrier", device_ids=None)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


class _SyncBatchNorm(SyncBatchNorm):
    """torch's refuses the CPU."""

    convert_sync_batchnorm = staticmethod(convert_syncbn_model)


def install() -> None:
    """Changes torch in this process for good."""
    if nn.SyncBatchNorm is _SyncBatchNorm:
        return
    names = _cuda()
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        vars(module).update((name, value) for name, value in names.items() if hasattr(module, name))
    context = contextlib.nullcontext
    vars(torch.cuda.nvtx).update(range_push=_nothing, range_pop=_nothing, mark=_nothing, range=context)
    vars(torch.cuda.profiler).update(init=_nothing, start=_nothing, stop=_nothing, profile=context)
    _change_arguments()
    for owner, name, value in (
        (inspect.getmodule(nn.DataParallel), "_get_available_device_type", _nothing),
        (nn, "SyncBatchNorm", _SyncBatchNorm),
        (torch, "Generator", _Generator),
        (Tensor, "record_stream", _nothing),
    ):
        setattr(owner, name, value)
    # A mode is of one thread, and a subclass has a `run` of its own.
    start = threading.Thread.start

    def start_on_cpu(self: threading.Thread) -> None:
        run = self.run

        def run_on_cpu() -> None:
            with _OnCPU():
                run()

        self.run = run_on_cpu  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_on_cpu  # type: ignore[method-assign]
    _OnCPU().__enter__()
