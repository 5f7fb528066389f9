"""`convert(budget=)`: the share that is kept, what is chosen, and what cannot be met."""

import copy
import pickle
import warnings

import pytest
import torch
from report_models import WIDTH, Block, Net, holding
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vit_models import kept

import fastvit
from fastvit.recompute import RecomputeLevel

BLOCKS = 6


@pytest.fixture
def x():
    torch.manual_seed(5)
    return torch.randn(8, 49, WIDTH)


def policy(model):
    return next(hook.policy for hook in model._forward_pre_hooks.values())


THOROUGH = [pytest.param(budget, marks=pytest.mark.thorough) for budget in (0.9, 0.75, 0.65, 0.57, 0.4, 0.3)]


@pytest.mark.parametrize("budget", [*THOROUGH, 0.5, 0.2, 0.15, 0.1, 0.06])
def test_the_share_that_remains(budget, x):
    model = Net(BLOCKS)
    whole = kept(model, x)
    assert fastvit.convert(model, budget=budget, example_inputs=x) is model
    share = kept(model, x) / whole
    assert budget - 0.045 < share < budget + 0.015  # without big steps; the graph's objects count too
    assert (policy(model).level >= RecomputeLevel.MATMULS) == (budget < 0.62)
    assert fastvit.verify(model, x, dtype=None)


def test_products_are_rebuilt_last_and_early_blocks_first(x):
    model = fastvit.convert(Net(BLOCKS), budget=0.5, example_inputs=x)
    sites = policy(model).sites
    products = [site for site in sites if site[1] == "AddmmBackward0"]
    cheap = [site for site in sites if site[1] in ("NativeLayerNormBackward0", "GeluBackward0")]
    assert len(cheap) == 3 * BLOCKS and 0 < len(products) < 2 * BLOCKS
    assert "blocks.0" in {block for block, _, _ in products}
    assert "blocks.5" not in {block for block, _, _ in products}


def test_a_budget_that_is_met_by_one_site(x):
    model = fastvit.convert(Net(BLOCKS), budget=0.985, example_inputs=x)
    assert len(policy(model).sites) == 1 and policy(model).level == RecomputeLevel.CHEAP


def test_a_budget_that_cannot_be_met_says_the_least(x):
    model = Net(BLOCKS)
    whole = kept(model, x)
    with pytest.raises(ValueError, match=r"a budget of 0.01 cannot be met; the least is \d+ bytes") as caught:
        fastvit.convert(model, budget=0.01, example_inputs=x)
    least = int(str(caught.value).split(" bytes")[0].rsplit(" ", 1)[1])
    fastvit.convert(model, budget=least + 512, example_inputs=x)
    assert kept(model, x) < 0.1 * whole and kept(model, x) == pytest.approx(least, abs=4096)
    assert fastvit.verify(model, x, dtype=None)


def test_below_whole_blocks_outputs_of_blocks_are_rebuilt_every_second_first(x):
    model = fastvit.convert(Net(BLOCKS), budget="least")
    whole_blocks = kept(model, x)
    budget = whole_blocks - 2 * x.nbytes + 4096
    fastvit.convert(model, budget=budget, example_inputs=x)
    assert budget - 1.5 * x.nbytes < kept(model, x) <= budget
    inputs = [block for block, *name in policy(model).sites if name == ["AddBackward0", 1]]
    numbers = sorted(int(block.split(".")[1]) for block in inputs)
    assert len(numbers) == 2 and numbers[1] - numbers[0] > 1


