"""`convert(budget=)` with example inputs: the peak of a step that remains, and what is recomputed."""

import copy
import gc
import itertools
import random
import re
import warnings

import pytest
import torch
from conversion.models import convert_at
from conversion.vit_models import measure_kept_bytes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit.conversion.budget import StepPlans, make_recording_policy
from fastvit.conversion.plan_search import make_plans
from fastvit.conversion.scope_hooks import add_scope_hooks
from fastvit.memory import live_bytes
from fastvit.recompute import Policy, RecomputeLevel, observe_saved_tensors, record_step
from report.models import WIDTH, SmallViT, SmallViTBlock, measure_step_peak, policy_of

BLOCKS = 6
nightly = pytest.mark.nightly


@pytest.fixture
def x():
    torch.manual_seed(5)
    return torch.randn(8, 49, WIDTH)


def record_copy(model, x):
    """Returns the record of a step of a copy of the model, from which plans are made."""
    copied = add_scope_hooks(copy.deepcopy(model), make_recording_policy(Policy()))
    with observe_saved_tensors(lambda _: None) as observer:
        y = copied(x)
    return record_step(observer, [y], [*copied.parameters(), *copied.buffers(), x])


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return (self.norm(self.conv(x)) + x).relu_()


def conv_net(depth=8, width=32):
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *(ConvBlock(width) for _ in range(depth)))


def random_net(seed):
    """Blocks of random kinds and widths, behind one another."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            hidden = WIDTH * draw.choice([1, 2, 4])
            activation = draw.choice([nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh])
            norm = draw.choice([nn.LayerNorm, nn.LayerNorm, nn.Identity])
            self.parts = nn.Sequential(
                norm(WIDTH), nn.Linear(WIDTH, hidden), activation(), nn.Linear(hidden, WIDTH)
            )

        def forward(self, x):
            return x + self.parts(x)

    kinds = [SmallViTBlock, Residual]
    return nn.Sequential(*(draw.choice(kinds)() for _ in range(draw.randint(5, 9))), nn.LayerNorm(WIDTH))


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.3])
def test_the_peak_that_remains_is_just_below_the_budget(budget, x):
    model = SmallViT(BLOCKS)
    original_peak = measure_step_peak(model, x)
    assert fastvit.convert(model, budget=budget, example_inputs=x) is model
    assert budget - 0.09 < measure_step_peak(model, x) / original_peak <= budget
    assert fastvit.verify(model, x, dtype=None)


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        pytest.param(lambda: SmallViT(BLOCKS), 0.05, id="transformer"),
        pytest.param(conv_net, 0.13, id="convolutions"),
    ],
)
def test_the_peak_on_paper_is_that_of_a_step(make, difference, x):
    """oneDNN's copies in the backward of a convolution depend on its sizes."""
    model = make()
    inputs = x if isinstance(model, SmallViT) else torch.randn(4, 3, 32, 32)
    plans = StepPlans(record_copy(model, inputs), torch.device("cpu")).plans
    for plan in plans[:: max(1, len(plans) // 6)]:
        planned = Policy(plan.level, only_sites=plan.sites)
        copied = add_scope_hooks(copy.deepcopy(model), planned)
        assert measure_step_peak(copied, inputs) == pytest.approx(plan.peak_bytes, rel=difference)
        assert measure_kept_bytes(copied, inputs) == pytest.approx(plan.kept_bytes, rel=difference)


@pytest.mark.parametrize("seed", range(12))
def test_plans_of_random_models_have_ever_smaller_peaks_for_ever_more_work(seed, x):
    """No plan takes more work than the mix of two others, within 3 % of a step: values are not divided."""
    plans = make_plans(record_copy(random_net(seed), x), lambda value: value.bytes_moved + value.flops / 16)
    assert len(plans) > 3 and not plans[0].recomputed_values
    for before, after in itertools.pairwise(plans):
        assert after.peak_bytes < before.peak_bytes and after.work > before.work
    step = 3 * plans[-1].work  # A backward takes twice the time of a forward.
    for i, plan in enumerate(plans):
        for before, after in itertools.product(plans[:i], plans[i + 1 :]):
            fraction = (before.peak_bytes - plan.peak_bytes) / (before.peak_bytes - after.peak_bytes)
            mixed = before.work + fraction * (after.work - before.work)
            assert plan.work <= mixed + 0.03 * step


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=nightly) for seed in range(1, 5))])
def test_a_smaller_budget_is_met_and_has_no_larger_measured_peak(seed):
    model, peaks, x = random_net(seed), [], torch.randn(4, 49, WIDTH)
    original_peak = measure_step_peak(model, x)
    for budget in (0.8, 0.5, 0.4, "least"):
        try:
            fastvit.convert(model, budget=budget, example_inputs=x)
        except ValueError:
            continue
        peaks.append(measure_step_peak(model, x))
        assert budget == "least" or peaks[-1] <= budget * original_peak
    assert all(after <= 1.005 * before for before, after in itertools.pairwise(peaks))


