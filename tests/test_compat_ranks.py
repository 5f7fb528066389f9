"""fastvit.compat over two gloo ranks: DDP's options, weights, no_sync, groups."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fastvit.compat import inplace_abn
from fastvit.compat.apex import amp, fp16_utils
from fastvit.compat.apex.parallel import DistributedDataParallel, convert_syncbn_model
from fastvit.compat.apex.parallel.distributed import flat_dist_call

BATCH = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 1, 6, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def share(rank: int, world: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = data(step)
    return images[rank::world], labels[rank::world]


def backward(model, optimizer, images, labels, infinite=False, **options) -> None:
    with amp.scale_loss(F.cross_entropy(model(images), labels), optimizer, **options) as scaled:
        if infinite:
            scaled = scaled * float("inf")
        scaled.backward()


def train(rank, world, level, infinite_on=None):
    """Three steps over `world` shares of each batch; the second overflows on one rank alone."""
    model = convert_syncbn_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    parallel = DistributedDataParallel(model) if world > 1 else model
    for step in range(3):
        optimizer.zero_grad()
        infinite = step == 1 and infinite_on is not None and (world == 1 or rank == infinite_on)
        backward(parallel, optimizer, *share(rank, world, step), infinite=infinite)
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    buffers = torch.cat([b.float().flatten() for b in model.buffers()])
    return weights, buffers, amp.state_dict()["loss_scaler0"]["loss_scale"]


@pytest.mark.parametrize("infinite_on", [None, 1])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_weights_are_equal_over_ranks(ranks, level, infinite_on):
    first, second = ranks.run(2, train, level, infinite_on)
    assert all(map(torch.equal, first[:2], second[:2]))
    assert first[2] == second[2] == (2.0**16 if infinite_on is None else 2.0**15)
    # and both are what one process gets from whole batches
    alone = train(0, 1, level, infinite_on)
    tolerance = {"O0": 1e-6, "O3": 3e-2}.get(level, 1e-2)
    torch.testing.assert_close(first[:2], alone[:2], rtol=tolerance, atol=tolerance)


def train_from_own_weights(rank, world, share_weights):
    """Weights that differ at `initialize` and are made equal after it, as in scripts without a seed."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    parallel = model
    if share_weights == "broadcast":
        flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))
    else:
        make = DistributedDataParallel if share_weights == "apex" else nn.parallel.DistributedDataParallel
        parallel = make(model)
    for step in range(3):
        backward(parallel, optimizer, *share(rank, world, step))
        if parallel is model:
            flat_dist_call([p.grad for p in amp.master_params(optimizer)], dist.all_reduce)
        optimizer.step()
        optimizer.zero_grad()
    return model[1].weight.detach()


@pytest.mark.parametrize("share_weights", ["apex", "torch", "broadcast"])
def test_weights_that_are_shared_after_initialize(ranks, share_weights):
    weight, weight_1 = ranks.run(2, train_from_own_weights, share_weights)
    assert torch.equal(weight, weight_1)
    torch.manual_seed(0)
    start = nn.Linear(36, 3).weight
    assert 0 < (weight - start).abs().max() < 0.1


