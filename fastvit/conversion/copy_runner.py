"""Forwards of copies of a model, for `report`, `verify` and a budget. Nothing of the model itself changes."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader

from .._checks import check_module
from .._norm_base import ProcessGroupMixin
from ..memory import live_bytes, peak_bytes
from ..recompute import SavedTensorObserver, StepRecord, active_scope, record_step
from .nested_values import Arguments, copy_arguments, refuse_iterators, tensor_leaves
from .scope_hooks import revert

_QUIET = 3.0  # seconds before progress is shown, and between its lines


def as_arguments(inputs: Tensor | Sequence | Mapping) -> Arguments:
    """Positional and keyword arguments from a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def copy_input(tensor: Tensor) -> Tensor:
    """Copies an input. Of a result of an op the copy is one too: the model may overwrite it."""
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied if tensor.is_leaf else copied.clone()


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
        self._check_supported()
        refuse_iterators(caller, model, arguments)
        tensors = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
        self.devices = list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]
        if any(device.type not in ("cpu", "cuda") for device in self.devices):
            names = ", ".join(map(str, self.devices))
            raise ValueError(f"{caller}: a model and inputs on the CPU or on CUDA expected, got {names}")
        self._begun = self._shown = time.monotonic()
        self._forwards = 0

    def _check_supported(self) -> None:
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

    def copy_model(self) -> nn.Module:
        """Returns a copy of the model, hooks included."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise ValueError(
                f"{self.caller}: it runs a copy of the model, and copy.deepcopy(model) raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def measure_original_bytes(self) -> int:
        """Returns the kept bytes of a copy that is neither converted nor fused."""
        original = revert(self.training_copy())
        with self.holding_output(original):  # allocations of caches do not count
            pass
        return self.measure_kept_bytes(original)

    def training_copy(self) -> nn.Module:
        """Returns a copy in training mode.

        If the model is in training mode, submodules in evaluation mode stay in it.
        """
        copied = self.copy_model()
        if not copied.training:
            copied.train()
        if distributed.is_available() and distributed.is_initialized():
            # Synchronised layers are set to evaluation, because other ranks may not run this forward and an
            # exchange would wait for them. They keep as many bytes in evaluation.
            for module in copied.modules():
                if isinstance(module, (nn.SyncBatchNorm, ProcessGroupMixin)):
                    module.training = False
        return copied

    def copy_inputs(self, copy_tensor: Callable[[Tensor], Tensor] = copy_input) -> Arguments:
        """Copies the inputs, since a forward may overwrite them or change objects among them."""
        return copy_arguments(self.caller, self.model, self.arguments, copy_tensor)

    def run_forward(self, model: nn.Module, arguments: Arguments) -> object:
        """Runs a copy.

        Raises:
            TypeError: it failed, and an argument is the size of a tensor, or holds the arguments.
        """
        self._show_progress()
        args, kwargs = arguments
        try:
            return model(*args, **kwargs)
        except Exception as error:
            self._explain_failure(error, arguments)
            raise

    def _show_progress(self) -> None:
        self._forwards += 1
        if (now := time.monotonic()) - self._shown > _QUIET:
            self._shown = now
            done = f"forward {self._forwards}, after {now - self._begun:.0f} s"
            print(f"fastvit.{self.caller}: runs a copy of the model: {done}", file=sys.stderr)

    def _explain_failure(self, error: Exception, arguments: Arguments) -> None:
        """Raises TypeError where an argument shows why a forward has failed."""
        args, kwargs = arguments
        for value in (args, *args, *kwargs.values()):
            if isinstance(value, (tuple, list)) and value and all(type(n) is int for n in value):
                size = tuple(value)
                raise TypeError(
                    f"{self.caller}: a tensor expected, such as torch.zeros{size}, got the size {size}"
                ) from error
        for kind, instead in _HOLDERS:
            if len(args) == 1 and isinstance(args[0], kind):
                given = f"{self.caller}: the model failed with a {type(args[0]).__name__} ({error})"
                raise TypeError(f"{given}; {instead}") from error

    def measure_kept_bytes(self, model: nn.Module) -> int:
        """Bytes that a forward keeps for backward, its result included."""
        with self.preserving_random_state():
            arguments = self.copy_inputs()

            def work() -> object:
                result = self.run_forward(model, arguments)
                torch.clear_autocast_cache()  # it holds casts of weights, which a backward may not need
                return result

            torch.clear_autocast_cache()
            return live_bytes(work, *self.devices)[0]

    def record_step(
        self, model: nn.Module, observing: AbstractContextManager[SavedTensorObserver]
    ) -> StepRecord:
        """Returns the record of a step of a copy, whose scopes recompute all that can be.

        Args:
            model: the copy.
            observing: observes saved tensors.
        """
        with observing as observer, self.preserving_random_state():
            arguments = self.copy_inputs()
            results = tensor_leaves(self.run_forward(model, arguments))
            besides = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
            record = record_step(observer, results, besides)
            torch.clear_autocast_cache()
        return record

    def measure_original_peak(self) -> int:
        """Returns the peak of a step of a copy that is neither converted nor fused."""
        return self.measure_step_peak(revert(self.training_copy()))

    def measure_step_peak(self, model: nn.Module) -> int:
        """Returns the peak bytes of a step above those before it, without what gradients of weights leave."""
        # A copy of a scripted module has parameters that are no leaves.
        trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in trained]

        def step() -> None:
            results = [one for one in tensor_leaves(self.run_forward(model, arguments)) if one.requires_grad]
            torch.clear_autocast_cache()
            try:
                if results:
                    torch.autograd.backward(results, [torch.ones_like(one) for one in results])
            except RuntimeError as error:
                if "a second time" not in str(error):  # a result whose graph the forward has freed
                    raise

        try:
            with self.preserving_random_state():
                arguments = self.copy_inputs()
                step()  # allocations of caches do not count
            with self.preserving_random_state():
                arguments = self.copy_inputs()
                return peak_bytes(step, self.devices[0])
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def holding_output(self, model: nn.Module) -> Iterator[Arguments]:
        """Runs a forward, holds its result, and yields the copies of the inputs."""
        with self.preserving_random_state():
            arguments = self.copy_inputs()
            result = self.run_forward(model, arguments)
            yield arguments
            del result
            torch.clear_autocast_cache()

    @contextlib.contextmanager
    def preserving_random_state(self) -> Iterator[None]:
        """Enables gradients; restores random states at the end, so all forwards draw the same numbers."""
        gpus = {device.index or 0 for device in self.devices if device.type == "cuda"}
        numpy = sys.modules.get("numpy.random")
        states = random.getstate(), numpy.get_state() if numpy else None
        with torch.random.fork_rng(sorted(gpus)), torch.inference_mode(False), torch.enable_grad():
            try:
                yield
            finally:
                random.setstate(states[0])
                if numpy:
                    numpy.set_state(states[1])
