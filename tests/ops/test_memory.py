"""Ops allocate their results alone, and refuse storage that is missing; tensors larger than the caches."""

import ctypes
import functools
import gc
import math
import os

import pytest
import torch

from fastvit import ops
from fastvit.memory import peak_bytes
from ops import reference
from ops.compare import assert_repeats_bits, assert_same_bits
from ops.inputs import LayerInputs, make_generator
from ops.matrix import DTYPES, name_of
from ops.op_calls import (
    find_op,
    make_exchange_calls,
    make_layer_calls,
    make_layer_calls_with_exchange,
    select_tensors,
)
from ops.tolerances import FROM_OUTPUT, assert_close_enough, relative_error


@pytest.mark.cuda_model
@pytest.mark.parametrize("layout", ["nchw", "cropped"])
@pytest.mark.parametrize("bytes_left", ["none", "all_but_one"])
def test_freed_and_shrunk_storage_is_refused_before_anything_is_written(
    bytes_left, layout, device, registered_ops
):
    case = LayerInputs(layout, torch.float32, device)
    calls = (
        make_layer_calls(case),
        make_layer_calls_with_exchange(case),
        make_exchange_calls(device, registered_ops),
    )
    for op, arguments in (call for some_calls in calls for call in some_calls):
        for place, t in enumerate(arguments):
            if not isinstance(t, torch.Tensor):
                continue
            others = [(a, a.clone()) for a in select_tensors(arguments) if a is not t]
            shrunk = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
            storage = shrunk.untyped_storage()
            storage.resize_(0 if bytes_left == "none" else storage.nbytes() - 1)
            name = find_op(op)._schema.arguments[place].name
            message = f"has shape .*, but its storage was freed or shrunk to {storage.nbytes()} bytes"
            with pytest.raises(RuntimeError, match=f"{op}: {name} {message}"):
                find_op(op)(*arguments[:place], shrunk, *arguments[place + 1 :])
            assert all(torch.equal(a, old) for a, old in others), f"{op} wrote before it checked {name}"


@pytest.mark.cuda_model
def test_storage_is_counted_from_where_the_tensor_begins(device):
    base = torch.randn(40, device=device)
    x = base[4:].view(3, 4, 3)[:, :3, :2]  # its last number is base[4 + 35 - 4]
    expected = ops.bn_stats(x)
    base.untyped_storage().resize_(4 * 36)
    assert torch.equal(ops.bn_stats(x), expected)
    base.untyped_storage().resize_(4 * 35)
    with pytest.raises(RuntimeError, match="bn_stats: x has shape .*freed or shrunk to 140 bytes"):
        ops.bn_stats(x)


@pytest.mark.cuda_model
def test_an_empty_tensor_needs_no_storage(device):
    x = torch.randn(0, 3, device=device)
    x.untyped_storage().resize_(0)
    y, saved = ops.bn_forward(x, moments=ops.bn_stats(x))
    assert y.shape == (0, 3) and saved[-2:].tolist() == [0, 0]


@pytest.mark.cuda_model
def test_where_outputs_do_not_fit_into_memory_nothing_is_written(device):
    """x is one number; no machine has the memory of its output, 2^48 bytes or more."""
    x = torch.zeros(1, 3, 1, dtype=torch.float64, device=device).expand(2**22, 3, 2**22)
    case = LayerInputs("nchw_s1", torch.float64, device)
    w, b, *running = (t[:3] for t in (case.weight, case.bias, case.running_mean, case.running_var))
    moments = torch.tensor([1.0, 2, 3, 4, 5, 6, 0, 7], dtype=torch.float64, device=device)
    running.append(torch.tensor(3, device=device))
    old_tensors = [t.clone() for t in (moments, w, b, *running)]
    relu = w, b, None, "relu", 0.0, 1
    for op, arguments in (
        ("bn_forward", (x, *relu, moments, *running)),
        ("bn_forward", (x, *relu, None, *running)),
        ("bn_apply", (x, moments, *relu)),
        ("bn_backward", (x, x, moments, *relu, False, moments[:6])),
        ("bn_backward", (x, x, moments, *relu)),
        ("act_forward", (x,)),
        ("act_backward", (x, x)),
        ("layer_norm_forward", (x,)),
    ):
        with pytest.raises(RuntimeError, match="API call failed|out of memory|allocate"):
            find_op(op)(*arguments)
    assert_same_bits((moments, w, b, *running), old_tensors)


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@pytest.mark.skipif(os.environ.get("FASTVIT_CUDA_HOST") == "race", reason="the race checker allocates, too")
@pytest.mark.cuda_model("nightly")
def test_a_call_frees_what_it_allocates(device, device_option):
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("glibc 2.33 counts allocated bytes")
    mallinfo.restype = MallocInfo
    case = LayerInputs("nchw", torch.float32, device)
    wrong_call = "act_forward", (case.x, None, "an activation of more than 15 characters")
    num_calls = 50 if device_option == "cuda_model" else 500
    gc.collect()
    for op, arguments in (*make_layer_calls(case), *make_layer_calls_with_exchange(case), wrong_call):
        bytes_left = []
        for _ in range(4):  # the first makes what stays; others in the process make and free objects
            before = mallinfo().uordblks
            for _ in range(num_calls):
                try:
                    find_op(op)(*arguments)
                except RuntimeError:
                    assert arguments is wrong_call[1]
            bytes_left.append((mallinfo().uordblks - before) / num_calls)
        assert sorted(bytes_left[1:])[1] < 16, f"{op}: {bytes_left} bytes a call"


