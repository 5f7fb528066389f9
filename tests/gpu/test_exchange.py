"""Exchanges on a GPU: NCCL, kernels of ranks that read each other's memory, processes with CUDA IPC."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from ops import reference
from ops.tolerances import assert_close_enough
from sync.one_process import Loopback
from torch import nn

from fastvit import InPlaceABNSync, SyncBatchNorm, ops, sync
from fastvit.sync.protocol import Tag
from gpu.stacks import DEVICE, copy_results, make_images, make_stack, run_step

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda_ipc() -> None:
    """Skips if the system forbids memory to be opened by another process: WSL, MIG, some containers."""
    try:
        torch.ops.fastvit.ipc_allocate(64, 0)
    except RuntimeError as error:
        pytest.skip(f"no CUDA IPC here: {str(error).splitlines()[0]}")


@pytest.mark.parametrize(
    "statistics,backend", [("collective", "Collective"), ("auto", "CudaIpc"), ("peer", "CudaIpc")]
)
def test_a_group_of_one_that_exchanges_gives_the_results_without_a_group(
    monkeypatch, request, statistics, backend
):
    """NCCL, or the layers' kernels, hand back what was sent, in the order of the stream."""
    if backend == "CudaIpc":
        request.getfixturevalue("cuda_ipc")
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    monkeypatch.setenv("FASTVIT_STATISTICS", statistics)
    plain, synchronised = make_stack("planes"), make_stack("planes")
    synchronised.load_state_dict(plain.state_dict())
    leaf, dy = make_images("planes").requires_grad_(), make_images("planes", 1)
    expected = copy_results(run_step(plain, leaf, dy), plain)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        monkeypatch.setattr(
            sync, "get_transport", lambda _, layer: sync.GroupTransport(dist.group.WORLD, layer)
        )
        actual = copy_results(run_step(synchronised, leaf, dy), synchronised)
        assert f": {backend}" in " ".join(sync.describe_groups())
        torch.cuda.set_sync_debug_mode("error")
        run_step(synchronised, leaf, dy)  # the host waits for no exchange
        torch.cuda.set_sync_debug_mode("default")
        sync.check(wait=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
    for a, b in zip(actual, expected, strict=True):
        assert_close_enough(a.double(), b.double(), row="in_place_layer", dtype=torch.float32)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_kernels_of_several_ranks_exchange_at_full_size_and_in_graphs(world):
    """Every rank has a stream. Repeats and replays give the same bits."""
    loopback = Loopback(world, device=DEVICE)
    inputs = [torch.randn(16, 256, 28, 28, device=DEVICE) + rank for rank in range(world)]
    gradients = [torch.randn_like(x) for x in inputs]
    weight, bias = torch.rand(256, device=DEVICE) + 0.5, torch.rand(256, device=DEVICE)
    options = {"weight": weight, "bias": bias, "activation": "leaky_relu"}
    from_output = options | {"from_output": True}

    def run_whole_batch():
        """Returns y and dx of each rank, with the moments and sums merged by the reference."""
        moments = reference.merge_moments(torch.stack([ops.bn_stats(x) for x in inputs]))
        operands = []
        for x, dy in zip(inputs, gradients, strict=True):
            y = x.clone()
            operands.append((y, dy, ops.bn_forward_inplace(y, **options, moments=moments)))
        local_sums = torch.cat([ops.bn_reduce(*one, **from_output) for one in operands])
        global_sums = local_sums.double().sum(0).float()
        return [
            (one[0], ops.bn_backward(*one, **from_output, global_sums=global_sums)[0]) for one in operands
        ]

    def run_ranks(forward_index):
        def run_rank(rank, backend):
            y, dy, tag = inputs[rank].clone(), gradients[rank], Tag(0, forward_index)
            saved = ops.bn_forward_inplace(y, **options, moments=backend.compute_moments(y, 1, tag))
            sums = backend.compute_sums(lambda e: ops.bn_reduce(y, dy, saved, **from_output, exchange=e), tag)
            return y, ops.bn_backward(y, dy, saved, **from_output, global_sums=sums[1])[0]

        return loopback.run_each(run_rank)

    def assert_same_bits(results):
        for actual, expected in zip(results, first_results, strict=True):
            assert all(map(torch.equal, actual, expected))

    all_expected, first_results = run_whole_batch(), run_ranks(1)
    for actual, expected in zip(first_results, all_expected, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert_close_enough(a, b.double(), row="in_place_layer")
    for forward_index in (2, 3):
        assert_same_bits(run_ranks(forward_index))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_ranks(0)
    for _ in range(3):  # every replay is an exchange of its own: the epoch is in device memory
        for tensors in captured:
            for t in tensors:
                t.zero_()
        graph.replay()
        assert_same_bits(captured)
    for backend in loopback.ranks:
        backend.raise_reported_fault(wait=True)


def test_exchanges_of_a_group_follow_each_other_on_any_stream():
    loopback, numbers = Loopback(1, device=DEVICE), torch.arange(64.0, device=DEVICE)[None]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    totals = []
    for step in range(1, 31):
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda._sleep(100_000 * (step % 2))  # the first exchange would end last
            totals.append(loopback.ranks[0].merge_over_ranks(numbers * step, Tag(0, step)))
    loopback.ranks[0].raise_reported_fault(wait=True)
    for step, sums in enumerate(totals, 1):
        assert torch.equal(sums, torch.cat([step * numbers] * 2))


def test_a_peer_that_never_sends_is_named_and_nothing_is_kept():
    """The GPU stops waiting, and the next call of the host raises."""
    loopback, x = Loopback(2, timeout=0.2, device=DEVICE), make_images("planes")
    running = {
        "running_mean": torch.zeros(x.shape[1], device=DEVICE),
        "running_var": torch.ones(x.shape[1], device=DEVICE),
        "num_batches_tracked": torch.tensor(3, device=DEVICE),
    }
    old_values = [t.clone() for t in running.values()]
    y, saved = ops.bn_forward(x, moments=loopback.ranks[0].compute_moments(x, 1, Tag(4, 1)), **running)
    message = "rank 0 in forward of layer 4, step 1: nothing from rank 1 within"
    with pytest.raises(RuntimeError, match=message):
        loopback.ranks[0].raise_reported_fault(wait=True)
    assert y.isnan().all() and saved.isnan().all() and all(map(torch.equal, running.values(), old_values))


def _make_batch(rank: int) -> torch.Tensor:
    """Returns images of a rank. Each rank has another number of samples, of another mean."""
    return torch.randn(6 + rank, 64, 14, 14, generator=torch.Generator().manual_seed(rank)) + rank


def _train_with_peers(rank: int, world: int, store: str, results) -> None:
    """Trains as one of some processes on one GPU, and puts the results into a queue."""
    os.environ["FASTVIT_STATISTICS"] = "peer"
    torch.cuda.set_device(0)
    timeout = datetime.timedelta(seconds=40)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    leaf, tensors = _make_batch(rank).to(DEVICE).requires_grad_(), []
    for layer in (InPlaceABNSync(64).to(DEVICE), SyncBatchNorm(64, fuse_relu=True).to(DEVICE)):
        for _ in range(5):
            y = layer(leaf.clone())
            (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) * (1 + rank))
        tensors.append([y.detach().cpu(), dx.cpu(), layer.running_mean.cpu()])
    sync.check(wait=True)
    results.put((rank, " ".join(sync.describe_groups()), tensors))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def _run_processes(world: int, store: str) -> dict:
    """Returns the description of groups and the tensors of each rank."""
    context, end = torch.multiprocessing.get_context("spawn"), time.monotonic() + 50
    queue, results = context.Queue(), {}
    processes = [
        context.Process(target=_train_with_peers, args=(rank, world, store, queue)) for rank in range(world)
    ]
    try:
        for process in processes:
            process.start()
        while len(results) < world:
            rank, groups, tensors = queue.get(timeout=max(0, end - time.monotonic()))
            results[rank] = groups, tensors
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_processes_on_one_gpu_give_the_results_of_one_batch(world, tmp_path, cuda_ipc):
    results = _run_processes(world, str(tmp_path / "store"))
    assert all("CudaIpc" in groups for groups, _ in results.values())
    batches = [_make_batch(rank).double() for rank in range(world)]
    sizes = [len(batch) for batch in batches]
    leaf = torch.cat(batches).requires_grad_()
    dy = torch.cat([torch.full_like(batch, 1 + rank) for rank, batch in enumerate(batches)])
    normalized = nn.functional.batch_norm(leaf, None, None, training=True)
    expected_mean = (1 - 0.9**5) * leaf.mean((0, 2, 3))
    outputs = {"in_place_layer": nn.functional.leaky_relu(normalized, 0.01), "layer": normalized.relu()}
    for layer, (row, expected_y) in enumerate(outputs.items()):
        (expected_dx,) = torch.autograd.grad(expected_y, leaf, dy, retain_graph=True)
        parts = zip(expected_y.split(sizes), expected_dx.split(sizes), strict=True)
        for rank, (rank_y, rank_dx) in enumerate(parts):
            y, dx, mean = results[rank][1][layer]
            assert_close_enough(y, rank_y, row=row)
            assert_close_enough(dx, rank_dx, row=row, least_scale=1.0)
            assert_close_enough(mean, expected_mean, row=row)
