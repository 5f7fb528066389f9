"""A scope closes whatever raises: the next call of anything finds no hooks and no mode."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fastvit
from conversion.cases import add_in_turn, select_each_pair
from conversion.models import DIM, assert_same_bits, list_gradients, make_tokens

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
# Exceptions that are no `Exception` skip torch's hooks that are always called.
ERRORS = {
    error.__name__: error
    for error in (
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
        ValueError,
        RecursionError,
        MemoryError,
        torch.OutOfMemoryError,
    )
}


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_closed(next_call=None):
    """Returns whether no hooks and no function mode are left.

    A scope that closes inside of a torch function leaves a mode that passes calls on. A model that is not
    converted leaves this mode in place, and the next scope removes the mode.
    """
    if next_call == "a model that is not converted":
        modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        if top_hooks() is not None or not all(mode.is_closed for mode in modes):
            return False
        step_in_scope()
    return top_hooks() is None and torch._C._len_torch_function_stack() == 0


@pytest.fixture(autouse=True)
def close_modes_and_hooks():
    """Closes the modes and hooks that a test has left open, since they would change later tests."""
    yield
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while top_hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Raises(nn.Module):
    """Raises an error, if it has one."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


def make_mlp(*last):
    torch.manual_seed(0)
    layers = nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)
    return nn.Sequential(*layers, *last)


def mend(model):
    """Removes the errors of a model, and returns the model."""
    for module in model.modules():
        if isinstance(module, Raises):
            module.error = None
    return model


def step(model):
    """Takes a step and returns the gradients."""
    model(make_tokens()).square().sum().backward()
    return list_gradients(model)


def step_in_scope():
    with fastvit.recompute_scope():
        step(make_mlp())


# The calls after the exception.
NEXT_CALLS = {
    "the model": lambda model: step(mend(model)),
    "another model": lambda model: step(fastvit.convert(make_mlp())),
    "a model that is not converted": lambda model: step(make_mlp()),
    "report": lambda model: fastvit.report(make_mlp(), make_tokens()),
    "report of the model": lambda model: fastvit.report(mend(model), make_tokens()),
    "verify": lambda model: fastvit.verify(make_mlp(), make_tokens()),
    "a budget": lambda model: fastvit.convert(make_mlp(), budget=0.95, example_inputs=make_tokens()),
    "scope": lambda model: step_in_scope(),
}


@pytest.mark.parametrize("next_call", NEXT_CALLS)
def test_any_call_works_after_an_interrupt_in_a_forward(next_call):
    model = fastvit.convert(make_mlp(Raises(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        model(make_tokens())
    NEXT_CALLS[next_call](model)
    assert is_closed(next_call)


@pytest.mark.parametrize("name", ERRORS)
def test_a_step_after_an_exception_in_a_forward_has_eager_bits(name):
    error, model = ERRORS[name], fastvit.convert(make_mlp(Raises(ERRORS[name]())))
    with pytest.raises(error):
        model(make_tokens())
    assert is_closed() or not issubclass(error, Exception)
    assert_same_bits(step(mend(model)), step(make_mlp()))
    assert is_closed()


@pytest.mark.parametrize(
    ("error", "next_call"),
    select_each_pair(["KeyboardInterrupt", "ValueError"], ["the model", "a model that is not converted"]),
)
def test_an_exception_in_a_hook_of_the_user_closes_the_scope(error, next_call):
    def hook(*_):
        raise ERRORS[error]

    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = fastvit.convert(make_mlp())
        handle = getattr(model[1], register)(hook)
        with pytest.raises(ERRORS[error]):
            model(make_tokens())
        handle.remove()
        NEXT_CALLS[next_call](model)
        assert is_closed(next_call)


def test_a_pre_hook_that_raises_before_the_scope_opens_leaves_the_outer_scope_open():
    model = fastvit.convert(make_mlp())

    def refuse(module, args):
        raise ValueError("not now")

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    with fastvit.recompute_scope():
        with pytest.raises(ValueError, match="not now"):
            model(make_tokens())
        assert fastvit.recompute.active_scope() is not None, "the scope around is still open"
    handle.remove()
    assert is_closed()
    step(model)


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "ValueError"])
def test_an_exception_in_a_block_of_blocks_closes_all_scopes(name):
    error = ERRORS[name]
    blocks = nn.Sequential(*(nn.Sequential(make_mlp(), make_mlp(Raises(None))) for _ in range(2)))
    model = fastvit.convert(nn.Sequential(blocks, nn.LayerNorm(DIM)))
    expected = step(model)
    blocks[1][1][-1].error = error()
    with pytest.raises(error):
        model(make_tokens())
    fastvit.report(make_mlp(), make_tokens())
    assert is_closed()
    model.zero_grad()
    assert_same_bits(step(mend(model)), expected)


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "ValueError", "MemoryError"])
def test_what_was_saved_before_an_exception_is_freed(name):
    model = fastvit.convert(make_mlp(Raises(ERRORS[name]())))
    x = make_tokens().requires_grad_()
    leaf = weakref.ref(x)
    with contextlib.suppress(ERRORS[name]):
        model(x)
    mend(model)
    del x
    fastvit.convert(make_mlp())(make_tokens())
    gc.collect()
    assert leaf() is None


