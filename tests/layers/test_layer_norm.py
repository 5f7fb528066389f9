"""The layer LayerNorm against torch's."""

import copy
import pickle

import pytest
import torch
from ops.inputs import run_layer_step
from ops.matrix import DTYPES, name_of
from ops.tolerances import assert_close_enough
from torch import nn

import fastvit

pytestmark = pytest.mark.cuda_model("nightly")

# The shape of x, then the arguments of the layer.
LAYERS = {
    "tokens": ((3, 17, 48), 48, {}),
    "two_dimensions": ((3, 5, 7, 8), (7, 8), {"eps": 0.1}),
    "no_bias": ((4, 13), (13,), {"bias": False}),
    "no_parameters": ((2, 6, 4), [6, 4], {"elementwise_affine": False}),
}


def make_layer_pair(normalized_shape, **options) -> tuple[nn.Module, nn.Module]:
    """Returns our layer and torch's, with the same random parameters."""
    ours = fastvit.LayerNorm(normalized_shape, **options)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, 1.0)
    theirs = nn.LayerNorm(normalized_shape, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(
    "name,dtype",
    [
        *(pytest.param(name, torch.float32, id=f"{name}-float32") for name in LAYERS),
        *(pytest.param("tokens", dtype, id=f"tokens-{name_of(dtype)}") for dtype in DTYPES[1:]),
    ],
)
def test_a_layer_norm_gives_torchs_results(name, dtype, device):
    shape, normalized_shape, options = LAYERS[name]
    ours, theirs = make_layer_pair(normalized_shape, dtype=dtype, device=device, **options)
    x, dy = (torch.randn(shape, dtype=torch.float64).to(dtype).to(device) for _ in range(2))
    expected = run_layer_step(theirs.double(), x.double(), dy)
    for actual, exact in zip(run_layer_step(ours, x, dy), expected, strict=True):
        assert actual.dtype == dtype
        assert_close_enough(actual, exact, row="layer", dtype=dtype)
    assert repr(ours) == repr(theirs)


def test_copies_and_checkpoints_give_the_same_output(device):
    ours, theirs = make_layer_pair(24, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is fastvit.LayerNorm
        x = torch.randn(5, 24, device=device)
        assert torch.equal(other(x), ours(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_under_autocast_outputs_have_its_dtype(dtype, device):
    ours, theirs = make_layer_pair(48, device=device)
    fixed = fastvit.LayerNorm(48, device=device, output_dtype=torch.float32)
    linear = nn.Linear(48, 8, device=device)
    x, dy = torch.randn(9, 48, device=device), torch.randn(9, 8, device=device)
    with torch.autocast(device, dtype):
        assert ours(x).dtype == dtype and fixed(x).dtype == torch.float32
        assert ours(x.to(dtype)).dtype == dtype and ours(x.double()).dtype == torch.float64
        for actual, expected in zip(
            run_layer_step(nn.Sequential(ours, linear), x, dy),
            run_layer_step(nn.Sequential(theirs, linear), x, dy),
            strict=True,
        ):
            assert actual.dtype == expected.dtype
            assert_close_enough(actual, expected, row="layer", dtype=dtype)
        with torch.autocast(device, enabled=False):
            assert ours(x).dtype == torch.float32
    assert ours(x).dtype == torch.float32 and "output_dtype=torch.float32" in repr(fixed)


def test_backward_saves_x_and_two_numbers_of_each_row(device):
    layer, saved = fastvit.LayerNorm(64, device=device), []
    x = torch.randn(10, 64, device=device, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    parameters = {p.data_ptr() for p in layer.parameters()}
    assert sorted(t.nbytes for t in saved if t.data_ptr() not in parameters) == [2 * 10 * 4, x.nbytes]


def test_a_layer_on_meta_gives_shapes():
    layer = fastvit.LayerNorm((2, 8), device="meta")
    y = layer(torch.empty(3, 2, 8, device="meta", dtype=torch.bfloat16))
    assert y.is_meta and y.shape == (3, 2, 8) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "x"])
def test_frozen_tensors_get_no_gradient(frozen, device):
    layer = fastvit.LayerNorm(32, device=device)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    x = torch.randn(6, 32, device=device, requires_grad=frozen != "x")
    layer(x).square().sum().backward()
    for name, tensor in (("x", x), *layer.named_parameters()):
        assert (tensor.grad is None) == (frozen == name or (frozen == "both" and name != "x"))
