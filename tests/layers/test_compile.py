"""torch.compile and torch.export: one graph, and the outputs, gradients and buffers of eager execution."""

import copy
import itertools

import pytest
import torch
from ops.inputs import run_layer_step
from ops.tolerances import assert_close_enough
from torch import nn

import fastvit
from fastvit import BatchNormAct, functional


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()


class ResidualLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = fastvit.SyncBatchNorm(channels, fuse_relu=True)

    def forward(self, x):
        return self.norm(x, x.sigmoid())


class TokenLayer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = fastvit.InPlaceABN(channels, activation="elu", activation_param=1.0, channel_last=True)

    def forward(self, x):
        return self.norm(x.flatten(2).transpose(1, 2).contiguous()).transpose(1, 2).unflatten(2, x.shape[2:])


LAYERS = {
    "abn": lambda: fastvit.InPlaceABN(6, momentum=None),
    "abn_without_bias": lambda: fastvit.InPlaceABN(6, bias=False),
    "sbn": lambda: fastvit.SyncBatchNorm(6, fuse_relu=True),
    "residual": lambda: ResidualLayer(6),
    "tokens": lambda: TokenLayer(6),
}


def make_model(name: str, device: str, channels_last: bool = False) -> nn.Sequential:
    """Returns a layer with random parameters between two convolutions."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    # no bias before the norm: its gradient is zero but for rounding
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), layer, nn.Conv2d(6, 4, 3))
    return model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)


def run_step(model: nn.Module, forward, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the output, gradients and buffers of a step, before which the buffers are reset."""
    model.zero_grad()
    for buffer, value in zip(model.buffers(), [0, 1, 0], strict=True):
        buffer.fill_(value)
    y = forward(x)
    if y.requires_grad:
        y.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


def assert_same_model_step(model: nn.Module, forward, x: torch.Tensor) -> None:
    """Raises unless `forward`, which runs `model`, does the step of the model itself."""
    for actual, expected in zip(run_step(model, forward, x), run_step(model, model, x), strict=True):
        assert_close_enough(actual.double(), expected.double(), row="in_place_layer", dtype=torch.float32)


def compile_cases():
    """Yields each layer with each backend in both modes. Compiling takes seconds."""
    nightly = {("aot_eager", "eval"), ("inductor", "train")}
    for name, backend, mode in itertools.product(LAYERS, ("aot_eager", "inductor"), ("train", "eval")):
        marks = [pytest.mark.nightly] if (backend, mode) in nightly else []
        yield pytest.param(name, backend, mode == "train", marks=marks, id=f"{name}-{backend}-{mode}")


@pytest.mark.parametrize("name,backend,training", list(compile_cases()))
def test_a_layer_between_others_compiles_as_one_graph(name, backend, training, device):
    channels_last = training == (backend == "inductor")  # so that each backend compiles both layouts
    model = make_model(name, device, channels_last).train(training)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=backend == "aot_eager")
    for samples in (4, 7) if backend == "aot_eager" else (4, 4):
        x = torch.randn(samples, 3, 9, 10, device=device)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        assert_same_model_step(model, compiled, x)
    with torch.no_grad():
        assert_close_enough(compiled(x), model(x), row="layer")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "call,shape,autocast",
    [
        pytest.param(lambda x, w, b: functional.layer_norm(x, (4, 6), w, b), (4, 6), False, id="layer_norm"),
        pytest.param(
            lambda x, w, b: functional.layer_norm(x, (4, 6), w, b), (4, 6), True, id="layer_norm_autocast"
        ),
        pytest.param(lambda x, *_: functional.act(x, "gelu_tanh"), (5, 4, 6), False, id="act"),
        pytest.param(lambda x, gate, _: functional.gated_act(x, gate), (5, 4, 6), False, id="gated_act"),
    ],
)
def test_functions_compile_as_one_graph(call, shape, autocast, backend, device):
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((5, 4, 6), shape, shape)]
    results = []
    for run in (torch.compile(call, fullgraph=True, backend=backend), call):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = run(*leaves)
        gradients = torch.autograd.grad(y.float().square().sum(), leaves, materialize_grads=True)
        results.append([y, *gradients])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        dtype = torch.bfloat16 if autocast else torch.float32
        assert_close_enough(actual, expected, row="layer", dtype=dtype)


@pytest.mark.parametrize("name", ["abn", "tokens"])
def test_a_layer_that_is_compiled_alone_equals_eager(name, device):
    """Its input is then an input of the graph, which torch 2.13 gets wrong for mark_dirty."""
    model = make_model(name, device)
    first, layer, last = model
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 9, 10, device=device)
    assert_same_model_step(model, lambda x: last(compiled(first(x))), x)


