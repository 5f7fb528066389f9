"""The way by which a group shares statistics, the choice of it, and other collectives in a model."""

import copy
import errno
import functools
import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from on_ranks import EACH_BACKEND
from ops.tolerances import assert_close_enough
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import info, sync
from fastvit.sync import shared_memory
from fastvit.sync.collective import CollectiveBackend
from fastvit.sync.statistics_group import StatisticsGroup, get_statistics_group

CPU = torch.device("cpu")


def way() -> str:
    return get_statistics_group(dist.group.WORLD, CPU).describe()


def step(layer, channels=6, dtype=torch.float32):
    x = torch.randn(4, channels, 3, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    return y


def no_space(file, offset, size):
    raise OSError(errno.ENOSPC, "No space left on device")


def chooses(rank, world, settings, breaks_on):
    os.environ["FASTVIT_STATISTICS"] = settings[rank]
    if rank == breaks_on:
        shared_memory._map_segment = lambda *_: os.open("/nowhere", os.O_RDONLY)
    if breaks_on == "space":
        os.posix_fallocate = no_space
    if breaks_on == "folder":
        shared_memory.SHM_DIR = Path("/proc")  # where nothing can be made
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("fastvit.sync")
    log.addHandler(handler), log.setLevel(logging.DEBUG)
    try:
        step(fastvit.SyncBatchNorm(6))
        (record,) = records
        assert way() in record.getMessage() and way() in info.facts()["statistics"]
        # A failure is a warning, of one rank; the user's wish is not.
        assert (record.levelname == "WARNING") == (breaks_on is not None and rank == 0)
        return way()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        log.removeHandler(handler)
        shared_memory._map_segment, shared_memory.SHM_DIR, os.posix_fallocate = originals


originals = shared_memory._map_segment, shared_memory.SHM_DIR, os.posix_fallocate


@pytest.mark.parametrize(
    "settings,breaks_on,said",
    [
        (["auto", "auto"], None, "group 0 (2 ranks, cpu): SharedMemory, host"),
        (["auto", "peer"], None, "group 0 (2 ranks, cpu): SharedMemory, host"),
        (["peer", "collective"], None, "cannot use peer memory: FASTVIT_STATISTICS=collective"),
        (["auto", "collective"], None, "group 0 (2 ranks, cpu): Collective: FASTVIT_STATISTICS=collective"),
        (["auto", "auto"], 1, "Collective: rank 1: [Errno 2] No such file"),
        (["auto", "auto"], "space", "Collective: rank 0: [Errno 28] No space left on device"),
        (["auto", "auto"], "folder", "group 0 (2 ranks, cpu): Collective: "),
        (["auto", "peer"], 0, "FASTVIT_STATISTICS=peer, but group 0 cannot use peer memory: rank"),
        (["auto", "shm"], None, "FASTVIT_STATISTICS is 'shm'; auto, collective, peer expected"),
    ],
)
def test_all_ranks_choose_the_same(ranks, settings, breaks_on, said):
    results = ranks.run(2, chooses, settings, breaks_on)
    assert sorted(results[0]) == sorted(results[1])  # which rank answered first may differ
    assert said in results[0]


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


def grows(rank, world):
    torch.manual_seed(rank)
    before = mapped()
    small, double, large = (fastvit.SyncBatchNorm(c, momentum=1.0) for c in (6, 8, 5000))
    for _ in range(2):
        for layer, dtype in (
            (small, torch.float32),
            (double.double(), torch.float64),
            (large, torch.float32),
        ):
            x = torch.randn(4, layer.num_features, 3, dtype=dtype)
            everyone = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(everyone, x)
            layer(x)
            assert_close_enough(layer.running_mean, torch.cat(everyone).double().mean((0, 2)), row="running")
            step(layer, layer.num_features, dtype)
    assert mapped() <= before + 1  # narrower segments are unmapped


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_wider_layers_come_later(ranks, statistics):
    ranks.run(2, grows, statistics=statistics)


def groups_in_one_model(rank, world):
    pairs = fastvit.create_syncbn_process_group(2)
    torch.manual_seed(0)
    samples = torch.randn(world, 6, 5)
    one, two = fastvit.SyncBatchNorm(6, momentum=1.0), fastvit.InPlaceABNSync(6, momentum=1.0, group=pairs)
    y = one(samples[rank : rank + 1])
    assert_close_enough(one.running_mean, samples.double().mean((0, 2)), row="running")
    two(y.clone())
    mine = nn.functional.batch_norm(samples.double(), None, None, training=True)[rank // 2 * 2 :][:2]
    assert_close_enough(two.running_var, mine.var((0, 2)), row="running")
    for group, members in (
        (pairs, samples[rank // 2 * 2 :][:2]),
        (None, samples),
        (pairs, samples[rank // 2 * 2 :][:2]),
    ):
        two.set_process_group(group)  # one module, now with these, now with those
        two(samples[rank : rank + 1].clone())
        assert_close_enough(two.running_mean, members.double().mean((0, 2)), row="running")
    assert dist.get_world_size(pairs) == 2 and fastvit.create_syncbn_process_group(0) is None
    for bad in (3, -1, world + 1):
        with pytest.raises(ValueError, match="must be|must not exceed|at least 0"):
            fastvit.create_syncbn_process_group(bad)
    other = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"does not contain this rank .global rank {rank}"):
            fastvit.InPlaceABNSync(6, group=other)(samples[rank : rank + 1].clone())


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_several_groups_and_a_module_shared_between_them(ranks, statistics):
    ranks.run(4, groups_in_one_model, statistics=statistics)


def recomputed(rank, world, reentrant):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv1d(6, 6, 1), fastvit.SyncBatchNorm(6), nn.Conv1d(6, 6, 1), fastvit.InPlaceABNSync(6)
    )
    twin = copy.deepcopy(net)
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    net(x).square().sum().backward()
    want, x.grad = x.grad, None
    y = checkpoint(twin[:2], x, use_reentrant=reentrant)
    checkpoint(twin[2:], y, use_reentrant=reentrant).square().sum().backward()
    assert_close_enough(x.grad, want, row="in_place_layer")
    for got, expected in zip(twin.parameters(), net.parameters(), strict=True):
        assert_close_enough(got.grad, expected.grad, row="in_place_layer")


@pytest.mark.parametrize("statistics", EACH_BACKEND)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_sync_layers_give_the_same_gradients(ranks, reentrant, statistics):
    ranks.run(2, recomputed, reentrant, statistics=statistics)


def sharded(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    blocks = [
        nn.Sequential(nn.Linear(6, 6), layer(6)) for layer in (fastvit.SyncBatchNorm, fastvit.InPlaceABNSync)
    ]
    net = nn.Sequential(*blocks)
    twin = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (world,))
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        net(x).square().sum().backward()
        twin(x).square().sum().backward()
    for got, want in zip(net.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(want.grad, op=dist.ReduceOp.SUM)
        assert_close_enough(got.grad.full_tensor(), want.grad / world, row="in_place_layer")


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_fully_sharded(ranks, statistics):
    ranks.run(2, sharded, statistics=statistics)


def uneven_inputs(rank, world):
    """DDP's Join stands in for DDP's own collectives only: with synchronised layers it stops all ranks."""
    net = nn.parallel.DistributedDataParallel(fastvit.SyncBatchNorm(6))
    done = 0
    with (
        pytest.raises(RuntimeError, match="exhausted (all )?inputs"),
        net.join(throw_on_early_termination=True),
    ):
        for _ in range(2 + rank):
            net(torch.randn(4, 6)).sum().backward()
            done += 1
    step(net.module)
    return done


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_join_with_uneven_inputs(ranks, statistics):
    assert ranks.run(2, uneven_inputs, statistics=statistics) == [2, 2]


def one_compiles(rank, world):
    torch.manual_seed(1)
    norms = (
        fastvit.SyncBatchNorm(6),
        fastvit.InPlaceABNSync(6),
        fastvit.BatchNormActSync(6, activation="gelu"),
    )
    net = nn.Sequential(nn.Conv1d(6, 6, 1), *norms)
    compiled = copy.deepcopy(net)
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(rank))
    net(x).square().sum().backward()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager") if rank == 0 else compiled
    run(x).square().sum().backward()
    for got, want in zip(compiled.parameters(), net.parameters(), strict=True):
        assert_close_enough(got.grad, want.grad, row="in_place_layer")
    for got, want in zip(compiled.buffers(), net.buffers(), strict=True):
        assert_close_enough(got.float(), want.float(), row="running")


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_a_compiled_rank_meets_one_that_is_not(ranks, statistics):
    ranks.run(2, one_compiles, statistics=statistics)


def bits(rank, world):
    torch.manual_seed(rank)
    layer, x = fastvit.InPlaceABNSync(70), torch.randn(4 + rank, 70, 3, requires_grad=True)
    y = layer(x.clone())
    y.square().sum().backward()
    return [t.tolist() for t in (y, x.grad, layer.running_mean, layer.running_var)]


def test_the_bits_are_those_of_shared_memory(ranks):
    assert ranks.run(3, bits, statistics="collective") == ranks.run(3, bits, statistics="peer")


def checked_later(rank, world, where):
    """As on a GPU, whose host does not wait: NaN first, an error at the next call, no buffer changes."""
    a, b = fastvit.SyncBatchNorm(6), fastvit.SyncBatchNorm(6)
    step(a), step(b)
    backend = get_statistics_group(dist.group.WORLD, CPU).backend
    # Without the check of CpuCollectiveBackend.
    backend.merge_over_ranks = functools.partial(CollectiveBackend.merge_over_ranks, backend)
    step(a), step(b)
    sync.check()
    before = [t.clone() for layer in (a, b) for t in (layer.running_mean, layer.running_var)]
    y = (b if rank else a)(torch.randn(4, 6, requires_grad=True))
    assert y.isnan().all()
    after = [t for layer in (a, b) for t in (layer.running_mean, layer.running_var)]
    assert all(map(torch.equal, after, before))
    calls = {
        "forward": lambda: a(torch.randn(4, 6)),
        "backward": y.sum().backward,
        "evaluation": lambda: copy.deepcopy(a).eval()(torch.randn(4, 6)),
        "check": sync.check,
    }
    with pytest.raises(
        RuntimeError, match=f"rank {rank} is in forward of layer {rank} .*, but rank {1 - rank}"
    ):
        calls[where]()
    sync.check()  # it is said once
    with pytest.raises(RuntimeError, match="an exchange of this group has failed"):
        a(torch.randn(4, 6))


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation", "check"])
def test_a_mismatch_that_the_host_sees_later(ranks, where):
    ranks.run(2, checked_later, where, statistics="collective")


def test_every_copy_of_a_layer_is_a_layer_of_its_own():
    layer = fastvit.SyncBatchNorm(3)
    copies = [layer, copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies += fastvit.convert_syncbn_model(nn.ModuleList([nn.BatchNorm1d(3), fastvit.InPlaceABN(3)]))
    assert len({one.layer_id for one in copies}) == 6
    assert not hasattr(fastvit.revert_syncbn_model(copies[-2]), "layer_id")


def test_a_first_call_is_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    shared = StatisticsGroup.__new__(StatisticsGroup)  # of GPUs, without a group
    shared.__dict__.update(_device=torch.device("cuda"), _layer_indices={}, _pid=os.getpid())
    with pytest.raises(RuntimeError, match=r"first call of a layer .bn, 6 channels. .* run a step before"):
        shared.compute_moments(sync.LayerKey("bn", 1, 0.1), torch.zeros(2, 6), 1)


def test_replaced_backends_are_still_checked(monkeypatch):
    """A CUDA graph may use the backend with which its exchanges were captured."""
    asked, shared = [], StatisticsGroup.__new__(StatisticsGroup)
    shared._backends = [
        SimpleNamespace(raise_reported_fault=lambda wait, k=k: asked.append((k, wait))) for k in range(2)
    ]
    monkeypatch.setattr("fastvit.sync.statistics_group._groups", {"a group": {"cuda": shared}})
    sync.check(wait=True)
    assert asked == [(0, True), (1, True)]


def test_a_group_has_a_backend_for_each_device(monkeypatch):
    """A module on several GPUs of one process: the peers' memory is mapped on one of them."""
    monkeypatch.setattr(
        "fastvit.sync.statistics_group.StatisticsGroup",
        lambda process_group, device: SimpleNamespace(at=device),
    )
    process_group = type("ProcessGroup", (), {})()
    first, second = (get_statistics_group(process_group, torch.device("cuda", i)) for i in range(2))
    assert first is not second and get_statistics_group(process_group, torch.device("cuda", 0)) is first


@pytest.mark.parametrize(
    "variable,world,why", [("NCCL_P2P_DISABLE", 2, "NCCL_P2P_DISABLE=1"), ("_", 65, "65 ranks, more than 64")]
)
def test_collectives_where_gpus_have_no_peer_memory(monkeypatch, variable, world, why):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(
        "fastvit.sync.statistics_group.GpuCollectiveBackend", lambda *_: SimpleNamespace(name="Collective")
    )
    shared = StatisticsGroup.__new__(StatisticsGroup)  # of GPUs, without a group
    consensus = SimpleNamespace(
        rank=0, world_size=world, gather_answers=lambda question, answer: {answer: [0, 1]}
    )
    shared.__dict__.update(_device=torch.device("cuda"), _consensus=consensus, _process_group=lambda: shared)
    assert shared._negotiate_backend(6, torch.float32)[1:] == (f"Collective: {why}", logging.DEBUG)


def counts(rank, world):
    """Steps are 1, 2, 3, ... and wrap where float32 does not represent them exactly."""
    layer = fastvit.SyncBatchNorm(6)
    step(layer)
    transport = get_statistics_group(dist.group.WORLD, CPU).backend
    steps = [transport._forward_index] + [transport.next_forward_index() for _ in range(3)]
    transport._forward_index = 2**24 - 2
    return steps + [transport.next_forward_index() for _ in range(3)]


@pytest.mark.parametrize("statistics", EACH_BACKEND)
def test_step_numbers_wrap_below_2_to_the_24(ranks, statistics):
    assert ranks.run(2, counts, statistics=statistics) == [[1, 2, 3, 4, 2**24 - 1, 0, 1]] * 2


def test_without_a_group():
    assert sync.default_group(None) is None
    assert "FASTVIT_STATISTICS=" in sync.available_backends() and not sync.describe_groups()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LOCAL", "LOCAL_TRANSPORT"),
        ("Local", "LocalTransport"),
        ("Shared", "GroupTransport"),
        ("transport_for", "get_transport"),
    ],
)
def test_old_names_warn(old, new):
    with pytest.warns(DeprecationWarning, match=f"fastvit.sync.{old} is fastvit.sync.{new} now"):
        assert getattr(sync, old) is getattr(sync, new)


def test_old_attributes_and_arguments_warn():
    x = torch.randn(4, 3)
    with pytest.warns(
        DeprecationWarning, match="LocalTransport.moments is LocalTransport.compute_moments now"
    ):
        assert torch.equal(sync.LOCAL_TRANSPORT.moments(x, 1)[0], fastvit.ops.bn_stats(x, 1))
    with pytest.warns(DeprecationWarning, match="GroupTransport.sums is GroupTransport.compute_sums now"):
        assert sync.GroupTransport(None, None).sums
    with pytest.warns(DeprecationWarning, match="LayerKey.*number=.*layer_id="):
        key = sync.LayerKey("bn", number=3)
    with pytest.warns(DeprecationWarning, match="LayerKey.number is LayerKey.layer_id now"):
        assert key.number == key.layer_id == 3
    assert pickle.loads(pickle.dumps(key)) == key == sync.LayerKey("bn", 3)