# --- hooks around the scope, which raise while it decides what to keep


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end pytest if hooks that are left raised it once more."""


class FullStorage:
    """Hooks that raise at the n-th pack, or at the packs of all large results, as full memory would."""

    def __init__(self, n, error):
        self.n, self.error = n, error

    def pack(self, tensor):
        if self.n == "large":
            is_full = tensor.numel() > make_tokens().numel()
        else:
            self.n -= 1
            is_full = self.n == 0
        if is_full:
            raise self.error
        return tensor

    def unpack(self, tensor):
        return tensor

    def install(self):
        return saved_tensors_hooks(self.pack, self.unpack)


PACK_ERRORS = {"MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError, "Interrupt": Interrupt}


@pytest.mark.parametrize(
    ("n", "name", "next_call"), add_in_turn(select_each_pair([1, 4, "large"], PACK_ERRORS), NEXT_CALLS)
)
def test_an_exception_in_hooks_around_a_model_closes_its_scope(n, name, next_call):
    error, model = PACK_ERRORS[name], fastvit.convert(make_mlp(Raises(None)))
    with contextlib.suppress(error), FullStorage(n, error()).install():
        model(make_tokens())
    assert is_closed() or not issubclass(error, Exception)
    NEXT_CALLS[next_call](model)
    assert is_closed(next_call)


@pytest.mark.parametrize(
    ("n", "name"), select_each_pair([1, 4, "large"], ["Interrupt"]) + [("large", "MemoryError")]
)
def test_an_exception_in_hooks_around_a_scope_closes_it(n, name):
    model, error = make_mlp(), PACK_ERRORS[name]
    with contextlib.suppress(error), FullStorage(n, error()).install(), fastvit.recompute_scope():
        y = model(make_tokens())  # held, since a scope decides on what is still saved
        assert y.grad_fn is not None
    assert is_closed()


@pytest.mark.parametrize("place", ["forward", "hooks"])
def test_hooks_of_the_user_survive_an_exception(place):
    """After the exception they are on top and are called. After their block there are none."""
    storage = FullStorage("large" if place == "hooks" else 0, MemoryError())
    model = fastvit.convert(make_mlp(Raises(MemoryError() if place == "forward" else None)))
    with storage.install():
        with pytest.raises(MemoryError):
            model(make_tokens())
        assert top_hooks() == (storage.pack, storage.unpack) and torch._C._len_torch_function_stack() == 0
        storage.n = 0
        make_mlp()(make_tokens())
        assert storage.n < 0 and top_hooks() == (storage.pack, storage.unpack)
    assert is_closed()


@pytest.mark.parametrize("next_call", ["the model", "report", "a model that is not converted", "scope"])
def test_an_interrupt_inside_of_hooks_of_the_user_leaves_none_of_ours(next_call):
    """The end of the user's block takes off the hooks that are on top, whose hooks these may be."""
    model, storage = fastvit.convert(make_mlp(Raises(KeyboardInterrupt()))), FullStorage(0, None)
    with contextlib.suppress(KeyboardInterrupt), storage.install():
        model(make_tokens())
    NEXT_CALLS[next_call](model)
    assert is_closed(next_call)


# --- a module that calls itself


class Recursive(nn.Module):
    """Calls itself, and raises an error at the last call, if it has one."""

    def __init__(self, error=None):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.last = Raises(error)

    def forward(self, x, depth=3):
        x = self(x, depth - 1) if depth else self.last(x)
        return x + self.b(torch.tanh(self.a(self.norm(x))))


@pytest.mark.parametrize(
    ("name", "place"),
    select_each_pair(["no error", "KeyboardInterrupt", "ValueError"], ["the model", "in a model"]),
)
def test_a_module_that_calls_itself_has_eager_bits_after_an_exception(name, place):
    def make(error=None):
        recursive = Recursive(error)
        return nn.Sequential(recursive, nn.Linear(DIM, DIM)) if place == "in a model" else recursive

    error = ERRORS.get(name)
    model = fastvit.convert(make(error and error()))
    with pytest.raises(error) if error else contextlib.nullcontext():
        model(make_tokens())
    actual = step(mend(model))
    assert is_closed()
    assert_same_bits(actual, step(make()))
