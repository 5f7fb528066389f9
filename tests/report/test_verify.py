"""`verify`: agreement of the converted model, and recipes that something made wrong."""

import copy
import ctypes
import re

import numpy
import pytest
import torch
import torch.nn.functional as F
from recompute.test_writes import WRITES, Rotated
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


@pytest.mark.parametrize("dtype", [torch.float64, None])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_agrees_to_the_bit(name, dtype, x):
    for model in (MODELS[name](), fastvit.convert(MODELS[name](), matmuls=True)):
        found = fastvit.verify(model, x, dtype=dtype)
        assert found and found.tolerance == 0 and not found.skip, found
        assert max(found.differences.values()) == 0, found
        assert "tensors agree" in str(found) and not found.nondeterministic


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


def test_inputs_that_the_model_marks_itself(x):
    class Marks(nn.Sequential):
        def forward(self, x):
            x.requires_grad = True
            return super().forward(x)

    found = fastvit.verify(Marks(SmallViTBlock()), x)
    assert found and not any(name.startswith("gradient of input") for name in found.differences)


def test_inputs_by_keyword_and_outputs_in_structures(x):
    class Named(SmallViTBlock):
        def forward(self, *, tokens, scale):
            return {"logits": super().forward(tokens) * scale, "pair": (tokens.sum(), None)}

    found = fastvit.verify(Named(), tokens=x, scale=2.0)
    assert found and {"output 0", "output 1", "gradient of input 0"} <= set(found.differences)


# --- writes that the graph does not show: each is found, or its tensors are kept


