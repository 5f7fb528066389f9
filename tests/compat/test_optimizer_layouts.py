"""Optimizers of fastvit.compat and torch step parameters of any strides and sizes."""

import copy

import pytest
import torch
from torch import nn

from fastvit.compat.apex import amp
from fastvit.compat.apex._fused_optimizer import tensor_norms
from fastvit.compat.apex.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from fastvit.compat.apex.parallel import LARC

OURS = {
    "adam": lambda p: FusedAdam(p, 0.1, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, 0.1),
    "novograd": lambda p: FusedNovoGrad(p, 0.1, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, 0.1, momentum=0.9),
    "larc": lambda p: LARC(FusedSGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
}


TORCHS = {
    "torch_adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "torch_sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "torch_adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}


SHAPE = (4, 3, 2, 2)


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: t.new_full((4, 5, 2, 2), 7.0)[:, 1:4].copy_(t),
    "every_second": lambda t: t.new_full((8, 3, 2, 4), 7.0)[::2, ..., ::2].copy_(t),
}


def step_in_layouts(parameter, optimizer, layouts):
    for step, layout in enumerate(layouts):
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        parameter.grad = LAYOUTS[layout](gradient)
        optimizer.step()
    return parameter.detach()


CASES = [(kind, layout) for kind in ("adam", "larc", "torch_adamw") for layout in LAYOUTS]
CASES += [(kind, layout) for kind in ("lamb", "novograd", "sgd") for layout in ("transposed", "every_second")]
CASES += [(kind, layout) for kind in ("torch_sgd", "torch_adagrad") for layout in ("transposed", "columns")]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_resumed_run_steps_parameters_of_any_layout(amp_off, kind, layout):
    """Its gradients have the next layout and then that of the parameter."""
    next_layout = ([*LAYOUTS] * 2)[[*LAYOUTS].index(layout) + 1]
    make = (OURS | TORCHS)[kind]
    first = nn.Parameter(torch.randn(SHAPE))
    optimizer = make([first])
    step_in_layouts(first, optimizer, ["contiguous"])
    other = nn.Parameter(LAYOUTS[layout](first.detach()))
    its_optimizer = make([other])
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if kind in TORCHS and layout == "transposed":  # alone it steps one layout
        FP16_Optimizer(its_optimizer)
    elif kind in TORCHS:
        amp.initialize([], its_optimizer, verbosity=0)
    expected = step_in_layouts(first, optimizer, ["contiguous"] * 2)
    actual = step_in_layouts(other, its_optimizer, [next_layout, layout])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    whole = torch.empty(0).set_(other.detach().untyped_storage())
    assert (whole == 7.0).sum() == whole.numel() - other.numel()  # nothing beside it was written


def test_empty_parameters_leave_others_finite():
    for make in (*OURS.values(), lambda p: FusedNovoGrad(p, norm_type=0)):
        parameters = [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        make(parameters).step()
        assert parameters[1].isfinite().all()


def test_norms_of_large_layers_are_right():
    """Torch's own sum of 16 million float32 squares is 0.03 % off on the CPU, and so would rates be."""
    parameter = nn.Parameter(torch.ones(1 << 24))
    parameter.grad = torch.rand(1 << 24)
    gradient = parameter.grad.double()
    FusedLAMB([parameter], 1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0).step()
    clipped = gradient / gradient.norm()
    moved = (1 - parameter.detach()).double() / (clipped / (clipped + 1))
    assert moved.median().item() == pytest.approx(1.0, rel=1e-5)
    (actual,) = tensor_norms([gradient.float()])  # which LARC and NovoGrad take too
    assert actual.item() == pytest.approx(gradient.norm().item(), rel=1e-5)
