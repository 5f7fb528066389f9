"""Layers over 2 to 4 ranks: equal to one big batch, with one collective each way, alone and in models."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import EACH_BACKEND, on_ranks
from ops.tolerances import assert_close_enough
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from fastvit.sync.collective import ALL_GATHER_NAME

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ACTIVATION = {"abn": nn.LeakyReLU(0.2), "sbn": nn.ReLU(), "bna": nn.GELU()}  # of what make_layer makes
KINDS = list(ACTIVATION)


def make_layer(kind, channels, dtype=torch.float32, **options):
    if kind == "abn":
        layer = fastvit.InPlaceABNSync(channels, activation_param=0.2, dtype=dtype, **options)
    elif kind == "bna":
        layer = fastvit.BatchNormActSync(channels, activation="gelu", dtype=dtype, **options)
    else:
        layer = fastvit.SyncBatchNorm(channels, fuse_relu=True, dtype=dtype, **options)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        layer.weight.copy_(torch.randn(channels, generator=generator).sign() + 0.5)
        layer.bias.copy_(torch.randn(channels, generator=generator))
    return layer


def make_batch(samples, dtype=torch.float32, seed=2):
    """Returns x and dy."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, 6, 5, 3)
    return [torch.randn(shape, generator=generator).to(dtype) * 2 + 3 for _ in range(2)]


def run_torch_on_whole_batch(kind, layer, x, dy):
    """Returns torch's outputs, gradients and running statistics of the whole batch, in float64."""
    norm = nn.BatchNorm2d(6).double()
    norm.load_state_dict(copy.deepcopy(layer.state_dict()))
    leaf = x.double().clone().requires_grad_()
    y = ACTIVATION[kind](norm(leaf))
    y.backward(dy.double())
    return y, leaf.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var


def make_cases_of_one_big_batch():
    """Returns each kind with each batch; the backends alternate, so that each pair of parameters occurs."""
    cases = []
    batches = [((3, 3), F32), ((3, 3), BF16), ((1, 5), F64), ((4, 0, 2), BF16), ((0, 3, 0, 2), F32)]
    for i, (sizes, dtype) in enumerate(batches):
        for j, kind in enumerate(KINDS):
            backend, dtype_name = EACH_BACKEND[(i + j) % 2], str(dtype).removeprefix("torch.")
            name = f"{kind}-{'+'.join(map(str, sizes))}-{dtype_name}-{backend}"
            cases.append(pytest.param(len(sizes), kind, sizes, dtype, backend, id=name))
    return cases


@on_ranks()
@pytest.mark.parametrize(("world", "kind", "sizes", "dtype", "statistics"), make_cases_of_one_big_batch())
def test_ranks_equal_one_big_batch(rank, world, kind, sizes, dtype, statistics):
    layer = make_layer(kind, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    x, dy = make_batch(sum(sizes), dtype)
    expected = run_torch_on_whole_batch(kind, layer, x, dy)
    leaf, local_dy = (t.split(sizes)[rank].clone() for t in (x, dy))
    if sizes[0] < sizes[1]:  # either layout, with either backend
        leaf = leaf.contiguous(memory_format=torch.channels_last)
    leaf.requires_grad_()
    y = layer(leaf.clone())
    y.backward(local_dy)
    row = "in_place_layer" if kind == "abn" else "layer"
    assert_close_enough(y, expected[0].split(sizes)[rank], row=row, dtype=dtype)
    assert_close_enough(leaf.grad, expected[1].split(sizes)[rank], row=row, dtype=dtype)
    for parameter, expected_gradient in zip((layer.weight, layer.bias), expected[2:4], strict=True):
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient)
        assert_close_enough(gradient, expected_gradient, row=row, dtype=dtype)
    assert_close_enough(layer.running_mean, expected[4], row="running")
    assert_close_enough(layer.running_var, expected[5], row="running")
    assert layer.num_batches_tracked == 1
    return layer.running_mean.tolist(), layer.running_var.tolist()


