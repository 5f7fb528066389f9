"""Inputs for the tests of ops and layers, and steps of layers."""

import torch
from torch import nn

from ops.matrix import LAYOUTS, to_channels_last


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


def clone_with_strides(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x with the same strides, to which an op may write."""
    return copy_with_strides_of(x, x)


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


class OtherActivation(nn.Module):
    """An activation that no layer of fastvit has."""

    def forward(self, x):
        return torch.nn.functional.mish(x)


class TimmBatchNorm(nn.BatchNorm2d):
    """Does what timm's BatchNormAct2d does, and has its name."""

    def __init__(self, *args, act=None, drop=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop, self.act = drop or nn.Identity(), act or nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


TimmBatchNorm.__module__, TimmBatchNorm.__name__ = "timm.layers.norm_act", "BatchNormAct2d"
