"""Tests that need a GPU: streams, graphs, host synchronisation, launches, memory, mixed precision, NCCL.

That the ops and layers are right on a GPU is shown by the other tests, run with FASTVIT_TEST_DEVICE=cuda.
"""

import copy
import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from ops import reference
from ops.inputs import LAYOUTS, LayerInputs, Layout, to_channels_last
from ops.tolerances import assert_close_enough
from sync.one_process import Loopback
from torch import nn

import fastvit
from fastvit import InPlaceABN, InPlaceABNSync, SyncBatchNorm, functional, ops, sync
from fastvit.sync.protocol import Tag

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"

# Large enough that several blocks share a channel, and one of them merges their partial results; and small.
SHAPES = {
    "planes": ((16, 8, 40, 40), torch.contiguous_format),
    "rows": ((16, 24, 40, 40), torch.channels_last),
    "small": ((4, 8, 3, 3), torch.contiguous_format),
}
LARGE = {
    "large planes": Layout(lambda r: r(32, 4, 56, 56), 1),
    "large short planes": Layout(lambda r: r(64, 64, 14, 14), 1),
    "large rows": Layout(lambda r: to_channels_last(r(16, 64, 56, 56)), 1),
    "large tokens": Layout(lambda r: r(32, 197, 96), 2),
}


def randn(name: str, seed: int = 0) -> torch.Tensor:
    shape, memory_format = SHAPES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    return x.to(DEVICE).contiguous(memory_format=memory_format)


class Stack(nn.Module):
    """Every kind of layer, with a residual and a cumulative average."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = InPlaceABN(channels, activation="elu", activation_param=1.0)
        self.second = SyncBatchNorm(channels, momentum=None, fuse_relu=True)
        self.third = InPlaceABNSync(channels)
        for layer in self.children():
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.1)

    def forward(self, x):
        x = self.first(x * 1.5)
        return self.third(self.second(x * 0.5, x) * 2.0)


def stack(name: str) -> nn.Module:
    return Stack(SHAPES[name][0][1]).to(DEVICE)


def step(model: nn.Module, leaf: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    y = model(leaf)
    return [y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy)]


def everything(results: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*results, *model.buffers())]


def warm_up(work) -> None:
    """As torch asks: before a capture, some steps beside the main stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("kind", ["abn", "sbn"])
def test_large_inputs_equal_the_cpu(kind, layout, dtype, monkeypatch):
    for name, make in LARGE.items():
        monkeypatch.setitem(LAYOUTS, name, make)
    results = []
    for device in ("cpu", DEVICE):
        case = LayerInputs(layout, dtype, device)
        common = {"channel_last": case.channel_dim != 1, "device": device, "dtype": case.weight.dtype}
        layer = InPlaceABN if kind == "abn" else SyncBatchNorm
        options = {"activation": "elu", "activation_param": 0.5} if kind == "abn" else {"fuse_relu": True}
        layer = layer(case.channels, **options, **common)
        with torch.no_grad():
            layer.weight.copy_(case.weight)
            layer.bias.copy_(case.bias)
        leaf = case.x.detach().requires_grad_()
        y = layer(leaf.clone())
        gradients = torch.autograd.grad(y, [leaf, layer.weight, layer.bias], case.dy)
        results.append([y, *gradients, layer.running_mean, layer.running_var])
    row = "in_place_layer" if kind == "abn" else "layer"
    for want, got in zip(*results, strict=True):
        assert got.device.type == torch.device(DEVICE).type and got.dtype == want.dtype
        assert_close_enough(got, want, row=row, dtype=dtype, least_scale=1.0)


