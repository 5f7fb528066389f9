"""fastvit.compat.apex.optimizers: FP16_Optimizer of BERT scripts, GradScaler, large layers, any layout."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import HALF, flat_parameters
from fastvit.compat.apex import amp
from fastvit.compat.apex._fused_optimizer import tensor_norms
from fastvit.compat.apex.fp16_utils import network_to_half
from fastvit.compat.apex.optimizers import (
    FP16_Optimizer,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from fastvit.compat.apex.parallel import LARC


def network(dtype=torch.float16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


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
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "scale", "after"),
    [
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}}, 1024.0, 512.0),
        ({"static_loss_scale": 128.0}, 128.0, 128.0),
    ],
)
def test_fp16_optimizer_follows_float32(options, scale, after, capsys):
    """With masters of half parameters alone, three losses, clipping, and rates that the script writes. An
    overflow skips a step under a static scale too.
    """
    torch.manual_seed(0)
    layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    model = network_to_half(nn.Sequential(*layers))
    plain = copy.deepcopy(model[1]).float()
    optimizer, reference = FP16_Optimizer(bert_adam(model), **options), bert_adam(plain)
    start = flat_parameters(plain)
    assert optimizer.cur_scale == optimizer.loss_scale == scale
    for seed in range(5):
        before, infinite = flat_parameters(model), seed == 2
        optimizer.backward(loss_of(model, seed), retain_graph=True)
        for other in (7, 9):
            loss = loss_of(model, other) * (float("inf") if infinite else 1)
            optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        norm, want = optimizer.clip_master_grads(0.5), -1
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 / (1 + seed)
        if not infinite:
            sum(loss_of(plain, each) for each in (seed, 7, 9)).backward()
            want = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
        torch.testing.assert_close(norm, want, rtol=0.05, atol=0.02)
        optimizer.step()
        optimizer.zero_grad(), reference.zero_grad()
        assert torch.equal(flat_parameters(model), before) == infinite
    masters = iter(sum(optimizer.state_dict()["fp32_from_fp16"], []))
    kept = {p: next(masters) for group in optimizer.param_groups for p in group["params"] if p.dtype == HALF}
    assert next(masters, None) is None and len(kept) == 3
    assert all(m.dtype == torch.float32 and torch.equal(m.to(HALF), p) for p, m in kept.items())
    got = torch.cat([kept.get(p, p).detach().flatten() for p in model.parameters()])
    assert (got - flat_parameters(plain)).norm() < 0.05 * (flat_parameters(plain) - start).norm()
    said = f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {after}"
    assert capsys.readouterr().out.count(said) == 1 and optimizer.cur_scale == after
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: 0)


def of_apex(state, which):
    """The state_dict in the form of one of apex's two classes, or as it is."""
    if which == "fp16_utils":  # a scaler that is an object
        return state | {"loss_scaler": SimpleNamespace(**state["loss_scaler"])}
    if which == "contrib":
        masters = state.pop("fp32_from_fp16")
        return state | state["loss_scaler"] | {"fp32_groups": masters}
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
    again, other = bert()
    again.load_state_dict(saved["model"])
    other.load_state_dict(of_apex(saved["optimizer"], which))
    assert other.cur_scale == (2.0**15 if "dynamic_loss_scale" in options else 128.0)
    assert other.dynamic_loss_scale == ("dynamic_loss_scale" in options)
    bert_step(again, other, 3)
    assert torch.equal(flat_parameters(again), flat_parameters(model))
    mine, theirs = (o.state_dict()["fp32_from_fp16"] for o in (other, optimizer))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert {master.dtype for group in mine for master in group} == {torch.float32}
    bert_step(again, other, 4, infinite=True)
    assert other.cur_scale == (2.0**14 if other.dynamic_loss_scale else 128.0)
    with pytest.raises(RuntimeError, match="or 'fp32_groups', got .*fp32_groups_flat"):
        other.load_state_dict({"fp32_groups_flat": []})


