"""Tensors in the arguments and the result of a forward: which there are, and copies of what holds them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Arguments", "copy_arguments", "find_block_tensors", "refuse_iterators", "tensor_leaves"]

Arguments = tuple[tuple, dict[str, object]]

_MAPPINGS = (dict, UserDict, MappingProxyType)  # reading one of these runs no code of the program
_FLAT = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))
_HEAP_TYPE = 1 << 9  # the flag of classes that Python code has made


def tensor_leaves(values: object) -> list[Tensor]:
    """Returns the tensors in a structure of sequences, dictionaries and dataclasses."""
    return list(_walk_tensors(values))


def find_block_tensors(values: object) -> Iterable[object]:
    """Returns objects among which are the tensors in `values`.

    This runs in each forward of a block: a tensor, or a flat sequence, is not walked through.
    """
    if type(values) is Tensor:
        return (values,)
    if isinstance(values, (tuple, list)) and all(type(value) in _FLAT for value in values):
        return values
    return _walk_tensors(values)


def _walk_tensors(values: object) -> Iterator[Tensor]:
    """Yields tensors in the order of the structure, each as often as it occurs."""
    waiting, parents = [values], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif (parts := _parts(value)) and id(value) not in parents:
            parents.add(id(value))  # a structure may hold itself
            waiting.extend(reversed(parts))


def _parts(value: object) -> list[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, _MAPPINGS):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return []


class _CopyTensors(TorchFunctionMode):
    """Lets copy.deepcopy copy tensors by a function: torch's own copy refuses results of ops."""

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor]):
        super().__init__()
        self.copy_tensor = copy_tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__deepcopy__:
            return self.copy_tensor(args[0])
        return function(*args, **(kwargs or {}))


def copy_arguments(
    caller: str, model: nn.Module, arguments: Arguments, copy_tensor: Callable[[Tensor], Tensor]
) -> Arguments:
    """Copies arguments with all that a forward may change: tensors, generators, and objects with state.

    Raises:
        TypeError: an object cannot be copied.
    """
    memo: dict[int, Any] = {}
    args, kwargs = arguments
    names = _argument_names(model, arguments)
    values = [*args, *kwargs.values()]
    copied = [
        _copy(caller, name, value, copy_tensor, memo) for name, value in zip(names, values, strict=True)
    ]
    return tuple(copied[: len(args)]), dict(zip(kwargs, copied[len(args) :], strict=True))


def _copy(caller: str, name: str, value: Any, copy_tensor: Callable, memo: dict[int, Any]) -> Any:
    """Returns a copy of one argument; what is in `memo` is copied once."""
    if id(value) in memo:
        return memo[id(value)]

    def copy_part(part: object) -> Any:
        return _copy(caller, name, part, copy_tensor, memo)

    if isinstance(value, Tensor):
        copied = copy_tensor(value)
    elif isinstance(value, torch.Generator):
        copied = value.clone_state()
    elif type(value) in (list, tuple, set, frozenset):
        copied = type(value)(map(copy_part, value))
    elif type(value) is dict:
        copied = {key: copy_part(part) for key, part in value.items()}
    elif isinstance(value, (Enum, MethodType)) or type(value) is object:  # told apart by identity
        return value
    else:
        try:
            with _CopyTensors(copy_tensor):
                copied = copy.deepcopy(value, memo)
        except Exception as error:
            if not _is_of_python_class(value):  # a lock, a process group
                return value
            raise TypeError(
                f"{caller}: {name} is an object with state ({type(value).__name__}), which a forward of a "
                f"copy may change, and copy.deepcopy of it raised {type(error).__name__}: {error}; pass what "
                "the model reads of it as tensors, numbers or containers of them"
            ) from error
    memo[id(value)] = copied
    memo.setdefault(id(memo), []).append(value)  # as copy.deepcopy: an id is valid while its object lives
    return copied


def _is_of_python_class(value: object) -> bool:
    kind = type(value)
    return bool(kind.__flags__ & _HEAP_TYPE) and type(kind).__name__ != "pybind11_type"


def refuse_iterators(caller: str, model: nn.Module, arguments: Arguments) -> None:
    """Raises TypeError where an argument is or has an iterator, which a forward of a copy would use up."""
    args, kwargs = arguments
    names = _argument_names(model, arguments)
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        waiting, parents = [value], set()
        while waiting:
            part = waiting.pop()
            if hasattr(type(part), "__next__"):
                what = "is" if part is value else "has"
                raise TypeError(
                    f"{caller}: {name} {what} an iterator ({type(part).__name__}), which a forward of a copy "
                    "would use up; pass a model whose forward takes what the iterator gives, such as "
                    "next(it) or list(it)"
                )
            if not isinstance(part, Tensor) and id(part) not in parents:
                parents.add(id(part))
                waiting.extend(_parts(part))


def _argument_names(model: nn.Module, arguments: Arguments) -> list[str]:
    """Returns how messages call the arguments: by the names of the forward's parameters where it has them."""
    args, kwargs = arguments
    names = [f"argument {number}" for number in range(1, len(args) + 1)]
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for index, parameter in enumerate(parameters[: len(names)]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names[index] = f"argument {parameter.name!r}"
    return names + [f"argument {name!r}" for name in kwargs]
