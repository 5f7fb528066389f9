"""fastvit.compat over two gloo ranks: weights, no_sync, groups, DistributedDataParallel and Reducer."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compat.amp.models import data, flat_parameters, scaled_backward
from compat.amp.models import gradients as gradients_of
from fastvit.compat import inplace_abn
from fastvit.compat.apex import amp, fp16_utils
from fastvit.compat.apex.parallel import DistributedDataParallel, Reducer, convert_syncbn_model
from fastvit.compat.apex.parallel.distributed import flat_dist_call, parameters_without_sync


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))


def loss_of(model, rank: int, world: int, step: int, dtype=torch.float32) -> torch.Tensor:
    """Returns the loss of the rank's share of a batch."""
    images, labels = data(step)
    return F.cross_entropy(model(images[rank::world].to(dtype)).float(), labels[rank::world])


def train(rank, world, level, infinite_on=None):
    """Three steps over `world` shares of each batch; the second overflows on one rank alone."""
    model = convert_syncbn_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    parallel = DistributedDataParallel(model) if world > 1 else model
    for step in range(3):
        optimizer.zero_grad()
        infinite = step == 1 and infinite_on is not None and (world == 1 or rank == infinite_on)
        loss = loss_of(parallel, rank, world, step)
        scaled_backward(loss * float("inf") if infinite else loss, optimizer)
        optimizer.step()
    buffers = torch.cat([b.float().flatten() for b in model.buffers()])
    return flat_parameters(model), buffers, amp.state_dict()["loss_scaler0"]["loss_scale"]


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


def accumulate(rank, world, level, no_sync, delay=False, make=DistributedDataParallel, compiled=False):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
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
        local = no_sync and step < 2
        with parallel.no_sync() if local else contextlib.nullcontext():
            if level == "fp16":
                optimizer.backward(loss_of(parallel, rank, world, step, torch.float16))
            else:
                loss = loss_of(parallel, rank, world, step)
                scaled_backward(loss, optimizer, delay_unscale=delay and local)
    return gradients_of(model)


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
    ({"num_allreduce_streams": 2, "prof": True}, 1.5),
)


