"""A budget without example inputs: a training step itself gives the plan, and nothing else is run."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import fastvit
from fastvit.memory import live_bytes, peak_bytes
from fastvit.recompute import RecomputeLevel
from fastvit.recompute.packed_tensor import MIN_RECOMPUTE_BYTES
from report.models import WIDTH, SmallViT, policy_of


@pytest.fixture
def x():
    torch.manual_seed(5)
    return torch.randn(8, 49, WIDTH)


def make_layers(kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def measure_third_peak(model, x):
    """Returns the peak bytes of the third step of the model itself: the first step makes a plan."""

    def run_step():
        model.zero_grad()
        y = model(x)
        y.backward(torch.ones_like(y))

    run_step()
    run_step()
    return peak_bytes(run_step)


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.3])
def test_the_second_step_meets_the_budget(budget, x):
    model = SmallViT(6)
    original_peak = measure_third_peak(model, x)
    fastvit.convert(model, budget=budget)
    assert 0.95 * budget < measure_third_peak(model, x) / original_peak < 1.05 * budget
    assert fastvit.verify(model, x, dtype=None)


def test_a_peak_does_not_depend_on_earlier_measurements(x):
    model = SmallViT(6)
    assert len({measure_third_peak(model, x) for _ in range(3)}) == 1


def test_the_first_step_keeps_the_least(x):
    model, least = (fastvit.convert(SmallViT(6), budget=budget) for budget in (0.9, "least"))
    assert live_bytes(lambda: model(x))[0] == pytest.approx(live_bytes(lambda: least(x))[0], abs=2**15)


def test_what_the_caller_gives_is_used_once():
    class Counts(nn.Sequential):
        def forward(self, x, given, scales):
            given["calls"] += 1
            return super().forward(x) * given["calls"] * next(scales)

    given = {"calls": 0}
    fastvit.convert(make_layers(Counts), budget=0.6)(torch.randn(8, 16, WIDTH), given, iter([2.0]))
    assert given == {"calls": 1}


def test_a_generator_of_the_program_draws_the_same():
    generator, results = torch.Generator(), []

    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * torch.bernoulli(torch.full(x.shape, 0.9), generator=generator)

    x = torch.randn(8, 16, WIDTH)
    for change in (lambda m: m, lambda m: fastvit.convert(m, budget=0.6)):
        model = change(make_layers(Noisy))
        generator.manual_seed(0)
        results.append(model(x))
    assert torch.equal(*results)


def test_a_model_may_overwrite_an_input_that_requires_a_gradient():
    stem, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 12, 12)
    head = nn.Sequential(nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 1))
    fastvit.convert(head, budget=0.6)
    head(stem(x)).sum().backward()
    report = fastvit.report(head, stem(x))
    assert report.kept_after <= report.kept_before
    assert fastvit.verify(head, stem(x))


def test_larger_inputs_plan_again(x):
    budget = int(0.6 * measure_third_peak(SmallViT(6), x))
    model = fastvit.convert(SmallViT(6), budget=budget)
    model(x[:1]).sum().backward()
    assert policy_of(model).only_sites == frozenset()
    model(x).sum().backward()
    assert 0.8 * budget < measure_third_peak(model, x) <= 1.01 * budget
    plan = policy_of(model)
    model(x[:3])
    assert policy_of(model) == plan


def test_a_first_batch_of_tensors_that_are_too_small_warns_once(x):
    model = fastvit.convert(SmallViT(6), budget=0.5)
    assert x[:1, :2].nbytes < MIN_RECOMPUTE_BYTES
    message = r"convert: a budget of 0.5 cannot be met; the least peak of a step is \d+ bytes, .*pass"
    with pytest.warns(UserWarning, match=message):
        for _ in range(2):
            model(x[:1, :2]).sum().backward()
    with warnings.catch_warnings(action="error"):
        model(x[:2, :2]).sum().backward()
        model(x[:2, :2]).sum().backward()
    model(x).sum().backward()
    assert measure_third_peak(model, x) < 0.51 * measure_third_peak(SmallViT(6), x)


def test_an_exception_in_the_first_step_leaves_the_plan_to_the_next(x):
    model = fastvit.convert(SmallViT(3), budget=0.5)
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model(x)
    assert policy_of(model).only_sites


def test_a_budget_in_a_converted_model_and_models_without_gradients(x):
    inner = fastvit.convert(SmallViT(3), budget=0.5)
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    with fastvit.recompute_scope():
        outer(x).sum().backward()
    assert policy_of(inner).only_sites is None
    outer(x).sum().backward()
    assert policy_of(inner).only_sites
    frozen = fastvit.convert(SmallViT(2).requires_grad_(False), budget=0.5)
    with warnings.catch_warnings(action="error"):
        frozen(x)


def test_a_part_with_options_of_its_own_keeps_them(x):
    model = fastvit.convert(SmallViT(3), budget=0.8)
    fastvit.convert(model.blocks[1], matmuls=True)
    model(x).sum().backward()
    part = policy_of(model.blocks[1])
    assert part.level == RecomputeLevel.MATMULS and part.only_sites is None
    assert policy_of(model.blocks[0]).only_sites is policy_of(model).only_sites


def test_copies_have_the_plan(x):
    model = fastvit.convert(SmallViT(3), budget=0.5)
    model(x).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(x).sum().backward()
        assert policy_of(other) == policy_of(model) and policy_of(other).only_sites


def test_a_budget_that_is_met_adds_no_hook(x):
    for given in (
        {"budget": 1.0},
        {"budget": "1 GiB", "example_inputs": x},
        {"budget": 1.0, "example_inputs": x},
    ):
        model = fastvit.convert(SmallViT(2), **given)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert set(vars(model)) == set(vars(SmallViT(2)))


def test_compiled_code_is_left_to_the_partitioner(x):
    torch._dynamo.reset()
    model = fastvit.convert(SmallViT(2), budget=0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="convert: ")
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(x).sum().backward()


def test_reports_show_the_plan(x):
    report = fastvit.report(fastvit.convert(SmallViT(6), budget=0.5), x)
    assert report.kept_after <= 0.52 * report.kept_before + x.nbytes
    assert any(row.reason == "the budget is met without it" for row in report.tensors)


def test_an_empty_batch_plans_nothing(x):
    model = fastvit.convert(SmallViT(2), budget="1 MiB")
    model(x[:0]).sum().backward()
    model(x).sum().backward()
