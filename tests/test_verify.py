"""`verify`: agreement of the converted model, and recipes that something made wrong."""

import copy
import ctypes

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def stack(*last):
    return nn.Sequential(Block(), Block(), *last)


@pytest.fixture
def x():
    torch.manual_seed(3)
    return torch.randn(4, 16, 32)


MODELS = {
    "blocks": stack,
    "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(16), nn.ReLU(True)),
    "dropout": lambda: stack(nn.Dropout(0.3), nn.Linear(32, 32)),
    "layers of fastvit": lambda: nn.Sequential(
        nn.Linear(32, 32), nn.Unflatten(1, (16, 1)), fastvit.BatchNormAct(16, activation="gelu"),
        nn.Conv2d(16, 4, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, None])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_agrees_to_the_bit(name, dtype, x):
    for model in (MODELS[name](), fastvit.convert(MODELS[name](), products=True)):
        found = fastvit.verify(model, x, dtype=dtype)
        assert found and found.limit == 0 and not found.sites and max(found.differences.values()) == 0, found
        assert "tensors agree" in str(found) and not found.unsteady


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_and_the_random_states_do_not_change(x):
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(16), nn.Dropout(0.5)).train()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    state, rng, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state(), numpy.random.get_state()
    assert fastvit.verify(model, x) and not fastvit.convert.__globals__["is_converted"](model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng) and all(p.grad is None for p in model.parameters())
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), drawn, strict=True))
    assert len(model[0]._forward_hooks) == 1


def test_inputs_that_the_model_marks_itself(x):
    class Marks(nn.Sequential):
        def forward(self, x):
            x.requires_grad_()
            return super().forward(x)

    model = Marks(Block())
    assert fastvit.verify(model, x)


def test_inputs_by_keyword_and_outputs_in_structures(x):
    class Named(Block):
        def forward(self, *, tokens, scale):
            return {"logits": super().forward(tokens) * scale, "pair": (tokens.sum(), None)}

    found = fastvit.verify(Named(), tokens=x, scale=2.0)
    assert found and {"output 0", "output 1", "gradient of input 0"} <= set(found.differences)


# --- writes that the graph does not show: each is found, or its tensors are kept


class Writes(torch.autograd.Function):
    """Writes into its input and returns it, without mark_dirty, as some rotary embeddings do."""

    @staticmethod
    def forward(ctx, x):
        x.neg_()
        return x

    @staticmethod
    def backward(ctx, dy):
        return -dy