@test_ranks_equal_one_big_batch.check
def _(results):
    assert all(running_statistics == results[0] for running_statistics in results)


def compute_bits_of_a_step(rank, world):
    torch.manual_seed(rank)
    layer, x = fastvit.InPlaceABNSync(70), torch.randn(4 + rank, 70, 3, requires_grad=True)
    y = layer(x.clone())
    y.square().sum().backward()
    return [t.tolist() for t in (y, x.grad, layer.running_mean, layer.running_var)]


def test_both_backends_give_the_same_bits(ranks):
    collective, peer = (ranks.run(3, compute_bits_of_a_step, statistics=name) for name in EACH_BACKEND)
    assert collective == peer


@contextlib.contextmanager
def count_collectives():
    """Yields a dict that then has the number of calls of each collective of torch.distributed."""
    names = "all_gather all_reduce all_to_all_single broadcast barrier isend".split()
    names.append(ALL_GATHER_NAME)
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in set(names)
        }
        yield counts
    counts |= {name: spy.call_count for name, spy in spies.items() if spy.called}


def count_collectives_of_a_layer(rank, world, kind):
    layer = make_layer(kind, 6)
    x, dy = make_batch(2, seed=rank)
    leaf = x.requires_grad_()
    with count_collectives() as forward:
        y = layer(leaf.clone())
    with count_collectives() as backward:
        y.backward(dy)
    with count_collectives() as frozen_input:
        layer(x.detach().clone()).backward(dy)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    with count_collectives() as frozen:
        layer(x.detach().clone())
    with count_collectives() as evaluation:
        layer.eval()(leaf.clone()).backward(dy)
    return [forward, backward, frozen_input, frozen, evaluation]


@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_each_way(ranks, kind):
    one = {"all_to_all_single": 1}
    function = count_collectives_of_a_layer
    assert ranks.run(2, function, kind, statistics="collective")[0] == [one, one, one, one, {}]
    assert ranks.run(2, function, kind, statistics="peer")[0] == [{}, {}, {}, {}, {}]
    assert ranks.run(1, function, kind)[0] == [{}, {}, {}, {}, {}]


@on_ranks(2)
def test_no_value_and_one_value_on_each_rank(rank, world):
    """One value on each rank does not raise, since counts are not read back."""
    layer = make_layer("sbn", 6, momentum=1.0)
    layer(torch.empty(0, 6, 5, 3, requires_grad=True)).sum().backward()
    assert layer.running_mean.tolist() == [0.0] * 6 and layer.running_var.tolist() == [1.0] * 6
    assert layer.num_batches_tracked == 1 and layer.weight.grad.tolist() == [0.0] * 6
    layer(torch.full((1, 6), float(rank)))
    assert layer.running_mean.tolist() == [0.5] * 6 and layer.running_var.tolist() == [0.5] * 6


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "is_compiled", "statistics"),
    [
        pytest.param(kind, is_compiled, EACH_BACKEND[(i + is_compiled) % 2], id=f"{kind}-{form}")
        for i, kind in enumerate(KINDS)
        for is_compiled, form in enumerate(("eager", "compiled"))
    ],
)
def test_one_rank_evaluates_without_running_statistics(rank, world, kind, is_compiled, statistics):
    """Without running statistics too, an evaluation is this rank's own: it neither sends nor waits."""
    layer = make_layer(kind, 6, track_running_stats=False).eval()
    (x, dy), norm = make_batch(4), nn.BatchNorm2d(6, track_running_stats=False).double()
    norm.weight, norm.bias = (nn.Parameter(p.detach().double()) for p in (layer.weight, layer.bias))
    evaluate = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    if rank == 0:
        leaf, expected_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
        y, expected = evaluate(leaf * 1), ACTIVATION[kind](norm(expected_leaf))
        y.backward(dy), expected.backward(dy.double())
        assert_close_enough(y, expected, row="in_place_layer")
        assert_close_enough(leaf.grad, expected_leaf.grad, row="in_place_layer")
    y = layer.train()(x.split(2)[rank].clone())  # a step of both ranks
    assert_close_enough(y, ACTIVATION[kind](norm(x.double())).split(2)[rank], row="in_place_layer")


