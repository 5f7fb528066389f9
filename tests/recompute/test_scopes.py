"""recompute_scope within checkpoints, other hooks, other scopes, threads and compiled code."""

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import recompute_scope
from fastvit.recompute import Policy, RecomputeLevel, active_scope
from recompute.models import (
    assert_same_bits,
    count_recomputations,
    make_conv_stack,
    measure_forward,
    step_in_scope,
)


@pytest.mark.parametrize("place", ["scope outside", "scope inside", "converted submodule"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_scopes_and_checkpoints_nest_either_way(place, reentrant, device):
    x = torch.randn(4, 8, 20, 20, device=device)
    expected = step_in_scope(make_conv_stack("keep").to(device), x)
    net = make_conv_stack("recompute").to(device)

    def inner(x):
        if place == "converted submodule":
            x = net[:2](x)
            with recompute_scope():
                return net[2:](x)
        with recompute_scope() if place == "scope inside" else contextlib.nullcontext():
            return net(x)

    checkpointed = nn.Module()
    checkpointed.net = net
    checkpointed.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)
    scope = recompute_scope if place == "scope outside" else contextlib.nullcontext
    assert_same_bits(step_in_scope(checkpointed, x, scope), expected)
    leaf = x.clone().requires_grad_()
    assert measure_forward(checkpointed, leaf, scope) < 0.1, "checkpoint's own hooks see every tensor"


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_hooks_inside_see_every_tensor_and_hooks_outside_what_the_scope_keeps(place, device):
    x = torch.randn(4, 8, 20, 20, device=device)
    expected = step_in_scope(make_conv_stack("keep").to(device), x)
    shapes = {"keep": [], "recompute": []}
    for kind, seen_shapes in shapes.items():

        def pack(t, seen_shapes=seen_shapes):
            seen_shapes.append(t.shape)
            return t.detach()

        @contextlib.contextmanager
        def enter_both(pack=pack):
            hooks = saved_tensors_hooks(pack, lambda t: t)
            first, second = (hooks, recompute_scope()) if place == "outside" else (recompute_scope(), hooks)
            with first, second:
                yield

        assert_same_bits(step_in_scope(make_conv_stack(kind).to(device), x, enter_both), expected)
    if place == "outside":  # an output of each layer is recomputed
        assert len(shapes["recompute"]) == len(shapes["keep"]) - 4
    else:
        assert shapes["keep"] == shapes["recompute"] and len(shapes["keep"]) > 8


def test_scopes_nest_and_end_on_errors(device):
    x = torch.randn(4, 8, 12, 12, device=device)
    net = make_conv_stack("recompute").to(device)
    with recompute_scope():
        with recompute_scope():
            a = net[:4](x)
        y = net[4:](a)
    with pytest.raises(ZeroDivisionError), recompute_scope():
        _ = 1 / 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with count_recomputations() as bn_apply:
        y.sum().backward()
    assert bn_apply.call_count == 4


def test_old_names_of_arguments_warn_and_work():
    with pytest.warns(DeprecationWarning, match=r"recompute_scope\(matmuls=\) now") as warned:
        with recompute_scope(products=True):
            assert active_scope().policy == Policy(RecomputeLevel.MATMULS)
    assert [one.filename for one in warned] == [__file__]
    with pytest.warns(DeprecationWarning, match=r"recompute_scope\(recompute_weight_casts=\) now"):
        with recompute_scope(weight_casts=True):
            assert active_scope().policy == Policy(weight_casts=True)
    with pytest.raises(TypeError, match="products is the old name of matmuls"):
        recompute_scope(products=True, matmuls=True)


def test_models_in_one_scope_do_not_change_each_others_plans(device):
    models = [make_conv_stack(kind).to(device) for kind in ("recompute", "keep")]
    x = torch.randn(4, 8, 12, 12, device=device)
    expected = [step_in_scope(model, x) for model in models]
    with recompute_scope():
        for i in (0, 1, 1, 0):
            assert_same_bits(step_in_scope(models[i], x, contextlib.nullcontext), expected[i])


def test_two_threads_may_run_a_converted_model_at_once():
    """The model has no state of a step but the parameters."""
    eager = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2)))
    model = fastvit.convert(copy.deepcopy(eager))
    inputs = [torch.randn(n, 50, 64) for n in (4, 8)]
    expected = [torch.autograd.grad(eager(x).sum(), list(eager.parameters())) for x in inputs]
    failed = []

    def work(index):
        for _ in range(10):
            actual = torch.autograd.grad(model(inputs[index]).sum(), list(model.parameters()))
            if not all(map(torch.equal, actual, expected[index])):
                failed.append(index)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
        assert not thread.is_alive()
    assert not failed


def test_a_scope_keeps_nothing_without_gradients(device):
    net = make_conv_stack("recompute").to(device)
    x = torch.randn(4, 8, 6, 6, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with recompute_scope(), mode():
            assert not net(x).requires_grad
    net.requires_grad_(False)
    net[-1].weight.requires_grad_()
    with recompute_scope(), count_recomputations() as bn_apply:
        net(x).sum().backward()
    assert bn_apply.call_count == 0, "a frozen layer saves nothing that its output could be recomputed from"


def test_a_scope_in_compiled_code_leaves_eager_gradients():
    torch._dynamo.reset()
    net, x = make_conv_stack("recompute", 2), torch.randn(4, 8, 9, 9)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def scoped(x):
        with recompute_scope():
            return net(x)

    parameters = list(net.parameters())
    expected, actual = (torch.autograd.grad(f(x).square().sum(), parameters) for f in (net, scoped))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
