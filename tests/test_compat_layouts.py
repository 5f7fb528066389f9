"""The optimizers step parameters, gradients and state in any memory layout."""

import copy

import pytest
import torch
from torch import nn

from fastvit.compat.apex import amp
from fastvit.compat.apex._fused import lay_out
from fastvit.compat.apex.fp16_utils import FP16_Optimizer
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from fastvit.compat.apex.parallel import LARC

OURS = {
    "adam": lambda p: FusedAdam(p, 0.1, weight_decay=0.1),
    "lamb": lambda p: FusedLAMB(p, 0.1),
    "novograd": lambda p: FusedNovoGrad(p, 0.1, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, 0.1, momentum=0.9),
    "larc": lambda p: LARC(FusedSGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
}
TORCHS = {
    "torch adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "torch sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "torch adagrad": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}
SHAPE = (4, 3, 2, 2)
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: t.new_full((4, 5, 2, 2), 7.0)[:, 1:4].copy_(t),
    "every second": lambda t: t.new_full((8, 3, 2, 4), 7.0)[::2, ..., ::2].copy_(t),
}


def start(layout):
    torch.manual_seed(0)
    return nn.Parameter(LAYOUTS[layout](torch.randn(SHAPE)))


def train(parameter, optimizer, layouts):
    for step, layout in enumerate(layouts):
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        parameter.grad = LAYOUTS[layout](gradient)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*OURS, *TORCHS])
def test_any_layout(kind, layout, gradient):
    make = (OURS | TORCHS)[kind]
    first, other = start("contiguous"), start(layout)
    optimizer, its_optimizer = make([first]), make([other])
    if kind in TORCHS:
        its_optimizer.register_step_pre_hook(lay_out)
    want = train(first, optimizer, ["contiguous"] * 3)
    got = train(other, its_optimizer, ["contiguous", gradient, layout])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    whole = torch.empty(0).set_(other.detach().untyped_storage())
    assert (whole == 7.0).sum() == whole.numel() - other.numel()  # nothing beside it was written


@pytest.mark.parametrize("kind", [*OURS, *TORCHS])
def test_state_of_another_layout(kind):
    """A run that is resumed with channels_last."""
    make = (OURS | TORCHS)[kind]
    first = start("contiguous")
    optimizer = make([first])
    train(first, optimizer, ["contiguous"])
    other = nn.Parameter(LAYOUTS["channels_last"](first.detach()))
    its_optimizer = make([other])
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if kind in TORCHS:
        its_optimizer.register_step_pre_hook(lay_out)
    got = train(other, its_optimizer, ["channels_last"] * 2)
    torch.testing.assert_close(got, train(first, optimizer, ["contiguous"] * 2), rtol=1e-5, atol=1e-6)


def half_conv(kind, level, last):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 5)
    if level == "fp16":
        model.bfloat16()
        optimizer = FP16_Optimizer((OURS | TORCHS)[kind](model.parameters()))
    else:
        optimizer = (OURS | TORCHS)[kind](model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if last:
        model.to(memory_format=torch.channels_last)
    images = torch.linspace(-1, 1, 384).view(2, 3, 8, 8)
    for _ in range(2):
        if level == "fp16":
            optimizer.backward(model(images.bfloat16()).float().square().mean())
        else:
            with amp.scale_loss(model(images).square().mean(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    amp.initialize([], enabled=False)
    return model.weight.detach().float()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "fp16"])
@pytest.mark.parametrize("kind", ["adam", "sgd", "torch adamw", "torch sgd"])
def test_channels_last_after_initialize(kind, level):
    want, got = half_conv(kind, level, False), half_conv(kind, level, True)
    torch.testing.assert_close(got, want, rtol=0, atol=4e-2)  # the sums of a convolution have another order


def test_written_half_parameters_with_masters():
    parameter = nn.Parameter(torch.randn(3, 4).bfloat16())
    optimizer = FusedAdam([parameter], 1e-9, master_weights=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = optimizer.state[parameter]["master_param"][1:].clone()
    with torch.no_grad():
        parameter[0].fill_(0.25)
    optimizer.step()
    assert torch.equal(parameter[0], torch.full((4,), 0.25).bfloat16())
    torch.testing.assert_close(optimizer.state[parameter]["master_param"][1:], kept, rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm_type", [0, 2])
def test_empty_parameters(norm_type):
    parameters = [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))]
    for make in (*OURS.values(), lambda p: FusedNovoGrad(p, norm_type=norm_type)):
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert parameters[1].isfinite().all()


def test_complex_parameters_are_refused():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"dense real gradients.*torch.optim.Adam complex"):
        FusedAdam([parameter]).step()
