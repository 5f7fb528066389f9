"""Statistics over 2-4 gloo processes: equal to one big batch, collectives counted, faults end in errors."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import EACH_BACKEND
from ops.tolerances import assert_close_enough
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from fastvit.sync.collective import ALL_GATHER_NAME

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = ["abn", "sbn", "bna"]
ACTIVATION = {"abn": nn.LeakyReLU(0.2), "sbn": nn.ReLU(), "bna": nn.GELU()}  # of what make_layer makes


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


def batch(samples, dtype=torch.float32, seed=2):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, 6, 5, 3)
    return [torch.randn(shape, generator=generator).to(dtype) * 2 + 3 for _ in range(2)]


def one_process(kind, layer, x, dy):
    """The layer over the whole batch, by torch in float64."""
    norm = nn.BatchNorm2d(6).double()
    norm.load_state_dict(copy.deepcopy(layer.state_dict()))
    leaf = x.double().clone().requires_grad_()
    y = ACTIVATION[kind](norm(leaf))
    y.backward(dy.double())
    return y, leaf.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var


def equals_one_big_batch(rank, world, kind, sizes, dtype, channels_last):
    layer = make_layer(kind, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    x, dy = batch(sum(sizes), dtype)
    want = one_process(kind, layer, x, dy)
    leaf, gradient = (t.split(sizes)[rank].clone() for t in (x, dy))
    if channels_last:
        leaf = leaf.contiguous(memory_format=torch.channels_last)
    leaf.requires_grad_()
    y = layer(leaf.clone())
    y.backward(gradient)
    row = "in_place_layer" if kind == "abn" else "layer"
    assert_close_enough(y, want[0].split(sizes)[rank], row=row, dtype=dtype)
    assert_close_enough(leaf.grad, want[1].split(sizes)[rank], row=row, dtype=dtype)
    parameters = [p.grad.clone() for p in (layer.weight, layer.bias)]
    for gradient in parameters:
        dist.all_reduce(gradient)
    for got, expected in zip(parameters, want[2:4], strict=True):
        assert_close_enough(got, expected, row=row, dtype=dtype)
    assert_close_enough(layer.running_mean, want[4], row="running")
    assert_close_enough(layer.running_var, want[5], row="running")
    assert layer.num_batches_tracked == 1
    return layer.running_mean.tolist(), layer.running_var.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize(
    "sizes,dtype",
    [((3, 3), F32), ((3, 3), BF16), ((1, 5), F64), ((4, 0, 2), BF16), ((0, 3, 0, 2), F32)],
    ids=str,
)
def test_equals_one_big_batch(ranks, kind, sizes, dtype, statistics):
    channels_last = sizes[0] < sizes[1]  # either layout, with either way
    states = ranks.run(
        len(sizes), equals_one_big_batch, kind, sizes, dtype, channels_last, statistics=statistics
    )
    assert all(state == states[0] for state in states)


@contextlib.contextmanager
def called():
    """Counts every collective of torch.distributed that is called as its attribute."""
    names = (
        ALL_GATHER_NAME,
        "all_gather",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "barrier",
        "isend",
    )
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in dict.fromkeys(names)
        }
        yield counts
    counts |= {name: spy.call_count for name, spy in spies.items() if spy.called}


def collectives(rank, world, kind):
    layer = make_layer(kind, 6)
    x, dy = batch(2, seed=rank)
    leaf = x.requires_grad_()
    with called() as forward:
        y = layer(leaf.clone())
    with called() as backward:
        y.backward(dy)
    with called() as frozen_input:
        layer(x.detach().clone()).backward(dy)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    with called() as frozen:
        layer(x.detach().clone())
    with called() as evaluation:
        layer.eval()(leaf.clone()).backward(dy)
    return [forward, backward, frozen_input, frozen, evaluation]


@pytest.mark.parametrize("kind", KINDS)
def test_one_collective_each_way(ranks, kind):
    one = {"all_to_all_single": 1}
    assert ranks.run(2, collectives, kind, statistics="collective")[0] == [one, one, one, one, {}]
    assert ranks.run(2, collectives, kind, statistics="peer")[0] == [{}, {}, {}, {}, {}]
    assert ranks.run(1, collectives, kind)[0] == [{}, {}, {}, {}, {}]


def no_value_and_one(rank, world):
    """All ranks are empty; then each has one value, which does not raise, since counts are not read back."""
    layer = make_layer("sbn", 6, momentum=1.0)
    layer(torch.empty(0, 6, 5, 3, requires_grad=True)).sum().backward()
    assert layer.running_mean.tolist() == [0.0] * 6 and layer.running_var.tolist() == [1.0] * 6
    assert layer.num_batches_tracked == 1 and layer.weight.grad.tolist() == [0.0] * 6
    layer(torch.full((1, 6), float(rank)))
    assert layer.running_mean.tolist() == [0.5] * 6 and layer.running_var.tolist() == [0.5] * 6


def test_no_value_and_one_value_on_each_rank(ranks):
    ranks.run(2, no_value_and_one)


def one_rank_evaluates(rank, world, kind, compiled):
    """Without running statistics too, an evaluation is this rank's own: it neither sends nor waits."""
    layer = make_layer(kind, 6, track_running_stats=False).eval()
    (x, dy), norm = batch(4), nn.BatchNorm2d(6, track_running_stats=False).double()
    norm.weight, norm.bias = (nn.Parameter(p.detach().double()) for p in (layer.weight, layer.bias))
    model = torch.compile(layer, backend="aot_eager") if compiled else layer
    if rank == 0:
        leaf, plain = x.clone().requires_grad_(), x.double().requires_grad_()
        got, want = model(leaf * 1), ACTIVATION[kind](norm(plain))
        got.backward(dy), want.backward(dy.double())
        assert_close_enough(got, want, row="in_place_layer")
        assert_close_enough(leaf.grad, plain.grad, row="in_place_layer")
    y = layer.train()(x.split(2)[rank].clone())  # a step of both ranks
    assert_close_enough(y, ACTIVATION[kind](norm(x.double())).split(2)[rank], row="in_place_layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_one_rank_evaluates_without_running_statistics(ranks, kind, compiled, statistics):
    ranks.run(2, one_rank_evaluates, kind, compiled, statistics=statistics)


def tensor_parallel(rank, world):
    """Layers of fastvit over a sequence in shards, and a model that is parallelised before it is fused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh, x = init_device_mesh("cpu", (world,)), torch.randn(2, 4, 6)
    plain = nn.Sequential(nn.LayerNorm(6), nn.GELU("tanh"))
    fused = fastvit.fuse(copy.deepcopy(plain))
    parallel = parallelize_module(copy.deepcopy(plain), mesh, {"0": SequenceParallel()})
    parallelize_module(fused, mesh, {"0": SequenceParallel()})
    assert type(fused[0]) is not nn.LayerNorm and type(fastvit.fuse(parallel)[0]) is nn.LayerNorm
    want = plain(x)
    want.square().sum().backward()
    for net in (fused, parallel):
        y = net(x.chunk(world, 1)[rank])
        assert isinstance(y, DTensor) and y.placements == (Shard(1),)
        assert_close_enough(y.full_tensor(), want, row="layer")
        y.full_tensor().square().sum().backward()
        assert_close_enough(net[0].weight.grad.full_tensor(), plain[0].weight.grad, row="layer")
    shards = distribute_tensor(x, mesh, [Shard(1)])
    gated = fastvit.functional.gated_act(shards, shards)
    assert_close_enough(gated.full_tensor(), nn.functional.silu(x) * x, row="layer")
    for layer in (make_layer("bna", 4), make_layer("abn", 4)):
        with pytest.raises(ValueError, match=r"the input is a DTensor.*call fastvit.fuse after parallelize"):
            layer.eval()(shards * 1)


def test_tensor_parallel(ranks):
    ranks.run(2, tensor_parallel)


def model(kind):
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), make_layer(kind, 6), nn.Conv2d(6, 4, 1))


def under_ddp(rank, world, kind, how):
    x, _ = batch(6)
    sizes = [2, 4]
    whole = model(kind).double()
    whole[1] = nn.Sequential(nn.BatchNorm2d(6).double(), ACTIVATION[kind])
    net = model(kind)
    whole[1][0].load_state_dict(net[1].state_dict())
    (whole(x.double()).square().sum() / world).backward()
    wrapped = DistributedDataParallel(net, static_graph=how == "static")
    if how == "compiled":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    mine = x.split(sizes)[rank]
    if how == "accumulate":  # the same samples twice, halved: statistics of each step are the whole step's
        with wrapped.no_sync():
            (wrapped(mine).square().sum() / 2).backward()
        (wrapped(mine).square().sum() / 2).backward()
    else:
        wrapped(mine).square().sum().backward()
    for got, want in zip(net.parameters(), whole.parameters(), strict=True):
        assert_close_enough(got.grad, want.grad, row="in_place_layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["plain", "static", "accumulate", "compiled"])
def test_ddp_equals_one_process(ranks, kind, how):
    ranks.run(2, under_ddp, kind, how)


def recomputed(rank, world):
    """In a scope, over ranks and under DDP: the bits of memory="keep", with as many collectives."""
    x, _ = batch(2 + rank, seed=rank)
    results = []
    for memory in ("keep", "recompute"):
        net = DistributedDataParallel(model("bna"))
        net.module[1].memory = memory
        with called() as forward, fastvit.recompute_scope():
            y = net(x)
        with called() as backward:
            y.square().sum().backward()
        assert forward == backward == {"all_to_all_single": 1}
        results.append([y.detach(), *(p.grad for p in net.parameters()), net.module[1].running_var])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputed_sync_layers_give_the_same_gradients(ranks):
    ranks.run(2, recomputed, statistics="collective")
