"""A compiled model that is converted keeps less, with the values of the compiled model."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from report.models import SmallViTBlock
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config

from conversion.models import assert_same_bits, leave_unconverted
from fastvit import convert, revert
from fastvit.conversion.scope_hooks import get_scope_hook
from fastvit.memory import live_bytes

pytestmark = pytest.mark.nightly


class BlockWithBreak(SmallViTBlock):
    def act(self, x):
        torch._dynamo.graph_break()
        return super().act(x)


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class BlockModel(nn.Module):
    def __init__(self, make_block=SmallViTBlock, depth=2):
        super().__init__()
        self.blocks = nn.Sequential(*[make_block() for _ in range(depth)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.blocks(x))


class RenamedSelf(BlockModel):
    def forward(net, x):  # noqa: N805
        return net.norm(net.blocks(x))


class DecoratedForward(BlockModel):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return super().forward(x)


class HookedBlocks(BlockModel):
    """Has hooks before it is converted."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_pre_hook(do_nothing)
        self.blocks[1].register_forward_hook(do_nothing)


def do_nothing(*_):
    return None


def compile_in_place(model, **options):
    model.compile(**options)
    return model


def compile_as_function(model, **options):
    return torch.compile(lambda x: model(x) * 2, **options)


def compile_each_block(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def compile_under_autocast(model, **options):
    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    return torch.compile(run, **options)


class CompiledStep(NamedTuple):
    kept_bytes: int
    tensors: list  # gradients and buffers after two steps
    graph_breaks: int


def run_steps(model, forward, x):
    def compute_loss():
        torch.manual_seed(1)
        return forward(x).square().mean()

    model.zero_grad()
    counters.clear()
    compute_loss().backward()
    kept_bytes, loss = live_bytes(compute_loss)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    tensors = [*gradients, *map(torch.clone, model.buffers())]
    return CompiledStep(kept_bytes, tensors, sum(counters["graph_break"].values()))


def compare_and_measure_share(make, x, compile_model=torch.compile, options=None, **compile_options):
    """Returns the bytes that the converted model keeps, as a share of the model's, both compiled.

    Raises unless the values are equal, and the converted model has no more graph breaks.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    converted = convert(copy.deepcopy(model), **(options or {}))
    expected = run_steps(model, compile_model(model, **compile_options), x)
    actual = run_steps(converted, compile_model(converted, **compile_options), x)
    assert_same_bits(actual.tensors, expected.tensors)
    assert actual.graph_breaks <= expected.graph_breaks
    return actual.kept_bytes / expected.kept_bytes


def make_conv_model():
    return BlockModel(ConvBlock)


@pytest.mark.parametrize(
    ("compile_model", "make", "options", "batch", "largest_share"),
    [
        pytest.param(torch.compile, BlockModel, {}, 4, 0.66, id="module"),
        pytest.param(compile_in_place, BlockModel, {}, 4, 0.66, id="in place"),
        pytest.param(torch.compile, RenamedSelf, {}, 4, 0.66, id="self is renamed"),
        pytest.param(torch.compile, DecoratedForward, {}, 4, 0.66, id="decorated forward"),
        pytest.param(torch.compile, HookedBlocks, {}, 4, 0.66, id="blocks with hooks"),
        pytest.param(compile_as_function, BlockModel, {}, 4, 0.66, id="function"),
        pytest.param(compile_each_block, BlockModel, {}, 4, 0.66, id="each block"),
        pytest.param(torch.compile, make_conv_model, {}, 4, 0.66, id="statistics of BatchNorm"),
        pytest.param(compile_under_autocast, BlockModel, {}, 32, 0.7, id="autocast"),
        pytest.param(torch.compile, BlockModel, {"matmuls": True}, 4, 0.45, id="matmuls"),
    ],
)
def test_a_compiled_model_keeps_less_with_the_same_values(compile_model, make, options, batch, largest_share):
    x = torch.randn(batch, 64, 64)
    share = compare_and_measure_share(make, x, compile_model, options, backend="aot_eager", fullgraph=True)
    assert share <= largest_share
    assert config.joint_custom_pass is None and torch.compiler.config.cache_key_tag == ""


def test_inductor_keeps_less_with_and_without_its_caches():
    def make():
        return BlockModel(lambda: SmallViTBlock(0.1), depth=1)

    for _ in range(2):  # the second time from the caches
        assert compare_and_measure_share(make, torch.randn(4, 64, 64), fullgraph=True) <= 0.7


def test_dynamic_shapes_compile_no_more_often():
    counts = []
    for change in (convert, leave_unconverted):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = change(BlockModel(depth=1))
        model = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for batch in (2, 3, 5):
            model(torch.randn(batch, 64, 64)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] <= counts[1]
    x = torch.randn(4, 64, 64)
    assert compare_and_measure_share(BlockModel, x, backend="aot_eager", dynamic=True) <= 0.66


def test_compiled_code_keeps_the_fraction_of_a_plan():
    torch._dynamo.reset()
    x, model = torch.randn(4, 64, 64), BlockModel()
    eager, results = run_steps(model, model, x), []
    for options in (
        {"budget": 0.3},
        {"budget": 0.6, "example_inputs": x},
        {"budget": "least", "example_inputs": x},
    ):
        torch._dynamo.reset()
        converted = convert(copy.deepcopy(model), **options)
        compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
        results.append(run_steps(converted, compiled, x))
        fraction = get_scope_hook(converted).policy.kept_fraction
        assert fraction == 0.3 or "example_inputs" in options
        without_output = results[-1].kept_bytes - x.nbytes
        assert fraction / 2 < without_output / eager.kept_bytes <= fraction
        assert_same_bits(results[-1].tensors, results[0].tensors)


def test_a_budget_in_bytes_without_inputs_is_refused():
    torch._dynamo.reset()
    model = torch.compile(convert(BlockModel(), budget="1 MiB"), backend="aot_eager")
    message = "convert: compiled code cannot meet a budget in bytes without example_inputs"
    with pytest.raises(Exception, match=message):
        model(torch.randn(4, 64, 64))


@pytest.mark.parametrize("compile_model", [torch.compile, compile_as_function], ids=["module", "function"])
def test_a_model_with_graph_breaks_keeps_less(compile_model):
    def make():
        return BlockModel(BlockWithBreak)

    x = torch.randn(4, 64, 64)
    assert compare_and_measure_share(make, x, compile_model, backend="aot_eager") < 0.95


def test_a_backend_without_autograd_keeps_as_much():
    x = torch.randn(4, 64, 64)
    assert compare_and_measure_share(BlockModel, x, backend="eager", fullgraph=True) == 1


def test_other_models_of_the_process_and_a_reverted_model_keep_as_much():
    torch._dynamo.reset()
    x, model = torch.randn(4, 64, 64), BlockModel()
    converted = convert(copy.deepcopy(model))
    compiled = {m: torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, converted)}

    def measure(m):
        return run_steps(m, compiled[m], x).kept_bytes

    less, whole = measure(converted), measure(model)
    assert less <= 0.66 * whole
    assert (measure(converted), measure(model)) == (less, whole)
    revert(converted)
    assert measure(converted) == whole