def reduced(rank, world):
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in (torch.float32, torch.bfloat16):
            for options, _ in OPTIONS:
                model = nn.Linear(4, 2).to(dtype)
                nn.init.constant_(model.weight, rank + 1.0)
                parallel = DistributedDataParallel(model, **options)
                assert torch.equal(model.weight, torch.full_like(model.weight, 1.0))  # rank 0's
                assert all(getattr(parallel, name) == value for name, value in options.items())
                assert parallel.world_size == world and not hasattr(parallel, "allreduce_buckets")
                parallel(torch.full((1, 4), rank + 1.0, dtype=dtype)).sum().backward()
                results.append(model.weight.grad[0, 0].item())
    with pytest.raises(TypeError, match="takes apex's arguments, got bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=25)
    with pytest.raises(ValueError, match="gradient_predivide_factor must be above 0, got 0.0"):
        DistributedDataParallel(nn.Linear(2, 1), gradient_predivide_factor=0.0)
    return results, {str(warning.message).partition(";")[0] for warning in caught}


def test_ddp_options(ranks):
    """The gradients of the ranks are 1 and 2. Rank 0 says for all what has no effect."""
    first, second = ranks.run(2, reduced)
    assert first[0] == second[0] == [want for _, want in OPTIONS] * 2
    unused = {f"DistributedDataParallel: {name} has no effect" for name in ("num_allreduce_streams", "prof")}
    assert unused <= first[1] and not unused & second[1]


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


class Model(nn.Module):
    """A body of two layers, one of which may be checkpointed, and two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x, head=0, reentrant=None):
        body = lambda x: self.second(self.first(x))  # noqa: E731
        h = body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)
        return self.heads[head](h).square().mean()


def x(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)


def plain(model, rank, step):
    model(x(rank, step)).backward()


def two_forwards(model, rank, step):
    (model(x(rank, step), 0) + model(x(rank, step), 1)).backward()


def two_backwards(model, rank, step):
    plain(model, rank, step)
    model(x(rank, step + 5), 1).backward()


def reentrant(model, rank, step):
    model(x(rank, step), reentrant=True).backward()


def reentrant_alone(model, rank, step):
    """No parameter outside of the checkpoints, one of which lies in another."""
    inner = lambda x: checkpoint(model, x, 0, use_reentrant=True)  # noqa: E731
    checkpoint(inner, x(rank, step), use_reentrant=True).backward()


def not_reentrant(model, rank, step):
    model(x(rank, step), reentrant=False).backward()


def another_head_on_each_rank(model, rank, step):
    model(x(rank, step), head=rank).backward()


def gradient_penalty(model, rank, step):
    inputs = x(rank, step)
    (slope,) = torch.autograd.grad(model(inputs), inputs, create_graph=True)
    (model(inputs) + slope.square().sum()).backward()


def frozen_at_first(model, step):
    model.first.requires_grad_(step > 0)


def frozen_later(model, step):
    model.first.requires_grad_(step == 0)


def all_but_one_bias(model, step):
    model.requires_grad_(False)
    model.heads[0].bias.requires_grad_(True)


def unchanged(model, step):
    pass


def gradients(rank, world, graph, change):
    """Returns the gradients in DistributedDataParallel, and the expected ones: the mean over the ranks."""
    own = Model()
    parallel = DistributedDataParallel(copy.deepcopy(own))
    got, want = [], []
    for step in range(2):
        for model, inside in ((own, own), (parallel, parallel.module)):
            inside.zero_grad()
            change(inside, step)
            graph(model, rank, step)
        for mine, local in zip(parallel.module.parameters(), own.parameters(), strict=True):
            mean = torch.zeros_like(local) if local.grad is None else local.grad
            used = torch.tensor(float(local.grad is not None))
            dist.all_reduce(mean), dist.all_reduce(used)
            got.append(mine.grad)
            want.append(mean / world if used else None)
    return got, want


CHANGES = (unchanged, frozen_at_first, frozen_later, all_but_one_bias)
CASES = [(graph, change) for graph in (plain, reentrant) for change in CHANGES]
CASES += [(graph, unchanged) for graph in (two_forwards, two_backwards, reentrant_alone, not_reentrant)]
CASES += [(graph, unchanged) for graph in (another_head_on_each_rank, gradient_penalty)]


@pytest.mark.parametrize(("graph", "change"), CASES)
def test_gradients_are_means(ranks, graph, change):
    for got, want in ranks.run(2, gradients, graph, change):
        torch.testing.assert_close(got, want)


def others(rank, world):
    results = {}
    torch.manual_seed(rank)
    teacher = DistributedDataParallel(nn.Linear(4, 2).requires_grad_(False))  # is broadcast, and that is all
    results["teacher"] = teacher.module.weight.tolist()
    dropped = weakref.ref(DistributedDataParallel(nn.Linear(4, 2)))
    gc.collect()
    assert dropped() is None  # its hooks do not keep it alive

    model = Model()
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    model.heads[0] = nn.Linear(4, 2)  # other weights on each rank
    parallel(x(rank)).backward()
    results["new head"] = [model.heads[0].weight.tolist(), model.heads[0].weight.grad.tolist()]

    copied = copy.deepcopy(parallel)
    copied.zero_grad()
    torch.compile(copied, backend="eager", fullgraph=True)(x(rank)).backward()
    copied(x(rank)).backward()
    with copied.no_sync():
        assert parameters_without_sync() == {*copied.parameters()}
    results["copy"] = copied.module.first.weight.grad.tolist()

    state = copy.deepcopy(parallel).__getstate__()
    del state["_tracked_parameters"], state["_graph_task_ids"]  # a state that has other names
    loaded = DistributedDataParallel.__new__(DistributedDataParallel)
    loaded.__setstate__(state)
    loaded.zero_grad()
    for _ in range(2):
        loaded(x(rank)).backward()
    torch.testing.assert_close(loaded.module.first.weight.grad, copied.module.first.weight.grad)

    with parallel.no_sync():
        model.zero_grad()
        plain(parallel, rank, 0)
        local = model.first.weight.grad.tolist()
    plain(parallel, rank, 1)
    results["no_sync"] = model.first.weight.grad.tolist()

    parallel.disable_allreduce()
    model.zero_grad()
    plain(parallel, rank, 0)
    assert model.first.weight.grad.tolist() == local
    parallel.enable_allreduce()
    plain(parallel, rank, 1)
    assert model.first.weight.grad.tolist() == results["no_sync"]

    failing = model.first.weight.register_hook(lambda gradient: 1 / 0)  # the last of the backward
    with pytest.raises(ZeroDivisionError):
        plain(parallel, rank, 0)
    failing.remove()
    model.zero_grad()
    plain(parallel, rank, 0)
    results["after an error"] = model.first.weight.grad.tolist()

    embedding = nn.Embedding(5, 2, sparse=True)
    parallel = DistributedDataParallel(embedding)
    parallel(torch.tensor([rank, 4])).sum().backward()
    assert embedding.weight.grad.is_sparse
    results["sparse"] = embedding.weight.grad.to_dense()[:, 0].tolist()

    try:
        DistributedDataParallel(nn.Linear(2 + rank, 2))
    except RuntimeError as error:
        results["different"] = str(error)
    return results, local


def test_modules_of_other_kinds(ranks):
    (first, local), (second, other) = ranks.run(2, others)
    assert first == second and local != other
    assert first["sparse"] == [0.5, 0.5, 0.0, 0.0, 1.0]
    assert "the ranks have modules of different parameters" in first["different"]


def by_reducer(rank, world):
    torch.manual_seed(rank)
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "by_one": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["sparse"] = nn.Embedding(2, 1, sparse=True)  # used by one
    reducer = Reducer(model)
    ones = torch.ones(1, 2) * (rank + 1)
    loss = model["used"](ones)
    if rank:
        loss = loss + model["by_one"](ones) + model["sparse"](torch.tensor([1]))
    loss.sum().backward()
    local = model["used"].weight.grad.tolist()
    reducer.reduce()
    given = [torch.full((3,), float(rank)), torch.tensor(rank + 1.0)]
    Reducer(tensor for tensor in given).reduce()
    weights = [p.tolist() for p in model.parameters()]
    grads = [p.grad if p.grad is None else p.grad.to_dense().tolist() for p in model.parameters()]
    return local, weights, grads, given


def test_a_reducer_averages_weights_and_gradients(ranks):
    (local, weights, grads, given), other = ranks.run(2, by_reducer)
    assert local == [[1.0, 1.0]] and other[0] == [[2.0, 2.0]] and weights == other[1]
    assert grads == other[2] == [[[1.5, 1.5]], [1.0], [[1.0, 1.0]], [0.5], None, None, [[0.0], [0.5]]]
    assert [t.tolist() for t in given] == [[0.5] * 3, 1.5]


def summed(rank, world):
    parallel = DistributedDataParallel(Model(), gradient_average=False)
    reentrant(parallel, rank, 0)
    try:
        reentrant_alone(parallel, rank, 0)
    except RuntimeError as error:
        return parallel.module.first.weight.grad.isfinite().all().item(), str(error)


def test_sums_in_reentrant_checkpoints_are_refused_where_they_would_be_wrong(ranks):
    for finite, message in ranks.run(2, summed):
        assert finite and "gradient_average=False needs checkpoint(..., use_reentrant=False)" in message
