"""The functions, classes and modules that the source of a random program uses."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint  # noqa: F401  programs use it

# Factories of parameters and buffers. Autograd saves a scale, which multiplies, but no shift, which is added.


def scale(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def frozen_scale(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape), requires_grad=False)


shift, frozen_shift = scale, frozen_scale


def shift_buffer(*shape: int) -> nn.Buffer:
    return nn.Buffer(torch.randn(shape))


def scale_of(subclass: type[Tensor], *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).as_subclass(subclass))


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


def freeze(module: nn.Module, name_part: str = "") -> nn.Module:
    """Freezes the parameters whose names contain `name_part`, and returns the module."""
    for name, parameter in module.named_parameters():
        if name_part in name:
            parameter.requires_grad_(False)
    return module


def frozen_encoder(width: int) -> nn.Module:
    """Returns a transformer encoder without gradients, which takes torch's fast path in evaluation."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1).requires_grad_(False)


def padding_mask(tokens: Tensor) -> Tensor:
    """Returns a mask that is True at the last three tokens of every second sequence."""
    mask = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    mask[1::2, -3:] = True
    return mask


def train_norms_only(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)


def train_biases_only(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)


def train_second_half(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)


def list_leaf_modules(model: nn.Module, step: int = 1) -> list[nn.Module]:
    """Returns each `step`-th module of those that have no submodules and do not work in place."""
    leaf_modules = [m for m in model.modules() if not any(m.children()) and not getattr(m, "inplace", False)]
    return leaf_modules[::step]


def first_output(outputs):
    """Returns the first output of a forward, which returns a list or one tensor."""
    return outputs[0] if isinstance(outputs, list) else outputs


