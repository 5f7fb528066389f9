"""Tests that an observer changes no decision of a plan, and that kept tensors get no recipes."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit.recompute import observe_saved_tensors
from fastvit.recompute.packed_tensor import Kept, Recomputed
from fastvit.recompute.planner import RecomputePlanner
from recompute.models import assert_same_bits, list_gradients


class Block(nn.Module):
    """A LayerNorm, Linears, a gelu and a residual sum. The cast of the larger bias is no small tensor."""

    def __init__(self, dim=32):
        super().__init__()
        self.norm, self.wide, self.back = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 64 * dim),
            nn.Linear(64 * dim, dim),
        )

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Plans:
    """Notes what is decided on each saved tensor, in order, and counts the recipes that are built."""

    def __enter__(self):
        self.states, self.num_built = [], 0
        self.patch = pytest.MonkeyPatch()
        plan_tensor, build_recipe = RecomputePlanner._plan_tensor, RecomputePlanner._build_recipe

        def observed_plan(planner, packed, info, recipe):
            plan_tensor(planner, packed, info, recipe)
            self.states.append((info.node_name, type(packed.state)))

        def counted_build(*arguments):
            self.num_built += 1
            return build_recipe(*arguments)

        self.patch.setattr(RecomputePlanner, "_plan_tensor", observed_plan)
        self.patch.setattr(RecomputePlanner, "_build_recipe", counted_build)
        return self

    def __exit__(self, *_):
        self.patch.undo()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def run(model, is_half, context=contextlib.nullcontext):
    """Returns the plans of a step and the gradients."""
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    with Plans() as plans, context():
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            y = model(x).sum()
        y.backward()
    return plans, list_gradients(model)


OPTIONS = {
    "all": {},
    "products": {"matmuls": True},
    "weight casts": {"matmuls": True, "recompute_weight_casts": True},
    "skip": {"skip": [("0", "gelu"), ("2", "layer_norm")]},
    "skip of all": {
        "skip": [(str(i), op) for i in range(3) for op in ("gelu", "layer_norm", "to_copy", "add")]
    },
}


@pytest.mark.parametrize("is_half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_observer_changes_no_decision(options, is_half):
    eager = make_model()
    model = fastvit.convert(copy.deepcopy(eager), **options)
    plans, actual = run(model, is_half)
    model.zero_grad()
    observed, _ = run(model, is_half, lambda: observe_saved_tensors(lambda tensor: None))
    assert plans.states == observed.states
    assert plans.num_built <= observed.num_built
    assert_same_bits(actual, run(eager, is_half)[1])


@pytest.mark.parametrize("is_half", [False, True], ids=["fp32", "bf16"])
def test_nothing_is_built_for_what_is_skipped(is_half):
    skipped, _ = run(fastvit.convert(make_model(), **OPTIONS["skip of all"]), is_half)
    assert {state for _, state in skipped.states} == {Kept}
    assert skipped.num_built == 0


def test_a_forward_leaves_few_objects_to_the_garbage_collector():
    """Collections take as long as all else that a plan does, where each saved tensor has many objects."""
    model, x = fastvit.convert(make_model()), torch.randn(4, 16, 32)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        with Plans() as plans:
            y = model(x).sum()
        num_objects = len(gc.get_objects()) - before
        y.backward()
        del y
        gc.collect()
    finally:
        gc.enable()
    assert any(state is Recomputed for _, state in plans.states)
    assert num_objects < 30 * len(plans.states), f"{num_objects} for {len(plans.states)} tensors"
