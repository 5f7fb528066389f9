"""Runs the CUDA calls of a script on the CPU, for `python -m fastvit.compat --cpu`.

CUDA devices in the arguments of torch's functions become the CPU. `torch.cuda` reports the CPU as its device.
CUDA's autocast is the CPU's autocast, and NCCL is gloo. An op without a CPU kernel raises torch's own error.
Without `--cpu` nothing imports this module.
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
from ._cpu_half import cpu_half

NOTICE = (
    "python -m fastvit.compat --cpu: CUDA calls of this script run on the CPU. "
    "Use --cpu to try a script, not to measure its speed."
)

_CUDA_DEVICE_NAME = re.compile(r"cuda(:\d+)?")
_AUTOCAST_NAME = re.compile(r"(is|get|set)_autocast_(gpu_)?(enabled|dtype)")
_DEVICE_MOVES = {Tensor.cuda, Tensor.pin_memory}  # These methods return their tensor, which is on the CPU.
_CPU = torch.device("cpu")


def _to_cpu(value: Any) -> Any:
    """Returns the CPU for a CUDA device, the CPU's type for the name of a CUDA tensor type, or `value`."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if _CUDA_DEVICE_NAME.fullmatch(value) else value.replace("torch.cuda.", "torch.")
    return value


def _device_or_index_to_cpu(value: Any) -> Any:
    """Returns the CPU for the index of a device too, and otherwise the result of `_to_cpu`."""
    return _CPU if type(value) is int else _to_cpu(value)