def accumulate(rank, world, level, no_sync, delay=False, make=DistributedDataParallel, compiled=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    nn.init.normal_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if level == "fp16":
        model.half()
        optimizer = fp16_utils.FP16_Optimizer(optimizer, static_loss_scale=128.0)
    else:
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    parallel = make(model)
    for step in range(3):
        images, labels = share(rank, world, step)
        local = no_sync and step < 2
        with parallel.no_sync() if local else contextlib.nullcontext():
            if level == "fp16":
                optimizer.backward(F.cross_entropy(parallel(images.half()).float(), labels))
            else:
                backward(parallel, optimizer, images, labels, delay_unscale=delay and local)
    return torch.cat([p.grad.float().flatten() for p in amp.master_params(optimizer)])


@pytest.mark.parametrize("level", ["O1", "O2", "fp16"])
def test_accumulation_under_no_sync(ranks, level):
    """The local gradients of `no_sync` take part in the reduction that follows, of a compiled model too."""
    want = ranks.run(2, accumulate, level, False)[0]
    torchs = nn.parallel.DistributedDataParallel
    for options in ((False,), (True,), (False, torchs), (False, torchs, True)):
        one, two = ranks.run(2, accumulate, level, True, *options)
        assert torch.equal(one, two)
        torch.testing.assert_close(one, want, rtol=2e-2, atol=5e-3)
    assert want.abs().max() > 0.05


OPTIONS = (
    ({}, 1.5),
    ({"message_size": 1, "delay_allreduce": True}, 1.5),
    ({"gradient_average": False}, 3.0),
    ({"gradient_predivide_factor": 2.0}, 1.5),
    ({"gradient_predivide_factor": 2.0, "gradient_average": False}, 1.5),
    ({"allreduce_always_fp32": True}, 1.5),
)


def reduced(rank, world):
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for options, _ in OPTIONS:
            model = nn.Linear(4, 2).to(dtype)
            nn.init.constant_(model.weight, rank + 1.0)
            parallel = DistributedDataParallel(model, **options)
            assert torch.equal(model.weight, torch.full_like(model.weight, 1.0))  # rank 0's
            parallel(torch.full((1, 4), rank + 1.0, dtype=dtype)).sum().backward()
            results.append(model.weight.grad[0, 0].item())
    return results


def test_ddp_options(ranks):
    """The gradients of the ranks are 1 and 2."""
    assert ranks.run(2, reduced) == [[want for _, want in OPTIONS] * 2] * 2


def options_without_effect(rank, world):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(2, 1), num_allreduce_streams=2, prof=True)
    with pytest.raises(TypeError, match="takes apex's arguments, got bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=25)
    try:
        DistributedDataParallel(nn.Linear(2, 1), gradient_predivide_factor=0.0)
    except ValueError as error:
        return [str(w.message) for w in caught], str(error)


def test_options_without_effect(ranks):
    (warned, error), (others, _) = ranks.run(2, options_without_effect)
    assert any("num_allreduce_streams has no effect" in text for text in warned)
    assert any("prof has no effect" in text for text in warned)
    assert not any("no effect" in text for text in others)  # rank 0 speaks for all
    assert "gradient_predivide_factor must be above 0, got 0.0" in error


def by_flat_call(rank, world):
    mixed = [torch.full((2, 3), rank + 1.0).t(), torch.full((4,), rank, dtype=torch.int64), torch.ones(())]
    aliases = [tensor.view_as(tensor) for tensor in mixed]
    flat_dist_call(mixed, dist.broadcast, (1,))
    means = [torch.full((3,), float(rank)), torch.tensor(rank + 1.0).bfloat16()]
    flat_dist_call(means, dist.all_reduce)
    return [tensor.tolist() for tensor in aliases + means]


def test_flat_dist_call(ranks):
    for result in ranks.run(2, by_flat_call):
        assert result == [[[2.0] * 2] * 3, [1] * 4, 1.0, [0.5] * 3, 1.5]


def groups(rank, world):
    everyone, nobody = inplace_abn.active_group(True), inplace_abn.active_group(False)
    only = inplace_abn.active_group(rank == 1)
    again = inplace_abn.active_group(rank == 1)
    layer = inplace_abn.InPlaceABNSync(2)
    nn.init.constant_(layer.weight, -1.0)
    inplace_abn.set_active_group(layer, everyone)
    x = torch.randn(world, 4, 2, 3, generator=torch.Generator().manual_seed(0))
    y = layer(x[rank].clone())
    want = F.leaky_relu(
        F.batch_norm(x.flatten(0, 1), None, None, layer.weight.abs() + 1e-5, None, True), 0.01
    )
    torch.testing.assert_close(y, want.unflatten(0, (world, 4))[rank])
    member = only is not dist.GroupMember.NON_GROUP_MEMBER
    return everyone is dist.group.WORLD, nobody, only is again, member


def test_groups_of_inplace_abn(ranks):
    assert ranks.run(2, groups) == [(True, None, True, False), (True, None, True, True)]
