"""`verify`: agreement of the converted model, and recipes that something made wrong."""

import copy
import ctypes
import itertools

import numpy
import pytest
import torch
import torch.nn.functional as F
from recompute.writes import WRITES, Rotated
from torch import nn

import fastvit
from fastvit.conversion.scope_hooks import is_converted
from fastvit.recompute import RecomputeLevel
from fastvit.recompute.recompute_rules import RECOMPUTE_RULES
from report.models import WIDTH, SmallViT, SmallViTBlock

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture
def x():
    torch.manual_seed(3)
    return torch.randn(4, 16, WIDTH)


MODELS = {
    "blocks": lambda: SmallViT(2),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16), nn.ReLU(True)),
    "layers of fastvit": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (16, 1)), fastvit.BatchNormAct(16, activation="gelu"),
        nn.Conv2d(16, 4, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_agrees_to_the_bit(name, x):
    converted = fastvit.convert(MODELS[name](), matmuls=True)
    for model, dtype in itertools.product((MODELS[name](), converted), (torch.float64, None)):
        verification = fastvit.verify(model, x, dtype=dtype)
        assert verification and verification.tolerance == 0 and not verification.skip, verification
        assert max(verification.differences.values()) == 0, verification
        assert "tensors agree" in str(verification) and not verification.nondeterministic


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_and_the_random_states_do_not_change(x, monkeypatch):
    """torch.manual_seed seeds every GPU, and verify restores those of the model alone."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("every GPU is seeded"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16), nn.Dropout(0.5)).train()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    state, rng, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state(), numpy.random.get_state()
    assert fastvit.verify(model, x) and not is_converted(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng) and all(p.grad is None for p in model.parameters())
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), drawn, strict=True))
    assert len(model[0]._forward_hooks) == 1


def test_inputs_that_the_model_marks_itself_have_no_gradient_to_compare(x):
    class Marks(nn.Sequential):
        def forward(self, x):
            x.requires_grad = True
            return super().forward(x)

    verification = fastvit.verify(Marks(SmallViTBlock()), x)
    assert verification and not any(name.startswith("gradient of input") for name in verification.differences)


def test_inputs_by_keyword_and_outputs_in_structures_are_compared(x):
    class Named(SmallViTBlock):
        def forward(self, *, tokens, scale):
            return {"logits": super().forward(tokens) * scale, "pair": (tokens.sum(), None)}

    verification = fastvit.verify(Named(), tokens=x, scale=2.0)
    assert verification and {"output 0", "output 1", "gradient of input 0"} <= set(verification.differences)


# Writes that the graph does not show: each is found, or its tensors are kept


class FunctionAndHead(nn.Module):
    """`function(x, scale)` of a table, followed by a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.function(x, self.scale).to(self.head.weight.dtype))


def double_by_address(h):
    """Doubles a tensor in place. Not even the calls of torch show this write."""
    memory = (ctypes.c_char * h.nbytes).from_address(h.data_ptr())
    numpy.frombuffer(memory, str(h.dtype).removeprefix("torch."))[:] *= 2
    return h


def with_write(write):
    """Returns a function in which `write` changes a result that is not saved yet."""

    def function(x, s):
        h = F.gelu(x * s)
        write(h, h)
        return torch.relu(h)

    return function


HOLES = {name: with_write(WRITES[name]) for name in ("no_grad", "data", "data is set", "numpy")} | {
    "address": lambda x, s: double_by_address(F.gelu(x * s)),
    "Function": lambda x, s: Rotated.apply(F.gelu(x * s)),
    "wider operand": lambda x, s: torch.sigmoid(((x * s).exp().bfloat16() * 1.5).mul_(s)),
    "cast of a slice": lambda x, s: (x * s).exp()[2:].to(x.dtype, copy=True),
}


def have_equal_steps(model, other, x):
    """Returns whether two models have the same output and gradients."""
    results = []
    for each in (model, other):
        y = each(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(each.parameters()))])
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("hole", HOLES)
def test_a_write_that_autograd_does_not_record_is_found(hole, x):
    model = nn.Sequential(FunctionAndHead(HOLES[hole]))
    original = copy.deepcopy(model)
    fastvit.convert(model)
    is_right = have_equal_steps(original, model, x)
    for dtype in (torch.float64, None):
        verification = fastvit.verify(model, x, dtype=dtype)
        assert verification or verification.skip, verification
        assert bool(verification) == is_right, verification
    if not is_right:
        assert "which convert(model, skip=verification.skip) keeps" in str(verification)
        fastvit.convert(model, skip=verification.skip)
        assert fastvit.verify(model, x, dtype=None) and have_equal_steps(original, model, x)