def test_bytes(x):
    model = Net(BLOCKS)
    whole = kept(model, x)
    for budget, share in (
        (whole // 2, 0.5),
        (f"{0.5 * whole / 2**20:.4f} MiB", 0.5),
        (1, 1.0),
        ("0.5", 0.5),
        ("1 GB", 1.0),
    ):
        fastvit.convert(model, budget=budget, example_inputs=x)
        assert share - 0.05 < kept(model, x) / whole < share + 0.015


def test_without_inputs_the_first_training_step_plans(x):
    eager = Net(BLOCKS)
    want = fastvit.convert(copy.deepcopy(eager), budget=0.4, example_inputs=x)
    model = fastvit.convert(copy.deepcopy(eager), budget=0.4)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    other = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert kept(other, x) == kept(model, x) > 0.5 * kept(eager, x)
    for one in (model, other):
        gradients = []
        for m in (eager, one.train()):
            m.zero_grad()
            m(x).square().sum().backward()
            gradients.append([p.grad for p in m.parameters()])
        assert all(map(torch.equal, *gradients))
        assert policy(one).sites == policy(want).sites and kept(one, x) == kept(want, x)
    attributes = [set(vars(module)) for module in eager.modules()]
    assert [set(vars(module)) for module in fastvit.revert(model).modules()] == attributes
    pending = fastvit.revert(fastvit.convert(copy.deepcopy(eager), budget=0.4))
    assert not pending._forward_pre_hooks_with_kwargs and not pending._forward_pre_hooks


def test_attention_by_hand_and_linears_that_narrow(x):
    class ByHand(Block):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + self.proj(((q @ k.mT * 0.25).softmax(-1) @ v).transpose(1, 2).flatten(2))
            return x + self.wide(self.narrow(self.norm2(x)).sigmoid())

    model = nn.Sequential(*(ByHand() for _ in range(BLOCKS)))
    whole = kept(model, x)
    fastvit.convert(model, budget=0.14, example_inputs=x)
    assert policy(model).level >= RecomputeLevel.EVERY_OP and kept(model, x) < 0.15 * whole
    assert fastvit.verify(model, x, dtype=None)


def test_under_autocast(x):
    model = Net(BLOCKS)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        whole = kept(model, x)
        fastvit.convert(model, budget=0.6, example_inputs=(x,))
        assert 0.5 < kept(model, x) / whole < 0.62


def test_the_model_does_not_change(x):
    class Counts(Net):
        def forward(self, x, scale=1.0):
            self.calls += 1
            return super().forward(x)

    model = Counts(2).eval()
    model.register_buffer("calls", torch.zeros(()))
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings(action="error"):
        fastvit.convert(model, budget=0.8, example_inputs={"x": x, "scale": 2.0})
    assert not model.training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_is_skipped_stays_so(x):
    skip = [(f"blocks.{i}", "gelu") for i in range(BLOCKS)]
    model = fastvit.convert(Net(BLOCKS), budget=0.6, example_inputs=x, skip=skip)
    assert not any(name == "GeluBackward0" for _, name, _ in policy(model).sites)


def test_a_shared_block_counts_in_each_call(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x):
            for _ in range(4):
                x = self.blocks[0](x)
            return x

    model = Twice()
    whole = kept(model, x)
    fastvit.convert(model, budget=0.7, example_inputs=x)
    assert 0.5 < kept(model, x) / whole < 0.71


def test_each_op_is_repeated_at_most_once_at_any_depth():
    class Residuals(nn.Module):
        def __init__(self, depth=40):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))

        def forward(self, x):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = (norm(conv(x)) + x).relu_()
            return x

    class Count(TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.convolutions += func is torch.ops.aten.convolution.default
            return func(*args, **kwargs or {})

    model = Residuals().requires_grad_()
    x = torch.randn(2, 8, 16, 16)
    whole, given = kept(model, x), []
    for _ in range(2):
        model.zero_grad()
        with Count() as count:
            model(x).square().mean().backward()
        given.append([p.grad for p in model.parameters()])
        fastvit.convert(model, budget="least")
    assert all(map(torch.equal, *given))
    assert 60 < count.convolutions <= 80 and kept(model, x) < 0.1 * whole


@pytest.mark.parametrize(
    "budget",
    [
        0,
        1.5,
        2.0,
        1e9,
        "2.0",
        "1.5",
        "1e9",
        torch.tensor(2),
        -0.5,
        float("nan"),
        float("inf"),
        "2 GiBs",
        "1.2.3 GB",
    ]
    + ["1e400 GiB", "lots", True, False, [0.5]],
    ids=str,
)
def test_a_budget_that_is_neither_a_share_nor_bytes(budget, x):
    """A float above 1 is no number of bytes."""
    takes = "a share above 0 and at most 1, or bytes as an int or as '2 GiB', or 'least'"
    with pytest.raises(ValueError) as error:
        fastvit.convert(Net(1), budget=budget, example_inputs=x)
    assert str(error.value) == f"convert: budget must be {takes}, got {budget!r}"


@pytest.mark.parametrize("value", ["yes", "False", 1, 0, None, torch.tensor(True)], ids=str)
@pytest.mark.parametrize("option", ["products", "weight_casts"])
def test_an_option_that_is_no_bool(option, value):
    with pytest.raises(ValueError, match=f"convert: {option} is .*; True or False expected"):
        fastvit.convert(Net(1), **{option: value})


@pytest.mark.parametrize(
    "skip", ["blocks.0", {"blocks.0": "gelu"}, [("blocks.0",)], [("blocks.0", 1)], ["gelu"], None, 3], ids=str
)
def test_what_is_skipped_must_be_pairs_of_names(skip):
    with pytest.raises(ValueError, match="convert: skip must have pairs of a block's name and an op, got "):
        fastvit.convert(Net(1), skip=skip)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"example_inputs": 1}, ValueError, "budget and example_inputs expected together"),
        ({"budget": 0.5, "example_inputs": torch.Size((8, 49, 64))}, TypeError,
         r"a tensor expected, such as torch.zeros\(8, 49, 64\), got the size"),
    ],
)  # fmt: skip
def test_example_inputs_that_are_wrong(given, error, message):
    with pytest.raises(error, match=f"convert: {message}"):
        fastvit.convert(Net(1), **given)


def test_a_model_that_cannot_be_copied(x):
    model = holding(Net(1), x)
    with pytest.raises(ValueError, match=r"convert: it runs a copy of the model, and copy.deepcopy\(model\)"):
        fastvit.convert(model, budget=0.5, example_inputs=x)
    assert fastvit.convert(model) is model
