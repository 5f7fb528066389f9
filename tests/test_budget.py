"""`convert(budget=)`: the share that is kept, what is chosen, and what cannot be met."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from fastvit.memory import live_bytes

WIDTH, BLOCKS = 96, 6


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)) * scale


@pytest.fixture
def x():
    torch.manual_seed(5)
    return torch.randn(8, 49, WIDTH)


def kept(model, x):
    model(x)
    return live_bytes(lambda: model(x))[0]


def policy(model):
    return next(hook.policy for hook in model._forward_pre_hooks.values())


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.65, 0.57, 0.5, 0.4, 0.3])
def test_the_share_that_remains(budget, x):
    model = Vit()
    whole = kept(model, x)
    assert fastvit.convert(model, budget=budget, example_inputs=x) is model
    share = kept(model, x) / whole
    assert budget - 0.045 < share < budget + 0.015  # without big steps; the graph's objects count too
    assert policy(model).products == (budget < 0.62)
    assert fastvit.verify(model, x, dtype=None)


def test_products_are_rebuilt_last_and_early_blocks_first(x):
    model = fastvit.convert(Vit(), budget=0.5, example_inputs=x)
    sites = policy(model).sites
    products = [site for site in sites if site[1] == "AddmmBackward0"]
    cheap = [site for site in sites if site[1] in ("NativeLayerNormBackward0", "GeluBackward0")]
    assert len(cheap) == 3 * BLOCKS and 0 < len(products) < 2 * BLOCKS
    assert {block for block, _, _ in products} == {f"blocks.{i}" for i in range(len(products) // 2 + 1)} or {
        block for block, _, _ in products
    } == {f"blocks.{i}" for i in range((len(products) + 1) // 2)}


def test_a_budget_that_is_met_by_one_site(x):
    model = fastvit.convert(Vit(), budget=0.985, example_inputs=x)
    assert len(policy(model).sites) == 1 and not policy(model).products


def test_a_budget_that_cannot_be_met_says_what_was_reached(x):
    model = Vit()
    whole = kept(model, x)
    with pytest.warns(UserWarning, match=r"a budget of 5.0% is not met; .* leaves \d\d\.\d%") as caught:
        fastvit.convert(model, budget=0.05, example_inputs=x)
    reached = float(str(caught[0].message).rsplit(" ", 1)[1].rstrip("%")) / 100
    assert len(caught) == 1 and caught[0].filename == __file__
    assert kept(model, x) == kept(fastvit.convert(Vit(), products=True), x)
    assert kept(model, x) / whole == pytest.approx(reached, abs=0.02)


def test_under_autocast(x):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    model = Vit()
    forward(model)
    whole = live_bytes(lambda: forward(model))[0]
    with torch.autocast("cpu", torch.bfloat16):
        fastvit.convert(model, budget=0.6, example_inputs=(x,))
    assert 0.5 < live_bytes(lambda: forward(model))[0] / whole < 0.62


def test_another_batch_keeps_the_same_share(x):
    model = Vit()
    fastvit.convert(model, budget=0.5, example_inputs=x[:4])
    assert kept(model, x) / kept(fastvit.revert(copy.deepcopy(model)), x) < 0.52


def test_the_model_does_not_change(x):
    class Counts(Vit):
        def forward(self, x, scale=1.0):
            self.calls += 1
            return super().forward(F.dropout(x, 0.1, self.training), scale)

    model = Counts(2).eval()
    model.register_buffer("calls", torch.zeros(()))
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings(action="error"):
        fastvit.convert(model, budget=0.8, example_inputs={"x": x, "scale": 2.0})
    assert not model.training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_converting_again_starts_anew(x):
    model = fastvit.convert(Vit(), budget=0.9, example_inputs=x)
    whole = kept(fastvit.revert(copy.deepcopy(model)), x)
    fastvit.convert(model, budget=0.5, example_inputs=x)
    assert 0.45 < kept(model, x) / whole < 0.52
    assert policy(fastvit.convert(model)).sites is None


def test_what_is_skipped_stays_so(x):
    skip = [(f"blocks.{i}", "gelu") for i in range(BLOCKS)]
    model = fastvit.convert(Vit(), budget=0.6, example_inputs=x, skip=skip)
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


def test_blocks_that_are_called_without_the_model(x):
    model = fastvit.convert(Vit(), budget=0.65, example_inputs=x)

    def forward(model):
        y = x
        for block in model.blocks:
            y = block(y)
        return y

    forward(model)
    whole, part = (
        live_bytes(lambda m=m: forward(m))[0] for m in (fastvit.revert(copy.deepcopy(model)), model)
    )
    assert part < 0.68 * whole


# --- errors


@pytest.mark.parametrize("budget", [0, 1, -0.5, 2, float("nan"), "0.5", True])
def test_a_budget_out_of_range(budget, x):
    with pytest.raises(ValueError, match="budget must be a share above 0 and below 1, got "):
        fastvit.convert(Vit(1), budget=budget, example_inputs=x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0.5}, "convert: budget needs example_inputs, which was not given"),
        ({"example_inputs": torch.zeros(1)}, "convert: example_inputs needs budget, which was not given"),
    ],
)
def test_a_budget_and_its_inputs_go_together(given, message):
    with pytest.raises(ValueError, match=message):
        fastvit.convert(Vit(1), **given)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            torch.Size((8, 49, WIDTH)),
            r"example_inputs\[0\] must be a tensor, such as torch.randn\(8, 49, 96\)",
        ),
        ({"y": torch.zeros(1)}, r"the inputs do not fit Vit.forward\(x, scale=1.0\): .*'[xy]'"),
    ],
)
def test_wrong_example_inputs(inputs, message):
    with pytest.raises(TypeError, match="convert: " + message):
        fastvit.convert(Vit(1), budget=0.5, example_inputs=inputs)


def test_a_model_that_cannot_be_copied(x):
    model = Vit(1)
    model.last = model(x)
    with pytest.raises(
        ValueError, match=r"convert: it runs a copy of the model, and copy.deepcopy\(model\) r"
    ):
        fastvit.convert(model, budget=0.5, example_inputs=x)
    assert fastvit.convert(model) is model