@pytest.mark.parametrize("name", SHAPES)
def test_graph_replays_equal_eager_steps(name):
    model, dy = stack(name), randn(name, 9)
    eager = copy.deepcopy(model)
    leaf = randn(name).requires_grad_()
    warm_up(lambda: step(model, leaf, dy))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, leaf, dy)
    model.load_state_dict(eager.state_dict())
    for seed in (3, 4, 5):
        x = randn(name, seed)
        with torch.no_grad():
            leaf.copy_(x)
        graph.replay()
        got = everything(captured, model)
        want = everything(step(eager, x.requires_grad_(), dy), eager)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"replay {seed}, result {i}: {(a - b).abs().max()}"
    assert model.second.num_batches_tracked == 3


def eager_and_converted(products):
    torch.manual_seed(0)
    parts = (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    eager = nn.Sequential(*parts, nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8)).to(DEVICE)
    return eager, fastvit.convert(copy.deepcopy(eager), matmuls=products)


@pytest.mark.parametrize("products", [False, True])
def test_a_converted_model_in_graphed_callables(products):
    """Replays of forward and backward, which recomputes: eager's bits."""
    eager, model = eager_and_converted(products)
    inputs = [torch.randn(32, 50, 64, device=DEVICE, requires_grad=True) for _ in range(3)]
    # It refuses a module that has hooks itself.
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(model), (inputs[0].detach().requires_grad_(),))
    for x in inputs:
        got, want = (
            torch.autograd.grad(run(x).square().sum(), [x, *run.parameters()]) for run in (graphed, eager)
        )
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("products", [False, True])
def test_a_captured_step_of_a_converted_model(products):
    eager, model = eager_and_converted(products)
    static = torch.randn(32, 50, 64, device=DEVICE)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (eager, model)]

    def train(model, optimizer, x):
        optimizer.zero_grad()  # to None, so that each replay writes the gradients anew
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warm_up(lambda: train(model, optimizers[1], static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(model, optimizers[1], static)
    model.load_state_dict(eager.state_dict())
    for state in optimizers[1].state.values():  # the tensors are those of the graph
        state["momentum_buffer"].zero_()
    for _ in range(4):
        x = torch.randn(32, 50, 64, device=DEVICE)
        static.copy_(x)
        graph.replay()
        assert torch.equal(captured, train(eager, optimizers[0], x))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_graphs_that_the_compiler_makes():
    """`mode="reduce-overhead"` warms up in the graph's memory pool, and expects all of it back."""
    torch._dynamo.reset()
    model = nn.Sequential(SyncBatchNorm(8, fuse_relu=True), nn.Conv2d(8, 8, 1), InPlaceABN(8)).to(DEVICE)
    eager, dy = copy.deepcopy(model), randn("planes", 9)
    compiled = torch.compile(model, mode="reduce-overhead")
    for seed in range(4):  # warm-up, capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        for m in (compiled, eager):  # a replay overwrites gradients that lie in the graph's memory
            m.zero_grad(set_to_none=True)
        leaves = [randn("planes", seed).requires_grad_() for _ in range(2)]
        got, want = (m(leaf) for m, leaf in zip((compiled, eager), leaves, strict=True))
        assert_close_enough(got, want.double(), row="layer", dtype=torch.float32)
        got.backward(dy)
        want.backward(dy)
        assert_close_enough(
            leaves[0].grad, leaves[1].grad.double(), row="layer", dtype=torch.float32, least_scale=1.0
        )


@pytest.mark.parametrize("name", ["planes", "rows"])
def test_streams_do_not_disturb_each_other(name):
    """The memory that the blocks of a launch share belongs to the stream of the launch."""
    channels = SHAPES[name][0][1]
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.rand(channels, device=DEVICE)

    tail = weight, bias, None, "leaky_relu"

    def run(x, dy):
        y, moments = x.clone(), ops.bn_stats(x)
        saved = ops.bn_forward_inplace(y, *tail, moments=moments)
        (sums,) = ops.bn_reduce(y, dy, saved, *tail, from_output=True)
        dx, *_ = ops.bn_backward(y, dy, saved, *tail, from_output=True, global_sums=sums)
        return moments, y, saved, sums, dx

    inputs = [(randn(name, seed), randn(name, seed + 10)) for seed in range(3)]
    want = [run(*pair) for pair in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got = [[] for _ in inputs]
    for _ in range(20):
        for stream, pair, results in zip(streams, inputs, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(*pair))
    torch.cuda.synchronize()
    for expected, results in zip(want, got, strict=True):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_step_never_waits_for_the_gpu():
    model, leaf, dy = stack("planes"), randn("planes").requires_grad_(), randn("planes", 1)
    step(model, leaf, dy)  # the first forward of an InPlaceABN reads |bias| / |weight|
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, leaf, dy)
        with pytest.raises(RuntimeError, match="synchron"):
            leaf.detach().sum().item()  # the detector works
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernel_count(work):
    """Kernels that one call of `work` launches, by torch's profiler, without copies and fills."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not (e.is_user_annotation or e.name.startswith(("Memcpy", "Memset"))) for e in on_gpu)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["abn", "sbn"])
def test_one_kernel_each_way(kind, name):
    if not kernel_count(lambda: torch.ones(4, device=DEVICE)):
        pytest.skip("torch's profiler sees no kernels here")
    channels = SHAPES[name][0][1]
    layer = (InPlaceABN(channels) if kind == "abn" else SyncBatchNorm(channels, fuse_relu=True)).to(DEVICE)
    leaf, dy = randn(name).requires_grad_(), randn(name, 1)
    inputs = [leaf, layer.weight, layer.bias]
    torch.autograd.grad(layer(leaf.clone()), inputs, dy)  # the first forward also checks the layer's weights
    x, results = leaf.clone(), []
    forward = kernel_count(lambda: results.append(layer(x)))
    backward = kernel_count(lambda: torch.autograd.grad(results.pop(), inputs, dy))
    room = torch.cuda.get_device_properties(DEVICE).shared_memory_per_multiprocessor
    most = 1 if room >= 160 << 10 else 2  # on less, not all of these fit on chip
    assert 1 <= forward <= most and 1 <= backward <= most, f"{forward} forward, {backward} backward"


@pytest.mark.parametrize("kind", ["abn", "sbn"])
def test_overflow_reaches_the_scaler(kind):
    """An infinite gradient must not become a finite one on its way through a layer."""
    layer = (InPlaceABN(8) if kind == "abn" else SyncBatchNorm(8)).to(DEVICE)
    conv = nn.Conv2d(8, 8, 1, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(conv.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**60)
    before = conv.weight.detach().clone()
    with torch.autocast(DEVICE, torch.float16):
        loss = layer(conv(randn("small"))).float().square().sum()
    scaler.scale(loss).backward()
    assert not layer.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**59 and torch.equal(conv.weight, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_devices_than_the_current_one():
    """inplace_abn #176: no device guard, so only cuda:0 works."""
    case, other = LayerInputs("nchw", torch.float32, "cuda:0"), LayerInputs("nchw", torch.float32, "cuda:1")
    y, dx = [], []
    for c in (case, other):
        leaf = c.x.detach().requires_grad_()
        y.append(functional.inplace_abn(leaf.clone(), c.weight, c.bias, None, None))
        dx.append(torch.autograd.grad(y[-1], leaf, c.dy)[0])
    assert torch.cuda.current_device() == 0 and y[1].device.index == dx[1].device.index == 1
    assert torch.equal(y[0], y[1].to("cuda:0")) and torch.equal(dx[0], dx[1].to("cuda:0"))


@pytest.fixture(scope="module")
def ipc() -> None:
    """Skips where the system forbids memory to be opened by another process: WSL, MIG, some containers."""
    try:
        torch.ops.fastvit.ipc_allocate(64, 0)
    except RuntimeError as error:
        pytest.skip(f"no CUDA IPC here: {str(error).splitlines()[0]}")


@pytest.mark.parametrize(
    "way,name",
    [("collective", "Collective"), ("auto", "CudaIpc"), ("peer", "CudaIpc")],
)
def test_exchange_in_a_group_of_one(monkeypatch, request, way, name):
    """Made to exchange: NCCL, or the layers' kernels, hand back what was sent, in the order of the stream."""
    if name == "CudaIpc":
        request.getfixturevalue("ipc")
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    monkeypatch.setenv("FASTVIT_STATISTICS", way)
    alone, shared = stack("planes"), stack("planes")
    shared.load_state_dict(alone.state_dict())
    leaf, dy = randn("planes").requires_grad_(), randn("planes", 1)
    want = everything(step(alone, leaf, dy), alone)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        monkeypatch.setattr(
            sync, "get_transport", lambda _, layer: sync.GroupTransport(dist.group.WORLD, layer)
        )
        got = everything(step(shared, leaf, dy), shared)
        assert f": {name}" in " ".join(sync.describe_groups())
        torch.cuda.set_sync_debug_mode("error")
        step(shared, leaf, dy)  # the host waits for no exchange
        torch.cuda.set_sync_debug_mode("default")
        sync.check(wait=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
    for a, b in zip(got, want, strict=True):
        assert_close_enough(a.double(), b.double(), row="in_place_layer", dtype=torch.float32)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_exchange_by_the_kernels_of_several_ranks(world):
    """Loopback at full size, a stream per rank: the bits of moments and sums merged by a message."""
    loop = Loopback(world, device=DEVICE)
    inputs = [torch.randn(16, 256, 28, 28, device=DEVICE) + r for r in range(world)]
    gradients = [torch.randn_like(x) for x in inputs]
    weight, bias = torch.rand(256, device=DEVICE) + 0.5, torch.rand(256, device=DEVICE)
    options = {"weight": weight, "bias": bias, "activation": "leaky_relu"}
    rows = torch.stack([ops.bn_stats(x) for x in inputs])
    moments, want = reference.merge_moments(rows), []
    for x in inputs:
        y = x.clone()
        want.append((y, ops.bn_forward_inplace(y, **options, moments=moments)))
    from_output = options | {"from_output": True}
    parts = [(y, dy, saved) for (y, saved), dy in zip(want, gradients, strict=True)]
    own = torch.cat([ops.bn_reduce(*part, **from_output) for part in parts])
    total = own.double().sum(0).float()
    wanted = [(part[0], ops.bn_backward(*part, **from_output, global_sums=total)[0]) for part in parts]

    def step(number):
        def work(rank, way):
            y, dy, tag = inputs[rank].clone(), gradients[rank], Tag(0, number)
            saved = ops.bn_forward_inplace(y, **options, moments=way.compute_moments(y, 1, tag))
            sums = way.compute_sums(lambda e: ops.bn_reduce(y, dy, saved, **from_output, exchange=e), tag)
            return y, ops.bn_backward(y, dy, saved, **from_output, global_sums=sums[1])[0]

        return loop.run_each(work)

    def right(got):
        for mine, others in zip(got, wanted, strict=True):
            for a, b in zip(mine, others, strict=True):
                assert_close_enough(a, b.double(), row="in_place_layer", dtype=torch.float32)

    first = step(1)
    right(first)
    for number in (2, 3):
        for mine, again in zip(step(number), first, strict=True):
            assert all(map(torch.equal, mine, again))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(0)
    for _ in range(3):  # every replay is an exchange of its own: the epoch is in device memory
        for tensors in captured:
            for t in tensors:
                t.zero_()
        graph.replay()
        for mine, again in zip(captured, first, strict=True):
            assert all(map(torch.equal, mine, again))
    for way in loop.ranks:
        way.raise_reported_fault(wait=True)


def test_exchanges_follow_the_stream():
    """A group's exchanges come one after the other, whichever stream each is on."""
    loop, numbers = Loopback(1, device=DEVICE), torch.arange(64.0, device=DEVICE)[None]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    totals = []
    for step in range(1, 31):
        with torch.cuda.stream(streams[step % 3]):
            torch.cuda._sleep(100_000 * (step % 2))  # what comes first would end last
            totals.append(loop.ranks[0].merge_over_ranks(numbers * step, Tag(0, step)))
    loop.ranks[0].raise_reported_fault(wait=True)
    for step, both in enumerate(totals, 1):
        assert torch.equal(both, torch.cat([step * numbers] * 2))


def test_a_peer_that_never_sends():
    """The GPU stops waiting, nothing is kept, and the next call of the host says who was missing."""
    loop, x = Loopback(2, timeout=0.2, device=DEVICE), randn("planes")
    running = {
        "running_mean": torch.zeros(x.shape[1], device=DEVICE),
        "running_var": torch.ones(x.shape[1], device=DEVICE),
        "num_batches_tracked": torch.tensor(3, device=DEVICE),
    }
    before = [t.clone() for t in running.values()]
    y, saved = ops.bn_forward(x, moments=loop.ranks[0].compute_moments(x, 1, Tag(4, 1)), **running)
    with pytest.raises(
        RuntimeError, match="rank 0 in forward of layer 4, step 1: nothing from rank 1 within"
    ):
        loop.ranks[0].raise_reported_fault(wait=True)
    assert y.isnan().all() and saved.isnan().all() and all(map(torch.equal, running.values(), before))


def _batch(rank: int) -> torch.Tensor:
    """Each rank has another number of samples, of another mean."""
    return torch.randn(6 + rank, 64, 14, 14, generator=torch.Generator().manual_seed(rank)) + rank


def _train_with_peers(rank: int, world: int, store: str, results) -> None:
    """One of some processes on one GPU."""
    os.environ["FASTVIT_STATISTICS"] = "peer"
    torch.cuda.set_device(0)
    limit = datetime.timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    leaf, got = _batch(rank).to(DEVICE).requires_grad_(), []
    for layer in (InPlaceABNSync(64).to(DEVICE), SyncBatchNorm(64, fuse_relu=True).to(DEVICE)):
        for _ in range(5):
            y = layer(leaf.clone())
            (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y) * (1 + rank))
        got += [y.detach().cpu(), dx.cpu(), layer.running_mean.cpu()]
    sync.check(wait=True)
    results.put((rank, " ".join(sync.describe_groups()), got))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_processes_on_one_gpu(world, tmp_path, ipc):
    """CudaIpc, over the memory of one GPU: outputs and gradients of one batch norm over all batches."""
    context, end = torch.multiprocessing.get_context("spawn"), time.monotonic() + 50
    results = context.Queue()
    given = (world, str(tmp_path / "store"), results)
    processes = [context.Process(target=_train_with_peers, args=(rank, *given)) for rank in range(world)]
    try:
        for process in processes:
            process.start()
        got = {}
        while len(got) < world:
            rank, way, values = results.get(timeout=max(0, end - time.monotonic()))
            got[rank] = way, values
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    batches = [_batch(rank).double() for rank in range(world)]
    leaf = torch.cat(batches).requires_grad_()
    dy = torch.cat([torch.full_like(batch, 1 + rank) for rank, batch in enumerate(batches)])
    normed = nn.functional.batch_norm(leaf, None, None, training=True)
    for layer, y in enumerate((nn.functional.leaky_relu(normed, 0.01), normed.relu())):
        (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        row = ("in_place_layer", "layer")[layer]
        parts = zip(*(t.split([len(batch) for batch in batches]) for t in (y, dx)), strict=True)
        for rank, (y_rank, dx_rank) in enumerate(parts):
            way, of_rank = got[rank]
            assert "CudaIpc" in way
            y_got, dx_got, mean = of_rank[3 * layer : 3 * layer + 3]
            assert_close_enough(y_got, y_rank, row=row, dtype=torch.float32)
            assert_close_enough(dx_got, dx_rank, row=row, dtype=torch.float32, least_scale=1.0)
            assert_close_enough(mean, (1 - 0.9**5) * leaf.mean((0, 2, 3)), row=row, dtype=torch.float32)
