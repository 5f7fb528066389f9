"""Forwards of copies of a model, for `report`, `verify` and a budget. Nothing of the model itself changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from .._checks import check_module
from .._norm import SharesGroup
from ..memory import live_bytes
from ..recompute import active_scope

__all__ = ["Arguments", "CopyRunner", "as_arguments", "tensor_leaves"]

Arguments = tuple[tuple, dict[str, object]]

_QUIET = 3.0  # seconds before progress is shown, and between its lines


def as_arguments(inputs: Tensor | Sequence | Mapping) -> Arguments:
    """Positional and keyword arguments from a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def tensor_leaves(values: object) -> list[Tensor]:
    """The tensors in a structure, which may be a dataclass, as in transformers, or a mapping."""
    if dataclasses.is_dataclass(values):
        values = vars(values)
    elif isinstance(values, Mapping):
        values = dict(values)
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


_HOLDERS = (
    (Mapping, "pass what it holds as keyword arguments, **batch"),
    ((tuple, list), "pass what it holds as arguments, *batch"),
    (DataLoader, "pass a batch of it, next(iter(loader)), or the part of that which the model takes"),
)


class CopyRunner:
    """A model and the inputs with which copies of it run.

    Args:
        caller: the public function, named in errors.
        model: never called, and never changed.
        arguments: of the forward.
    """

    def __init__(self, caller: str, model: nn.Module, arguments: Arguments):
        self.caller, self.model, self.arguments = caller, model, arguments
        self._refuse()
        tensors = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
        self.devices = list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]
        if any(device.type not in ("cpu", "cuda") for device in self.devices):
            names = ", ".join(map(str, self.devices))
            raise ValueError(f"{caller}: a model and inputs on the CPU or on CUDA expected, got {names}")
        self._begun = self._shown = time.monotonic()
        self._forwards = 0

    def _refuse(self) -> None:
        check_module(self.caller, self.model)
        if active_scope() is not None:
            raise RuntimeError(f"{self.caller}: call it outside of recompute_scope()")
        for module in self.model.modules():
            name = type(module).__name__
            if any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__):
                raise ValueError(
                    f"{self.caller}: {name} is sharded, and copies of it cannot run alone; pass the model "
                    "as it is before it is sharded"
                )
            if type(module).__module__.startswith("torch.nn.parallel"):
                raise ValueError(
                    f"{self.caller}: the forward of {name} cannot run without its backward; pass its .module"
                )

    def copy(self) -> nn.Module:
        """A copy of the model, hooks included."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise ValueError(
                f"{self.caller}: it runs a copy of the model, and copy.deepcopy(model) raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def measure_original_bytes(self, revert: Callable[[nn.Module], nn.Module]) -> int:
        """`kept_bytes` of a copy that `revert` makes the original."""
        original = revert(self.training_copy())
        with self.held(original):  # allocations of caches do not count
            pass
        return self.kept_bytes(original)

    def training_copy(self) -> nn.Module:
        """A copy that is in training; modules that are not, in a model that is, stay so."""
        copied = self.copy()
        if not copied.training:
            copied.train()
        if distributed.is_available() and distributed.is_initialized():
            # Other ranks may not run this, so no exchange may. In evaluation such a layer keeps as much.
            for module in copied.modules():
                if isinstance(module, (nn.SyncBatchNorm, SharesGroup)):
                    module.training = False
        return copied

    def inputs(self) -> Arguments:
        """Copies of the inputs, since a forward may overwrite them."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(Tensor, copied, self.arguments)

    def forward(self, model: nn.Module, arguments: Arguments) -> object:
        """Runs a copy.

        Raises:
            TypeError: it failed, and an argument is the size of a tensor, or holds the arguments.
        """
        self._forwards += 1
        if (now := time.monotonic()) - self._shown > _QUIET:
            self._shown = now
            done = f"forward {self._forwards}, after {now - self._begun:.0f} s"
            print(f"fastvit.{self.caller}: runs a copy of the model: {done}", file=sys.stderr)
        args, kwargs = arguments
        try:
            return model(*args, **kwargs)
        except Exception as error:
            for value in (args, *args, *kwargs.values()):
                if isinstance(value, (tuple, list)) and value and all(type(n) is int for n in value):
                    size = tuple(value)
                    raise TypeError(
                        f"{self.caller}: a tensor expected, such as torch.zeros{size}, got the size {size}"
                    ) from error
            for kind, instead in _HOLDERS:
                if len(args) == 1 and isinstance(args[0], kind):
                    given = type(args[0]).__name__
                    raise TypeError(
                        f"{self.caller}: the model failed with a {given} ({error}); {instead}"
                    ) from error
            raise

    def kept_bytes(self, model: nn.Module) -> int:
        """Bytes that a forward keeps for backward, its result included."""
        with self.untouched():
            arguments = self.inputs()

            def work() -> object:
                result = self.forward(model, arguments)
                torch.clear_autocast_cache()  # it holds casts of weights, which a backward may not need
                return result

            torch.clear_autocast_cache()
            return live_bytes(work, *self.devices)[0]

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Inside, the result of a forward is held."""
        with self.untouched():
            result = self.forward(model, self.inputs())
            yield
            del result
            torch.clear_autocast_cache()

    @property
    def _gpus(self) -> list[int]:
        return sorted({device.index or 0 for device in self.devices if device.type == "cuda"})

    def seed(self) -> None:
        """Seeds the random states that `untouched` restores, and no other GPU's."""
        for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in self._gpus)):
            generator.manual_seed(0)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """With gradients; random states are restored."""
        numpy = sys.modules.get("numpy.random")
        states = random.getstate(), numpy.get_state() if numpy else None
        with torch.random.fork_rng(self._gpus), torch.inference_mode(False), torch.enable_grad():
            try:
                yield
            finally:
                random.setstate(states[0])
                if numpy:
                    numpy.set_state(states[1])
