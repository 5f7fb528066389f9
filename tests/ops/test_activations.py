"""Activations and gates against the float64 reference: every layout, dtype and activation."""

import itertools

import pytest
import torch

from fastvit import functional, ops
from ops.inputs import (
    ACTIVATION_PARAM,
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    LayerInputs,
    assert_matches_reference,
    assert_repeats_bits,
    make_generator,
)

pytestmark = pytest.mark.cuda_model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout,activation",
    [
        (layout, a)
        for layout in LAYOUTS
        for a in (ACTIVATIONS if layout == "tokens" else ["gelu_tanh", "silu"])
    ],
)
def test_activation_ops_match_the_reference(layout, activation, dtype, device):
    case = LayerInputs(layout, dtype, device)
    x, dy = case.x - 3, case.dy
    for gate in (None, case.residual):
        (y,) = assert_matches_reference("act_forward", x, gate, activation, ACTIVATION_PARAM)
        dx, dgate = assert_matches_reference("act_backward", x, dy, gate, activation, ACTIVATION_PARAM)
        assert y.stride() == dx.stride() == torch.empty_like(x).stride()
        assert dgate.stride() == ((1,) if gate is None else torch.empty_like(gate).stride())


def views():
    g = make_generator()
    packed = torch.randn(6, 7, 48, generator=g)
    return {
        "halves": packed.chunk(2, -1),
        "halves along the middle": (packed[:, :3], packed[:, 4:]),
        "a transposed": (packed.transpose(0, 1), packed.permute(1, 0, 2).contiguous()),
        "b expanded": (packed, packed[:, :1].expand(6, 7, 48)),
        "every other": (packed[..., ::2], packed[..., 1::2]),
        "a scalar": (packed[0, 0, 0], packed[0, 0, 1]),
        "six dimensions": (packed.view(2, 3, 7, 2, 4, 6), packed.flip(0).view(2, 3, 7, 2, 4, 6)),
        "six dimensions with gaps": (
            packed.view(2, 3, 7, 2, 4, 6)[..., ::2],
            packed.view(2, 3, 7, 2, 4, 6)[..., 3:],
        ),
        "empty": (packed[:0], packed[:0]),
        "not at 16 bytes": (packed.flatten()[1:-2], packed.flatten()[3:]),
        "one long row": (packed.flatten(), packed.flip(0).flatten()),
    }


@pytest.mark.parametrize("name", views())
def test_operands_that_lie_otherwise(name, device):
    a, b = (t.to(device) for t in views()[name])
    for dy in (b, a.flip(0) if a.dim() else a, b.new_ones(()).expand_as(b)):
        for gate, activation in ((None, "silu"), (b, "gelu")):
            assert_matches_reference("act_forward", a, gate, activation)
            assert_matches_reference("act_backward", a, dy, gate, activation)


def test_repeats_and_threads_give_the_same_bits(device):
    a, b, dy = torch.randn(3, 40, 2100, device=device).unbind(0)

    def run():
        both_ways = ((ops.act_forward(a, gate), *ops.act_backward(a, dy, gate)) for gate in (None, b))
        return list(itertools.chain(*both_ways))

    assert_repeats_bits(run)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, device):
    a, b = (torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a: functional.act(a, activation, ACTIVATION_PARAM), a)
    assert torch.autograd.gradcheck(
        lambda a, b: functional.gated_act(a, b, activation, ACTIVATION_PARAM), (a, b)
    )


@pytest.mark.parametrize("b", [torch.randn(4, 3), torch.randn(5, 3).half()], ids=["shape", "dtype"])
def test_a_gate_that_does_not_fit_is_named(b):
    with pytest.raises(
        ValueError, match=r"gated_act: gate is \(\d, 3\), .*; \(5, 3\), torch.float32 expected"
    ):
        functional.gated_act(torch.randn(5, 3), b)


def test_a_gate_keeps_its_operands_alone(device):
    a, b = torch.randn(2, 6, 40, device=device, requires_grad=True).unbind(0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.gated_act(a, b)
    assert [t.data_ptr() for t in kept] == [a.data_ptr(), b.data_ptr()]