class Case(nn.Module):
    """One forward of a table, as a block of a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale, self.head = nn.Parameter(torch.randn(32)), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.function(x, self.scale).to(self.head.weight.dtype))


def no_grad(x, s):
    h = x * s
    with torch.no_grad():
        h.mul_(2)
    return torch.relu(h)


def data(x, s):
    h = F.gelu(x * s)
    h.data.clamp_(max=0.5)
    return h


def data_of_a_result(x, s):
    h = F.hardtanh(x * s)
    h.data = h.data.sign()
    return h


def array(x, s):
    h = F.hardtanh(x * s)
    h.detach().numpy()[:] *= 2
    return h


def double(h):
    """Not even the calls of torch show it."""
    memory = (ctypes.c_char * h.nbytes).from_address(h.data_ptr())
    numpy.frombuffer(memory, str(h.dtype).removeprefix("torch."))[:] *= 2
    return h


def by_address(x, s):
    return double(F.gelu(x * s))


def function(x, s):
    return Writes.apply(F.gelu(x * s))


def wider_operand(x, s):
    return torch.sigmoid(((x * s).exp().bfloat16() * 1.5).mul_(s))


def cast_of_a_slice(x, s):
    return (x * s).exp()[2:].to(x.dtype, copy=True)


HOLES = [no_grad, data, data_of_a_result, array, by_address, function, wider_operand, cast_of_a_slice]


def same_step(model, other, x):
    steps = []
    for one in (model, other):
        y = one(x)
        steps.append([y, *torch.autograd.grad(y.square().sum(), list(one.parameters()))])
    return all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_a_write_that_autograd_does_not_record_is_found(hole, x):
    model = nn.Sequential(Case(hole))
    original = copy.deepcopy(model)
    fastvit.convert(model)
    right = same_step(original, model, x)
    for dtype in (torch.float64, None):
        found = fastvit.verify(model, x, dtype=dtype)
        assert found or found.sites, found
        assert bool(found) == right, found
    if not right:
        assert "which convert(model, skip=verification.sites) keeps" in str(found)
        fastvit.convert(model, skip=found.sites)
        assert fastvit.verify(model, x, dtype=None) and same_step(original, model, x)


def test_what_only_address_shows_is_wrong_and_found(x):
    """So that the test above does not pass because every tensor is kept."""
    found = fastvit.verify(nn.Sequential(Case(by_address)), x)
    assert not found and found.sites == (("", "gelu"),) and found.wrong


def test_a_layer_of_fastvit_whose_output_was_written_to(x):
    class Writes(nn.Module):
        def forward(self, y):
            return double(y)

    layer = fastvit.BatchNormAct(16, activation="gelu")
    model = nn.Sequential(
        nn.Unflatten(1, (16, 1)), nn.Conv2d(16, 16, 1), layer, Writes(), nn.Conv2d(16, 4, 1)
    )
    assert len(fastvit.verify(model, x).sites) == 1


def test_a_recipe_in_a_block_is_named_by_it(x):
    class Hidden(Block):
        def forward(self, x):
            return x + self.fc2(by_address(self.fc1(self.norm(x)), torch.ones(64, dtype=x.dtype)))

    model = nn.Sequential(Block(), Hidden(), Block())
    found = fastvit.verify(model, x)
    assert found.sites == (("1", "gelu"),)
    assert fastvit.verify(fastvit.convert(model, skip=found.sites), x)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (
            [("blocks.7", "gelu")],
            r"skip must have names of blocks \(\['', '0', '1'\]\), got 'blocks.7'",
        ),
        (["gelu"], "skip must have pairs of a block's name and an op"),
    ],
)
def test_what_is_skipped_must_exist(skip, message):
    with pytest.raises(ValueError, match=message):
        fastvit.convert(stack(), skip=skip)


# --- differences


def test_a_wrong_gradient_fails_and_prints(x, monkeypatch):
    monkeypatch.setitem(vars(fastvit.recompute.rules)["RULES"], "GeluBackward0", _twice)
    found = fastvit.verify(stack(), x)
    assert not found and set(found.sites) == {("0", "gelu"), ("1", "gelu")}
    assert "tensors differ by more than 0" in str(found) and "gradient of 0.fc2.weight" in str(found)
    assert not fastvit.verify(stack(), x, limit=1e9)  # the sites remain


def _twice(read):
    return lambda t: 2 * F.gelu(t), (read.input("self", 0),)


def test_a_model_that_differs_from_itself(x):
    class Unsteady(Block):
        count = 0

        def forward(self, x):
            Unsteady.count += 1
            return super().forward(x) * (1 + 1e-12 * Unsteady.count)

    found = fastvit.verify(Unsteady(), x)
    assert found.unsteady and found and "differ between two runs of the original" in str(found)


def test_fused_layers_have_a_tolerance(x):
    model = fastvit.fuse(stack())
    exact, rough = fastvit.verify(model, x), fastvit.verify(model, x, dtype=None)
    assert (
        exact
        and exact.limit == 1e-7
        and rough
        and rough.limit == 2e-2
        and max(rough.differences.values()) > 0
    )
    assert not fastvit.verify(model, x, dtype=None, limit=0)


# --- errors


def test_a_model_that_returns_no_tensor(x):
    class Nothing(Block):
        def forward(self, x):
            return None

    with pytest.raises(ValueError, match="verify: a forward that returns tensors expected"):
        fastvit.verify(Nothing(), x)
