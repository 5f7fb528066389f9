"""A converted ViT under DDP and FSDP2: the bits of the model that is not converted."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from vit_models import Block, LayerScale, Model, converted, kept, patches


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
        # a norm that is sharded by itself, or before it was converted, is so again when its block ends
        assert share < {"layers": 0.9, "blocks": 0.8 if converts_last else 0.75, "model": 0.75}[units]


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
