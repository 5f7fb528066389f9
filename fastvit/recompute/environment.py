"""An `Environment` holds the settings of torch under which an op ran, and under which its recipe runs.

A recipe is the op call that recomputes a tensor. Autocast is not among the settings: a recipe computes the op
after autocast's casts, and runs without autocast. Nor are those that choose a kernel of attention or
BatchNorm: a recipe calls the op of one kernel, such as `cudnn_batch_norm`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_C: Any = torch._C
Environment = tuple  # `(is_cuda, *values)`: whether the settings are those of CUDA, and their values
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # getter and setter


def _precision_setting(backend: str, op: str) -> Setting:
    """Returns the setting of float32 precision. `set_float32_matmul_precision` and TF32 flags change it."""
    getter, setter = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return partial(getter, backend, op), partial(setter, backend, op)


def _reduction_setting(dtype: str) -> Setting:
    """Returns the setting that permits cuBLAS to sum in half precision."""
    name = f"cublas_allow_{dtype}_reduced_precision_reduction"
    setter = getattr(_C, f"_set_{name}")  # Newer torch has a pair of bools, and sets it by two arguments.
    return getattr(_C, f"_get_{name}"), lambda v: setter(*v) if isinstance(v, tuple) else setter(v)


_CPU_SETTINGS: tuple[Setting, ...] = (
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    _precision_setting("mkldnn", "matmul"),
    _precision_setting("mkldnn", "conv"),
)
_CUDA_SETTINGS: tuple[Setting, ...] = (
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    _reduction_setting("fp16"),
    _reduction_setting("bf16"),
    _precision_setting("cuda", "matmul"),
    _precision_setting("cuda", "conv"),
)
_CUDA_GETTERS = [getter for getter, _ in _CUDA_SETTINGS]
_last_cpu_environment: Environment = ()  # thousands of saved tensors share this tuple
# `current_environment` runs for each saved tensor; these names save look-ups.
_get_mkldnn, _get_precision = _C._get_mkldnn_enabled, _C._get_fp32_precision_getter


def current_environment(is_cuda: bool) -> Environment:
    """Returns the current settings that ops on a GPU, or on the CPU, read."""
    if is_cuda:
        return True, *[getter() for getter in _CUDA_GETTERS]
    # This reads the settings of _CPU_SETTINGS without a loop, for speed.
    global _last_cpu_environment
    environment = False, _get_mkldnn(), _get_precision("mkldnn", "matmul"), _get_precision("mkldnn", "conv")
    last = _last_cpu_environment
    if environment == last:
        return last
    _last_cpu_environment = environment
    return environment


@contextlib.contextmanager
def use_environment(environment: Environment) -> Iterator[None]:
    """Sets the settings to those of `environment` inside the `with` statement, and restores them."""
    outer_environment = current_environment(is_cuda=environment[0])
    try:
        _set_environment(environment)
        yield
    finally:
        _set_environment(outer_environment)


def _set_environment(environment: Environment) -> None:
    is_cuda, *values = environment
    for (_, setter), value in zip(_CUDA_SETTINGS if is_cuda else _CPU_SETTINGS, values, strict=True):
        setter(value)
