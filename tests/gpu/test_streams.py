"""Streams and launches: what runs beside each other, waits of the host, the number of kernels."""

import pytest
import torch

from fastvit import InPlaceABN, SyncBatchNorm, ops
from gpu.stacks import DEVICE, SHAPES, make_images, make_stack, run_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["planes", "rows"])
def test_streams_do_not_disturb_each_other(name):
    """The memory that the blocks of a launch share belongs to the stream of the launch."""
    channels = SHAPES[name][0][1]
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.rand(channels, device=DEVICE)
    shared_arguments = weight, bias, None, "leaky_relu"

    def run_ops(x, dy):
        y, moments = x.clone(), ops.bn_stats(x)
        saved = ops.bn_forward_inplace(y, *shared_arguments, moments=moments)
        (sums,) = ops.bn_reduce(y, dy, saved, *shared_arguments, from_output=True)
        dx, *_ = ops.bn_backward(y, dy, saved, *shared_arguments, from_output=True, global_sums=sums)
        return moments, y, saved, sums, dx

    inputs = [(make_images(name, seed), make_images(name, seed + 10)) for seed in range(3)]
    all_expected = [run_ops(*pair) for pair in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    all_results = [[] for _ in inputs]
    for _ in range(20):
        for stream, pair, results in zip(streams, inputs, all_results, strict=True):
            with torch.cuda.stream(stream):
                results.append(run_ops(*pair))
    torch.cuda.synchronize()
    for expected, results in zip(all_expected, all_results, strict=True):
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_step_never_waits_for_the_gpu():
    model, leaf, dy = make_stack("planes"), make_images("planes").requires_grad_(), make_images("planes", 1)
    run_step(model, leaf, dy)  # the first forward of an InPlaceABN reads |bias| / |weight|
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_step(model, leaf, dy)
        with pytest.raises(RuntimeError, match="synchron"):
            leaf.detach().sum().item()  # the detector works
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_kernels(work) -> int:
    """Returns the kernels that one call of `work` launches, by torch's profiler, without copies and fills."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not (e.is_user_annotation or e.name.startswith(("Memcpy", "Memset"))) for e in events)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layer_class", [InPlaceABN, SyncBatchNorm])
def test_a_layer_launches_one_kernel_each_way(layer_class, name):
    if not count_kernels(lambda: torch.ones(4, device=DEVICE)):
        pytest.skip("torch's profiler sees no kernels here")
    options = {"fuse_relu": True} if layer_class is SyncBatchNorm else {}
    layer = layer_class(SHAPES[name][0][1], **options).to(DEVICE)
    leaf, dy = make_images(name).requires_grad_(), make_images(name, 1)
    inputs = [leaf, layer.weight, layer.bias]
    torch.autograd.grad(layer(leaf.clone()), inputs, dy)  # the first forward also checks the layer's weights
    x, results = leaf.clone(), []
    forward = count_kernels(lambda: results.append(layer(x)))
    backward = count_kernels(lambda: torch.autograd.grad(results.pop(), inputs, dy))
    shared_memory = torch.cuda.get_device_properties(DEVICE).shared_memory_per_multiprocessor
    limit = 1 if shared_memory >= 160 << 10 else 2  # with less, some of these inputs do not fit on chip
    assert 1 <= forward <= limit and 1 <= backward <= limit, f"{forward} forward, {backward} backward"