@on_ranks(2)
def test_tensor_parallel_layers_equal_whole_ones(rank, world):
    """Layers of fastvit over a sequence in shards, and a model that is parallelised before it is fused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh, x = init_device_mesh("cpu", (world,)), torch.randn(2, 4, 6)
    whole = nn.Sequential(nn.LayerNorm(6), nn.GELU("tanh"))
    fused = fastvit.fuse(copy.deepcopy(whole))
    parallel = parallelize_module(copy.deepcopy(whole), mesh, {"0": SequenceParallel()})
    parallelize_module(fused, mesh, {"0": SequenceParallel()})
    assert type(fused[0]) is not nn.LayerNorm and type(fastvit.fuse(parallel)[0]) is nn.LayerNorm
    expected = whole(x)
    expected.square().sum().backward()
    for net in (fused, parallel):
        y = net(x.chunk(world, 1)[rank])
        assert isinstance(y, DTensor) and y.placements == (Shard(1),)
        assert_close_enough(y.full_tensor(), expected, row="layer")
        y.full_tensor().square().sum().backward()
        assert_close_enough(net[0].weight.grad.full_tensor(), whole[0].weight.grad, row="layer")
    shards = distribute_tensor(x, mesh, [Shard(1)])
    gated = fastvit.functional.gated_act(shards, shards)
    assert_close_enough(gated.full_tensor(), nn.functional.silu(x) * x, row="layer")
    for layer in (make_layer("bna", 4), make_layer("abn", 4)):
        with pytest.raises(ValueError, match=r"the input is a DTensor.*call fastvit.fuse after parallelize"):
            layer.eval()(shards * 1)


def make_small_model(kind):
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), make_layer(kind, 6), nn.Conv2d(6, 4, 1))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "plain") for kind in KINDS),
        ("sbn", "static"),
        ("abn", "accumulate"),
        ("abn", "compiled"),
        ("bna", "compiled"),
    ],
)
def test_ddp_equals_one_process(rank, world, kind, form):
    x, _ = make_batch(6)
    whole = make_small_model(kind).double()
    whole[1] = nn.Sequential(nn.BatchNorm2d(6).double(), ACTIVATION[kind])
    net = make_small_model(kind)
    whole[1][0].load_state_dict(net[1].state_dict())
    (whole(x.double()).square().sum() / world).backward()
    wrapped = DistributedDataParallel(net, static_graph=form == "static")
    if form == "compiled":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    local_x = x.split([2, 4])[rank]
    if form == "accumulate":  # the same samples twice, halved: statistics of each step are the whole step's
        with wrapped.no_sync():
            (wrapped(local_x).square().sum() / 2).backward()
        (wrapped(local_x).square().sum() / 2).backward()
    else:
        wrapped(local_x).square().sum().backward()
    for parameter, expected in zip(net.parameters(), whole.parameters(), strict=True):
        assert_close_enough(parameter.grad, expected.grad, row="in_place_layer")


@on_ranks(2, statistics="collective")
def test_recomputed_layers_give_the_bits_of_kept_ones_and_as_many_collectives(rank, world):
    x, _ = make_batch(2 + rank, seed=rank)
    results = []
    for memory in ("keep", "recompute"):
        net = DistributedDataParallel(make_small_model("bna"))
        net.module[1].memory = memory
        with count_collectives() as forward, fastvit.recompute_scope():
            y = net(x)
        with count_collectives() as backward:
            y.square().sum().backward()
        assert forward == backward == {"all_to_all_single": 1}
        results.append([y.detach(), *(p.grad for p in net.parameters()), net.module[1].running_var])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
