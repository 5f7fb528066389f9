"""apex.parallel's DistributedDataParallel and Reducer over two ranks: any graph, any parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit.compat.apex.parallel import DistributedDataParallel, Reducer


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


GRAPHS = [
    plain, two_forwards, two_backwards, reentrant, reentrant_alone, not_reentrant, another_head_on_each_rank,
    gradient_penalty,
]  # fmt: skip


def frozen_at_first(model, step):
    model.first.requires_grad_(step > 0)


def frozen_later(model, step):
    model.first.requires_grad_(step == 0)


def all_but_one_bias(model, step):
    model.requires_grad_(False)
    model.heads[0].bias.requires_grad_(True)


def unchanged(model, step):
    pass


def gradients(rank, world, graph, change, delay):
    """Of a module in DistributedDataParallel, and what they must be: the mean of the ranks' own."""
    own = Model()
    parallel = DistributedDataParallel(copy.deepcopy(own), delay_allreduce=delay)
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


CASES = [(graph, unchanged, delay) for graph in GRAPHS for delay in (False, True)]
CHANGES = (frozen_at_first, frozen_later, all_but_one_bias)
CASES += [(graph, change, False) for graph in (plain, reentrant) for change in CHANGES]


@pytest.mark.parametrize(("graph", "change", "delay"), CASES)
def test_gradients_are_means(ranks, graph, change, delay):
    """For every graph, whatever parameters are frozen and thawed."""
    for got, want in ranks.run(2, gradients, graph, change, delay):
        torch.testing.assert_close(got, want)


def others(rank, world):
    results = {}
    torch.manual_seed(rank)
    teacher = DistributedDataParallel(nn.Linear(4, 2).requires_grad_(False))  # is broadcast, and that is all
    results["teacher"] = teacher.module.weight.tolist()

    model = Model()
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    model.heads[0] = nn.Linear(4, 2)  # other weights on each rank
    parallel(x(rank)).backward()
    results["new head"] = [model.heads[0].weight.tolist(), model.heads[0].weight.grad.tolist()]

    copied = copy.deepcopy(parallel)
    copied.zero_grad()
    copied(x(rank)).backward()
    results["copy"] = copied.module.first.weight.grad.tolist()

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
    reducer = Reducer(model)
    ones = torch.ones(1, 2) * (rank + 1)
    loss = model["used"](ones) + (model["by_one"](ones) if rank else 0)
    loss.sum().backward()
    local = model["used"].weight.grad.tolist()
    reducer.reduce()
    given = [torch.full((3,), float(rank)), torch.tensor(rank + 1.0)]
    Reducer(tensor for tensor in given).reduce()
    weights = [p.tolist() for p in model.parameters()]
    return local, weights, [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()], given


def test_reducer(ranks):
    (local, weights, grads, given), other = ranks.run(2, by_reducer)
    assert local == [[1.0, 1.0]] and other[0] == [[2.0, 2.0]] and weights == other[1]
    assert grads == other[2] == [[[1.5, 1.5]], [1.0], [[1.0, 1.0]], [0.5], None, None]
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
