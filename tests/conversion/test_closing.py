"""A scope closes whatever raises: afterwards the next call of anything finds no hooks and no mode."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fastvit
from conversion.models import DIM, assert_same_bits, list_gradients, make_tokens

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_closed(next_call=None):
    """A scope that closes inside of a torch function leaves a mode that passes calls on."""
    if next_call == "a model that is not converted":
        modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        return (
            hooks() is None and all(mode.is_closed for mode in modes) and in_scope() is None and is_closed()
        )
    return hooks() is None and torch._C._len_torch_function_stack() == 0


@pytest.fixture(autouse=True)
def undone():
    """Closes the modes and hooks that a test has left open, since they would change later tests."""
    yield
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def mlp(*last):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), *last
    )


class Raises(nn.Module):
    """Raises an error until it has none."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


# --- what is called next

NEXT = {
    "the model": lambda model: (mend(model), model(make_tokens()).sum().backward()),
    "another model": lambda model: fastvit.convert(mlp())(make_tokens()).sum().backward(),
    "a model that is not converted": lambda model: mlp()(make_tokens()).sum().backward(),
    "report": lambda model: fastvit.report(mlp(), make_tokens()),
    "report of the model": lambda model: (mend(model), fastvit.report(model, make_tokens())),
    "verify": lambda model: fastvit.verify(mlp(), make_tokens()),
    "a budget": lambda model: fastvit.convert(mlp(), budget=0.95, example_inputs=make_tokens()),
    "scope": lambda model: in_scope(),
}
ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError, RecursionError, torch.OutOfMemoryError]


def mend(model):
    for module in model.modules():
        if isinstance(module, Raises):
            module.error = None


def in_scope():
    with fastvit.recompute_scope():
        mlp()(make_tokens()).sum().backward()


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_in_a_forward(error, then):
    model = fastvit.convert(mlp(Raises(error())))
    with pytest.raises(error):
        model(make_tokens())
    assert is_closed() or not issubclass(error, Exception)
    NEXT[then](model)
    assert is_closed(then)


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_a_hook_of_the_user(error, then):
    def hook(*_):
        raise error

    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = fastvit.convert(mlp())
        handle = getattr(model[1], register)(hook)
        with pytest.raises(error):
            model(make_tokens())
        handle.remove()
        NEXT[then](model)
        assert is_closed(then)


@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_in_a_block_of_blocks(error):
    blocks = nn.Sequential(*(nn.Sequential(mlp(), mlp(Raises(None))) for _ in range(2)))
    model = fastvit.convert(nn.Sequential(blocks, nn.LayerNorm(DIM)))
    blocks[1][1][-1].error = error()
    with pytest.raises(error):
        model(make_tokens())
    fastvit.report(mlp(), make_tokens())
    assert is_closed()


# --- the decisions at the end of a block raise


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end pytest where hooks that are left raise it once more."""


class Full:
    """Hooks round a model, which raise at the n-th pack, or at those of all results of the first Linear."""

    def __init__(self, n, error):
        self.n, self.error = n, error

    def pack(self, tensor):
        if self.n == "large":
            full = tensor.numel() > make_tokens().numel()
        else:
            self.n -= 1
            full = self.n == 0
        if full:
            raise self.error
        return tensor

    def unpack(self, tensor):
        return tensor

    def around(self):
        return saved_tensors_hooks(self.pack, self.unpack)


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, Interrupt])
@pytest.mark.parametrize("n", [1, 4, "large"])
def test_an_exception_in_the_hooks_around(n, error, then):
    """As of memory or a disk that is full; at the last decision, when the block ends, or before."""
    model = fastvit.convert(mlp(Raises(None)))
    with contextlib.suppress(error), Full(n, error()).around():
        model(make_tokens())
    assert is_closed() or not issubclass(error, Exception)
    NEXT[then](model)
    assert is_closed(then)


@pytest.mark.parametrize("error", [MemoryError, Interrupt])
@pytest.mark.parametrize("n", [1, 4, "large"])
def test_an_exception_in_the_hooks_around_a_scope(n, error):
    model = mlp()
    with contextlib.suppress(error), Full(n, error()).around(), fastvit.recompute_scope():
        y = model(make_tokens())  # held, since a scope decides on what is still saved
        assert y.grad_fn is not None
    assert is_closed()


@pytest.mark.parametrize("where", ["forward", "hooks"])
def test_hooks_of_the_user_survive(where):
    """After an exception they are on top, and are called; after their block nothing is."""
    full = Full("large" if where == "hooks" else 0, MemoryError())
    model = fastvit.convert(mlp(Raises(MemoryError() if where == "forward" else None)))
    with full.around():
        with pytest.raises(MemoryError):
            model(make_tokens())
        assert hooks() == (full.pack, full.unpack) and torch._C._len_torch_function_stack() == 0
        full.n = 0
        mlp()(make_tokens())
        assert full.n < 0 and hooks() == (full.pack, full.unpack)
    assert is_closed()


@pytest.mark.parametrize("then", NEXT)
def test_an_interrupt_inside_of_hooks_of_the_user(then):
    """The end of their block takes off what is on top."""
    model, full = fastvit.convert(mlp(Raises(KeyboardInterrupt()))), Full(0, None)
    with contextlib.suppress(KeyboardInterrupt), full.around():
        model(make_tokens())
    NEXT[then](model)
    assert is_closed(then)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
def test_what_was_saved_before_an_exception_is_freed(error):
    model = fastvit.convert(mlp(Raises(None)))
    x = make_tokens().requires_grad_()
    leaf = weakref.ref(x)
    model[-1].error = error()
    with contextlib.suppress(error):
        model(x)
    model[-1].error = None
    del x
    fastvit.convert(mlp())(make_tokens())
    gc.collect()
    assert leaf() is None


@pytest.mark.parametrize("error", ERRORS)
def test_steps_after_an_exception_are_as_before(error):
    model, eager = fastvit.convert(mlp(Raises(error()))), mlp()
    with pytest.raises(error):
        model(make_tokens())
    mend(model)
    for one in (model, eager):
        one(make_tokens()).square().sum().backward()
    assert_same_bits(list_gradients(model), list_gradients(eager))
    assert is_closed()


# --- a module that calls itself


class Tree(nn.Module):
    """Calls itself, and raises an error at a depth."""

    def __init__(self, error=None):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b, self.error = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, DIM),
            error,
        )

    def forward(self, x, depth=3):
        if depth:
            x = self(x, depth - 1)
        elif self.error is not None:
            raise self.error
        return x + self.b(torch.tanh(self.a(self.norm(x))))


@pytest.mark.parametrize("error", [None, *ERRORS])
@pytest.mark.parametrize("inner", [False, True], ids=["", "in a model"])
def test_a_module_that_calls_itself(error, inner):
    tree = Tree(None if error is None else error())
    model = fastvit.convert(nn.Sequential(tree, nn.Linear(DIM, DIM)) if inner else tree)
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        model(make_tokens())
    tree.error = None
    model(make_tokens()).square().sum().backward()
    assert is_closed()
    expected = Tree()
    torch.manual_seed(0)
    whole = nn.Sequential(expected, model[1]) if inner else expected
    before = [p.grad for p in tree.parameters()]
    whole(make_tokens()).square().sum().backward()
    assert_same_bits(before, [p.grad for p in expected.parameters()])