def make_allocating_calls(x: torch.Tensor) -> list[tuple]:
    """Returns for each op its name, how many outputs it has that are as large as x, and a call."""
    dy, residual = torch.randn_like(x), torch.randn_like(x)
    half, gate = torch.cat([x, x], 1).chunk(2, 1)
    moments = ops.bn_stats(x)
    _, saved = ops.bn_forward(x, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved)
    added, leaky = {"residual": residual, "activation": "relu"}, {"activation": "leaky_relu"}
    from_output = leaky | {"from_output": True}
    return [
        ("bn_stats", 0, lambda: ops.bn_stats(x)),
        ("bn_forward", 1, lambda: ops.bn_forward(x, moments=moments, **added)),
        ("bn_apply", 1, lambda: ops.bn_apply(x, saved, residual=residual, activation="gelu")),
        ("bn_forward_inplace", 0, lambda: ops.bn_forward_inplace(x, moments=moments, **leaky)),
        ("bn_reduce", 0, lambda: ops.bn_reduce(x, dy, saved, **added)),
        ("bn_reduce from_output", 0, lambda: ops.bn_reduce(x, dy, saved, **from_output)),
        ("bn_backward", 2, lambda: ops.bn_backward(x, dy, saved, **added, global_sums=sums)),
        (
            "bn_backward from_output",
            1,
            lambda: ops.bn_backward(x, dy, saved, **from_output, global_sums=sums),
        ),
        ("act_forward", 1, lambda: ops.act_forward(half)),
        ("act_forward with a gate", 1, lambda: ops.act_forward(half, gate)),
        ("act_backward with a gate", 2, lambda: ops.act_backward(half, gate, gate)),
    ]


def count_allocated_bytes(call) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        results = call()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    del results
    return allocated


@pytest.mark.cuda_model
def test_no_op_allocates_more_than_its_outputs(device):
    """An op may also allocate O(C) bytes, on a GPU O(C) of each block. There only the peak is counted."""
    x = torch.randn(16, 8, 64, 64, device=device)
    for name, outputs, call in make_allocating_calls(x):
        if device == "cuda":
            torch.cuda.empty_cache()  # a cached block that is larger than an output counts as a whole
            allocated, allowance = peak_bytes(call, device), 1 << 20
        else:
            allocated, allowance = count_allocated_bytes(call), 4096
        assert outputs * x.nbytes <= allocated <= outputs * x.nbytes + allowance, (name, allocated)


@pytest.mark.cuda_model
def test_layer_norm_allocates_little_beside_its_outputs():
    x = torch.randn(4096, 256)
    _, saved = ops.layer_norm_forward(x)
    for call in (lambda: ops.layer_norm_forward(x), lambda: ops.layer_norm_backward(x, x, saved)):
        assert x.nbytes <= count_allocated_bytes(call) <= 1.01 * x.nbytes + 4096


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "sizes",
    [
        (4, 211, 211),
        *(pytest.param(sizes, marks=pytest.mark.nightly) for sizes in ((128, 7, 7), (771,), (256,))),
    ],
    ids=str,
)
def test_results_larger_than_the_caches_equal_those_of_their_halves(sizes, dtype):
    """CPUs write them past the caches, in whole vectors, wherever rows and planes begin."""
    n = 36 * 2**20 // math.prod(sizes) // dtype.itemsize
    x, dy = torch.randn(2, n, *sizes, dtype=torch.float32).to(dtype)
    moments = ops.bn_stats(x)
    _, saved = ops.bn_forward(x, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved)
    calls = {
        "bn_forward": lambda x, dy: ops.bn_forward(x, moments=moments)[0],
        "bn_backward": lambda x, dy: ops.bn_backward(x, dy, saved, global_sums=sums)[0],
        "act_backward": lambda x, dy: ops.act_backward(x, dy, activation="silu")[0],
    }
    if len(sizes) == 1:
        calls |= {
            "layer_norm_forward": lambda x, dy: ops.layer_norm_forward(x)[0],
            "layer_norm_backward": lambda x, dy: ops.layer_norm_backward(x, dy, ops.layer_norm_forward(x)[1])[
                0
            ],
        }
    for name, call in calls.items():
        halves = [call(*pair) for pair in zip(x.chunk(2), dy.chunk(2), strict=True)]
        assert torch.equal(call(x, dy), torch.cat(halves)), name