class _CpuDeviceMode(torch.overrides.TorchFunctionMode, contextlib.ContextDecorator):
    """Replaces the devices in the arguments of every call of a torch function from Python."""

    def __enter__(self) -> Any:
        torch.set_autocast_dtype("cpu", cpu_half())  # the state is per thread
        return super().__enter__()

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _DEVICE_MOVES:
            return args[0]
        kwargs = kwargs or {}
        if function is torch.device:  # the script's CUDA device remains, for `.type` and `.index`
            args = ("cuda", *args) if args and type(args[0]) is int else args
            device = function(*args, **kwargs)
            return _CPU if device.type == "cpu" else device  # the device of CPU tensors has no index
        convert = _device_or_index_to_cpu if function is Tensor.to else _to_cpu
        cpu_kwargs = {name: _to_cpu(value) for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            cpu_kwargs["device"] = _device_or_index_to_cpu(kwargs["device"])
        return function(*map(convert, args), **cpu_kwargs)


# Replacements of the functions and classes of torch.cuda


def _make_constant_function(value: Any) -> Callable:
    """Returns a function that returns `value`. torch.compile needs another function object for each name."""
    return lambda *args, **kwargs: value


class Event(torch.cpu.Event):
    """Records the time of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Returns milliseconds, as torch.cuda.Event does."""
        return 1000 * (end.time - self.time)


class Stream(contextlib.ContextDecorator):
    """Replaces streams and their contexts. The CPU ends each op before it returns, so no wait is needed."""

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

    synchronize = wait_stream = wait_event = __exit__ = _make_constant_function(None)


def _parallel_apply(modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None) -> list[Any]:
    """Calls the modules one after another, with the arguments of nn.parallel.parallel_apply."""
    inputs = [args if isinstance(args, (list, tuple)) else (args,) for args in inputs]
    calls = zip(modules, inputs, kwargs_tup or [{}] * len(inputs), devices or inputs, strict=True)
    return [module(*args, **kwargs) for module, args, kwargs, _ in calls]


def _count_devices() -> int:
    """Returns the number of the launcher's ranks on this host, or else of devices in CUDA_VISIBLE_DEVICES."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(visible_devices)))


class _NeedsGPU(NotImplementedError, AttributeError):
    """Raised for a name that needs a GPU. As an AttributeError it makes `hasattr` return False."""


def _raise_needs_gpu(name_or_class: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises `_NeedsGPU`. This is `torch._C.__getattr__`, and the constructor of classes that need a GPU."""
    caller = sys._getframe(1)
    needed_name = getattr(name_or_class, "__name__", name_or_class)
    raise _NeedsGPU(
        f"--cpu: {caller.f_globals.get('__name__')}.{caller.f_code.co_name} uses {needed_name}, which needs"
        " a GPU; leave the call out on the CPU, by an option of the script"
        " or `if torch.cuda.get_device_name() != 'CPU'`"
    )


_current_device_index = deque([0], maxlen=1)
_HOST_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_device_properties = types.SimpleNamespace(
    name="CPU",
    major=8,  # compute capability 8.0, the first with bfloat16
    minor=0,
    total_memory=_HOST_MEMORY_BYTES,
    multi_processor_count=os.cpu_count(),
    warp_size=32,
)
_CONSTANT_RESULTS: tuple[tuple[Any, str], ...] = (  # a result, and the functions that return it
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
    ((_HOST_MEMORY_BYTES, _HOST_MEMORY_BYTES), "mem_get_info"),
    (_device_properties, "get_device_properties"),
    (
        types.SimpleNamespace(
            cudaProfilerStart=_make_constant_function(0), cudaProfilerStop=_make_constant_function(0)
        ),
        "cudart",
    ),
    ((2, 27, 3), "version"),  # NCCL's version
    ("cpu", "_get_available_device_type"),  # nn.DataParallel calls it
)
_CONTEXT_NAMES = "Stream ExternalStream StreamContext stream device device_of range profile"
_REPLACEMENTS: dict[str, Any] = {  # Functions of torch.cuda that stay call these replacements too.
    **{name: _make_constant_function(value) for value, names in _CONSTANT_RESULTS for name in names.split()},
    **{kind: getattr(torch, kind) for kind in dir(torch) if kind.endswith(("Tensor", "Storage"))},
    **dict.fromkeys(_CONTEXT_NAMES.split(), Stream),
    **{
        name: type(name, (), {"__new__": _raise_needs_gpu})
        for name in ("CUDAGraph", "MemPool", "graph_pool_handle")
    },
    "Event": Event,
    "device_count": _count_devices,
    "current_device": lambda: _current_device_index[0],
    "set_device": lambda device: _current_device_index.append(torch._utils._get_device_index(device, True)),
    "default_generators": defaultdict(torch.Generator),  # keep their seeds; nothing draws from them
    "make_graphed_callables": lambda callables, *args, **kwargs: callables,
    "cufft_plan_cache": types.SimpleNamespace(size=0, max_size=0, clear=_make_constant_function(None)),
    "parallel_apply": _parallel_apply,
    "reduce_add": lambda tensors, destination=None: sum(tensors),
}
_PATCHED_MODULES = """
    backends.cuda backends.cudnn cuda cuda.graphs cuda.memory cuda.nccl cuda.nvtx cuda.profiler cuda.random
    cuda.streams nn.parallel nn.parallel.comm nn.parallel.data_parallel nn.parallel.parallel_apply
"""


# Functions and classes whose device argument the function mode does not see


def _override_arguments(owner: Any, name: str, **overrides: Any) -> None:
    """Wraps `owner.name`. Each override is an argument's value, or a function of the caller's value."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call_with_overrides(*args: Any, **kwargs: Any) -> Any:
        bound_arguments = signature.bind(*args, **kwargs)
        bound_arguments.apply_defaults()
        # A release of torch may lack some of these arguments.
        for argument in overrides.keys() & bound_arguments.arguments.keys():
            override, value = overrides[argument], bound_arguments.arguments[argument]
            bound_arguments.arguments[argument] = override(value) if callable(override) else override
        return original(*bound_arguments.args, **bound_arguments.kwargs)

    setattr(owner, name, call_with_overrides)


def _to_autocast_dtype(dtype: Any) -> Any:
    return cpu_half() if dtype == torch.float16 else dtype


def _make_cpu_autocast_function(name: str) -> Callable:
    """Returns a replacement of `torch.<name>` for the CPU's autocast, which also serves CUDA's."""
    function = getattr(torch, name.replace("_gpu", ""))

    def call_for_cpu(*args: Any, **kwargs: Any) -> Any:
        args = (*args, *kwargs.values())
        device = () if args and isinstance(args[0], str) else ("cpu",)
        return function(*device, *(_to_autocast_dtype(_to_cpu(value)) for value in args))

    is_getter = not name.startswith("set")
    vars(call_for_cpu)["_dynamo_marked_constant"] = is_getter  # torch.compile guards autocast
    torch.jit._builtins._register_builtin(call_for_cpu, f"aten::{name}")
    return call_for_cpu


def _to_cpu_backend(name: str | None) -> str:
    return "gloo" if name is None or "nccl" in name.lower() else name


class _Generator(torch.Generator):
    """Replaces torch.Generator: a generator of the CPU for any device."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


class _SyncBatchNorm(SyncBatchNorm):
    """Replaces torch.nn.SyncBatchNorm, which raises on the CPU."""

    convert_sync_batchnorm = staticmethod(convert_syncbn_model)


def install() -> None:
    """Patches torch for the rest of this process."""
    if nn.SyncBatchNorm is _SyncBatchNorm:
        return
    for module in (sys.modules[f"torch.{name}"] for name in _PATCHED_MODULES.split()):
        vars(module).update((name, value) for name, value in _REPLACEMENTS.items() if hasattr(module, name))
    vars(torch).update(
        (name, _make_cpu_autocast_function(name)) for name in dir(torch) if _AUTOCAST_NAME.fullmatch(name)
    )
    _override_device_arguments()
    _replace_functions()
    _CpuDeviceMode().__enter__()


def _override_device_arguments() -> None:
    _override_arguments(torch.autocast, "__init__", device_type=_to_cpu, dtype=_to_autocast_dtype)
    _override_arguments(torch.amp.GradScaler, "__init__", device="cpu")
    _override_arguments(nn.Module, "to", args=lambda args: tuple(map(_device_or_index_to_cpu, args)))
    _override_arguments(nn.parallel.DistributedDataParallel, "__init__", device_ids=None, output_device=None)
    _override_arguments(torch, "load", map_location="cpu")
    _override_arguments(torch.jit, "load", map_location="cpu")
    _override_arguments(torch, "set_default_tensor_type", t=_to_cpu)
    _override_arguments(torch, "set_default_device", device=_device_or_index_to_cpu)
    _override_arguments(torch.autograd.profiler.profile, "__init__", use_cuda=False, use_device=None)
    _override_arguments(torch.autograd.profiler.emit_nvtx, "__init__", enabled=False)
    _override_arguments(torch.profiler.profile, "__init__", activities=None)
    _override_arguments(nn.DataParallel, "__init__", device_ids=[0], output_device=None)
    _override_arguments(nn.parallel, "data_parallel", device_ids=[0], output_device=None)
    for module in (torch.amp, torch.amp.autocast_mode):
        _override_arguments(module, "custom_fwd", device_type=_to_cpu, cast_inputs=_to_autocast_dtype)
        _override_arguments(module, "custom_bwd", device_type=_to_cpu)
    for module in (dist, dist.distributed_c10d):
        _override_arguments(module, "init_process_group", backend=_to_cpu_backend, device_id=None)
        _override_arguments(module, "new_group", backend=_to_cpu_backend)
        _override_arguments(module, "barrier", device_ids=None)


def _replace_functions() -> None:
    parallel, core, thread = nn.parallel._functions, torch._C, cast(Any, threading.Thread)
    for owner, name, value in (
        (core, "__getattr__", _raise_needs_gpu),
        (core, "_scatter", lambda x, gpus, n, dim, _: x.split(n, dim) if n else x.chunk(len(gpus), dim)),
        (core, "_gather", lambda tensors, dim, gpu: torch.cat(torch.atleast_1d(tensors), dim)),
        (core, "_broadcast", lambda x, gpus: (x,) * len(gpus)),
        (core, "_broadcast_coalesced", lambda tensors, gpus, size: [list(tensors) for _ in gpus]),
        (parallel.Scatter, "apply", lambda gpus, sizes, dim, x: core._scatter(x, gpus, sizes, dim, None)),
        (parallel.Gather, "apply", lambda gpu, dim, *tensors: core._gather(tensors, dim, gpu)),
        (parallel.Broadcast, "apply", lambda gpus, *tensors: tensors * len(gpus)),
        (parallel.ReduceAddCoalesced, "apply", lambda gpu, n, *x: tuple(sum(x[i::n]) for i in range(n))),
        (torch.version, "cuda", torch.version.cuda or "12.8"),
        (torch.accelerator, "current_accelerator", _make_constant_function(None)),
        (torch.backends.cudnn, "version", _make_constant_function(91002)),  # cuDNN 9.10.2
        (dist, "is_nccl_available", _make_constant_function(True)),
        (torch.storage._StorageBase, "cuda", lambda storage, *args, **kwargs: storage),
        (nn, "SyncBatchNorm", _SyncBatchNorm),
        (torch, "Generator", _Generator),
        (Tensor, "record_stream", _make_constant_function(None)),
        (thread, "_bootstrap_inner", _CpuDeviceMode()(thread._bootstrap_inner)),  # modes are per thread
    ):
        setattr(owner, name, value)
