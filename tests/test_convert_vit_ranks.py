"""A converted ViT under DDP and FSDP2: the bits of the model that is not converted."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from vit_models import Block, LayerScale, Model, converted, kept, patches

import fastvit


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


def under_ddp(rank, world, static_graph, converts_last):
    results = []
    for convert in (False, True):
        model = Model(lambda: Block(scale=LayerScale), 2)
        if convert and not converts_last:
            converted(model)
        ddp = DistributedDataParallel(model, static_graph=static_graph)
        if convert and converts_last:
            converted(model)
        results.append(trained(ddp, patches(8)[rank::world], model.parameters))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_ddp(ranks, static_graph, converts_last):
    assert all(ranks.run(2, under_ddp, static_graph, converts_last))


def under_fsdp(rank, world, units, converts_last):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    results, bytes_kept = [], []
    for convert in (False, True):
        model = Model(lambda: Block(scale=LayerScale), 3)
        if convert and not converts_last:
            converted(model)
        for block in model.blocks:
            if units == "layers":
                for module in (block.norm1, block.norm2, block.attn, block.mlp.fc1, block.mlp.fc2):
                    fully_shard(module, mesh=mesh)
            if units != "model":
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if convert and converts_last:
            converted(model)

        def parameters(model=model):
            return [p.full_tensor() for p in model.parameters()]

        results.append(trained(model, patches(8)[rank::world], parameters))
        bytes_kept.append(kept(model, patches(32)))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, bytes_kept[1] / bytes_kept[0]


@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("units", ["model", "blocks", "layers"])
def test_fsdp2(ranks, units, converts_last):
    for same, share in ranks.run(2, under_fsdp, units, converts_last):
        assert same
        # a norm that is sharded by itself is so again when its block ends
        assert share < {"layers": 0.9, "blocks": 0.75, "model": 0.75}[units]


class Normed(torch.nn.Module):
    """Ends with a norm and an activation, whose result both the activation and the next module save."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(12, 12, 3, padding=1), torch.nn.BatchNorm2d(12)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def read_outside(rank, world, converts_last):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    eager = torch.nn.Sequential(Normed(), Normed(), torch.nn.Conv2d(12, 4, 1))
    x, results, bytes_kept = torch.rand(8, 12, 16, 16), [], []
    for convert in (False, True):
        model = copy.deepcopy(eager)
        if convert and not converts_last:
            fastvit.convert(model)
        for module in (*model[:2], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        if convert and converts_last:
            fastvit.convert(model)
        results.append(trained(model, x, lambda model=model: [p.full_tensor() for p in model.parameters()]))
        bytes_kept.append(kept(model, x))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True)), bytes_kept


@pytest.mark.parametrize("converts_last", [False, True])
def test_fsdp2_gathers_a_block_too_late_for_a_reader_behind_it(ranks, converts_last):
    """So what the head reads is kept, and not rebuilt from parameters of the block before it."""
    for same, (before, after) in ranks.run(2, read_outside, converts_last):
        assert same
        assert after < 1.01 * before


def under_fsdp1(rank, world, kinds, converts_last):
    """Its flat parameters are freed between uses, and parameters of modules are views of them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    results = []
    for convert in (False, True):
        model = Model(lambda: Block(scale=LayerScale), 2)
        if convert and not converts_last:
            converted(model, products=True)
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy(kinds), device_id=torch.device("cpu")
        )
        if convert and converts_last:
            converted(model, products=True)
        results.append(trained(sharded, patches(8)[rank::world], sharded.parameters))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("converts_last", [False, True])
@pytest.mark.parametrize("kinds", [{Block}, {torch.nn.LayerNorm, torch.nn.Linear}], ids=["blocks", "layers"])
def test_fsdp1(ranks, kinds, converts_last):
    assert all(ranks.run(2, under_fsdp1, kinds, converts_last))
