"""fastvit.compat.apex.optimizers: FP16_Optimizer of BERT scripts, GradScaler, norms of large layers."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from amp_models import values
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex.optimizers import (
    FP16_Optimizer,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
)
from fastvit.compat.apex.parallel import LARC


def network(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


# FP16_Optimizer


def bert_adam(model):
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]
    return FusedAdam(groups, lr=1e-2, bias_correction=False, max_grad_norm=1.0)


def bert(**options):
    model = network()
    return model, FP16_Optimizer(bert_adam(model), **options)


def bert_step(model, optimizer, seed=0, infinite=False):
    optimizer.backward(loss_of(model, seed) * (float("inf") if infinite else 1.0))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + seed)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}])
def test_scripts_for_bert(options, capsys):
    """They follow the same optimizer in float32; an overflow skips a step under a static scale too."""
    model, optimizer = bert(**options)
    plain = network(torch.float32)
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    start = values(plain)
    reference = bert_adam(plain)
    scale = optimizer.cur_scale
    assert scale == (2.0**16 if "dynamic_loss_scale" in options else 128.0) == optimizer.loss_scale
    for seed in range(5):
        before = values(model)
        bert_step(model, optimizer, seed, infinite=seed == 2)
        assert torch.equal(values(model), before) == (seed == 2)
        if seed != 2:
            loss_of(plain, seed).backward()
            for group in reference.param_groups:
                group["lr"] = 1e-2 / (1 + seed)
            reference.step()
            reference.zero_grad()
    assert capsys.readouterr().out.count("OVERFLOW") == 1
    assert optimizer.cur_scale == (scale / 2 if "dynamic_loss_scale" in options else scale)
    assert (values(model) - values(plain)).norm() < 0.05 * (values(plain) - start).norm()


def test_max_grad_norm_is_of_each_group():
    groups = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for parameter, size in zip(groups, (3.0, 0.25), strict=True):
        parameter.grad = torch.full((4,), size)  # norms 6 and 0.5
    optimizer = FusedAdam(
        [{"params": [p]} for p in groups], lr=1.0, betas=(0.0, 0.0), eps=1.0, max_grad_norm=1.0
    )
    optimizer.step()
    clipped = [0.5, 0.25]  # of g / (|g| + 1)
    for parameter, size in zip(groups, clipped, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.full((4,), -size / (size + 1)))


def of_apex(state, which):
    """The state_dict in the form of one of apex's two classes, or as it is."""
    if which == "fp16_utils":  # a scaler that is an object
        return state | {"loss_scaler": SimpleNamespace(**state["loss_scaler"])}
    if which == "contrib":
        groups = state.pop("fp32_from_fp16")
        return (
            {k: v for k, v in state.items() if k != "overflow"}
            | state["loss_scaler"]
            | {"fp32_groups": groups}
        )
    return state