def test_products_are_recomputed_last_and_early_blocks_first(x):
    model = fastvit.convert(SmallViT(BLOCKS), budget=0.6, example_inputs=x)
    sites = policy_of(model).only_sites
    products = [site for site in sites if site[1] == "AddmmBackward0"]
    cheap = [site for site in sites if site[1] in ("NativeLayerNormBackward0", "GeluBackward0")]
    assert len(cheap) >= 2 * BLOCKS and 0 < len(products) < 2 * BLOCKS
    assert "blocks.0" in {block for block, _, _ in products}
    assert "blocks.5" not in {block for block, _, _ in products}


def test_a_budget_that_is_met_by_few_sites(x):
    model = fastvit.convert(SmallViT(BLOCKS), budget=0.985, example_inputs=x)
    assert len(policy_of(model).only_sites) <= 2 and policy_of(model).level == RecomputeLevel.CHEAP


def test_a_budget_that_cannot_be_met_says_the_least_and_what_holds_it(x):
    model = SmallViT(BLOCKS)
    message = r"a budget of 0.01 cannot be met; the least peak of a step is (\d+) bytes, .* at that peak"
    with pytest.raises(ValueError, match=message) as error:
        fastvit.convert(model, budget=0.01, example_inputs=x)
    text = str(error.value)
    assert "gradients of activations and the result: " in text and " in blocks." in text
    least_peak = int(re.search(message, text)[1])
    fastvit.convert(model, budget=least_peak, example_inputs=x)
    assert measure_step_peak(model, x) == pytest.approx(least_peak, rel=0.05)
    assert fastvit.verify(model, x, dtype=None)


