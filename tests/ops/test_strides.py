"""Ops on tensors of any shape and strides, which hypothesis draws, against the float64 reference."""

import math
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

from fastvit import ops
from ops.compare import assert_layer_norm_matches_reference, assert_matches_reference, assert_same_bits
from ops.inputs import make_generator, make_randn
from ops.matrix import DTYPES

pytestmark = pytest.mark.cuda_model

MAX_SIZES = {1: 70, 2: 40, 3: 12, 4: 6, 5: 4}  # of each dimension, by the number of dimensions
# Those of batch norm whose derivatives have no jump, on the two sides of which roundings might fall.
SMOOTH_ACTIVATIONS = ["identity", "gelu", "silu"]


class Placement(NamedTuple):
    """Says how a tensor lies in memory."""

    order: tuple[int, ...]  # the dimensions, the slowest first
    first: tuple[int, ...]  # for each dimension, the index of the first element in the memory
    step: tuple[int, ...]  # the distance of elements in the memory, in elements of the dimension
    is_expanded: tuple[bool, ...]  # whether all elements of the dimension are one

    def place(self, values: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
        """Returns a tensor of these values. NaN fills the rest of its memory."""
        distinct = values
        for dim, is_expanded in enumerate(self.is_expanded):
            distinct = distinct[(slice(None),) * dim + (slice(1),)] if is_expanded else distinct
        sizes = [
            first + size * step + 1
            for first, size, step in zip(self.first, distinct.shape, self.step, strict=True)
        ]
        memory = torch.full([sizes[dim] for dim in self.order], math.nan, dtype=dtype, device=device)
        whole = memory.permute([self.order.index(dim) for dim in range(values.dim())])
        elements = (
            slice(first, first + size * step, step)
            for first, size, step in zip(self.first, distinct.shape, self.step, strict=True)
        )
        return whole[tuple(elements)].copy_(distinct).expand(values.shape)


@st.composite
def placements(draw, dims: int, may_expand: bool = True) -> Placement:
    def draw_for_each_dim(*choices):
        return draw(st.tuples(*[st.sampled_from(choices)] * dims))

    return Placement(
        order=tuple(draw(st.permutations(range(dims)))),
        first=draw_for_each_dim(0, 0, 0, 1, 4),
        step=draw_for_each_dim(1, 1, 1, 2),
        is_expanded=draw_for_each_dim(False, False, False, may_expand),
    )


@st.composite
def operand_sets(draw, min_dims: int = 2) -> list[tuple]:
    """Draws three tensors of one shape: for each its placement, the same for all or not, and its values."""
    dims = draw(st.integers(min_dims, 5))
    shape = draw(st.lists(st.integers(1, MAX_SIZES[dims]), min_size=dims, max_size=dims))
    if draw(st.integers(0, 9)) == 9:
        shape[draw(st.integers(0, dims - 1))] = 0
    x_placement = draw(placements(dims))
    others = [draw(placements(dims)) for _ in range(2)] if draw(st.booleans()) else [x_placement] * 2
    randn = make_randn(make_generator(draw(st.integers(0, 99))))
    return [(placement, randn(*shape)) for placement in (x_placement, *others)]


def place_operands(operands: list[tuple], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [placement.place(values, dtype, device) for placement, values in operands]


def make_parameter(dtype: torch.dtype | None, values: torch.Tensor, device: str) -> torch.Tensor | None:
    return None if dtype is None else values.to(dtype).to(device)


dtypes = st.sampled_from(DTYPES)
parameter_dtypes = st.sampled_from([*DTYPES, None])


@given(
    operands=operand_sets(),
    dtype=dtypes,
    channel=st.floats(0, 1, exclude_max=True),
    weight_dtype=parameter_dtypes,
    bias_dtype=parameter_dtypes,
    activation=st.sampled_from(SMOOTH_ACTIVATIONS),
    has_residual=st.booleans(),
)
def test_batch_norm_ops_take_any_strides(
    operands, dtype, channel, weight_dtype, bias_dtype, activation, has_residual, device
):
    x, dy, residual = place_operands(operands, dtype, device)
    channel_dim = int(channel * x.dim())
    channels = x.shape[channel_dim]
    assume(channels > 0)
    values_per_channel = math.prod(x.shape[:channel_dim] + x.shape[channel_dim + 1 :])
    weight = make_parameter(weight_dtype, torch.linspace(-1.5, 1.5, channels) + 0.07, device)
    bias = make_parameter(bias_dtype, torch.linspace(-0.5, 0.5, channels), device)

    def assert_gradients_match_reference(input, saved, *shared, **options):
        """Sums may cancel, and dx is 0 where a channel has one value: the scales are those of their terms."""
        arguments = input, dy, saved, *shared
        scale = max(values_per_channel, 1) ** 0.5
        (sums,) = assert_matches_reference("bn_reduce", *arguments, **options, least_scales=[scale])
        scales = [(dy.double().abs().max() * 1.6 * saved[channels:-2].max()).item()] if x.numel() else []
        options |= {"global_sums": sums[0]}
        dx, dresidual, _ = assert_matches_reference("bn_backward", *arguments, **options, least_scales=scales)
        assert dx.stride() == torch.empty_like(input).stride()
        del options["global_sums"]
        assert_same_bits(ops.bn_backward(*arguments, **options), (dx, dresidual, sums[0]))
        return dresidual

    shared = weight, bias, residual if has_residual else None
    options = {"activation": activation, "channel_dim": channel_dim}
    (moments,) = assert_matches_reference("bn_stats", x, channel_dim)
    y, saved = assert_matches_reference("bn_forward", x, *shared, **options, moments=moments)
    assert y.stride() == torch.empty_like(x).stride()
    assert_same_bits(ops.bn_forward(x, *shared, **options), (y, saved))
    assert_same_bits([ops.bn_apply(x, saved, *shared, **options)], [y])
    dresidual = assert_gradients_match_reference(x, saved, *shared, **options)
    if has_residual:
        assert dresidual.stride() == torch.empty_like(residual).stride()

    if not any(operands[0][0].is_expanded):
        options["activation"] = "leaky_relu"
        y, saved = assert_matches_reference("bn_forward_inplace", x, weight, bias, **options, moments=moments)
        assert_gradients_match_reference(y, saved, weight, bias, **options, from_output=True)


@given(
    operands=operand_sets(min_dims=1),
    dtype=dtypes,
    activation=st.sampled_from(SMOOTH_ACTIVATIONS),
    has_gate=st.booleans(),
)
def test_activation_ops_take_any_strides(operands, dtype, activation, has_gate, device):
    x, dy, gate = place_operands(operands, dtype, device)
    gate = gate if has_gate else None
    (y,) = assert_matches_reference("act_forward", x, gate, activation)
    dx, dgate = assert_matches_reference("act_backward", x, dy, gate, activation)
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    assert dgate.stride() == (torch.empty_like(x).stride() if has_gate else (1,))


@given(
    operands=operand_sets(min_dims=1),
    dtype=dtypes,
    weight_dtype=parameter_dtypes,
    bias_dtype=parameter_dtypes,
)
def test_layer_norm_ops_take_any_strides(operands, dtype, weight_dtype, bias_dtype, device):
    (placement, values), *others = operands
    columns = values.shape[-1]
    # The deviations of a row that is constant, or almost, are roundings of its mean.
    assume(not placement.is_expanded[-1])
    values = values.clamp(-0.7, 0.7) + torch.tensor([1, -1]).repeat(columns)[:columns]
    x, dy, _ = place_operands([(placement, values), *others], dtype, device)
    if columns == 0:
        with pytest.raises(RuntimeError, match="1 to 2\\^30 values"):
            ops.layer_norm_forward(x)
        return
    weight = make_parameter(weight_dtype, torch.linspace(-1.5, 1.5, columns) + 0.07, device)
    bias = make_parameter(bias_dtype, torch.linspace(-0.5, 0.5, columns), device)
    assert_layer_norm_matches_reference(x, dy, weight, bias)
