"""Inputs for the tests of ops and layers in every layout, and comparisons with tests/reference.py."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fastvit import _checks, ops
from ops import reference
from ops.tolerances import FROM_OUTPUT, assert_close_enough

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ACTIVATIONS, INVERTIBLE = list(_checks.ACTIVATIONS), list(_checks.INVERTIBLE_ACTIVATIONS)
ACTIVATION_PARAM = 0.2  # the slope of leaky_relu, or the alpha of elu


def to_channels_last(x):
    """Returns images or volumes in channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


class Layout(NamedTuple):
    """A layout of tensors in memory."""

    make_values: Callable[[Callable[..., torch.Tensor]], torch.Tensor]  # takes make_randn's function
    channel_dim: int


# Most sizes are odd, so that vectors do not divide them. `_c1` has one channel, `_c96` 96 channels, and `_s1`
# one element in each plane. `r(*shape)` returns a float64 tensor of random numbers.
LAYOUTS = {
    "nchw": Layout(lambda r: r(6, 5, 7, 11), 1),
    "nchw_wide": Layout(lambda r: r(3, 3, 61, 67), 1),
    "nchw_c1": Layout(lambda r: r(6, 1, 13, 11), 1),
    "nchw_s1": Layout(lambda r: r(7, 5, 1, 1), 1),
    "ncl": Layout(lambda r: r(5, 19, 23), 1),
    "ncdhw": Layout(lambda r: r(2, 7, 3, 5, 4), 1),
    "nc": Layout(lambda r: r(37, 29), 1),
    "nc_2049": Layout(lambda r: r(5, 2049), 1),
    "nhwc_c96": Layout(lambda r: to_channels_last(r(3, 96, 5, 7)), 1),
    "nhwc_c384": Layout(lambda r: to_channels_last(r(2, 384, 3, 5)), 1),
    "nhwc_c13": Layout(lambda r: to_channels_last(r(6, 13, 7, 11)), 1),
    "ndhwc": Layout(lambda r: to_channels_last(r(2, 19, 3, 5, 4)), 1),
    "tokens": Layout(lambda r: r(3, 17, 48), 2),
    "tokens_c192": Layout(lambda r: r(2, 65, 192), 2),
    "nhwc_last": Layout(lambda r: r(2, 5, 7, 24), 3),
    "cropped": Layout(lambda r: r(6, 9, 9, 11)[1:, 2:7, 1:-1, 2:-1], 1),
    "cropped_nhwc": Layout(lambda r: to_channels_last(r(3, 12, 9, 8))[:, 2:9, 1:-1, 1:], 1),
    "transposed": Layout(lambda r: r(7, 6, 11, 5).permute(1, 3, 0, 2), 1),
    "transposed_nc": Layout(lambda r: r(29, 37).t(), 1),
    "every_other": Layout(lambda r: r(4, 6, 9, 10)[:, :, ::2, ::2], 1),
    "one_sample": Layout(lambda r: r(1, 8, 14, 14), 1),
}
CORE_LAYOUTS = ["nchw", "nhwc_c13", "tokens", "cropped"]


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_randn(g: torch.Generator):
    """Returns a function of a shape, which draws float64 numbers from the generator."""
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


