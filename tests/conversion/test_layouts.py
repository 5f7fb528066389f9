"""A recipe gives its tensor the strides and the dtype of the original."""

import pytest
import torch
import torch.nn.functional as F
from recompute.models import compare_and_measure_freed
from torch import nn

from conversion.cases import add_in_turn, select_each_pair
from conversion.models import (
    DIM,
    LEVELS,
    TokenModel,
    assert_eager_bits,
    make_autocast,
    make_step,
    make_tokens,
)


def cast_then(view, **options):
    """Returns a forward with a cast, and with a view that needs the strides of the cast."""

    def function(m, x):
        h = m.norm(m.first(x)).transpose(1, 2).to(torch.bfloat16, **options)
        return F.gelu(view(h) + 1.0)

    return function


def cast_to_channels_last(m, x):
    h = m.norm(m.first(x)).unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    h = h.to(torch.bfloat16, memory_format=torch.channels_last)
    return F.gelu(h.permute(0, 2, 3, 1).view(8, -1) + 1.0)


CASTS = {
    "contiguous": cast_then(lambda h: h.view(8, -1), memory_format=torch.contiguous_format),
    "contiguous, without a view": cast_then(lambda h: h, memory_format=torch.contiguous_format),
    "contiguous, rows": cast_then(lambda h: h.view(-1, 16), memory_format=torch.contiguous_format),
    "preserved": cast_then(lambda h: h.transpose(1, 2).view(8, -1), memory_format=torch.preserve_format),
    "a copy": cast_then(lambda h: h.transpose(1, 2).view(8, -1), copy=True),
    "then contiguous": cast_then(lambda h: h.contiguous().view(8, -1)),
    "slice": cast_then(lambda h: h[:, ::2].reshape(8, -1)),
    "channels_last": cast_to_channels_last,
}


@pytest.mark.parametrize(("cast", "level"), add_in_turn([(name,) for name in CASTS], LEVELS))
def test_a_cast_has_the_strides_of_its_memory_format(cast, level):
    assert_eager_bits(make_step(lambda: TokenModel(CASTS[cast]), make_tokens()), **LEVELS[level])


# The layouts of the input of a BatchNorm1d over the features of tokens.
LAYOUTS = {
    "transposed": lambda h: h.transpose(1, 2),
    "contiguous": lambda h: h.transpose(1, 2).contiguous(),
    "rows": lambda h: h.flatten(0, 1),
    "cut": lambda h: h.transpose(1, 2)[:, :, ::2],
}


@pytest.mark.parametrize(
    ("layout", "precision", "statistics", "affine", "mode"),
    select_each_pair(
        LAYOUTS,
        ["autocast", "bfloat16", "float16", "float32"],
        ["statistics", "no statistics"],
        ["affine", "not affine"],
        ["training", "evaluation"],
    ),
)
def test_a_batch_norm_of_any_strides_and_dtype_has_eager_bits(layout, precision, statistics, affine, mode):
    is_autocast = precision == "autocast"
    dtype = torch.float32 if is_autocast else getattr(torch, precision)

    def function(m, x):
        y = m.norm(LAYOUTS[layout](m.first(x)))
        return m.head(y if y.dim() == 2 else y.transpose(1, 2))

    def make():
        norm = nn.BatchNorm1d(DIM, affine=affine == "affine", track_running_stats=statistics == "statistics")
        model = TokenModel(function, norm=norm).to(dtype)
        if precision == "float16":
            norm.float()
        return model.train(mode == "training")

    context = make_autocast() if is_autocast else None
    assert_eager_bits(make_step(make, make_tokens().to(dtype), context))


C = 8
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {"rows": (512, C), "tokens": (64, C, 9), "images": (8, C, 12, 12), "volumes": (8, C, 5, 6, 7)}


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize(
    ("shape", "step"), [*select_each_pair(SHAPES, [1]), ("rows", 2), ("images", 2)], ids=str
)
def test_a_batch_norm_with_or_without_its_saved_statistics_has_eager_bits(shape, step):
    """The recipe takes the saved statistics if torch's kernel allows it, and computes them if not."""
    size = SHAPES[shape]
    norm = NORMS[len(size)](C)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, weight = torch.randn(*size) * 3 + 100, torch.randn(size[-1], 7, requires_grad=True)
    x.requires_grad_()

    def forward():
        return norm((x * 1.5)[::step]) @ weight

    assert compare_and_measure_freed(forward, [x, weight, norm.weight, norm.bias]) > 0