def test_the_input_is_overwritten_when_compiled_too(device):
    layer = fastvit.InPlaceABN(6, device=device)
    for requires_grad in (True, False):
        x = torch.randn(4, 6, 5, device=device, requires_grad=requires_grad).clone()
        expected = layer(x.clone())
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert_close_enough(y, expected, row="layer")
        assert_close_enough(x, expected, row="layer")


def assert_compiles_as_one_graph(layer: nn.Module, backend, x: torch.Tensor, *residual) -> None:
    """Raises unless a step of the layer alone gives the same when it is compiled as one graph."""
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        layer.reset_running_stats()
        step = run_layer_step(run, x, x.sin(), *residual)
        results.append([*step, *(b.clone().float() for b in layer.buffers())])
    for expected, actual in zip(*results, strict=True):
        assert_close_enough(actual, expected, row="layer", least_scale=1.0)


@pytest.mark.parametrize(
    "memory,channel_last,has_residual",
    [
        pytest.param("recompute", False, False, id="recompute"),
        pytest.param("recompute", True, True, id="recompute-channel_last-residual"),
        pytest.param("keep", True, False, id="keep-channel_last"),
        pytest.param("keep", False, True, id="keep-residual"),
    ],
)
def test_batch_norm_act_is_traced_as_ops_of_torch(memory, channel_last, has_residual):
    layer, targets = BatchNormAct(6, activation="gelu", memory=memory, channel_last=channel_last), []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.randn(4, 5, 6) if channel_last else torch.randn(4, 6, 5)
    assert_compiles_as_one_graph(layer, backend, x, *([torch.randn_like(x)] * has_residual))
    text = " ".join(targets)
    assert "batch_norm" in text and "gelu" in text
    assert "fastvit" not in text and "BatchNormFunction" not in text


@pytest.mark.parametrize(
    "options,dtype",
    [
        pytest.param({"momentum": None}, torch.float32, id="cumulative_average"),
        pytest.param({}, torch.float64, id="parameters_of_another_dtype"),
    ],
)
def test_batch_norm_act_that_torch_cannot_trace_is_traced_as_an_op_of_fastvit(options, dtype):
    x = torch.randn(4, 6, 5, dtype=dtype)
    assert_compiles_as_one_graph(BatchNormAct(6, **options), "aot_eager", x)


TOKENS_AND_IMAGES = {
    "tokens": lambda: torch.randn(4, 7, 3),
    "images": lambda: torch.randn(4, 5, 7, 3),
    "transposed_tokens": lambda: torch.randn(4, 3, 7).transpose(1, 2),
    "permuted_images": lambda: torch.randn(4, 3, 5, 7).permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("name", TOKENS_AND_IMAGES)
def test_inputs_with_channels_last_keep_their_strides_when_traced(name):
    x, layer = TOKENS_AND_IMAGES[name](), BatchNormAct(3, channel_last=True).eval()
    exported = torch.export.export(layer, (x,)).module()
    for run in (layer, torch.compile(layer, backend="eager"), exported):
        y = run(x)
        assert y.stride() == x.stride()
        assert_close_enough(y, layer(x), row="layer")


def test_batch_norm_act_is_exported_as_ops_of_torch():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct(4, activation="hardswish")).eval()
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model, (x,))
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.conv2d.default", "aten.batch_norm.default", "aten.hardswish.default"]
    assert_close_enough(exported.module()(x), model(x), row="layer")


def make_batch_norm_layers():
    return {
        "InPlaceABN": fastvit.InPlaceABN(4),
        "InPlaceABNSync": fastvit.InPlaceABNSync(4, momentum=None),
        "SyncBatchNorm": fastvit.SyncBatchNorm(4, fuse_relu=True),
    }


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", make_batch_norm_layers())
def test_exported_layers_give_the_results_of_eager_ones(name, training):
    """A program with a layer in place has no backward. That of SyncBatchNorm is one of torch's ops."""
    layer = make_batch_norm_layers()[name].train(training)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), layer), torch.randn(2, 3, 8, 8)
    eager = copy.deepcopy(model)
    program = torch.export.export(model, (x,)).module()
    with torch.set_grad_enabled(name == "SyncBatchNorm"):
        for _ in range(2):
            results = []
            for run in (program, eager):
                y = run(x)
                parameters = list(run.parameters()) if y.requires_grad else []
                gradients = torch.autograd.grad(y.square().sum(), parameters) if parameters else ()
                results.append([y, *gradients, *(b.float() for b in run.buffers())])
            for actual, expected in zip(*results, strict=True):
                assert_close_enough(actual, expected, row="layer", least_scale=1.0)