def count_allocations(call) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


def assert_backward_has_the_bits_of_two_ops(input, dy, saved, **options) -> None:
    (sums,) = ops.bn_reduce(input, dy, saved, **options)
    *gradients, local_sums = ops.bn_backward(input, dy, saved, **options)
    expected = ops.bn_backward(input, dy, saved, **options, global_sums=sums)[:2]
    assert_same_bits([*gradients, local_sums], [*expected, sums])


@pytest.mark.parametrize(
    "dtype,activation,has_residual",
    [
        pytest.param(torch.float32, "leaky_relu", False, id="float32-leaky_relu"),
        pytest.param(torch.float32, "silu", False, id="float32-silu"),
        pytest.param(torch.float32, "silu", True, id="float32-silu-residual"),
        pytest.param(torch.bfloat16, "leaky_relu", False, id="bfloat16-leaky_relu"),
        pytest.param(torch.bfloat16, "silu", False, id="bfloat16-silu"),
    ],
)
def test_ops_that_walk_cache_tiles_have_the_bits_of_two_ops(dtype, activation, has_residual, request):
    """A CPU's op that computes its own statistics walks 17 MiB and more tile by tile."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)  # with more threads than channels there are no tiles
    sizes = 4, 35, 181, 178 if dtype == torch.float32 else 356
    x, dy, residual = (torch.randn(sizes, generator=make_generator(seed)).to(dtype) for seed in range(3))
    weight, bias = torch.linspace(-1.5, 1.5, 35), torch.linspace(-0.5, 0.5, 35)
    options = {"weight": weight, "bias": bias, "activation": activation}
    if has_residual:
        options["residual"] = residual

    def run_forward(moments=None, momentum=0.1):
        running = {"running_mean": torch.zeros(35), "running_var": torch.ones(35)}
        running["num_batches_tracked"] = torch.tensor(2)
        results = ops.bn_forward(x, **options, **running, moments=moments, momentum=momentum)
        return *results, *running.values()

    for momentum in 0.1, None:
        assert_same_bits(run_forward(momentum=momentum), run_forward(ops.bn_stats(x), momentum))
    saved = run_forward()[1]
    assert_backward_has_the_bits_of_two_ops(x, dy, saved, **options)
    if has_residual:
        channels_last = residual.contiguous(memory_format=torch.channels_last)
        assert_backward_has_the_bits_of_two_ops(x, dy, saved, **options | {"residual": channels_last})
    elif activation == "leaky_relu":
        y, _ = ops.bn_forward(x, **options, invertible=True)
        overwritten = x.clone()
        assert_same_bits([ops.bn_forward_inplace(overwritten, **options), overwritten], [saved, y])
        assert_backward_has_the_bits_of_two_ops(y, dy, saved, **options, from_output=True)
    assert_repeats_bits(lambda: ops.bn_backward(x, dy, saved, **options))
    # y and `saved`, but no moments.
    assert count_allocations(lambda: ops.bn_forward(x, **options)) == 2
    assert count_allocations(lambda: ops.bn_forward(x[:3], **options | {"residual": None})) == 3


@pytest.mark.memory(20)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.timeout(600)
def test_more_than_2_to_the_31_elements(layout, device):
    """Indices have 64 bits: the last of 2^31 + 2^16 elements of bfloat16 differ from the rest."""
    x = torch.zeros(2**15 + 1, 4, 128, 128, dtype=torch.bfloat16, device=device)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    x[-1] = 1
    moments = ops.bn_stats(x)
    n = x.numel() // 4
    share = 128 * 128 / n
    assert relative_error(moments[:4], torch.full((4,), share)) < 1e-5
    assert reference.unpack_count(moments).item() == n
    leaky = {"activation": "leaky_relu"}
    saved = ops.bn_forward_inplace(x, moments=moments, eps=0.0, **leaky)
    assert x[-1].min() > 150 and x[0].max() < 0
    options = leaky | {"from_output": True}
    (sums,) = ops.bn_reduce(x, x, saved, **options)
    assert relative_error(sums[4:] / n, torch.ones(4)) < 0.02
    # With sums, what is left of two values is their rounding.
    options["training"] = False
    dx, *_ = ops.bn_backward(x, x, saved, **options)
    for part in (slice(0, 1), slice(-1, None)):
        expected, *_ = reference.bn_backward(x[part], x[part], saved, **options)
        assert_close_enough(dx[part], expected, row="bn_backward" + FROM_OUTPUT)
