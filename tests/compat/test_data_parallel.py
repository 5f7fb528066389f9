"""fastvit.compat over two gloo ranks: amp, DistributedDataParallel, Reducer and flat_dist_call."""

import contextlib
import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compat.amp.models import draw_batch, flat_gradients, flat_parameters, scaled_backward
from fastvit.compat.apex import amp, fp16_utils
from fastvit.compat.apex.parallel import DistributedDataParallel, Reducer, convert_syncbn_model
from fastvit.compat.apex.parallel.distributed import flat_dist_call, parameters_without_sync


def assert_same_on_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values)


# amp and FP16_Optimizer


def loss_of_share(model, rank: int, world: int, step: int, dtype=torch.float32) -> torch.Tensor:
    """Returns the loss of the rank's share of a batch."""
    images, labels = draw_batch(step)
    return F.cross_entropy(model(images[rank::world].to(dtype)).float(), labels[rank::world])


def train(rank, world, level, infinite_on):
    """Takes three steps over `world` shares of each batch; the second overflows on one rank alone."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)
    model = convert_syncbn_model(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    parallel = DistributedDataParallel(model) if world > 1 else model
    for step in range(3):
        optimizer.zero_grad()
        infinite = step == 1 and infinite_on is not None and (world == 1 or rank == infinite_on)
        loss = loss_of_share(parallel, rank, world, step)
        scaled_backward(loss * float("inf") if infinite else loss, optimizer)
        optimizer.step()
    buffers = torch.cat([b.float().flatten() for b in model.buffers()])
    return flat_parameters(model), buffers, amp.state_dict()["loss_scaler0"]["loss_scale"]


@on_ranks(2)
@pytest.mark.usefixtures("amp_off")
@pytest.mark.parametrize(
    ("level", "infinite_on"), [("O0", None), ("O0", 1), ("O1", 1), ("O2", None), ("O2", 1), ("O3", None)]
)
def test_ranks_train_the_weights_of_one_process(rank, world, level, infinite_on):
    return train(rank, world, level, infinite_on)


@test_ranks_train_the_weights_of_one_process.check
def _(results, level, infinite_on):
    first, second = results
    assert all(map(torch.equal, first[:2], second[:2]))
    assert first[2] == second[2] == (2.0**16 if infinite_on is None else 2.0**15)
    tolerance = {"O0": 1e-6, "O3": 3e-2}.get(level, 1e-2)
    alone = train(0, 1, level, infinite_on)
    torch.testing.assert_close(first[:2], alone[:2], rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_gradients_are_reduced_before_the_first_forward_of_the_wrapper(rank, world):
    parallel = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    parallel.module(torch.full((1, 2), float(rank))).sum().backward()
    assert parallel.module.weight.grad.tolist() == [[0.5, 0.5]]


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
                optimizer.backward(loss_of_share(parallel, rank, world, step, torch.float16))
            else:
                loss = loss_of_share(parallel, rank, world, step)
                scaled_backward(loss, optimizer, delay_unscale=delay and local)
    return flat_gradients(model)


@on_ranks(2)
@pytest.mark.parametrize("level", ["O1", "O2", "fp16"])
def test_local_gradients_of_no_sync_take_part_in_the_next_reduction(rank, world, level):
    """The model is also compiled, in torch's DistributedDataParallel."""
    expected = accumulate(rank, world, level, False)
    assert expected.abs().max() > 0.05
    reference = nn.parallel.DistributedDataParallel
    variants = ((False,), (True,), (False, reference), (False, reference, True))
    results = [accumulate(rank, world, level, True, *options) for options in variants]
    for gradients in results:
        torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=5e-3)
    assert_same_on_all_ranks(torch.stack(results).tolist())


# Options


OPTIONS = (
    ({}, 1.5),
    ({"message_size": 1, "delay_allreduce": True}, 1.5),
    ({"gradient_average": False}, 3.0),
    ({"gradient_predivide_factor": 2.0}, 1.5),
    ({"gradient_predivide_factor": 2.0, "gradient_average": False}, 1.5),
    ({"allreduce_always_fp32": True}, 1.5),
    ({"num_allreduce_streams": 2, "prof": True}, 1.5),
)