class Case(nn.Module):
    """One forward of a table, as a block of a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.function(x, self.scale).to(self.head.weight.dtype))


def double(h):
    """Not even the calls of torch show it."""
    memory = (ctypes.c_char * h.nbytes).from_address(h.data_ptr())
    numpy.frombuffer(memory, str(h.dtype).removeprefix("torch."))[:] *= 2
    return h


def written(write):
    """`write` changes a result that is not saved yet; the graph may not show it."""

    def function(x, s):
        h = F.gelu(x * s)
        write(h, h)
        return torch.relu(h)

    return function


HOLES = {name: written(WRITES[name]) for name in ("no_grad", "data", "data is set", "numpy")} | {
    "address": lambda x, s: double(F.gelu(x * s)),
    "Function": lambda x, s: Rotated.apply(F.gelu(x * s)),
    "wider operand": lambda x, s: torch.sigmoid(((x * s).exp().bfloat16() * 1.5).mul_(s)),
    "cast of a slice": lambda x, s: (x * s).exp()[2:].to(x.dtype, copy=True),
}


def same_step(model, other, x):
    steps = []
    for one in (model, other):
        y = one(x)
        steps.append([y, *torch.autograd.grad(y.square().sum(), list(one.parameters()))])
    return all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("hole", HOLES)
def test_a_write_that_autograd_does_not_record_is_found(hole, x):
    model = nn.Sequential(Case(HOLES[hole]))
    original = copy.deepcopy(model)
    fastvit.convert(model)
    right = same_step(original, model, x)
    for dtype in (torch.float64, None):
        found = fastvit.verify(model, x, dtype=dtype)
        assert found or found.skip, found
        assert bool(found) == right, found
    if not right:
        assert "which convert(model, skip=verification.skip) keeps" in str(found)
        fastvit.convert(model, skip=found.skip)
        assert fastvit.verify(model, x, dtype=None) and same_step(original, model, x)


def test_a_layer_of_fastvit_whose_output_was_written_to(x):
    class Writes(nn.Module):
        def forward(self, y):
            return double(y)

    layer = fastvit.BatchNormAct(16, activation="gelu")
    model = nn.Sequential(
        nn.Unflatten(1, (16, 1)), nn.Conv2d(16, 16, 1), layer, Writes(), nn.Conv2d(16, 4, 1)
    )
    assert len(fastvit.verify(model, x).skip) == 1


def test_a_recipe_in_a_block_is_named_by_it(x):
    class Hidden(SmallViTBlock):
        def act(self, x):
            return double(F.gelu(x))

    model = nn.Sequential(SmallViTBlock(), Hidden(), SmallViTBlock())
    found = fastvit.verify(model, x)
    assert found.skip == (("1", "gelu"),)
    assert fastvit.verify(fastvit.convert(model, skip=found.skip), x)


def test_older_names_warn(x):
    with pytest.warns(DeprecationWarning, match=r"verify\(limit=\) is verify\(tolerance=\) now"):
        found = fastvit.verify(SmallViT(1), x, limit=0.5)
    names = {"limit": "tolerance", "sites": "skip", "unsteady": "nondeterministic", "wrong": "failures"}
    for old, new in names.items():
        with pytest.warns(DeprecationWarning, match=f"Verification.{old} is Verification.{new} now"):
            assert getattr(found, old) == getattr(found, new)
    assert found.tolerance == 0.5


def test_an_op_is_skipped_by_the_name_that_a_report_prints(x):
    class Copies(nn.Module):
        def forward(self, x):
            return double(torch.tanh(x).transpose(-1, -2).contiguous())

    model = nn.Sequential(Copies(), nn.Linear(16, 4))
    found = fastvit.verify(model, x)
    assert found.skip == (("", "copy"),) and "('', 'copy')" in str(found)
    for name in ("copy", "clone"):  # clone is the plain name of the op
        assert fastvit.verify(fastvit.convert(model, skip=[("", name)]), x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("op", ["linalg_qr", "cast", "to_copy", "dropout", "addmm", "batch_norm", "twice"])
def test_an_op_of_any_name_may_be_skipped(op):
    fastvit.convert(SmallViT(1), skip=[("", op)])


@pytest.mark.parametrize(("op", "nearest"), [("geluu", "gelu"), ("LayerNorm", "layer_norm"), ("", r"\w+")])
def test_a_name_that_no_op_has(op, nearest):
    message = f"convert: skip must have names of ops .*, got {op!r}; the nearest names are .*'{nearest}'"
    with pytest.raises(ValueError, match=message):
        fastvit.convert(SmallViT(1), skip=[("", op)])


def test_what_is_skipped_must_exist():
    with pytest.raises(
        ValueError, match=r"skip must have names of blocks \(\['', 'blocks.0'\]\), got 'blocks.7'"
    ):
        fastvit.convert(SmallViT(1), skip=[("blocks.7", "gelu")])


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        *(
            ("dtype", value, "a floating-point torch.dtype or None")
            for value in ("float64", torch.int64, float)
        ),
        *(
            ("tolerance", value, "a number of at least 0, or None,")
            for value in ("0", -1, float("nan"), True)
        ),
    ],
)
def test_options_of_another_kind(option, value, takes, x):
    with pytest.raises(ValueError, match=f"verify: {option} is {re.escape(repr(value))}; {takes}"):
        fastvit.verify(SmallViT(1), x, **{option: value})


def test_a_wrong_gradient_fails_and_prints(x, monkeypatch):
    monkeypatch.setitem(RECOMPUTE_RULES, "GeluBackward0", (RecomputeLevel.CHEAP, _twice))
    found = fastvit.verify(SmallViT(2), x)
    assert not found and set(found.skip) == {("blocks.0", "gelu"), ("blocks.1", "gelu")}
    assert "tensors differ by more than 0" in str(found) and "gradient of blocks.0.fc2.weight" in str(found)
    assert not fastvit.verify(SmallViT(2), x, tolerance=1e9)  # the sites remain


def _twice(read):
    return lambda t: 2 * F.gelu(t), (read.operand("self", 0),)


def test_a_model_that_differs_from_itself(x):
    class Unsteady(SmallViTBlock):
        count = 0

        def forward(self, x):
            Unsteady.count += 1
            return super().forward(x) * (1 + 1e-12 * Unsteady.count)

    found = fastvit.verify(Unsteady(), x)
    assert found.nondeterministic and found and "differ between two runs of the original" in str(found)


def test_fused_layers_have_a_tolerance(x):
    model = fastvit.fuse(SmallViT(2))
    for dtype, limit in ((torch.float64, 1e-7), (None, 2e-2)):
        found = fastvit.verify(model, x, dtype=dtype)
        assert found and found.tolerance == limit and max(found.differences.values()) > 0
    assert not fastvit.verify(model, x, dtype=None, tolerance=0)


def test_a_model_that_returns_no_tensor(x):
    class Nothing(SmallViTBlock):
        def forward(self, x):
            return None

    with pytest.raises(ValueError, match="verify: the model returned no tensor"):
        fastvit.verify(Nothing(), x)
