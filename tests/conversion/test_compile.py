"""torch.compile of a model with scopes: what it keeps, its values, and what it leaves alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from report.models import SmallViTBlock
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config

from fastvit import convert, revert
from fastvit.memory import live_bytes


class Breaks(SmallViTBlock):
    def act(self, x):
        torch._dynamo.graph_break()
        return super().act(x)


class Net(nn.Module):
    def __init__(self, make=SmallViTBlock, blocks: int = 2):
        super().__init__()
        self.blocks = nn.Sequential(*[make() for _ in range(blocks)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.blocks(x))


class Renamed(Net):
    def forward(net, x):  # noqa: N805
        return net.norm(net.blocks(x))


class Decorated(Net):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return super().forward(x)


class Hooked(Net):
    """Has hooks before it is converted."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_pre_hook(do_nothing)
        self.blocks[1].register_forward_hook(do_nothing)


def do_nothing(*_):
    return None


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64)

    def forward(self, x):
        return F.relu(x + self.bn(self.conv(x)))


def as_module(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def as_function(model, **options):
    return torch.compile(lambda x: model(x) * 2, **options)


def each_block(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def step(model, run, x):
    """The bytes that a forward keeps, gradients and buffers after two steps, and graph breaks."""

    def loss():
        torch.manual_seed(1)
        return run(x).square().mean()

    model.zero_grad()
    counters.clear()
    loss().backward()
    kept, result = live_bytes(loss)
    result.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    return kept, [*grads, *map(torch.clone, model.buffers())], sum(counters["graph_break"].values())


def both(make, how, x, options=None, **given):
    """Bytes kept by a converted model over those of the model, both compiled; their values are equal."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    converted = convert(copy.deepcopy(model), **(options or {}))
    plain = step(model, how(model, **given), x)
    ours = step(converted, how(converted, **given), x)
    assert all(map(torch.equal, ours[1], plain[1]))
    assert ours[2] <= plain[2]
    return ours[0] / plain[0]


def under_autocast(model, **options):
    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    return torch.compile(run, **options)


@pytest.mark.parametrize(
    ("how", "make", "options", "batch", "most"),
    [
        (as_module, Net, {}, 4, 0.66),
        (in_place, Net, {}, 4, 0.66),
        (as_module, Renamed, {}, 4, 0.66),
        (as_module, Decorated, {}, 4, 0.66),
        (as_module, Hooked, {}, 4, 0.66),
        (as_function, Net, {}, 4, 0.66),
        (each_block, Net, {}, 4, 0.66),
        (as_module, lambda: Net(Residual), {}, 4, 0.66),  # statistics of BatchNorm
        (under_autocast, Net, {}, 32, 0.7),
        (as_module, Net, {"matmuls": True}, 4, 0.45),
    ],
)
def test_keeps_less_with_the_same_values(how, make, options, batch, most):
    x = torch.randn(batch, 64, 64)
    assert both(make, how, x, options, backend="aot_eager", fullgraph=True) <= most
    assert config.joint_custom_pass is None and torch.compiler.config.cache_key_tag == ""


@pytest.mark.nightly
def test_inductor_and_its_caches():
    make, x = lambda: Net(lambda: SmallViTBlock(0.1), 1), torch.randn(4, 64, 64)
    for _ in range(2):  # the second time from the caches
        assert both(make, as_module, x, fullgraph=True) <= 0.7


def test_dynamic_shapes():
    counts = []
    for change in (convert, lambda model: model):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = torch.compile(change(Net()), backend=counter, fullgraph=True, dynamic=True)
        for batch in (2, 3, 5):
            model(torch.randn(batch, 64, 64)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] <= counts[1]
    assert both(Net, as_module, torch.randn(4, 64, 64), backend="aot_eager", dynamic=True) <= 0.66


def test_compiled_code_keeps_the_share_of_a_budget():
    """Compiled code keeps the share of the bytes that the plan keeps."""
    torch._dynamo.reset()
    x, model = torch.randn(4, 64, 64), Net()
    eager, before = step(model, model, x)[0], None
    for given in (
        {"budget": 0.3},
        {"budget": 0.6, "example_inputs": x},
        {"budget": "least", "example_inputs": x},
    ):
        torch._dynamo.reset()
        converted = convert(copy.deepcopy(model), **given)
        kept, values, _ = step(converted, torch.compile(converted, backend="aot_eager", fullgraph=True), x)
        share = next(iter(converted._forward_pre_hooks.values())).policy.kept_fraction
        assert share == 0.3 or "example_inputs" in given
        assert share / 2 < (kept - x.nbytes) / eager <= share  # without the result
        assert all(map(torch.equal, values, before or values))
        before = values


def test_a_budget_in_bytes_without_inputs_is_refused():
    torch._dynamo.reset()
    model = convert(Net(), budget="1 MiB")
    with pytest.raises(
        Exception, match="convert: compiled code cannot meet a budget in bytes without example_inputs"
    ):
        torch.compile(model, backend="aot_eager")(torch.randn(4, 64, 64))


@pytest.mark.parametrize("how", [as_module, as_function])
def test_graph_breaks_in_a_model(how):
    assert both(lambda: Net(Breaks), how, torch.randn(4, 64, 64), backend="aot_eager") < 0.95


def test_a_backend_without_autograd_runs_it():
    assert both(Net, as_module, torch.randn(4, 64, 64), backend="eager", fullgraph=True) == 1


def test_other_models_of_the_process_and_revert():
    torch._dynamo.reset()
    x, model = torch.randn(4, 64, 64), Net()
    converted = convert(copy.deepcopy(model))
    plain, ours = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, converted))
    less, all_of_it = step(converted, ours, x)[0], step(model, plain, x)[0]
    assert less <= 0.66 * all_of_it
    assert (step(converted, ours, x)[0], step(model, plain, x)[0]) == (less, all_of_it)
    revert(converted)
    assert step(converted, ours, x)[0] == all_of_it
