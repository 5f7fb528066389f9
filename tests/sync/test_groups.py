"""Groups that share statistics: several in one model, beside other collectives, faults that show late."""

import copy
import functools
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import EACH_BACKEND, on_ranks
from ops.tolerances import assert_close_enough
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import sync
from fastvit.sync.collective import CollectiveBackend
from fastvit.sync.statistics_group import StatisticsGroup, get_statistics_group
from sync.layer_steps import gather_samples, make_layers, make_leaf, run_step

CPU = torch.device("cpu")


def get_backend():
    return get_statistics_group(dist.group.WORLD, CPU).backend


def count_mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


@on_ranks(2, statistics=EACH_BACKEND)
def test_wider_layers_come_later(rank, world):
    torch.manual_seed(rank)
    mapped_before = count_mapped_segments()
    small, double, large = (fastvit.SyncBatchNorm(c, momentum=1.0) for c in (6, 8, 5000))
    for _ in range(2):
        for layer in (small, double.double(), large):
            x = make_leaf(layer.num_features, layer.weight.dtype).detach()
            layer(x)
            assert_close_enough(layer.running_mean, gather_samples(x).double().mean((0, 2)), row="running")
            run_step(layer)
    assert count_mapped_segments() <= mapped_before + 1  # narrower segments are unmapped


@on_ranks(4, statistics=EACH_BACKEND)
def test_several_groups_and_a_module_shared_between_them(rank, world):
    pairs = fastvit.create_syncbn_process_group(2)
    torch.manual_seed(0)
    samples = torch.randn(world, 6, 5)
    local_sample, samples_of_pair = samples[rank : rank + 1], samples[rank // 2 * 2 :][:2]
    first = fastvit.SyncBatchNorm(6, momentum=1.0)
    second = fastvit.InPlaceABNSync(6, momentum=1.0, group=pairs)
    y = first(local_sample)
    assert_close_enough(first.running_mean, samples.double().mean((0, 2)), row="running")
    second(y.clone())
    y_of_all = nn.functional.batch_norm(samples.double(), None, None, training=True)
    assert_close_enough(second.running_var, y_of_all[rank // 2 * 2 :][:2].var((0, 2)), row="running")
    for group, members in ((pairs, samples_of_pair), (None, samples), (pairs, samples_of_pair)):
        second.set_process_group(group)
        second(local_sample.clone())
        assert_close_enough(second.running_mean, members.double().mean((0, 2)), row="running")


@on_ranks(4)
def test_a_group_must_divide_the_ranks_and_contain_this_one(rank, world):
    assert dist.get_world_size(fastvit.create_syncbn_process_group(2)) == 2
    assert fastvit.create_syncbn_process_group(0) is None
    for size in (3, -1, world + 1):
        with pytest.raises(ValueError, match="must be|must not exceed|at least 0"):
            fastvit.create_syncbn_process_group(size)
    group_of_others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"does not contain this rank .global rank {rank}"):
            fastvit.InPlaceABNSync(6, group=group_of_others)(make_leaf().detach())


@on_ranks(2)
@pytest.mark.parametrize(
    ("reentrant", "statistics"), [(True, "collective"), (False, "peer")], ids=["reentrant", "not reentrant"]
)
def test_checkpointed_sync_layers_give_the_same_gradients(rank, world, reentrant, statistics):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv1d(6, 6, 1), fastvit.SyncBatchNorm(6), nn.Conv1d(6, 6, 1), fastvit.InPlaceABNSync(6)
    )
    twin = copy.deepcopy(net)
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    net(x).square().sum().backward()
    expected, x.grad = x.grad, None
    y = checkpoint(twin[:2], x, use_reentrant=reentrant)
    checkpoint(twin[2:], y, use_reentrant=reentrant).square().sum().backward()
    assert_close_enough(x.grad, expected, row="in_place_layer")
    for parameter, expected in zip(twin.parameters(), net.parameters(), strict=True):
        assert_close_enough(parameter.grad, expected.grad, row="in_place_layer")


@on_ranks(2, statistics="collective")
def test_fully_sharded_layers_give_the_gradients_of_whole_ones(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    layers = fastvit.SyncBatchNorm(6), fastvit.InPlaceABNSync(6)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), layer) for layer in layers))
    whole = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (world,))
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        net(x).square().sum().backward()
        whole(x).square().sum().backward()
    for parameter, expected in zip(net.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(expected.grad, op=dist.ReduceOp.SUM)
        assert_close_enough(parameter.grad.full_tensor(), expected.grad / world, row="in_place_layer")


@on_ranks(2, statistics=EACH_BACKEND)
def test_join_with_uneven_inputs_stops_all_ranks(rank, world):
    """DDP's Join stands in for DDP's own collectives only."""
    net = nn.parallel.DistributedDataParallel(fastvit.SyncBatchNorm(6))
    steps = 0
    with (
        pytest.raises(RuntimeError, match="exhausted (all )?inputs"),
        net.join(throw_on_early_termination=True),
    ):
        for _ in range(2 + rank):
            net(torch.randn(4, 6)).sum().backward()
            steps += 1
    run_step(net.module)
    assert steps == 2


@on_ranks(2, statistics=EACH_BACKEND)
def test_a_compiled_rank_meets_one_that_is_not(rank, world):
    torch.manual_seed(1)
    layers = (
        fastvit.SyncBatchNorm(6),
        fastvit.InPlaceABNSync(6),
        fastvit.BatchNormActSync(6, activation="gelu"),
    )
    net = nn.Sequential(nn.Conv1d(6, 6, 1), *layers)
    twin = copy.deepcopy(net)
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(rank))
    net(x).square().sum().backward()
    run_twin = torch.compile(twin, fullgraph=True, backend="aot_eager") if rank == 0 else twin
    run_twin(x).square().sum().backward()
    for parameter, expected in zip(twin.parameters(), net.parameters(), strict=True):
        assert_close_enough(parameter.grad, expected.grad, row="in_place_layer")
    for buffer, expected in zip(twin.buffers(), net.buffers(), strict=True):
        assert_close_enough(buffer.float(), expected.float(), row="running")