@pytest.mark.parametrize("which", ["", "fp16_utils", "contrib"])
@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}])
def test_checkpoint_of_fp16_optimizer(options, which):
    model, optimizer = bert(**options)
    for seed in range(3):
        bert_step(model, optimizer, seed, infinite=seed == 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    bert_step(model, optimizer, 3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = bert(**options)
    again.load_state_dict(saved["model"])
    other.load_state_dict(of_apex(saved["optimizer"], which))
    assert other.cur_scale == (2.0**15 if "dynamic_loss_scale" in options else 128.0)
    bert_step(again, other, 3)
    assert torch.equal(values(again), values(model))
    for mine, theirs in zip(
        other.state_dict()["fp32_from_fp16"], optimizer.state_dict()["fp32_from_fp16"], strict=True
    ):
        assert all(m.dtype == torch.float32 and torch.equal(m, t) for m, t in zip(mine, theirs, strict=True))
    with pytest.raises(RuntimeError, match="or 'fp32_groups', got .*fp32_groups_flat"):
        other.load_state_dict({"fp32_groups_flat": []})


# torch's GradScaler


def scaled_steps(model, optimizer, iterations=4, overflow=None):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(iterations):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        if seed == overflow:
            model[0].weight.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


MAKERS = {
    "adam": lambda p: FusedAdam(p, 1e-2, capturable=True, master_weights=True),
    "adam without correction": lambda p: FusedAdam(
        p, 1e-2, capturable=True, master_weights=True, bias_correction=False
    ),
    "lamb": lambda p: FusedMixedPrecisionLamb(
        p, 1e-2, max_grad_norm=0.5, reduced_precision_dtype=torch.float16
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_grad_scaler_steps_half_parameters(name):
    """Equal to the same optimizer without a scaler; an overflow halves the scale and skips the step."""
    model = network()
    plain = copy.deepcopy(model)
    start = values(model)
    assert scaled_steps(model, MAKERS[name](model.parameters())) == 2.0**10
    optimizer = MAKERS[name](plain.parameters())
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(plain, seed).backward()
        optimizer.step()
    assert (values(model) - values(plain)).norm() < 0.02 * (values(plain) - start).norm()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=1e-3)  # unscaled
    again = network()
    optimizer = MAKERS[name](again.parameters())
    assert scaled_steps(again, optimizer, overflow=3) == 2.0**9
    other = network()
    its_optimizer = MAKERS[name](other.parameters())
    scaled_steps(other, its_optimizer, iterations=3)
    assert torch.equal(values(again), values(other))
    mine, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    for index in theirs["state"]:
        for key, value in theirs["state"][index].items():
            assert torch.equal(mine["state"][index][key], value), key
    assert mine["param_groups"][0].get("step") == theirs["param_groups"][0].get("step")


# FusedMixedPrecisionLamb


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_precision_lamb_follows_lamb(dtype):
    model, plain = network(dtype), network(dtype).float()
    optimizer = FusedMixedPrecisionLamb(model.parameters(), 1e-2, reduced_precision_dtype=dtype)
    reference = FusedLAMB(plain.parameters(), 1e-2)
    start = values(plain)
    for seed in range(5):
        gradients = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
        for mine, theirs, gradient in zip(model.parameters(), plain.parameters(), gradients, strict=True):
            mine.grad, theirs.grad = gradient, gradient.float()
        optimizer.step(), reference.step()
    masters = [optimizer.state[p].get("master_param", p) for p in model.parameters()]
    for mine, theirs in zip(masters, plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(values(plain), start)
    assert torch.equal(values(model), values(plain.to(dtype)))


def test_mixed_precision_lamb_without_masters_rounds():
    model = network()
    optimizer = FusedMixedPrecisionLamb(model.parameters(), 1e-6)
    before = values(model)
    loss_of(model).backward()
    optimizer.step()
    assert torch.equal(values(model), before) and "master_param" not in optimizer.state[model[0].weight]


def test_rates_of_mixed_precision_lamb_are_tensors():
    """Each group has its own rate, which schedulers write in place; checkpoints have rates and step."""
    model = network()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = FusedMixedPrecisionLamb(groups, 1e-2, step=7, reduced_precision_dtype=torch.float16)
    rates = [group["lr"] for group in optimizer.param_groups]
    rates[0].fill_(0.0)
    assert [round(rate.item(), 6) for rate in rates] == [0.0, 0.01, 0.01, 0.01]
    loss_of(model).backward()
    optimizer.step()
    assert [group["step"].item() for group in optimizer.param_groups] == [8] * 4
    assert torch.equal(model[0].weight, network()[0].weight)
    assert not torch.equal(model[0].bias, network()[0].bias)
    saved = copy.deepcopy(optimizer.state_dict())
    other = FusedMixedPrecisionLamb([{"params": [p]} for p in model.parameters()], 0.5)
    other.load_state_dict(saved)
    assert [group["lr"].item() for group in other.param_groups] == [rate.item() for rate in rates]
    assert other.param_groups[1]["step"].item() == 8
    saved["param_groups"][1]["lr"], saved["param_groups"][1]["step"] = 0.25, 3  # FusedLAMB's
    other.load_state_dict(saved)
    assert other.param_groups[1]["lr"].item() == 0.25 and other.param_groups[1]["step"].dtype == torch.int
    with pytest.raises(RuntimeError, match="FusedMixedPrecisionLamb has no AMSGrad"):
        FusedMixedPrecisionLamb(model.parameters(), amsgrad=True)


# Large layers


def test_norms_of_large_layers_are_right():
    """torch's own sum of 16 million float32 squares is 0.03 % off on the CPU, and every rate with it."""
    torch.manual_seed(0)
    gradient = torch.rand(1 << 24)
    want = gradient.double().norm().item()

    def first_step(make):
        parameter = nn.Parameter(torch.ones(1 << 24))
        parameter.grad = gradient.clone()
        make([parameter]).step()
        return (1 - parameter.detach()).double()

    moved = first_step(
        lambda p: FusedNovoGrad(p, 1.0, betas=(0.0, 0.0), bias_correction=False, grad_averaging=False)
    )
    assert (gradient.double() / moved).median().item() == pytest.approx(want, rel=1e-5)
    moved = first_step(lambda p: LARC(torch.optim.SGD(p, 1.0), trust_coefficient=1.0, clip=False))
    assert (moved / gradient).median().item() == pytest.approx(2.0**12 / want, rel=1e-5)
    moved = first_step(lambda p: FusedLAMB(p, 1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0))
    clipped = gradient.double() / want
    assert (moved / (clipped / (clipped + 1))).median().item() == pytest.approx(1.0, rel=1e-5)