def copy_with_strides_of(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `values` with the strides of x. NaN fills the memory between the elements."""
    strided = torch.empty_strided(x.shape, x.stride(), dtype=values.dtype, device=values.device)
    num_elements = strided.untyped_storage().nbytes() // strided.element_size()
    strided.as_strided((num_elements,), (1,)).fill_(float("nan"))
    return strided.copy_(values)


def make_differently_strided(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns images of other strides. `expanded` repeats channel 0; the other tensors equal `images`."""
    is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
    return {
        "other_format": images.contiguous() if is_channels_last else to_channels_last(images),
        "transposed": images.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        "cropped": nn.functional.pad(images, (1, 2, 3, 0))[..., 3:, 1:-2],
        "expanded": images[:, :1].expand_as(images),
    }


class LayerInputs:
    """The inputs of a layer's step: x, dy, residual, weight, bias and running statistics.

    Every third weight is negative. `parameters` is the dtype of weight, bias and running statistics; the
    default is float64 for float64 inputs, and float32 for others.
    """

    def __init__(self, layout: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0, parameters=None):
        g = make_generator(seed)
        make_values, self.channel_dim = LAYOUTS[layout]
        values = make_values(make_randn(g))
        self.channels = c = values.shape[self.channel_dim]

        def cast(t):
            return copy_with_strides_of(values, t.to(dtype).to(device))  # .to() would close gaps

        self.x = cast(values * 2 + 3)
        self.dy = cast(torch.randn(values.shape, generator=g, dtype=torch.float64))
        self.residual = cast(torch.randn(values.shape, generator=g, dtype=torch.float64))
        if parameters is None:
            parameters = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.rand(c, generator=g, dtype=torch.float64) + 0.5
        weight[::3] *= -1
        self.weight = weight.to(parameters).to(device)
        self.bias = (torch.randn(c, generator=g, dtype=torch.float64) * 0.3).to(parameters).to(device)
        self.running_mean = torch.randn(c, generator=g, dtype=torch.float64).to(parameters).to(device)
        self.running_var = (torch.rand(c, generator=g, dtype=torch.float64) + 0.5).to(parameters).to(device)
        self.num_batches_tracked = torch.tensor(3, device=device)

    def copy_buffers(self) -> dict[str, torch.Tensor]:
        return {
            "running_mean": self.running_mean.clone(),
            "running_var": self.running_var.clone(),
            "num_batches_tracked": self.num_batches_tracked.clone(),
        }


class _CopyToStridesOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, like):
        return copy_with_strides_of(like, values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_to_strides_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a differentiable copy of `values`, no leaf and no view, with the strides of `like`."""
    copied = _CopyToStridesOf.apply(values, like)
    assert copied.stride() == like.stride() and not copied._is_view()
    return copied


# For each op, the rows of TOLERANCES of the tensors that the op writes or returns, in this order.
TOLERANCE_ROWS = {
    "bn_stats": ["bn_stats"],
    "bn_forward": ["bn_forward", "bn_stats"],
    "bn_forward_inplace": ["bn_forward_inplace", "bn_stats"],
    "bn_reduce": ["bn_reduce"],
    "bn_backward": ["bn_backward", "bn_backward", "bn_reduce"],
    "act_forward": ["act_forward"],
    "act_backward": ["act_backward", "act_backward"],
}


def assert_matches_reference(
    op: str, x: torch.Tensor, *arguments, running: LayerInputs | None = None, **options
) -> list[torch.Tensor]:
    """Raises unless an op and the reference write and return the same tensors within TOLERANCES.

    Returns x if the op writes to x, then the tensors that the op returned, then the buffers after the op. The
    op gets copies of the buffers of `running`.
    """
    results = []
    for module in (ops, reference):
        buffers = running.copy_buffers() if running else {}
        writable = [clone_with_strides(x)] if op == "bn_forward_inplace" else []
        outputs = getattr(module, op)(*(writable or [x]), *arguments, **buffers, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results.append([*writable, *outputs, *buffers.values()])
    suffix = FROM_OUTPUT if options.get("from_output") else ""
    rows = [*(row + suffix for row in TOLERANCE_ROWS[op]), *["running"] * 3]
    for row, *pair in zip(rows, *results, strict=False):
        actual, expected = (t if t.is_floating_point() else t.float() for t in pair)
        assert_close_enough(actual, expected, row=row)
    return results[0]


def run_layer_step(layer, x: torch.Tensor, dy: torch.Tensor, *residual: torch.Tensor) -> list:
    """Returns the output of a layer's step and the gradients of its inputs and parameters.

    The layer gets copies of `x` and `residual` with the same strides. The copies are no leaves.
    """
    inputs = x, *residual
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    layer.zero_grad()
    y = layer(*map(copy_to_strides_of, leaves, inputs))
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())]


def describe_model(model):
    """Returns a tuple: the facts of a model that a converter may change, then those that it must keep.

    A converter may change the types and attributes of modules. It must keep the identities of modules and
    tensors, the keys of the state, and the repr.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (type(m), m.training, set(m.__dict__)) for name, m in model.named_modules()},
        [id(m) for m in model.modules()],
        {name: (id(t), t.requires_grad) for name, t in tensors.items()},
        list(model.state_dict()),
        str(model),
    )


def assert_repeats_bits(run) -> None:
    """Raises unless repeated calls of `run()` return tensors of the same bits, with any number of threads."""
    old_num_threads = torch.get_num_threads()
    try:
        expected = run()
        for num_threads in (1, 2, 3, 1):
            torch.set_num_threads(num_threads)
            for a, b in zip(expected, run(), strict=True):
                assert torch.equal(a, b), f"{num_threads} threads"
    finally:
        torch.set_num_threads(old_num_threads)


def clone_with_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x with the same strides, to which an op may write."""
    return copy_with_strides_of(x, x)


class TimmBatchNorm(nn.BatchNorm2d):
    """Does what timm's BatchNormAct2d does, and has its name."""

    def __init__(self, *args, act=None, drop=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = drop or nn.Identity(), act or nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


TimmBatchNorm.__module__, TimmBatchNorm.__name__ = "timm.layers.norm_act", "BatchNormAct2d"