@on_ranks(2, statistics="collective")
@pytest.mark.parametrize("place", ["forward", "backward", "evaluation", "check"])
def test_a_mismatch_that_the_host_sees_late_is_raised_once(rank, world, place):
    """As on a GPU, whose host does not wait: NaN first, an error at the next call, no buffer changes."""
    a, b = layers = make_layers(2)
    run_step(a), run_step(b)
    backend = get_backend()
    # The check of CpuCollectiveBackend is left out.
    backend.merge_over_ranks = functools.partial(CollectiveBackend.merge_over_ranks, backend)
    run_step(a), run_step(b)
    sync.check()
    before = [t.clone() for layer in layers for t in (layer.running_mean, layer.running_var)]
    y = layers[rank](torch.randn(4, 6, requires_grad=True))
    assert y.isnan().all()
    after = [t for layer in layers for t in (layer.running_mean, layer.running_var)]
    assert all(map(torch.equal, after, before))
    calls = {
        "forward": lambda: a(torch.randn(4, 6)),
        "backward": y.sum().backward,
        "evaluation": lambda: copy.deepcopy(a).eval()(torch.randn(4, 6)),
        "check": sync.check,
    }
    expected = f"rank {rank} is in forward of layer {rank} .*, but rank {1 - rank}"
    with pytest.raises(RuntimeError, match=expected):
        calls[place]()
    sync.check()
    with pytest.raises(RuntimeError, match="an exchange of this group has failed"):
        a(torch.randn(4, 6))


@on_ranks(2, statistics=EACH_BACKEND)
def test_step_numbers_wrap_below_2_to_the_24(rank, world):
    """Steps are 1, 2, 3, ... and wrap where float32 does not represent them exactly."""
    run_step(fastvit.SyncBatchNorm(6))
    backend = get_backend()
    assert backend._forward_index == 1
    assert [backend.next_forward_index() for _ in range(3)] == [2, 3, 4]
    backend._forward_index = 2**24 - 2
    assert [backend.next_forward_index() for _ in range(3)] == [2**24 - 1, 0, 1]


def test_every_copy_of_a_layer_is_a_layer_of_its_own():
    layer = fastvit.SyncBatchNorm(3)
    copies = [layer, copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies += fastvit.convert_syncbn_model(nn.ModuleList([nn.BatchNorm1d(3), fastvit.InPlaceABN(3)]))
    assert len({one.layer_id for one in copies}) == 6
    assert not hasattr(fastvit.revert_syncbn_model(copies[-2]), "layer_id")


def test_a_first_call_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group = StatisticsGroup.__new__(StatisticsGroup)  # of GPUs, without a process group
    group.__dict__.update(_device=torch.device("cuda"), _layer_indices={}, _pid=os.getpid())
    with pytest.raises(RuntimeError, match=r"first call of a layer .bn, 6 channels. .* run a step before"):
        group.compute_moments(sync.LayerKey("bn", 1, 0.1), torch.zeros(2, 6), 1)


def test_replaced_backends_are_still_checked(monkeypatch):
    """A CUDA graph may use the backend with which its exchanges were captured."""
    calls, group = [], StatisticsGroup.__new__(StatisticsGroup)
    group._backends = [
        SimpleNamespace(raise_reported_fault=lambda wait, k=k: calls.append((k, wait))) for k in range(2)
    ]
    monkeypatch.setattr("fastvit.sync.statistics_group._groups", {"a group": {"cuda": group}})
    sync.check(wait=True)
    assert calls == [(0, True), (1, True)]


def test_a_group_has_a_backend_for_each_device(monkeypatch):
    """A module on several GPUs of one process: the peers' memory is mapped on one of them."""
    monkeypatch.setattr(
        "fastvit.sync.statistics_group.StatisticsGroup",
        lambda process_group, device: SimpleNamespace(at=device),
    )
    process_group = type("ProcessGroup", (), {})()
    first, second = (get_statistics_group(process_group, torch.device("cuda", i)) for i in range(2))
    assert first is not second and get_statistics_group(process_group, torch.device("cuda", 0)) is first


def test_old_names_attributes_and_arguments_warn():
    for old, new in (
        ("LOCAL", "LOCAL_TRANSPORT"),
        ("Local", "LocalTransport"),
        ("Shared", "GroupTransport"),
        ("transport_for", "get_transport"),
    ):
        with pytest.warns(DeprecationWarning, match=f"fastvit.sync.{old} is fastvit.sync.{new} now"):
            assert getattr(sync, old) is getattr(sync, new)
    x = torch.randn(4, 3)
    expected = "LocalTransport.moments is LocalTransport.compute_moments now"
    with pytest.warns(DeprecationWarning, match=expected):
        assert torch.equal(sync.LOCAL_TRANSPORT.moments(x, 1)[0], fastvit.ops.bn_stats(x, 1))
    with pytest.warns(DeprecationWarning, match="GroupTransport.sums is GroupTransport.compute_sums now"):
        assert sync.GroupTransport(None, None).sums
    with pytest.warns(DeprecationWarning, match="LayerKey.*number=.*layer_id="):
        key = sync.LayerKey("bn", number=3)
    with pytest.warns(DeprecationWarning, match="LayerKey.number is LayerKey.layer_id now"):
        assert key.number == key.layer_id == 3
    assert pickle.loads(pickle.dumps(key)) == key == sync.LayerKey("bn", 3)
