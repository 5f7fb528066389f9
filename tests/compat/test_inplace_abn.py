"""fastvit.compat.inplace_abn gives the results of mapillary's layers."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from fastvit.compat import inplace_abn


def test_layers_take_the_absolute_weight_and_abn_the_signed_one():
    x = torch.randn(4, 3, 5)
    for layer in (inplace_abn.InPlaceABN(3), inplace_abn.InPlaceABNSync(3)):
        nn.init.constant_(layer.weight, -1.5)
        expected = F.leaky_relu(
            F.batch_norm(x, None, None, layer.weight.abs() + 1e-5, layer.bias, True), 0.01
        )
        torch.testing.assert_close(layer(x.clone()), expected)
        torch.testing.assert_close(layer.running_mean, 0.1 * x.mean((0, 2)))
        assert layer.state_dict().keys() == nn.BatchNorm1d(3).state_dict().keys()
        with pytest.raises(ValueError, match="activation_param"):
            type(layer)(3, activation_param=-0.1)
    y = F.batch_norm(x, None, None, torch.full((3,), -1.5), None, True)  # the signed weight, as mapillary's
    for name, expected in {"relu": F.relu(y), "elu": F.elu(y, 0.01), "identity": y}.items():
        abn = inplace_abn.ABN(3, activation=name)
        nn.init.constant_(abn.weight, -1.5)
        torch.testing.assert_close(abn(x.clone()), expected)
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        inplace_abn.ABN(3, activation="tanh")


def test_arguments_come_in_the_order_of_mapillary():
    x, (bias, mean, var) = torch.randn(4, 3, 2, 2), torch.ones(3, 3).unbind()
    weight, rest = torch.tensor([-2.0, 0.5, 1.0]), (True, 0.1, 1e-5, "leaky_relu", 0.01)
    y = inplace_abn.inplace_abn(x.clone(), weight, bias, mean.clone(), var.clone(), *rest)
    torch.testing.assert_close(
        y, F.leaky_relu(F.batch_norm(x, None, None, weight.abs() + 1e-5, bias, True), 0.01)
    )
    assert torch.equal(inplace_abn.inplace_abn_sync(x.clone(), weight, bias, mean, var, *rest, None), y)
    layer = inplace_abn.InPlaceABNSync(3, 1e-5, 0.1, True, True, "leaky_relu", 0.01, None)
    assert layer(x).shape == x.shape
    model, marker = nn.Sequential(inplace_abn.InPlaceABN(3), nn.Sequential(layer)), object()
    inplace_abn.set_active_group(model, marker)
    assert layer.group is marker and not hasattr(model[0], "group")


@on_ranks(2)
def test_groups_are_of_all_ranks_or_of_some(rank, world):
    everyone = inplace_abn.active_group(True)
    assert everyone is dist.group.WORLD and inplace_abn.active_group(False) is None
    second_rank = inplace_abn.active_group(rank == 1)
    assert inplace_abn.active_group(rank == 1) is second_rank
    assert (second_rank is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
    layer = inplace_abn.InPlaceABNSync(2)
    nn.init.constant_(layer.weight, -1.0)
    inplace_abn.set_active_group(layer, everyone)
    x = torch.randn(world, 4, 2, 3, generator=torch.Generator().manual_seed(0))
    weight = layer.weight.abs() + 1e-5
    expected = F.leaky_relu(F.batch_norm(x.flatten(0, 1), None, None, weight, None, True), 0.01)
    torch.testing.assert_close(layer(x[rank].clone()), expected.unflatten(0, (world, 4))[rank])
