"""Inputs for the tests: every layout in memory, and values with large means or small deviations."""

import reference
import torch
from tolerances import FROM_OUTPUT, check
from torch import nn

from fastvit import _checks, ops

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ACTIVATIONS, INVERTIBLE = list(_checks.ACTIVATIONS), list(_checks.INVERTIBLE_ACTIVATIONS)
PARAM = 0.2  # slope or alpha


def channels_last(x):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


# name -> (make(generator) -> float64 tensor, channel_dim). Prime sizes, one channel, one position, many.
LAYOUTS = {
    "nchw": (lambda r: r(6, 5, 7, 11), 1),
    "nchw_wide": (lambda r: r(3, 3, 61, 67), 1),
    "nchw_c1": (lambda r: r(6, 1, 13, 11), 1),
    "nchw_s1": (lambda r: r(7, 5, 1, 1), 1),
    "ncl": (lambda r: r(5, 19, 23), 1),
    "ncdhw": (lambda r: r(2, 7, 3, 5, 4), 1),
    "nc": (lambda r: r(37, 29), 1),
    "nc_2049": (lambda r: r(5, 2049), 1),
    "nhwc_c96": (lambda r: channels_last(r(3, 96, 5, 7)), 1),
    "nhwc_c384": (lambda r: channels_last(r(2, 384, 3, 5)), 1),
    "nhwc_c13": (lambda r: channels_last(r(6, 13, 7, 11)), 1),
    "ndhwc": (lambda r: channels_last(r(2, 19, 3, 5, 4)), 1),
    "tokens": (lambda r: r(3, 17, 48), 2),
    "tokens_c192": (lambda r: r(2, 65, 192), 2),
    "nhwc_last": (lambda r: r(2, 5, 7, 24), 3),
    "cropped": (lambda r: r(6, 9, 9, 11)[1:, 2:7, 1:-1, 2:-1], 1),
    "cropped_nhwc": (lambda r: channels_last(r(3, 12, 9, 8))[:, 2:9, 1:-1, 1:], 1),
    "transposed": (lambda r: r(7, 6, 11, 5).permute(1, 3, 0, 2), 1),
    "transposed_nc": (lambda r: r(29, 37).t(), 1),
    "every_other": (lambda r: r(4, 6, 9, 10)[:, :, ::2, ::2], 1),
    "one_sample": (lambda r: r(1, 8, 14, 14), 1),
}
CORE_LAYOUTS = ["nchw", "nhwc_c13", "tokens", "cropped"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(g: torch.Generator):
    return lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)


def strided_like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` in a tensor with the strides of x, gaps included."""
    strided = torch.empty_strided(x.shape, x.stride(), dtype=values.dtype, device=values.device)
    everything = strided.untyped_storage().nbytes() // strided.element_size()
    strided.as_strided((everything,), (1,)).fill_(float("nan"))
    return strided.copy_(values)


def with_other_strides(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors with the values of (N, C, H, W), the last one with those of channel 0, that lie otherwise."""
    by_channels = images.is_contiguous(memory_format=torch.channels_last)
    return {
        "other_format": images.contiguous() if by_channels else channels_last(images),
        "transposed": images.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        "cropped": nn.functional.pad(images, (1, 2, 3, 0))[..., 3:, 1:-2],
        "expanded": images[:, :1].expand_as(images),
    }


class Case:
    """The inputs of one layer: x, dy, residual, weight (both signs), bias, running statistics."""

    def __init__(self, layout: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0, parameters=None):
        g = generator(seed)
        make, self.channel_dim = LAYOUTS[layout]
        double = make(randn(g))
        self.channels = c = double.shape[self.channel_dim]

        def cast(values):
            return strided_like(double, values.to(dtype).to(device))  # .to() would close gaps

        self.x = cast(double * 2 + 3)
        self.dy = cast(torch.randn(double.shape, generator=g, dtype=torch.float64))
        self.residual = cast(torch.randn(double.shape, generator=g, dtype=torch.float64))
        if parameters is None:
            parameters = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.rand(c, generator=g, dtype=torch.float64) + 0.5
        weight[::3] *= -1
        self.weight = weight.to(parameters).to(device)
        self.bias = (torch.randn(c, generator=g, dtype=torch.float64) * 0.3).to(parameters).to(device)
        self.running_mean = torch.randn(c, generator=g, dtype=torch.float64).to(parameters).to(device)
        self.running_var = (torch.rand(c, generator=g, dtype=torch.float64) + 0.5).to(parameters).to(device)
        self.num_batches_tracked = torch.tensor(3, device=device)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {
            "running_mean": self.running_mean.clone(),
            "running_var": self.running_var.clone(),
            "num_batches_tracked": self.num_batches_tracked.clone(),
        }


class _Restride(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, like):
        return strided_like(like, values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def restride(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A differentiable copy of `values` with the strides of `like`: neither leaf nor view."""
    copied = _Restride.apply(values, like)
    assert copied.stride() == like.stride() and not copied._is_view()
    return copied


# What an op writes and returns, by its row of TOLERANCES; then buffers.
ROWS = {
    "bn_stats": ["bn_stats"],
    "bn_forward": ["bn_forward", "bn_stats"],
    "bn_forward_inplace": ["bn_forward_inplace", "bn_stats"],
    "bn_reduce": ["bn_reduce"],
    "bn_backward": ["bn_backward", "bn_backward", "bn_reduce"],
    "act_forward": ["act_forward"],
    "act_backward": ["act_backward", "act_backward"],
}


def agree(op: str, x: torch.Tensor, *arguments, running: "Case | None" = None, **options):
    """Compares what an op writes and returns, buffers of `running` at the end, with the reference's; both."""
    results = []
    for module in (ops, reference):
        buffers = running.buffers() if running else {}
        written = [fresh(x)] if op == "bn_forward_inplace" else []
        made = getattr(module, op)(*(written or [x]), *arguments, **buffers, **options)
        results.append([*written, *(made if isinstance(made, tuple) else [made]), *buffers.values()])
    of_op = [row + FROM_OUTPUT * options.get("from_output", False) for row in ROWS[op]]
    for row, *pair in zip([*of_op, *["running"] * 3], *results, strict=False):
        check(row, *(t if t.is_floating_point() else t.float() for t in pair))
    return results


def step(layer, x: torch.Tensor, dy: torch.Tensor, *residual: torch.Tensor) -> list:
    """Output and gradients of one step, on new inputs that are no leaves and have the strides of these."""
    inputs = x, *residual
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    layer.zero_grad()
    y = layer(*map(restride, leaves, inputs))
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in layer.parameters())]


def shape_of(model):
    """Types and attributes; what converters must not change: objects, tensors, keys; the repr."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (type(m), m.training, set(m.__dict__)) for name, m in model.named_modules()},
        [id(m) for m in model.modules()],
        {name: (id(t), t.requires_grad) for name, t in tensors.items()},
        list(model.state_dict()),
        str(model),
    )


def check_threads(run) -> None:
    """run() gives tensors of the same bits when repeated, with any number of threads."""
    before = torch.get_num_threads()
    try:
        first = run()
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            for a, b in zip(first, run(), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def fresh(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, to be overwritten."""
    return strided_like(x, x)


class TimmBatchNorm(nn.BatchNorm2d):
    """What timm's BatchNormAct2d does."""

    def __init__(self, *args, act=None, drop=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = drop or nn.Identity(), act or nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


TimmBatchNorm.__module__, TimmBatchNorm.__name__ = "timm.layers.norm_act", "BatchNormAct2d"
