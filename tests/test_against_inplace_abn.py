"""fastvit's InPlaceABN against mapillary's on the CPU; skipped where that cannot be imported.

For a checkout of its sources: compile its extension in place and put the folder on PYTHONPATH.
"""

import pytest
import torch
from packages import package

import fastvit

SHAPES = {"images": (6, 5, 4, 3), "rows": (16, 5), "sequences": (4, 5, 7), "volumes": (2, 5, 3, 2, 2)}


def steps(layer, inputs):
    """Outputs, gradients and buffers of two training steps and an evaluation."""
    found = {}
    for step, (x, dy) in enumerate(inputs):
        layer.train(step < 2).zero_grad()
        x = x.clone().requires_grad_()
        y = layer(x * 1)  # in place: not over the leaf
        named = {"y": y.detach().clone(), **dict(layer.named_buffers())}
        if layer.training:
            y.backward(dy)
            named |= {"dx": x.grad, **{f"d{name}": p.grad for name, p in layer.named_parameters()}}
        found |= {f"{name} of step {step}": value.clone() for name, value in named.items()}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation, slope", [("leaky_relu", 0.01), ("elu", 0.7), ("identity", 0.0)])
def test_every_output_and_gradient_is_that_of_mapillary(activation, slope, shape, dtype):
    peer = package("inplace_abn")
    options = {"activation": activation, "activation_param": slope, "momentum": 0.3}
    theirs, ours = (layer(5, **options).to(dtype) for layer in (peer.InPlaceABN, fastvit.InPlaceABN))
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2)
        ours.bias.normal_()
        theirs.load_state_dict(ours.state_dict())
        theirs.weight -= theirs.eps  # its gamma is |weight| + eps
    inputs = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(3)]
    expected, found = steps(theirs, inputs), steps(ours, inputs)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-7}[dtype]  # its slope and eps are float32
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