def test_several_blocks_are_made_from_one_input_where_that_has_a_smaller_peak():
    """A plan for many small blocks keeps the input of about every third block."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(ThinBlock() for _ in range(64))), torch.randn(64, 64)
    fastvit.convert(model, budget="least", example_inputs=x)
    assert measure_step_peak(model, x) < 0.7 * 64 * x.nbytes
    inputs = {block for block, name, _ in policy_of(model).only_sites if name == "AddBackward0"}
    assert 16 < len(inputs) < 64
    assert fastvit.verify(model, x, dtype=None)


class ThinBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


def test_a_budget_in_bytes_is_met(x):
    model = SmallViT(BLOCKS)
    original_peak = measure_step_peak(model, x)
    half = original_peak // 2
    half_text = f"{half / 2**20:.4f} MiB"
    for budget, fraction in ((half, 0.5), (half_text, 0.5), ("0.5", 0.5), (1, 1.0), ("1 GB", 1.0)):
        fastvit.convert(model, budget=budget, example_inputs=x)
        assert fraction - 0.09 < measure_step_peak(model, x) / original_peak <= fraction


def test_attention_by_hand_and_linears_that_narrow_are_recomputed(x):
    class ByHand(SmallViTBlock):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)

        def forward(self, x):
            x = self.mix_tokens(x)
            return x + self.wide(self.narrow(self.norm2(x)).sigmoid())

        def attend(self, q, k, v):
            return (q @ k.mT * 0.25).softmax(-1) @ v

    model = nn.Sequential(*(ByHand() for _ in range(BLOCKS)))
    original_bytes = measure_kept_bytes(model, x)
    assert measure_kept_bytes(convert_at("least", model), x) < 0.15 * original_bytes
    assert fastvit.verify(model, x, dtype=None)


@pytest.mark.parametrize("mask", ["with a gradient", "without", "indexed"])
def test_attention_with_a_mask_is_recomputed(mask, x):
    """Masks without gradient are operands like others, and so are indices into a table of biases."""

    class Masked(SmallViTBlock):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(50, 4))
            self.bias = nn.Parameter(torch.randn(4, 49, 49))
            self.register_buffer("index", torch.randint(50, (49 * 49,)))

        def forward(self, x):
            return self.mix_tokens(x)

        def attend(self, q, k, v):
            if mask == "without":
                return (q @ k.mT * 0.25 + self.bias.detach()).softmax(-1) @ v
            bias = self.bias
            if mask == "indexed":
                bias = self.table[self.index].view(49, 49, 4).permute(2, 0, 1).contiguous()
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])

    torch.manual_seed(0)
    model = nn.Sequential(*(Masked() for _ in range(4)))
    original_bytes = measure_kept_bytes(model, x)
    assert measure_kept_bytes(convert_at("least", model), x) < 0.2 * original_bytes
    assert fastvit.verify(model, x, dtype=None)


def test_constants_that_recipes_hold_are_on_paper(x):
    """A constant that a forward makes, and adds, lives as long as the recipe of the sum."""

    class AddsNoise(SmallViTBlock):
        def forward(self, x):
            with torch.no_grad():
                noise = torch.randn(x.shape[0] // 2, *x.shape[1:]).repeat(1, 1, 1)
            first, second = super().forward(x).chunk(2)
            return torch.cat([first, (second * 2 + noise[:1]).tanh()])

    torch.manual_seed(0)
    model = nn.Sequential(*(AddsNoise() for _ in range(4)))
    for plan in StepPlans(record_copy(model, x), torch.device("cpu")).plans[::12]:
        copied = add_scope_hooks(copy.deepcopy(model), Policy(plan.level, only_sites=plan.sites))
        assert measure_step_peak(copied, x) == pytest.approx(plan.peak_bytes, rel=0.06)


def test_a_plan_holds_nothing_of_the_step_that_it_was_made_from(x):
    model = fastvit.convert(SmallViT(4), budget="least")

    def run_step():
        model(x).sum().backward()
        model.zero_grad()

    gc.collect()
    gc.disable()
    try:
        nbytes, _ = live_bytes(run_step)
    finally:
        gc.enable()
    assert nbytes < x.nbytes


def test_a_forward_that_returns_nothing_plans(x):
    class KeepsLoss(SmallViT):
        def forward(self, x):
            self.loss = super().forward(x).square().mean()

    model = fastvit.convert(KeepsLoss(4), budget=0.7)
    for _ in range(2):
        model(x)
        model.loss.backward()
    assert policy_of(model).only_sites is not None


def test_a_model_with_a_scripted_part_has_a_report(x):
    model = SmallViT(2)
    model.blocks[0].act = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    assert fastvit.report(model, x).peak_before > 0


@nightly
def test_a_budget_under_autocast_is_met(x):
    model, x = SmallViT(BLOCKS), x[:3]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        original_peak = measure_step_peak(model, x)
        fastvit.convert(model, budget=0.6, example_inputs=(x,))
        assert 0.5 < measure_step_peak(model, x) / original_peak <= 0.6


def test_a_budget_changes_neither_model_nor_random_state(x):
    class Counts(SmallViT):
        def forward(self, x, scale=1.0):
            self.calls += 1
            return super().forward(x)

    model = Counts(2).eval()
    model.register_buffer("calls", torch.zeros(()))
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings(action="error"):
        fastvit.convert(model, budget=0.9, example_inputs={"x": x, "scale": 2.0})
    assert not model.training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_skipped_ops_are_not_in_the_plan_of_a_budget(x):
    skip = [(f"blocks.{i}", "gelu") for i in range(BLOCKS)]
    model = fastvit.convert(SmallViT(BLOCKS), budget=0.6, example_inputs=x, skip=skip)
    assert not any(name == "GeluBackward0" for _, name, _ in policy_of(model).only_sites)


def test_a_shared_block_counts_in_each_call(x):
    class SharedBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([SmallViTBlock()])

        def forward(self, x):
            for _ in range(4):
                x = self.blocks[0](x)
            return x

    model = SharedBlock()
    original_peak = measure_step_peak(model, x)
    fastvit.convert(model, budget=0.75, example_inputs=x)
    assert 0.5 < measure_step_peak(model, x) / original_peak <= 0.75


@nightly
def test_each_op_is_repeated_at_most_once_at_any_depth():
    class CountConvolutions(TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.convolutions += func is torch.ops.aten.convolution.default
            return func(*args, **kwargs or {})

    model, x = conv_net(depth=20, width=8), torch.randn(2, 3, 16, 16)
    original_peak, gradients = measure_step_peak(model, x), []
    for _ in range(2):
        model.zero_grad()
        with CountConvolutions() as count:
            model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        fastvit.convert(model, budget="least", example_inputs=x)
    assert all(map(torch.equal, *gradients))
    with CountConvolutions() as count:
        model(x).square().mean().backward()
    assert 30 < count.convolutions <= 42 and measure_step_peak(model, x) < 0.5 * original_peak


def test_older_names_of_options_warn():
    for old, new in (("products", "matmuls"), ("weight_casts", "recompute_weight_casts")):
        with pytest.warns(DeprecationWarning, match=rf"convert\({old}=\) is convert\({new}=\) now"):
            converted = fastvit.convert(SmallViT(1), **{old: True})
        assert policy_of(converted) == policy_of(fastvit.convert(SmallViT(1), **{new: True}))
