"""Activations and gates against the float64 reference."""

import pytest
import torch

from fastvit import functional
from ops.compare import assert_matches_reference
from ops.inputs import LayerInputs, make_generator
from ops.matrix import ACTIVATION_PARAM, ACTIVATIONS, op_cases

pytestmark = pytest.mark.cuda_model


@pytest.mark.parametrize("layout,dtype,activation", op_cases(core_layouts=["tokens"]))
def test_activation_ops_match_reference(layout, dtype, activation, device):
    case = LayerInputs(layout, dtype, device)
    x, dy = case.x - 3, case.dy
    for gate in (None, case.residual):
        (y,) = assert_matches_reference("act_forward", x, gate, activation, ACTIVATION_PARAM)
        dx, dgate = assert_matches_reference("act_backward", x, dy, gate, activation, ACTIVATION_PARAM)
        assert y.stride() == dx.stride() == torch.empty_like(x).stride()
        assert dgate.stride() == ((1,) if gate is None else torch.empty_like(gate).stride())


def make_operand_pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns an activation's input and a gate, which are views of different kinds."""
    packed = torch.randn(6, 7, 48, generator=make_generator())
    six_dims, flipped = packed.view(2, 3, 7, 2, 4, 6), packed.flip(0).view(2, 3, 7, 2, 4, 6)
    return {
        "halves": packed.chunk(2, -1),
        "halves_along_the_middle": (packed[:, :3], packed[:, 4:]),
        "x_transposed": (packed.transpose(0, 1), packed.permute(1, 0, 2).contiguous()),
        "gate_expanded": (packed, packed[:, :1].expand(6, 7, 48)),
        "every_other": (packed[..., ::2], packed[..., 1::2]),
        "numbers": (packed[0, 0, 0], packed[0, 0, 1]),
        "six_dimensions": (six_dims, flipped),
        "six_dimensions_with_gaps": (six_dims[..., ::2], six_dims[..., 3:]),
        "empty": (packed[:0], packed[:0]),
        "not_at_16_bytes": (packed.flatten()[1:-2], packed.flatten()[3:]),
        "one_long_row": (packed.flatten(), packed.flip(0).flatten()),
    }


@pytest.mark.parametrize("name", make_operand_pairs())
def test_operands_may_be_any_views(name, device):
    x, gate = (t.to(device) for t in make_operand_pairs()[name])
    for dy in (gate, x.flip(0) if x.dim() else x, gate.new_ones(()).expand_as(gate)):
        for given_gate, activation in ((None, "silu"), (gate, "gelu")):
            assert_matches_reference("act_forward", x, given_gate, activation)
            assert_matches_reference("act_backward", x, dy, given_gate, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_finite_differences(activation, device):
    x, gate = (torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: functional.act(x, activation, ACTIVATION_PARAM), x)
    assert torch.autograd.gradcheck(
        lambda x, gate: functional.gated_act(x, gate, activation, ACTIVATION_PARAM), (x, gate)
    )


@pytest.mark.parametrize("gate", [torch.randn(4, 3), torch.randn(5, 3).half()], ids=["shape", "dtype"])
def test_a_gate_that_does_not_fit_is_named(gate):
    message = r"gated_act: gate is \(\d, 3\), .*; \(5, 3\), torch.float32 expected"
    with pytest.raises(ValueError, match=message):
        functional.gated_act(torch.randn(5, 3), gate)


def test_a_gated_activation_saves_its_two_inputs_alone(device):
    x, gate = torch.randn(2, 6, 40, device=device, requires_grad=True).unbind(0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.gated_act(x, gate)
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), gate.data_ptr()]
