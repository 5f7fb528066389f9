"""`python -m fastvit.compat --cpu`: runs a script that was written for CUDA on the CPU, to try it.

Devices in the arguments of torch's functions become the CPU, `torch.cuda` answers for it, CUDA's autocast is
the CPU's, and NCCL is gloo. What has no CPU kernel keeps torch's error. Nothing else imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import threading
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..convert_syncbn import convert_syncbn_model
from ..sync_batch_norm import SyncBatchNorm
from ._half import cpu_half

SAID = "python -m fastvit.compat --cpu: CUDA is the CPU here, to try a script and not for its speed"

_DEVICE = re.compile(r"cuda(:\d+)?")
_AUTOCAST = re.compile(r"(is|get|set)_autocast_(gpu_)?(enabled|dtype)")
_STAY = {Tensor.cuda, Tensor.pin_memory}  # they return their tensor
_CPU = torch.device("cpu")


def _moved(value: Any) -> Any:
    """The CPU in place of a CUDA device, and the type of a CPU tensor in place of a CUDA tensor's."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if _DEVICE.fullmatch(value) else value.replace("torch.cuda.", "torch.")
    return value


def _device(value: Any) -> Any:
    """`_moved` of an argument that may be the index of a device."""
    return _CPU if type(value) is int else _moved(value)


class _OnCPU(torch.overrides.TorchFunctionMode, contextlib.ContextDecorator):
    """Sees every call of a function of torch from Python."""

    def __enter__(self) -> Any:
        torch.set_autocast_dtype("cpu", cpu_half())  # of this thread
        return super().__enter__()

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _STAY:
            return args[0]
        kwargs = kwargs or {}
        if function is torch.device:  # stays what the script says, for `.type` and `.index`
            args = ("cuda", *args) if args and type(args[0]) is int else args
            device = function(*args, **kwargs)
            return _CPU if device.type == "cpu" else device  # that of tensors has no index
        moved = {name: (_device if name == "device" else _moved)(value) for name, value in kwargs.items()}
        moved.pop("pin_memory", None)
        args = tuple(map(_device if function is Tensor.to else _moved, args))
        return function(*args, **moved)


# torch.cuda


def _answer(value: Any) -> Callable:
    """A function of its own for each name, as torch.compile wants."""
    return lambda *args, **kwargs: value


class Event(torch.cpu.Event):
    """The time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


class Stream(contextlib.ContextDecorator):
    """Work is done when it is asked for: a stream, or a context of one, has nothing to wait for."""

    cuda_stream = device_index = stream_id = priority = 0
    device, priority_range = torch.device("cuda", 0), staticmethod(lambda: (0, 0))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    query = Event.query

    def __enter__(self) -> Stream:
        return self

    synchronize = wait_stream = wait_event = __exit__ = _answer(None)


def _parallel_apply(modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None) -> list[Any]:
    inputs = [given if isinstance(given, (list, tuple)) else (given,) for given in inputs]
    calls = zip(modules, inputs, kwargs_tup or [{}] * len(inputs), devices or inputs, strict=True)
    return [module(*given, **kwargs) for module, given, kwargs, _ in calls]


def _count() -> int:
    """As many GPUs as the launcher starts ranks on this host, or as CUDA_VISIBLE_DEVICES names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(visible)))


class _NeedsGPU(NotImplementedError, AttributeError):
    """An AttributeError too, so that `hasattr` answers."""


