"""A converted ViT under DDP and FSDP trains with the bits of the model that is not converted."""

from functools import partial

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from conversion.cases import select_each_value
from conversion.models import assert_same_bits
from conversion.vit_models import Block, BlockModel, LayerScale, make_patches, measure_kept_bytes

pytestmark = pytest.mark.nightly
ORDERS = ["convert, then wrap", "wrap, then convert"]


def make_vit(depth):
    return BlockModel(lambda: Block(scale=LayerScale), depth)


def make_eager_and_converted(make, wrap, order, **options):
    """Returns two wrapped models. The second is converted before or after it is wrapped."""
    eager, model = make(), make()
    if order == "convert, then wrap":
        fastvit.convert(model, **options)
    wrapped = wrap(model)
    if order == "wrap, then convert":
        fastvit.convert(model, **options)
    return wrap(eager), wrapped


def train(model, x, find_parameters=nn.Module.parameters):
    """Takes three steps, and returns the losses and copies of the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in find_parameters(model))]


@on_ranks(2)
@pytest.mark.parametrize(("graph", "order"), [("dynamic", ORDERS[0]), ("static", ORDERS[1])])
def test_a_converted_model_under_ddp_trains_with_eager_bits(rank, world, graph, order):
    wrap = partial(DistributedDataParallel, static_graph=graph == "static")
    models = make_eager_and_converted(lambda: make_vit(2), wrap, order)
    assert_same_bits(*(train(model, make_patches(8)[rank::world]) for model in models))


def shard(model, modules, world):
    """Shards the modules and the model by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for module in (*modules, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    return model


def train_sharded_and_measure_kept(models, x):
    """Returns the kept bytes of two models. Raises unless they train with the same bits."""

    def find_parameters(model):
        return [p.full_tensor() for p in model.parameters()]

    assert_same_bits(*(train(model, x, find_parameters) for model in models))
    return [measure_kept_bytes(model, x) for model in models]


# The units of sharding, and the largest share of the bytes that is kept. A norm that is sharded by itself is
# sharded again when its block ends.
UNITS = {"model": 0.75, "blocks": 0.75, "layers": 0.9}


@on_ranks(2)
@pytest.mark.parametrize(("units", "order"), [*select_each_value(UNITS, ORDERS), ("layers", ORDERS[1])])
def test_a_converted_model_under_fsdp2_trains_with_eager_bits_and_keeps_less(rank, world, units, order):
    def wrap(model):
        modules = [] if units == "model" else list(model.blocks)
        for block in model.blocks if units == "layers" else ():
            modules[:0] = block.norm1, block.norm2, block.attn, block.mlp.fc1, block.mlp.fc2
        return shard(model, modules, world)

    models = make_eager_and_converted(lambda: make_vit(3), wrap, order)
    return train_sharded_and_measure_kept(models, make_patches(32)[rank::world])


@test_a_converted_model_under_fsdp2_trains_with_eager_bits_and_keeps_less.check
def _(results, units):
    assert all(after < UNITS[units] * before for before, after in results)


class ConvNormAct(nn.Module):
    """Ends with a norm and an activation, whose result both the activation and the next module save."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


@on_ranks(2)
@pytest.mark.parametrize("order", ORDERS)
def test_a_reader_behind_a_block_of_fsdp2_keeps_what_it_reads(rank, world, order):
    """FSDP2 gathers the block before it too late for a recipe of the reader."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(ConvNormAct(), ConvNormAct(), nn.Conv2d(12, 4, 1))

    models = make_eager_and_converted(make, lambda model: shard(model, model[:2], world), order)
    x = torch.rand(8, 12, 48, 48)  # parameters that are gathered at the time weigh little
    return train_sharded_and_measure_kept(models, x)


@test_a_reader_behind_a_block_of_fsdp2_keeps_what_it_reads.check
def _(results):
    assert all(after < 1.01 * before for before, after in results)


WRAPPED_CLASSES = {"blocks": {Block}, "layers": {nn.LayerNorm, nn.Linear}}


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("units", "order"), select_each_value(WRAPPED_CLASSES, ORDERS))
def test_a_converted_model_under_fsdp1_trains_with_eager_bits(rank, world, units, order):
    """Its flat parameters are freed between uses, and parameters of modules are views of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy(WRAPPED_CLASSES[units])
    wrap = partial(FullyShardedDataParallel, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    models = make_eager_and_converted(lambda: make_vit(2), wrap, order, matmuls=True)
    assert_same_bits(*(train(model, make_patches(8)[rank::world]) for model in models))