MAKERS = {
    "adam": lambda p: FusedAdam(p, 1e-2, capturable=True, master_weights=True),
    "adam without correction": lambda p: FusedAdam(p, 1e-2, False, capturable=True, master_weights=True),
    "lamb": lambda p: FusedMixedPrecisionLamb(
        p, 1e-2, max_grad_norm=0.5, reduced_precision_dtype=torch.float16
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_grad_scaler_steps_half_parameters(name):
    """As the same optimizer without a scaler; an overflow halves the scale and skips the step."""

    def trained(scale, iterations, overflow=None):
        model = network()
        optimizer = MAKERS[name](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        for seed in range(iterations):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed)).backward()
            if seed == overflow:
                model[0].weight.grad[0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer, scaler.get_scale()

    (model, optimizer, scale), (plain, _, _) = trained(2.0**10, 3), trained(1.0, 3)
    assert scale == 2.0**10
    moved = (flat_parameters(plain) - flat_parameters(network())).norm()
    assert (flat_parameters(model) - flat_parameters(plain)).norm() < 0.02 * moved
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=1e-3)  # unscaled
    skipped, its_optimizer, scale = trained(2.0**10, 4, overflow=3)
    assert scale == 2.0**9 and torch.equal(flat_parameters(skipped), flat_parameters(model))
    mine, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)
    assert mine["param_groups"][0].get("step") == theirs["param_groups"][0].get("step")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_precision_lamb_follows_lamb(dtype):
    model, plain = network(dtype), network(dtype).float()
    optimizer = FusedMixedPrecisionLamb(model.parameters(), 1e-2, reduced_precision_dtype=dtype)
    reference = FusedLAMB(plain.parameters(), 1e-2)
    start = flat_parameters(plain)
    for seed in range(5):
        gradients = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
        for mine, theirs, gradient in zip(model.parameters(), plain.parameters(), gradients, strict=True):
            mine.grad, theirs.grad = gradient, gradient.float()
        optimizer.step(), reference.step()
    masters = [optimizer.state[p].get("master_param", p) for p in model.parameters()]
    assert all(map(torch.equal, masters, plain.parameters())) and not torch.equal(
        flat_parameters(plain), start
    )
    assert torch.equal(flat_parameters(model), flat_parameters(plain.to(dtype)))


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
    saved["param_groups"][1]["lr"], saved["param_groups"][1]["step"] = 0.25, 3  # FusedLAMB's
    other = FusedMixedPrecisionLamb([{"params": [p]} for p in model.parameters()], 1e-6)
    other.load_state_dict(saved)
    assert [round(group["lr"].item(), 6) for group in other.param_groups] == [0.0, 0.25, 0.01, 0.01]
    assert [group["step"].item() for group in other.param_groups] == [8, 3, 8, 8]
    assert other.param_groups[1]["step"].dtype == torch.int
    again = FusedMixedPrecisionLamb(model.parameters(), 1e-6)  # without masters, which rounds
    before = flat_parameters(model)
    again.step()
    assert torch.equal(flat_parameters(model), before) and "master_param" not in again.state[model[0].weight]


def test_norms_of_large_layers_are_right():
    """Torch's own sum of 16 million float32 squares is 0.03 % off on the CPU, and so would rates be."""
    parameter = nn.Parameter(torch.ones(1 << 24))
    parameter.grad = torch.rand(1 << 24)
    gradient = parameter.grad.double()
    FusedLAMB([parameter], 1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0).step()
    clipped = gradient / gradient.norm()
    moved = (1 - parameter.detach()).double() / (clipped / (clipped + 1))
    assert moved.median().item() == pytest.approx(1.0, rel=1e-5)
    (got,) = tensor_norms([gradient.float()])  # which LARC and NovoGrad take too
    assert got.item() == pytest.approx(gradient.norm().item(), rel=1e-5)


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


def stepped(parameter, optimizer, layouts):
    for step, layout in enumerate(layouts):
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        parameter.grad = LAYOUTS[layout](gradient)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("gradient", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*OURS, *TORCHS])
def test_any_layout(amp_off, kind, layout, gradient):
    """A run that is resumed, and then has gradients of two layouts, takes the steps of the first run."""
    make = (OURS | TORCHS)[kind]
    first = nn.Parameter(torch.randn(SHAPE))
    optimizer = make([first])
    stepped(first, optimizer, ["contiguous"])
    other = nn.Parameter(LAYOUTS[layout](first.detach()))
    its_optimizer = make([other])
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if kind in TORCHS and gradient == "columns":  # alone it steps one layout
        FP16_Optimizer(its_optimizer)
    elif kind in TORCHS:
        amp.initialize([], its_optimizer, verbosity=0)
    want = stepped(first, optimizer, ["contiguous"] * 2)
    got = stepped(other, its_optimizer, [gradient, layout])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    whole = torch.empty(0).set_(other.detach().untyped_storage())
    assert (whole == 7.0).sum() == whole.numel() - other.numel()  # nothing beside it was written


@pytest.mark.parametrize("kind", [*OURS, "novograd of maxima"])
def test_empty_parameters(kind):
    parameters = [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))]
    make = OURS.get(kind, lambda p: FusedNovoGrad(p, norm_type=0))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    make(parameters).step()
    assert parameters[1].isfinite().all()