def put_nan_and_inf(t: Tensor) -> Tensor:
    """Returns a copy with one NaN, one positive and one negative infinity."""
    t = t.clone()
    t[0, 0, 0, 0], t[1, 1, 1, 1], t[2, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    return t


def make_losses(outputs: list[Tensor]) -> list[Tensor]:
    """Returns a loss for each output: the sum of its elements, multiplied by fixed random weights."""
    generator = torch.Generator().manual_seed(0)
    return [(o.float() * torch.randn(o.shape, generator=generator)).sum() for o in outputs]


def take_sgd_step(parameters: list[nn.Parameter]) -> None:
    """Takes a step of SGD with the parameters that have gradients."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-1e-3)


class Image(Tensor):
    """A subclass that overrides nothing."""


class LargeEps(Tensor):
    """A subclass of which layer_norm takes eps = 0.1."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, _with_large_eps(function, kwargs))


class LargeEpsMode(TorchFunctionMode):
    """A function mode in which layer_norm takes eps = 0.1."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **_with_large_eps(function, kwargs))


def _with_large_eps(function, kwargs: dict | None) -> dict:
    kwargs = kwargs or {}
    return kwargs | {"eps": 0.1} if function is F.layer_norm and "eps" in kwargs else kwargs


class NoisyDropoutMode(TorchFunctionMode):
    """A function mode in which dropout multiplies by uniform noise."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.dropout:
            return args[0] * torch.rand(args[0].shape, dtype=args[0].dtype)
        return function(*args, **(kwargs or {}))


class ChangedSumMode(TorchFunctionMode):
    """A function mode that adds 0.25 to each number that the program adds to a tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__add__ and isinstance(args[1], float):
            args = args[0], args[1] + 0.25
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def matmul_precision(precision: str):
    old_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old_precision)


@contextlib.contextmanager
def deterministic_algorithms():
    was_enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)


def copy_on_save():
    """Returns saved-tensor hooks that pack a copy of the tensor."""
    return torch.autograd.graph.saved_tensors_hooks(_copy_memory, lambda t: t)


def tuple_on_save():
    """Returns saved-tensor hooks that pack a tuple, whose only item is a copy of the tensor."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (_copy_memory(t),), lambda packed: packed[0])


def _copy_memory(t: Tensor) -> Tensor:
    """Copies a tensor unseen by modes. The strides stay the same; backward chooses kernels by strides."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        memory = t.untyped_storage().clone()
        return torch.empty(0, dtype=t.dtype).set_(memory, t.storage_offset(), t.size(), t.stride())


class StopProgram(BaseException):
    """An exception that ends a program from outside, as Ctrl-C does."""


class FailingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that raise MemoryError after `number` tensors."""

    def __init__(self, number: int):
        num_left = itertools.count(number, -1)

        def pack(tensor: Tensor) -> Tensor:
            if not next(num_left):
                raise MemoryError
            return tensor

        super().__init__(pack, lambda t: t)


_set_backward_hooks = Tensor._backward_hooks.__set__  # type: ignore[attr-defined]


class Run:
    """The state of one run of a program, outside of its model."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.log: list = []  # what hooks, modes and subclasses note; compared with eager's log
        self.depth = 0  # grows with each call of a module by itself, by 1 or 2; limits these calls
        self.failed: set[int] = set()  # the numbers of the lines whose fail_once has raised
        self.number = 1  # the number of calls of next_number, plus 1
        self.generator = torch.Generator().manual_seed(3)

    def cast_values(self, values: list[Tensor]) -> None:
        """Casts values to the dtype of the weights. A line under autocast is between two of these calls."""
        values[:] = [t.to(self.dtype) for t in values]

    def fail_once(self, line_number: int, error: type[BaseException]) -> None:
        """Raises the error the first time that the program runs the line with this number."""
        if line_number not in self.failed:
            self.failed.add(line_number)
            raise error

    def repeat_until_complete(self, model: nn.Module, x: Tensor, scope) -> None:
        """Repeats the forward until no `fail_once` raises in it."""
        for _ in range(14):  # a program has at most 13 lines that fail once
            try:
                with scope():
                    return model(x)
            except (ValueError, StopProgram):
                self.depth = 0

    def interrupt_and_rewind(self, model: nn.Module, x: Tensor, scope, context) -> None:
        """Runs a forward that may raise anywhere, and then restores all that the forward changed."""
        tensors = [*model.parameters(), *model.buffers(), x]
        old_values, rng_state = [t.detach().clone() for t in tensors], torch.get_rng_state()
        module_states = {module: (module.training, getattr(module, "calls", 0)) for module in model.modules()}
        log, failed = list(self.log), set(self.failed)
        number, generator_state = self.number, self.generator.get_state()
        with contextlib.suppress(MemoryError, ValueError, StopProgram), scope(), context:
            model(x)
        with torch.no_grad():
            for tensor, values in zip(tensors, old_values, strict=True):
                tensor.data.copy_(values)
        for module, module_state in module_states.items():
            module.training, module.calls = module_state
        torch.set_rng_state(rng_state)
        self.generator.set_state(generator_state)
        self.log[:], self.failed, self.number, self.depth = log, failed, number, 0

    def next_number(self) -> float:
        """Returns 1 + 1 / n, a number that differs from call to call."""
        self.number += 1
        return 1 + 1 / self.number

    def note(self, value: object) -> None:
        """Appends the repr of a value to the log."""
        self.log.append(repr(value))

    @functools.cached_property
    def noting_subclass(self) -> type[Tensor]:
        """A subclass that notes the names of the functions that are called with its tensors."""
        note = self.note

        class NotingTensor(Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                note(getattr(function, "__name__", function))
                return super().__torch_function__(function, types, args, kwargs or {})

        return NotingTensor

    def make_noting_mode(self) -> TorchFunctionMode:
        """Returns a function mode that notes the names of the functions that are called."""
        note = self.note

        class NotingMode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function != _set_backward_hooks:  # torch itself calls it under any saved-tensor hooks
                    note(getattr(function, "__name__", function))
                return function(*args, **(kwargs or {}))

        return NotingMode()
