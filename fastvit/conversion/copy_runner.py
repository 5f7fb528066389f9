"""Runs copies of a model, for `report`, `verify` and a budget. Nothing of the model itself changes."""

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
from .nested_values import ForwardArguments, copy_arguments, refuse_iterators, tensor_leaves
from .scope_hooks import revert

_SECONDS_BEFORE_PROGRESS = 3.0  # Before the first line on stderr, and between two lines.


def split_example_inputs(inputs: Tensor | Sequence | Mapping) -> ForwardArguments:
    """Returns the positional and the keyword arguments of a forward.

    Args:
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def copy_input_tensor(tensor: Tensor) -> Tensor:
    """Copies an input. A copy of a non-leaf is a non-leaf, since autograd lets a model overwrite no other."""
    leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return leaf if tensor.is_leaf else leaf.clone()


# Classes of a single argument, and what to pass instead.
_CONTAINER_HINTS = (
    (Mapping, "pass what it holds as keyword arguments, **batch"),
    ((tuple, list), "pass what it holds as arguments, *batch"),
    (DataLoader, "pass a batch of it, next(iter(loader)), or the part of the batch that the model takes"),
)


class CopyRunner:
    """Runs forwards of copies of a model.

    Args:
        caller: the name of the public function, for errors.
        model: the model, which is copied, and neither called nor changed.
        arguments: the arguments of a forward.
    """

    def __init__(self, caller: str, model: nn.Module, arguments: ForwardArguments):
        self.caller, self.model, self.arguments = caller, model, arguments
        self._check_supported()
        refuse_iterators(caller, model, arguments)
        tensors = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
        self.devices = list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]
        if any(device.type not in ("cpu", "cuda") for device in self.devices):
            names = ", ".join(map(str, self.devices))
            raise ValueError(f"{caller}: a model and inputs on the CPU or on CUDA expected, got {names}")
        self._start_time = self._last_progress_time = time.monotonic()
        self._num_forwards = 0

    def _check_supported(self) -> None:
        check_module(self.caller, self.model)
        if active_scope() is not None:
            raise RuntimeError(
                f"{self.caller}: a recompute_scope() is open; call {self.caller} outside of scopes"
            )
        for module in self.model.modules():
            name = type(module).__name__
            if any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__):
                raise ValueError(
                    f"{self.caller}: {name} is sharded, and copies of it cannot run alone; pass the model "
                    "before it is sharded"
                )
            if type(module).__module__.startswith("torch.nn.parallel"):
                raise ValueError(
                    f"{self.caller}: the forward of {name} cannot run without its backward; pass its .module"
                )

    def copy_model(self) -> nn.Module:
        """Returns a copy of the model with its hooks."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise ValueError(
                f"{self.caller}: a copy of the model is run, and copy.deepcopy(model) raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def measure_original_bytes(self) -> int:
        """Returns the kept bytes of a copy that is neither converted nor fused."""
        original = revert(self.copy_for_training())
        with self.hold_result(original):  # A first forward allocates caches, which do not count.
            pass
        return self.measure_kept_bytes(original)

    def copy_for_training(self) -> nn.Module:
        """Returns a copy in training mode.

        If the model is in training mode, submodules in evaluation mode keep their mode.
        """
        model = self.copy_model()
        if not model.training:
            model.train()
        if distributed.is_available() and distributed.is_initialized():
            # Synchronised layers are set to evaluation: an exchange would wait for other ranks, which may not
            # run this forward. In evaluation these layers keep as many bytes.
            for module in model.modules():
                if isinstance(module, (nn.SyncBatchNorm, ProcessGroupMixin)):
                    module.training = False
        return model

    def copy_inputs(self, copy_tensor: Callable[[Tensor], Tensor] = copy_input_tensor) -> ForwardArguments:
        """Copies the inputs, since a forward may overwrite them or change objects among them."""
        return copy_arguments(self.caller, self.model, self.arguments, copy_tensor)

    def run_forward(self, model: nn.Module, arguments: ForwardArguments) -> object:
        """Returns the result of a forward of a copy.

        Raises:
            TypeError: the forward failed, and an argument is a size, or a container of arguments.
        """
        self._show_progress()
        args, kwargs = arguments
        try:
            return model(*args, **kwargs)
        except Exception as error:
            self._explain_failure(error, arguments)
            raise

    def _show_progress(self) -> None:
        self._num_forwards += 1
        if (time_now := time.monotonic()) - self._last_progress_time > _SECONDS_BEFORE_PROGRESS:
            self._last_progress_time = time_now
            progress = f"forward {self._num_forwards}, after {time_now - self._start_time:.0f} s"
            print(f"fastvit.{self.caller}: runs a copy of the model: {progress}", file=sys.stderr)

    def _explain_failure(self, error: Exception, arguments: ForwardArguments) -> None:
        """Raises TypeError if a forward failed because of the kind of an argument; else returns."""
        args, kwargs = arguments
        for value in (args, *args, *kwargs.values()):
            if isinstance(value, (tuple, list)) and value and all(type(n) is int for n in value):
                size = tuple(value)
                raise TypeError(
                    f"{self.caller}: a tensor expected, such as torch.zeros{size}, got the size {size}"
                ) from error
        for kind, hint in _CONTAINER_HINTS:
            if len(args) == 1 and isinstance(args[0], kind):
                message = f"{self.caller}: the model failed with a {type(args[0]).__name__} ({error})"
                raise TypeError(f"{message}; {hint}") from error

    def measure_kept_bytes(self, model: nn.Module) -> int:
        """Returns the bytes that a forward keeps for backward, its result included."""
        with self.preserve_random_state():
            arguments = self.copy_inputs()

            def run_once() -> object:
                result = self.run_forward(model, arguments)
                torch.clear_autocast_cache()  # Casts of weights in it may not be needed in backward.
                return result

            torch.clear_autocast_cache()
            return live_bytes(run_once, *self.devices)[0]

    def record_step(
        self, model: nn.Module, observer_context: AbstractContextManager[SavedTensorObserver]
    ) -> StepRecord:
        """Returns the record of a step of a copy.

        Args:
            model: the copy, whose scopes recompute every op with a rule.
            observer_context: yields the observer of saved tensors.
        """
        with observer_context as observer, self.preserve_random_state():
            arguments = self.copy_inputs()
            results = tensor_leaves(self.run_forward(model, arguments))
            excluded = [*model.parameters(), *model.buffers(), *tensor_leaves(arguments)]
            record = record_step(observer, results, exclude=excluded)
            torch.clear_autocast_cache()
        return record

    def measure_original_peak(self) -> int:
        """Returns the peak of a step of a copy that is neither converted nor fused."""
        return self.measure_step_peak(revert(self.copy_for_training()))

    def measure_step_peak(self, model: nn.Module, *, keeps_gradients: bool = False) -> int:
        """Returns the peak bytes of a step above those before the step.

        Args:
            model: a copy, whose gradients are dropped.
            keeps_gradients: The bytes of the parameters' gradients count, too.
        """
        # A copy of a scripted module has parameters that are no leaves, and get no gradients.
        trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]

        def drop_gradients(*parameters: Tensor) -> None:
            for parameter in parameters:
                parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(drop_gradients) for p in trained if not keeps_gradients]

        def run_step() -> None:
            tensors = tensor_leaves(self.run_forward(model, arguments))
            results = [tensor for tensor in tensors if tensor.requires_grad]
            torch.clear_autocast_cache()
            try:
                if results:
                    torch.autograd.backward(results, list(map(torch.ones_like, results)))
            except RuntimeError as error:
                if "a second time" not in str(error):  # The forward has freed the graph of a result.
                    raise

        try:
            with self.preserve_random_state():
                arguments = self.copy_inputs()
                run_step()  # A first step allocates caches, which do not count.
            drop_gradients(*trained)
            with self.preserve_random_state():
                arguments = self.copy_inputs()
                return peak_bytes(run_step, self.devices[0])
        finally:
            drop_gradients(*trained)
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def hold_result(self, model: nn.Module) -> Iterator[ForwardArguments]:
        """Runs a forward, yields the copies of the inputs, and holds the result until the end."""
        with self.preserve_random_state():
            arguments = self.copy_inputs()
            result = self.run_forward(model, arguments)
            yield arguments
            del result
            torch.clear_autocast_cache()

    @contextlib.contextmanager
    def preserve_random_state(self) -> Iterator[None]:
        """Enables gradients, and restores random states at the end: all forwards draw the same numbers."""
        gpu_indices = {device.index or 0 for device in self.devices if device.type == "cuda"}
        numpy_random = sys.modules.get("numpy.random")
        states = random.getstate(), numpy_random.get_state() if numpy_random else None
        with torch.random.fork_rng(sorted(gpu_indices)), torch.inference_mode(False), torch.enable_grad():
            try:
                yield
            finally:
                random.setstate(states[0])
                if numpy_random:
                    numpy_random.set_state(states[1])