@on_ranks(2)
def test_options_decide_sums_means_and_factors(rank, world):
    """The gradients of the ranks are 1 and 2. Rank 0 says for all what has no effect."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in (torch.float32, torch.bfloat16):
            for options, expected in OPTIONS:
                model = nn.Linear(4, 2).to(dtype)
                nn.init.constant_(model.weight, rank + 1.0)
                parallel = DistributedDataParallel(model, **options)
                assert torch.equal(model.weight, torch.full_like(model.weight, 1.0))  # rank 0's
                assert all(getattr(parallel, name) == value for name, value in options.items())
                assert parallel.world_size == world and not hasattr(parallel, "allreduce_buckets")
                parallel(torch.full((1, 4), rank + 1.0, dtype=dtype)).sum().backward()
                assert model.weight.grad[0, 0].item() == expected
    unused = {f"DistributedDataParallel: {name} has no effect" for name in ("num_allreduce_streams", "prof")}
    messages = {str(warning.message).partition(";")[0] for warning in caught}
    assert unused & messages == (set() if rank else unused)
    with pytest.raises(TypeError, match="takes apex's arguments, got bucket_cap_mb"):
        DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=25)
    with pytest.raises(ValueError, match="gradient_predivide_factor must be above 0, got 0.0"):
        DistributedDataParallel(nn.Linear(2, 1), gradient_predivide_factor=0.0)


@on_ranks(2)
def test_flat_dist_call_writes_tensors_of_mixed_dtypes_and_strides(rank, world):
    mixed = [torch.full((2, 3), rank + 1.0).t(), torch.full((4,), rank, dtype=torch.int64), torch.ones(())]
    aliases = [tensor.view_as(tensor) for tensor in mixed]
    flat_dist_call(mixed, dist.broadcast, (1,))
    means = [torch.full((3,), float(rank)), torch.tensor(rank + 1.0).bfloat16()]
    flat_dist_call(means, dist.all_reduce)
    assert [t.tolist() for t in aliases + means] == [[[2.0] * 2] * 3, [1] * 4, 1.0, [0.5] * 3, 1.5]


# Graphs


class TwoHeads(nn.Module):
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


def draw_input(rank, step=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)


def call_plainly(model, rank, step=0):
    model(draw_input(rank, step)).backward()


def call_in_nested_checkpoints(model, rank, step=0):
    """Leaves no parameter outside of reentrant checkpoints."""

    def checkpointed(x):
        return checkpoint(model, x, 0, use_reentrant=True)

    checkpoint(checkpointed, draw_input(rank, step), use_reentrant=True).backward()


def call_forward_twice(model, rank, step):
    (model(draw_input(rank, step), 0) + model(draw_input(rank, step), 1)).backward()


def call_backward_twice(model, rank, step):
    call_plainly(model, rank, step)
    model(draw_input(rank, step + 5), 1).backward()


def penalize_gradient(model, rank, step):
    inputs = draw_input(rank, step)
    (slope,) = torch.autograd.grad(model(inputs), inputs, create_graph=True)
    (model(inputs) + slope.square().sum()).backward()


GRAPHS = {
    "plain": call_plainly,
    "reentrant": lambda model, rank, step: model(draw_input(rank, step), reentrant=True).backward(),
    "not_reentrant": lambda model, rank, step: model(draw_input(rank, step), reentrant=False).backward(),
    "nested_checkpoints": call_in_nested_checkpoints,
    "two_forwards": call_forward_twice,
    "two_backwards": call_backward_twice,
    "another_head_on_each_rank": lambda model, rank, step: model(
        draw_input(rank, step), head=rank
    ).backward(),
    "gradient_penalty": penalize_gradient,
}
NEEDS_GRADIENT = {  # by step and name of a parameter
    "unchanged": lambda step, name: True,
    "frozen_at_first": lambda step, name: step > 0 or not name.startswith("first"),
    "frozen_later": lambda step, name: step == 0 or not name.startswith("first"),
    "all_but_one_bias_frozen": lambda step, name: name == "heads.0.bias",
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("graph", "change"),
    [(graph, change) for graph in GRAPHS for change in NEEDS_GRADIENT if graph in ("plain", "reentrant")]
    + [(graph, "unchanged") for graph in GRAPHS if graph not in ("plain", "reentrant")],
)
def test_gradients_are_means(rank, world, graph, change):
    """A gradient that no rank has is None."""
    own = TwoHeads()
    parallel = DistributedDataParallel(copy.deepcopy(own))
    for step in range(2):
        for model, inside in ((own, own), (parallel, parallel.module)):
            inside.zero_grad()
            for name, parameter in inside.named_parameters():
                parameter.requires_grad_(NEEDS_GRADIENT[change](step, name))
            GRAPHS[graph](model, rank, step)
        for reduced, local in zip(parallel.module.parameters(), own.parameters(), strict=True):
            mean = torch.zeros_like(local) if local.grad is None else local.grad
            used = torch.tensor(float(local.grad is not None))
            dist.all_reduce(mean), dist.all_reduce(used)
            torch.testing.assert_close(reduced.grad, mean / world if used else None)


@on_ranks(2)
def test_sums_in_reentrant_checkpoints_are_refused_if_they_would_be_wrong(rank, world):
    parallel = DistributedDataParallel(TwoHeads(), gradient_average=False)
    GRAPHS["reentrant"](parallel, rank, 0)
    message = r"gradient_average=False needs checkpoint\(..., use_reentrant=False\)"
    with pytest.raises(RuntimeError, match=message):
        call_in_nested_checkpoints(parallel, rank)
    assert parallel.module.first.weight.grad.isfinite().all()


# Modules


@on_ranks(2)
def test_a_frozen_model_is_broadcast(rank, world):
    torch.manual_seed(rank)
    parallel = DistributedDataParallel(nn.Linear(4, 2).requires_grad_(False))
    assert_same_on_all_ranks(parallel.module.weight.tolist())


@on_ranks(2)
def test_hooks_do_not_keep_a_dropped_wrapper_alive(rank, world):
    dropped = weakref.ref(DistributedDataParallel(nn.Linear(4, 2)))
    gc.collect()
    assert dropped() is None


@on_ranks(2)
def test_a_layer_that_is_replaced_later_is_broadcast_and_reduced(rank, world):
    model = TwoHeads()
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    model.heads[0] = nn.Linear(4, 2)  # other weights on each rank
    parallel(draw_input(rank)).backward()
    assert_same_on_all_ranks([model.heads[0].weight.tolist(), model.heads[0].weight.grad.tolist()])


@on_ranks(2)
def test_copies_reduce_compiled_or_not(rank, world):
    """One copy comes from a state that has other names."""
    parallel = DistributedDataParallel(TwoHeads())
    call_plainly(parallel, rank)
    copied = copy.deepcopy(parallel)
    state = copy.deepcopy(parallel).__getstate__()
    del state["_tracked_parameters"], state["_graph_task_ids"]
    loaded = DistributedDataParallel.__new__(DistributedDataParallel)
    loaded.__setstate__(state)
    copied.zero_grad(), loaded.zero_grad()
    torch.compile(copied, backend="eager", fullgraph=True)(draw_input(rank)).backward()
    call_plainly(copied, rank)
    with copied.no_sync():
        assert parameters_without_sync() == {*copied.parameters()}
    for _ in range(2):
        call_plainly(loaded, rank)
    torch.testing.assert_close(loaded.module.first.weight.grad, copied.module.first.weight.grad)
    assert_same_on_all_ranks(copied.module.first.weight.grad.tolist())


@on_ranks(2)
def test_no_sync_and_disable_allreduce_keep_gradients_local(rank, world):
    parallel = DistributedDataParallel(TwoHeads())
    weight = parallel.module.first.weight
    with parallel.no_sync():
        call_plainly(parallel, rank)
        local = weight.grad.tolist()
    call_plainly(parallel, rank, 1)
    reduced = weight.grad.tolist()
    parallel.zero_grad()
    parallel.disable_allreduce()
    call_plainly(parallel, rank)
    assert weight.grad.tolist() == local
    parallel.enable_allreduce()
    call_plainly(parallel, rank, 1)
    assert weight.grad.tolist() == reduced
    assert_same_on_all_ranks(reduced)
    with pytest.raises(AssertionError):
        assert_same_on_all_ranks(local)


@on_ranks(2)
def test_a_backward_after_one_that_failed_reduces(rank, world):
    model = TwoHeads()
    parallel = DistributedDataParallel(model)
    failing = model.first.weight.register_hook(lambda gradient: 1 / 0)  # the last of the backward
    with pytest.raises(ZeroDivisionError):
        call_plainly(parallel, rank)
    failing.remove()
    model.zero_grad()
    call_plainly(parallel, rank)
    assert_same_on_all_ranks(model.first.weight.grad.tolist())


@on_ranks(2)
def test_sparse_gradients_are_reduced(rank, world):
    embedding = nn.Embedding(5, 2, sparse=True)
    parallel = DistributedDataParallel(embedding)
    parallel(torch.tensor([rank, 4])).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 1.0]


@on_ranks(2)
def test_modules_that_differ_between_ranks_are_refused(rank, world):
    with pytest.raises(RuntimeError, match="the ranks have modules of different parameters"):
        DistributedDataParallel(nn.Linear(2 + rank, 2))


@on_ranks(2)
def test_a_reducer_averages_weights_and_gradients(rank, world):
    torch.manual_seed(rank)
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "by_one": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model["sparse"] = nn.Embedding(2, 1, sparse=True)  # used by one
    reducer = Reducer(model)
    ones = torch.ones(1, 2) * (rank + 1)
    loss = model["used"](ones)
    if rank:
        loss = loss + model["by_one"](ones) + model["sparse"](torch.tensor([1]))
    loss.sum().backward()
    assert model["used"].weight.grad.tolist() == [[rank + 1.0] * 2]
    reducer.reduce()
    gradients = [p.grad if p.grad is None else p.grad.to_dense().tolist() for p in model.parameters()]
    assert gradients == [[[1.5, 1.5]], [1.0], [[1.0, 1.0]], [0.5], None, None, [[0.0], [0.5]]]
    tensors = [torch.full((3,), float(rank)), torch.tensor(rank + 1.0)]
    Reducer(tensor for tensor in tensors).reduce()
    assert [t.tolist() for t in tensors] == [[0.5] * 3, 1.5]
    assert_same_on_all_ranks([p.tolist() for p in model.parameters()])
