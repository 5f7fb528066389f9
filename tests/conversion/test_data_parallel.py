"""A converted ViT under DDP and FSDP2: the bits of the model that is not converted."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from conversion.vit_models import Block, BlockModel, LayerScale, make_patches, measure_kept_bytes


def trained(model, x, parameters):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in parameters())]


def compared(make, wrap, x, parameters, converts_last, **options):
    """Whether a wrapped model trains as without `convert`, and with FSDP2 the bytes that both keep."""
    results, sizes = [], []
    for convert in (False, True):
        model = make()
        if convert and not converts_last:
            fastvit.convert(model, **options)
        wrapped = wrap(model)
        if convert and converts_last:
            fastvit.convert(model, **options)
        results.append(trained(wrapped, x, lambda wrapped=wrapped: parameters(wrapped)))
        if parameters is whole:  # a forward of FSDP2 can run alone
            sizes.append(measure_kept_bytes(wrapped, x))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True)), *sizes


def blocks(depth):
    return lambda: BlockModel(lambda: Block(scale=LayerScale), depth)


def under_ddp(rank, world, static_graph, converts_last):
    wrap = functools.partial(DistributedDataParallel, static_graph=static_graph)
    return compared(blocks(2), wrap, make_patches(8)[rank::world], nn.Module.parameters, converts_last)


@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_ddp_of_a_converted_model_gives_eager_gradients(ranks, static_graph, converts_last):
    assert all(same for same, *_ in ranks.run(2, under_ddp, static_graph, converts_last))


def sharded(modules, model, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for module in (*modules, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    return model


def whole(model):
    return [p.full_tensor() for p in model.parameters()]


def under_fsdp(rank, world, units, converts_last):
    def wrap(model):
        parts = [] if units == "model" else list(model.blocks)
        for block in model.blocks if units == "layers" else ():
            parts[:0] = block.norm1, block.norm2, block.attn, block.mlp.fc1, block.mlp.fc2
        return sharded(parts, model, world)

    return compared(blocks(3), wrap, make_patches(32)[rank::world], whole, converts_last)


@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("units", ["model", "blocks", "layers"])
def test_fsdp2_of_a_converted_model_gives_eager_gradients(ranks, units, converts_last):
    for same, before, after in ranks.run(2, under_fsdp, units, converts_last):
        assert same
        # a norm that is sharded by itself is so again when its block ends
        assert after < {"layers": 0.9, "blocks": 0.75, "model": 0.75}[units] * before


class Normed(nn.Module):
    """Ends with a norm and an activation, whose result both the activation and the next module save."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def read_outside(rank, world, converts_last):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Normed(), Normed(), nn.Conv2d(12, 4, 1))

    x = torch.rand(8, 12, 48, 48)  # parameters that are gathered at the time weigh little
    return compared(make, lambda model: sharded(model[:2], model, world), x, whole, converts_last)


@pytest.mark.parametrize("converts_last", [False, True])
def test_fsdp2_gathers_a_block_too_late_for_a_reader_behind_it(ranks, converts_last):
    """So what the head reads is kept, and not recomputed from parameters of the block before it."""
    for same, before, after in ranks.run(2, read_outside, converts_last):
        assert same
        assert after < 1.01 * before


def under_fsdp1(rank, world, kinds, converts_last):
    """Its flat parameters are freed between uses, and parameters of modules are views of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def wrap(model):
        policy = ModuleWrapPolicy(kinds)
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))

    x = make_patches(8)[rank::world]
    return compared(blocks(2), wrap, x, nn.Module.parameters, converts_last, matmuls=True)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("kinds", [{Block}, {nn.LayerNorm, nn.Linear}], ids=["blocks", "layers"])
def test_fsdp1_of_a_converted_model_gives_eager_gradients(ranks, kinds, converts_last):
    assert all(same for same, *_ in ranks.run(2, under_fsdp1, kinds, converts_last))
