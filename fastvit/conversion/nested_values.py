"""Finds the tensors in the arguments and the result of a forward, and copies arguments."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator
from enum import Enum
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ForwardArguments = tuple[tuple, dict[str, object]]  # Positional arguments, and keyword arguments.

_MAPPINGS = (dict, UserDict, MappingProxyType)  # A read of one of these runs no code of the program.


def tensor_leaves(values: object) -> list[Tensor]:
    """Returns the tensors in a structure of sequences, dictionaries and dataclasses."""
    return list(iterate_tensors(values))


def iterate_tensors(values: object) -> Iterator[Tensor]:
    """Yields the tensors in a structure, which is read only when the first tensor is asked for."""
    for value in _iterate_parts(values):
        if isinstance(value, Tensor):
            yield value


def _iterate_parts(values: object) -> Iterator[object]:
    """Yields a structure and all of its parts in order; a part that occurs twice is yielded twice."""
    pending, parents = [values], set()
    while pending:
        value = pending.pop()
        yield value
        if (parts := _list_parts(value)) and id(value) not in parents:
            parents.add(id(value))  # A structure may hold itself.
            pending.extend(reversed(parts))


def _list_parts(value: object) -> list[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, _MAPPINGS):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor)):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


class _CopyTensors(TorchFunctionMode):
    """Makes copy.deepcopy copy tensors by `copy_tensor`, because torch's own copy refuses results of ops."""

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor]):
        super().__init__()
        self.copy_tensor = copy_tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__deepcopy__:
            return self.copy_tensor(args[0])
        return function(*args, **(kwargs or {}))


def copy_arguments(
    caller: str, model: nn.Module, arguments: ForwardArguments, copy_tensor: Callable[[Tensor], Tensor]
) -> ForwardArguments:
    """Copies arguments with all that a forward may change: tensors, generators, and objects with state.

    Raises:
        TypeError: an object cannot be copied.
    """
    memo: dict[int, Any] = {}  # A value that occurs twice is copied once, as by copy.deepcopy.

    def copy_value(name: str, value: Any) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        copied: Any
        if isinstance(value, Tensor):
            copied = copy_tensor(value)
        elif isinstance(value, torch.Generator):
            copied = value.clone_state()
        elif type(value) in (list, tuple, set, frozenset):
            copied = type(value)(copy_value(name, element) for element in value)
        elif type(value) is dict:
            copied = {key: copy_value(name, element) for key, element in value.items()}
        elif isinstance(value, (Enum, MethodType, ModuleType)) or type(value) is object:
            copied = value  # Programs compare values of these kinds by identity.
        else:
            try:
                with _CopyTensors(copy_tensor):
                    copied = copy.deepcopy(value, memo)
            except Exception as error:
                if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
                    return value  # Such as a lock or a process group.
                raise TypeError(
                    f"{caller}: {name} is an object with state ({type(value).__name__}), which a forward of "
                    f"a copy may change, and copy.deepcopy of it raised {type(error).__name__}: {error}; "
                    "pass what the model reads of it as tensors, numbers or containers of them"
                ) from error
        memo[id(value)] = copied
        return copied

    copied = [copy_value(name, value) for name, value in name_arguments(model, arguments)]
    args, kwargs = arguments
    return tuple(copied[: len(args)]), dict(zip(kwargs, copied[len(args) :], strict=True))


def refuse_iterators(caller: str, model: nn.Module, arguments: ForwardArguments) -> None:
    """Raises TypeError if an argument is or has an iterator, which a forward of a copy would use up."""
    for name, value in name_arguments(model, arguments):
        for element in _iterate_parts(value):
            if hasattr(type(element), "__next__"):
                verb = "is" if element is value else "has"
                raise TypeError(
                    f"{caller}: {name} {verb} an iterator ({type(element).__name__}), which a forward of a "
                    "copy would use up; pass a model whose forward takes the elements, such as "
                    "next(iterator) or list(iterator)"
                )


def name_arguments(model: nn.Module, arguments: ForwardArguments) -> list[tuple[str, object]]:
    """Returns the arguments with names for messages, by the parameters of the forward."""
    args, kwargs = arguments
    names: list[object] = list(range(1, len(args) + 1))
    with contextlib.suppress(TypeError, ValueError):
        for index, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
            if index == len(args) or parameter.kind is parameter.VAR_POSITIONAL:
                break
            names[index] = repr(parameter.name)
    named = [*zip(names, args, strict=True), *((repr(name), value) for name, value in kwargs.items())]
    return [(f"argument {name}", value) for name, value in named]
