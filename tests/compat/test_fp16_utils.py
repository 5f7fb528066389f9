"""fastvit.compat.apex.fp16_utils: models in half, masters by hand, and scalers."""

import copy

import pytest
import torch
from torch import nn

from compat.amp.models import draw_batch, make_network
from fastvit.compat.apex import fp16_utils


def test_network_to_half_keeps_batch_norm_in_float32():
    model = fp16_utils.network_to_half(make_network())
    images, _ = draw_batch()
    assert model(images).dtype == torch.bfloat16
    layers = {name: p.dtype for name, p in model[1].named_parameters() if p.dtype == torch.float32}
    assert layers.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    model(images).float().sum().backward()
    assert fp16_utils.clip_grad_norm(model.parameters(), 0.5) > 0.5
    norms = nn.ModuleList([nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True)]).half()
    fp16_utils.BN_convert_float(norms)
    assert [norm.weight.dtype for norm in norms] == [torch.float32, torch.float16]
    with pytest.raises(AttributeError, match="use fp16_utils.network_to_half, see docs"):
        _ = fp16_utils.FP16Model


def test_dynamic_loss_scaler_halves_and_doubles():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_window=3)
    for _ in range(4):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    for _ in range(3):
        scaler.update_scale(False)
    assert scaler.loss_scale == 2.0
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5


def test_scalers_look_at_gradients_and_scale_them():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    parameters = [parameter, nn.Parameter(torch.ones(1))]
    assert fp16_utils.DynamicLossScaler().has_overflow(parameters)
    assert not fp16_utils.LossScaler(8.0).has_overflow(parameters)
    parameter.grad = torch.ones(2)
    assert not fp16_utils.DynamicLossScaler().has_overflow(parameters)
    (scaled,) = fp16_utils.LossScaler(8.0).scale_gradient(None, (torch.ones(2),), None)
    assert torch.equal(scaled, torch.full((2,), 8.0))


@pytest.mark.parametrize(
    ("flat", "dtype"), [(False, torch.float16), (True, torch.float16), (True, torch.float32)], ids=str
)
def test_masters_by_hand_follow_a_float32_model(flat, dtype):
    """The loop has no wrapper of the optimizer: it scales the loss and steps the masters."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype), torch.randn(3, 4)
    model[0].bias.requires_grad_(False)
    plain = copy.deepcopy(model).float()
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(parameters) == 3 and len(masters) == (1 if flat else 3)
    assert all(m.dtype == torch.float32 and m.requires_grad and m.is_leaf for m in masters)
    optimizer, reference = torch.optim.SGD(masters, 1e-4), torch.optim.SGD(plain.parameters(), 1e-4)
    for unused in (False, True):
        model.zero_grad(), plain.zero_grad()
        for net in (model, plain):
            y = net[0](x.to(net[0].weight.dtype))
            (128.0 * (y if unused else net[1](y)).float().sum()).backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
        if not flat:
            assert [m.grad is None for m in masters] == [False, unused, unused]
        for gradient in (*(m.grad for m in masters), *(p.grad for p in plain.parameters())):
            if gradient is not None:
                gradient.div_(128.0)
        optimizer.step(), reference.step()
        fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters() if p.requires_grad])
    actual = torch.cat([m.detach().flatten() for m in masters])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # steps that half would round away
    assert torch.equal(torch.cat([p.detach().flatten() for p in parameters]), actual.to(dtype))


def test_a_flat_master_has_one_dtype():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(
        ValueError, match=r"flat_master takes one dtype of parameters, got \['torch.float16', "
    ):
        fp16_utils.prep_param_lists(model, flat_master=True)
    assert len(fp16_utils.prep_param_lists(model)[1]) == 4
    with pytest.raises(ValueError, match=r"one dtype of parameters, got \[\]"):
        fp16_utils.prep_param_lists(nn.ReLU(), flat_master=True)


def test_fp16_optimizer_names_what_it_has_instead_of_lists():
    optimizer = fp16_utils.FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2).half())], 0.1))
    assert optimizer.param_groups and not hasattr(optimizer, "fp32_from_fp16_groups")
    with pytest.raises(
        AttributeError, match="no fp32_from_fp16_groups; use param_groups, loss_scaler, and the"
    ):
        _ = optimizer.fp32_from_fp16_groups
