"""The functions and classes that the source of a random program may name besides torch."""

from __future__ import annotations

import contextlib
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

__all__ = [
    "AddedNumber", "DropoutNoise", "F", "Failing", "Image", "LargeEps", "LargeEpsMode", "Run", "Stop",
    "checkpoint", "copy_on_save", "deterministic", "encoder", "freeze", "frozen_scale", "frozen_shift",
    "leaves", "matmul_precision", "matrix", "nn", "padding", "poison", "scale", "scale_of", "sgd", "shift",
    "shift_buffer", "single", "torch", "train_biases_only", "train_norms_only", "train_second_half",
    "tuple_on_save", "weigh",
]  # fmt: skip

# A scale multiplies, so autograd saves it. A shift is added, so autograd does not.


def scale(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def shift(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def frozen_scale(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape), requires_grad=False)


def frozen_shift(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape), requires_grad=False)


def shift_buffer(*shape: int) -> nn.Buffer:
    return nn.Buffer(torch.randn(shape))


def scale_of(subclass: type[Tensor], *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).as_subclass(subclass))


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


def freeze(module: nn.Module, part: str = "") -> nn.Module:
    """Freezes the parameters of a module whose names contain `part`, and returns the module."""
    for name, parameter in module.named_parameters():
        if part in name:
            parameter.requires_grad_(False)
    return module


def encoder(width: int) -> nn.Module:
    """Returns a frozen encoder, which takes torch's fast path in evaluation."""
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1).requires_grad_(False)


def padding(tokens: Tensor) -> Tensor:
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


def leaves(model: nn.Module, every: int = 1) -> list[nn.Module]:
    """Returns every n-th of the modules that have no submodules and do not work in place."""
    found = [m for m in model.modules() if not any(m.children()) and not getattr(m, "inplace", False)]
    return found[::every]


def single(outputs):
    """Returns the first output of a forward that may return a list."""
    return outputs[0] if isinstance(outputs, list) else outputs


def poison(t: Tensor) -> Tensor:
    """Returns a copy with NaN and infinities at three places."""
    t = t.clone()
    t[0, 0, 0, 0], t[1, 1, 1, 1], t[2, 2, 2, 2] = float("nan"), float("inf"), -float("inf")
    return t


def weigh(outputs: list[Tensor]) -> list[Tensor]:
    """Returns a loss for each output."""
    generator = torch.Generator().manual_seed(0)
    return [(o.float() * torch.randn(o.shape, generator=generator)).sum() for o in outputs]


def sgd(parameters: list[nn.Parameter]) -> None:
    """Takes a step of SGD."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-1e-3)


class Image(Tensor):
    """A subclass that overrides nothing."""


class LargeEps(Tensor):
    """A subclass whose layer_norm has another eps."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, _with_large_eps(function, kwargs))


class LargeEpsMode(TorchFunctionMode):
    """A mode whose layer_norm has another eps."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **_with_large_eps(function, kwargs))


def _with_large_eps(function, kwargs: dict | None) -> dict:
    kwargs = kwargs or {}
    return kwargs | {"eps": 0.1} if function is F.layer_norm and "eps" in kwargs else kwargs


class DropoutNoise(TorchFunctionMode):
    """A mode whose dropout multiplies by uniform noise."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.dropout:
            return args[0] * torch.rand(args[0].shape, dtype=args[0].dtype)
        return function(*args, **(kwargs or {}))


class AddedNumber(TorchFunctionMode):
    """A mode that adds another number than the program."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__add__ and isinstance(args[1], float):
            args = args[0], args[1] + 0.25
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def matmul_precision(precision: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def copy_on_save():
    """Returns saved-tensor hooks that pack a copy."""
    return torch.autograd.graph.saved_tensors_hooks(_copy_memory, lambda t: t)


def tuple_on_save():
    """Returns saved-tensor hooks that pack a tuple with a copy."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (_copy_memory(t),), lambda packed: packed[0])


def _copy_memory(t: Tensor) -> Tensor:
    """Returns a copy with the same strides, which modes do not see. Backward chooses kernels by strides."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        memory = t.untyped_storage().clone()
        return torch.empty(0, dtype=t.dtype).set_(memory, t.storage_offset(), t.size(), t.stride())


class Stop(BaseException):
    """An exception that ends a program from outside, as Ctrl-C does."""


class Failing(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks that raise MemoryError after `number` tensors."""

    def __init__(self, number: int):
        left = itertools.count(number, -1)

        def pack(tensor: Tensor) -> Tensor:
            if not next(left):
                raise MemoryError
            return tensor

        super().__init__(pack, lambda t: t)


_set_backward_hooks = Tensor._backward_hooks.__set__  # type: ignore[attr-defined]


class Run:
    """The state of one run of a program, outside of its model."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.log: list = []  # notes of hooks and subclasses, which are compared with eager's
        self.depth = 0  # how many calls of a module by itself are open
        self.failed: set[int] = set()  # the places where fail_once has raised
        self.number = 1  # how often next_number was called, plus 1
        self.generator = torch.Generator().manual_seed(3)

    def cast(self, values: list[Tensor]) -> None:
        """Casts values to the dtype of the weights, before and after a line under autocast."""
        values[:] = [t.to(self.dtype) for t in values]

    def fail_once(self, place: int, error: type[BaseException]) -> None:
        """Raises the error the first time that the program comes to this place."""
        if place not in self.failed:
            self.failed.add(place)
            raise error

    def attempt(self, model: nn.Module, x: Tensor, scope) -> None:
        """Repeats the forward until `fail_once` does not end it."""
        for _ in range(9):
            try:
                with scope():
                    return model(x)
            except (ValueError, Stop):
                self.depth = 0

    def attempt_and_rewind(self, model: nn.Module, x: Tensor, scope, context) -> None:
        """Runs a forward that may end anywhere, and then restores all that it changed."""
        tensors = [*model.parameters(), *model.buffers(), x]
        before, state = [t.detach().clone() for t in tensors], torch.get_rng_state()
        modes = {module: (module.training, getattr(module, "calls", 0)) for module in model.modules()}
        log, failed = list(self.log), set(self.failed)
        number, noise = self.number, self.generator.get_state()
        with contextlib.suppress(MemoryError, ValueError, Stop), scope(), context:
            model(x)
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.data.copy_(old)
        for module, mode in modes.items():
            module.training, module.calls = mode
        torch.set_rng_state(state)
        self.generator.set_state(noise)
        self.log[:], self.failed, self.number, self.depth = log, failed, number, 0

    def next_number(self) -> float:
        self.number += 1
        return 1 + 1 / self.number

    def note(self, value: object) -> None:
        self.log.append(repr(value))

    @functools.cached_property
    def noted_type(self) -> type[Tensor]:
        """A subclass that notes the functions that are called with it."""
        note = self.note

        class Noted(Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                note(getattr(function, "__name__", function))
                return super().__torch_function__(function, types, args, kwargs or {})

        return Noted

    def noted_mode(self) -> TorchFunctionMode:
        """A mode that notes the functions that are called."""
        note = self.note

        class Noting(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function != _set_backward_hooks:  # by torch itself, under saved-tensor hooks of anybody
                    note(getattr(function, "__name__", function))
                return function(*args, **(kwargs or {}))

        return Noting()
