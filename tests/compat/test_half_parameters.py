"""fastvit.compat.apex.optimizers over half parameters: FP16_Optimizer, GradScaler, mixed-precision LAMB."""

import copy

import pytest
import torch
from torch import nn

from compat.amp.models import HALF, flat_parameters
from compat.half_models import loss_of_mlp, make_adam_of_bert, make_mlp
from fastvit.compat.apex.fp16_utils import network_to_half
from fastvit.compat.apex.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb


@pytest.mark.parametrize(
    ("options", "scale", "after"),
    [
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 1024.0}}, 1024.0, 512.0),
        ({"static_loss_scale": 128.0}, 128.0, 128.0),
    ],
    ids=["dynamic", "static"],
)
def test_fp16_optimizer_follows_float32(options, scale, after, capsys):
    """Half parameters alone have masters. The script has three losses, clips gradients and writes rates. An
    overflow skips a step under a static scale too.
    """
    torch.manual_seed(0)
    layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    model = network_to_half(nn.Sequential(*layers))
    plain = copy.deepcopy(model[1]).float()
    optimizer, reference = FP16_Optimizer(make_adam_of_bert(model), **options), make_adam_of_bert(plain)
    start = flat_parameters(plain)
    assert optimizer.cur_scale == optimizer.loss_scale == scale
    for seed in range(5):
        before, infinite = flat_parameters(model), seed == 2
        optimizer.backward(loss_of_mlp(model, seed), retain_graph=True)
        for other in (7, 9):
            loss = loss_of_mlp(model, other) * (float("inf") if infinite else 1)
            optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        norm, expected = optimizer.clip_master_grads(0.5), -1
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 1e-2 / (1 + seed)
        if not infinite:
            sum(loss_of_mlp(plain, each) for each in (seed, 7, 9)).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
        torch.testing.assert_close(norm, expected, rtol=0.05, atol=0.02)
        optimizer.step()
        optimizer.zero_grad(), reference.zero_grad()
        assert torch.equal(flat_parameters(model), before) == infinite
    masters = iter(sum(optimizer.state_dict()["fp32_from_fp16"], []))
    kept = {p: next(masters) for group in optimizer.param_groups for p in group["params"] if p.dtype == HALF}
    assert next(masters, None) is None and len(kept) == 3
    assert all(m.dtype == torch.float32 and torch.equal(m.to(HALF), p) for p, m in kept.items())
    actual = torch.cat([kept.get(p, p).detach().flatten() for p in model.parameters()])
    assert (actual - flat_parameters(plain)).norm() < 0.05 * (flat_parameters(plain) - start).norm()
    said = f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {after}"
    assert capsys.readouterr().out.count(said) == 1 and optimizer.cur_scale == after
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: 0)


MAKERS = {
    "adam": lambda p: FusedAdam(p, 1e-2, capturable=True, master_weights=True),
    "adam_without_correction": lambda p: FusedAdam(p, 1e-2, False, capturable=True, master_weights=True),
    "lamb": lambda p: FusedMixedPrecisionLamb(
        p, 1e-2, max_grad_norm=0.5, reduced_precision_dtype=torch.float16
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_grad_scaler_steps_half_parameters(name):
    """The steps are those without a scaler. An overflow halves the scale and skips the step."""

    def trained(scale, iterations, overflow=None):
        model = make_mlp()
        optimizer = MAKERS[name](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        for seed in range(iterations):
            optimizer.zero_grad()
            scaler.scale(loss_of_mlp(model, seed)).backward()
            if seed == overflow:
                model[0].weight.grad[0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer, scaler.get_scale()

    (model, optimizer, scale), (plain, _, _) = trained(2.0**10, 3), trained(1.0, 3)
    assert scale == 2.0**10
    moved = (flat_parameters(plain) - flat_parameters(make_mlp())).norm()
    assert (flat_parameters(model) - flat_parameters(plain)).norm() < 0.02 * moved
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=1e-3)  # unscaled
    skipped, its_optimizer, scale = trained(2.0**10, 4, overflow=3)
    assert scale == 2.0**9 and torch.equal(flat_parameters(skipped), flat_parameters(model))
    mine, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)
    assert mine["param_groups"][0].get("step") == theirs["param_groups"][0].get("step")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision_lamb_follows_lamb(dtype):
    model, plain = make_mlp(dtype), make_mlp(dtype).float()
    optimizer = FusedMixedPrecisionLamb(model.parameters(), 1e-2, reduced_precision_dtype=dtype)
    reference = FusedLAMB(plain.parameters(), 1e-2)
    start = flat_parameters(plain)
    for seed in range(5):
        gradients = torch.autograd.grad(loss_of_mlp(model, seed), list(model.parameters()))
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
    model = make_mlp()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = FusedMixedPrecisionLamb(groups, 1e-2, step=7, reduced_precision_dtype=torch.float16)
    rates = [group["lr"] for group in optimizer.param_groups]
    rates[0].fill_(0.0)
    assert [round(rate.item(), 6) for rate in rates] == [0.0, 0.01, 0.01, 0.01]
    loss_of_mlp(model).backward()
    optimizer.step()
    assert [group["step"].item() for group in optimizer.param_groups] == [8] * 4
    assert torch.equal(model[0].weight, make_mlp()[0].weight)
    assert not torch.equal(model[0].bias, make_mlp()[0].bias)
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