def _refuse(asked: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises for a name that torch._C lacks without CUDA, and for a class in its place."""
    caller = sys._getframe(1)
    raise _NeedsGPU(
        f"--cpu: {caller.f_globals.get('__name__')}.{caller.f_code.co_name} asks for"
        f" {getattr(asked, '__name__', asked)}, which needs a GPU; leave the call out on the CPU,"
        " by an option of the script or `if torch.cuda.get_device_name() != 'CPU'`"
    )


_current = deque([0], maxlen=1)
_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_properties = types.SimpleNamespace(
    name="CPU", major=8, minor=0, total_memory=_memory, multi_processor_count=os.cpu_count(), warp_size=32
)
_ANSWERS: tuple[tuple[Any, str], ...] = (
    (None, "init synchronize empty_cache ipc_collect set_stream check_error set_sync_debug_mode start stop"),
    (None, "mark range_end reset_peak_memory_stats reset_accumulated_memory_stats _record_memory_history"),
    (None, "reset_peak_host_memory_stats reset_accumulated_host_memory_stats caching_allocator_enable"),
    (None, "set_per_process_memory_fraction preferred_linalg_library preferred_blas_library _sleep"),
    (0, "range_push range_pop range_start get_sync_debug_mode"),
    (0, "utilization memory_usage device_memory_used temperature power_draw clock_rate"),
    (True, "is_available is_initialized is_bf16_supported"),
    (False, "is_current_stream_capturing can_device_access_peer"),
    (Stream(), "current_stream default_stream get_stream_from_external"),
    (defaultdict(int), "memory_stats host_memory_stats"),
    ({"segments": [], "device_traces": []}, "_snapshot"),
    ([], "get_arch_list memory_snapshot"),
    ("", "memory_summary"),
    ((_memory, _memory), "mem_get_info"),
    (_properties, "get_device_properties"),
    (types.SimpleNamespace(cudaProfilerStart=_answer(0), cudaProfilerStop=_answer(0)), "cudart"),
    ((2, 27, 3), "version"),  # of NCCL
    ("cpu", "_get_available_device_type"),  # nn.DataParallel asks
)
_CONTEXTS = "Stream ExternalStream StreamContext stream device device_of range profile"
_NAMES: dict[str, Any] = {  # the other functions of torch.cuda call these
    **{name: _answer(value) for value, names in _ANSWERS for name in names.split()},
    **{kind: getattr(torch, kind) for kind in dir(torch) if kind.endswith(("Tensor", "Storage"))},
    **dict.fromkeys(_CONTEXTS.split(), Stream),
    **{name: type(name, (), {"__new__": _refuse}) for name in ("CUDAGraph", "MemPool", "graph_pool_handle")},
    "Event": Event,
    "device_count": _count,
    "current_device": lambda: _current[0],
    "set_device": lambda device: _current.append(torch._utils._get_device_index(device, True)),
    "default_generators": defaultdict(torch.Generator),  # they keep their seeds; nothing draws from them
    "make_graphed_callables": lambda callables, *args, **kwargs: callables,
    "cufft_plan_cache": types.SimpleNamespace(size=0, max_size=0, clear=_answer(None)),
    "parallel_apply": _parallel_apply,
    "reduce_add": lambda tensors, destination=None: sum(tensors),
}
_MODULES = """
    backends.cuda backends.cudnn cuda cuda.graphs cuda.memory cuda.nccl cuda.nvtx cuda.profiler cuda.random
    cuda.streams nn.parallel nn.parallel.comm nn.parallel.data_parallel nn.parallel.parallel_apply
"""


# What has a device of its own


def _change(owner: Any, name: str, **changes: Any) -> None:
    """Gives `owner.name` the arguments in `changes`: values, or functions of what it was called with."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument in changes.keys() & bound.arguments.keys():  # a release of torch may lack one
            given, change = bound.arguments[argument], changes[argument]
            bound.arguments[argument] = change(given) if callable(change) else change
        return original(*bound.args, **bound.kwargs)

    setattr(owner, name, changed)


def _half(dtype: Any) -> Any:
    return cpu_half() if dtype == torch.float16 else dtype


def _autocast(name: str) -> Callable:
    """Asks or sets the state of the CPU's autocast, for CUDA and where no device is given."""
    function = getattr(torch, name.replace("_gpu", ""))

    def of_cpu(*args: Any, **kwargs: Any) -> Any:
        args = (*args, *kwargs.values())
        device = () if args and isinstance(args[0], str) else ("cpu",)
        return function(*device, *(_half(_moved(value)) for value in args))

    vars(of_cpu)["_dynamo_marked_constant"] = not name.startswith("set")  # torch.compile guards autocast
    torch.jit._builtins._register_builtin(of_cpu, f"aten::{name}")
    return of_cpu


def _backend(name: str | None) -> str:
    return "gloo" if name is None or "nccl" in name.lower() else name


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
    for module in (sys.modules[f"torch.{name}"] for name in _MODULES.split()):
        vars(module).update((name, value) for name, value in _NAMES.items() if hasattr(module, name))
    vars(torch).update((name, _autocast(name)) for name in dir(torch) if _AUTOCAST.fullmatch(name))
    _change(torch.autocast, "__init__", device_type=_moved, dtype=_half)
    _change(torch.amp.GradScaler, "__init__", device="cpu")
    _change(nn.Module, "to", args=lambda args: tuple(map(_device, args)))
    _change(nn.parallel.DistributedDataParallel, "__init__", device_ids=None, output_device=None)
    _change(torch, "load", map_location="cpu")
    _change(torch.jit, "load", map_location="cpu")
    _change(torch, "set_default_tensor_type", t=_moved)
    _change(torch, "set_default_device", device=_device)
    _change(torch.autograd.profiler.profile, "__init__", use_cuda=False, use_device=None)
    _change(torch.autograd.profiler.emit_nvtx, "__init__", enabled=False)
    _change(torch.profiler.profile, "__init__", activities=None)
    _change(nn.DataParallel, "__init__", device_ids=[0], output_device=None)
    _change(nn.parallel, "data_parallel", device_ids=[0], output_device=None)
    for module in (torch.amp, torch.amp.autocast_mode):
        _change(module, "custom_fwd", device_type=_moved, cast_inputs=_half)
        _change(module, "custom_bwd", device_type=_moved)
    for module in (dist, dist.distributed_c10d):
        _change(module, "init_process_group", backend=_backend, device_id=None)
        _change(module, "new_group", backend=_backend)
        _change(module, "barrier", device_ids=None)
    part, core, thread = nn.parallel._functions, torch._C, cast(Any, threading.Thread)
    for owner, name, value in (
        (core, "__getattr__", _refuse),
        (core, "_scatter", lambda x, gpus, n, dim, _: x.split(n, dim) if n else x.chunk(len(gpus), dim)),
        (core, "_gather", lambda tensors, dim, gpu: torch.cat(torch.atleast_1d(tensors), dim)),
        (core, "_broadcast", lambda x, gpus: (x,) * len(gpus)),
        (core, "_broadcast_coalesced", lambda tensors, gpus, size: [list(tensors) for _ in gpus]),
        (part.Scatter, "apply", lambda gpus, sizes, dim, x: core._scatter(x, gpus, sizes, dim, None)),
        (part.Gather, "apply", lambda gpu, dim, *tensors: core._gather(tensors, dim, gpu)),
        (part.Broadcast, "apply", lambda gpus, *tensors: tensors * len(gpus)),
        (part.ReduceAddCoalesced, "apply", lambda gpu, n, *x: tuple(sum(x[i::n]) for i in range(n))),
        (torch.version, "cuda", torch.version.cuda or "12.8"),
        (torch.accelerator, "current_accelerator", _answer(None)),
        (torch.backends.cudnn, "version", _answer(91002)),
        (dist, "is_nccl_available", _answer(True)),
        (torch.storage._StorageBase, "cuda", lambda storage, *args, **kwargs: storage),
        (nn, "SyncBatchNorm", _SyncBatchNorm),
        (torch, "Generator", _Generator),
        (Tensor, "record_stream", _answer(None)),
        (thread, "_bootstrap_inner", _OnCPU()(thread._bootstrap_inner)),  # a mode is of one thread
    ):
        setattr(owner, name, value)
    _OnCPU().__enter__()