def test_a_write_to_the_output_of_a_layer_of_fastvit_is_found(x):
    class Writes(nn.Module):
        def forward(self, y):
            return double_by_address(y)

    layer = fastvit.BatchNormAct(16, activation="gelu")
    model = nn.Sequential(
        nn.Unflatten(1, (16, 1)), nn.Conv2d(16, 16, 1), layer, Writes(), nn.Conv2d(16, 4, 1)
    )
    assert len(fastvit.verify(model, x).skip) == 1


def test_a_recipe_in_a_block_is_named_by_it(x):
    class Hidden(SmallViTBlock):
        def act(self, x):
            return double_by_address(F.gelu(x))

    model = nn.Sequential(SmallViTBlock(), Hidden(), SmallViTBlock())
    verification = fastvit.verify(model, x)
    assert verification.skip == (("1", "gelu"),)
    assert fastvit.verify(fastvit.convert(model, skip=verification.skip), x)


def test_older_names_of_verify_warn(x):
    with pytest.warns(DeprecationWarning, match=r"verify\(limit=\) is verify\(tolerance=\) now"):
        verification = fastvit.verify(SmallViT(1), x, limit=0.5)
    names = {"limit": "tolerance", "sites": "skip", "unsteady": "nondeterministic", "wrong": "failures"}
    for old, new in names.items():
        with pytest.warns(DeprecationWarning, match=f"Verification.{old} is Verification.{new} now"):
            assert getattr(verification, old) == getattr(verification, new)
    assert verification.tolerance == 0.5


def test_an_op_is_skipped_by_the_name_that_a_report_prints(x):
    class Copies(nn.Module):
        def forward(self, x):
            return double_by_address(torch.tanh(x).transpose(-1, -2).contiguous())

    model = nn.Sequential(Copies(), nn.Linear(16, 4))
    verification = fastvit.verify(model, x)
    assert verification.skip == (("", "copy"),) and "('', 'copy')" in str(verification)
    for name in ("copy", "clone"):  # clone is the plain name of the op
        assert fastvit.verify(fastvit.convert(model, skip=[("", name)]), x)


class Twice(torch.autograd.Function):
    """Makes `twice` a name of an op."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_an_op_of_any_name_may_be_skipped():
    for op in ("linalg_qr", "cast", "to_copy", "dropout", "addmm", "batch_norm", "twice"):
        fastvit.convert(SmallViT(1), skip=[("", op)])


def test_a_wrong_gradient_fails_and_prints(x, monkeypatch):
    monkeypatch.setitem(RECOMPUTE_RULES, "GeluBackward0", (RecomputeLevel.CHEAP, _twice))
    verification = fastvit.verify(SmallViT(2), x)
    assert not verification and set(verification.skip) == {("blocks.0", "gelu"), ("blocks.1", "gelu")}
    text = str(verification)
    assert "tensors differ by more than 0" in text and "gradient of blocks.0.fc2.weight" in text
    assert not fastvit.verify(SmallViT(2), x, tolerance=1e9)  # the sites remain


def _twice(read):
    return lambda t: 2 * F.gelu(t), (read.operand("self", 0),)


def test_a_model_that_differs_from_itself_is_noted(x):
    class Unsteady(SmallViTBlock):
        count = 0

        def forward(self, x):
            Unsteady.count += 1
            return super().forward(x) * (1 + 1e-12 * Unsteady.count)

    verification = fastvit.verify(Unsteady(), x)
    assert verification.nondeterministic and verification
    assert "differ between two runs of the original" in str(verification)


def test_fused_layers_have_a_tolerance(x):
    model = fastvit.fuse(SmallViT(2))
    for dtype, limit in ((torch.float64, 1e-7), (None, 2e-2)):
        verification = fastvit.verify(model, x, dtype=dtype)
        assert verification and verification.tolerance == limit and max(verification.differences.values()) > 0
    assert not fastvit.verify(model, x, dtype=None, tolerance=0)
