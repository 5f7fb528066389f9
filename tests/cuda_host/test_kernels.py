"""The CUDA kernels under conditions that the tests of ops do not vary.

These are the order of threads and blocks, the number of multiprocessors (hence of slices), capture into a
graph, misaligned operands, single launches, and memory that is refused.
"""

import functools
import os

import pytest
import torch
from ops import reference
from ops.compare import assert_same_bits
from ops.inputs import LayerInputs
from ops.matrix import CORE_DTYPES, name_of
from ops.op_calls import find_op, make_layer_calls, select_tensors

import fastvit
from fastvit import ops

pytestmark = pytest.mark.cuda_model

# Long planes (segments, slices), short planes (folded into rows), rows with and without whole vectors.
SHAPES = {
    "long_planes": lambda r: r(2, 3, 90, 91),
    "one_channel": lambda r: r(9, 1, 64, 33),
    "short_planes": lambda r: r(33, 24, 7, 7),
    "short_odd_planes": lambda r: r(19, 5, 3, 5),
    "rows": lambda r: r(40, 48, 9, 5).contiguous(memory_format=torch.channels_last),
    "rows_c3": lambda r: r(7, 3, 17, 19).contiguous(memory_format=torch.channels_last),
    "wide_rows": lambda r: r(70, 520),
}
# 6 multiprocessors with 160 KB of shared memory each hold a few tiles of these shapes at once, and not all.
SHAPES_OF_ROUNDS = {
    "planes": lambda r: r(12, 7, 48, 48),
    "unaligned_planes": lambda r: r(9, 7, 41, 41),
    "folded_planes": lambda r: r(90, 56, 7, 7),
    "rows_of_tiles": lambda r: r(20, 200, 9, 9).contiguous(memory_format=torch.channels_last),
}


def make_tensor(shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    make = (SHAPES | SHAPES_OF_ROUNDS)[shape]
    return make(lambda *s: torch.randn(*s, generator=g) * 2 + 3).to(dtype)


def make_arguments(weight, bias):
    """Returns parameters with an activation, and running statistics."""
    running = {"running_mean": torch.zeros(len(weight)), "running_var": torch.ones(len(weight))}
    running["num_batches_tracked"] = torch.tensor(0)
    options = {"weight": weight, "bias": bias, "activation": "leaky_relu", "activation_param": 0.2}
    return options, running


def run_step(x, dy, weight, bias, residual=None):
    """Returns all that the ops of a training step write, in place when there is no residual."""
    moments, (options, running) = ops.bn_stats(x), make_arguments(weight, bias)
    if residual is None:
        y = x.clone()
        saved = ops.bn_forward_inplace(y, **options, moments=moments, **running)
        (sums,) = ops.bn_reduce(y, dy, saved, **options, from_output=True)
        gradients = ops.bn_backward(y, dy, saved, **options, from_output=True, global_sums=sums)[:2]
    else:
        options["residual"] = residual
        y, saved = ops.bn_forward(x, **options, moments=moments, **running)
        (sums,) = ops.bn_reduce(x, dy, saved, **options)
        gradients = ops.bn_backward(x, dy, saved, **options, global_sums=sums)[:2]
    return [moments, y, saved, *running.values(), sums, *gradients]


def make_inputs(shape, dtype):
    x, dy, residual = (make_tensor(shape, dtype, seed) for seed in range(3))
    c = x.shape[1]
    return x, dy, torch.linspace(-1.5, 1.5, c) + 0.07, torch.linspace(-0.5, 0.5, c), residual


@pytest.mark.parametrize("sm_count", [3, 17])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_and_sums_are_right_on_any_number_of_multiprocessors(engine, shape, sm_count):
    """The slices grow with the device; the last block of each tile merges them."""
    engine.config.sm_count = sm_count
    x, dy, weight, bias, _ = make_inputs(shape, torch.float32)
    moments, want = ops.bn_stats(x), reference.bn_stats(x.double())
    torch.testing.assert_close(moments.double(), want, rtol=1e-5, atol=1e-5)
    saved = want.clone()
    c = x.shape[1]
    saved[c : 2 * c] = 1 / torch.sqrt(want[c : 2 * c] / (x.numel() // c) + 1e-5)
    sums = ops.bn_reduce(x, dy, saved.float(), weight=weight, bias=bias, activation="relu")
    doubles = (t.double() for t in (weight, bias))
    wanted = reference.bn_reduce(x.double(), dy.double(), saved, *doubles, activation="relu")
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-4, atol=1e-3)


def test_ops_keep_no_memory_of_torchs_allocator(engine):
    """Memory that outlives an op would stay in the pool of a CUDA graph in whose warm-up it came to be."""
    x, dy, weight, bias, _ = make_inputs("long_planes", torch.float32)
    for engine.config.stream in (70, 71):  # streams that no other test uses
        before = engine.allocations()
        run_step(x, dy, weight, bias)
        assert engine.allocations() == before


@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("shifts", [(0, 0, 0), (1, 1, 1), (3, 3, 3), (0, 1, 0), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("shape", ["long_planes", "short_planes"])
def test_results_do_not_depend_on_alignment(engine, shape, dtype, shifts):
    """Heads and tails of vectors, and operands whose 16-byte boundaries do not coincide."""

    def shifted(t, by):
        return torch.cat([t.new_full((by,), float("nan")), t.flatten(), t.new_full((3,), float("nan"))])[
            by : by + t.numel()
        ].view(t.shape)

    x, dy, weight, bias, residual = make_inputs(shape, dtype)
    want = run_step(x, dy, weight, bias, residual)
    moved = [shifted(t, by) for t, by in zip((x, dy, residual), shifts, strict=True)]
    got = run_step(moved[0], moved[1], weight, bias, moved[2])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=2e-3)


def run_step_by_single_launches(engine, x, dy, weight, bias, residual=None):
    """Returns what run_step does but moments, by ops that compute their statistics, and the launches."""
    options, running = make_arguments(weight, bias)
    launches = [engine.launches()]
    if residual is None:
        y = x.clone()
        saved = ops.bn_forward_inplace(y, **options, **running)
        launches.append(engine.launches())
        *gradients, sums = ops.bn_backward(y, dy, saved, **options, from_output=True)
    else:
        options["residual"] = residual
        y, saved = ops.bn_forward(x, **options, **running)
        launches.append(engine.launches())
        *gradients, sums = ops.bn_backward(x, dy, saved, **options)
    launches.append(engine.launches())
    kernels = [b - a for a, b in zip(launches, launches[1:], strict=False)]
    return [y, saved, *running.values(), sums, *gradients], kernels


@pytest.mark.parametrize(
    "sm_count,dtype,residual",
    [
        pytest.param(1, torch.float32, False, id="1-float32-in_place"),
        pytest.param(6, torch.bfloat16, False, id="6-bfloat16-in_place"),
        pytest.param(6, torch.float32, True, id="6-float32-residual"),
        pytest.param(108, torch.bfloat16, True, id="108-bfloat16-residual"),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_single_launches_have_the_bits_of_two_ops(engine, shape, sm_count, dtype, residual):
    """On chip where whole vectors fit, with the bits of the two ops, in any order of threads and blocks.

    A captured launch has semaphores of its own; the others leave theirs as zeros.
    """
    engine.config.sm_count = sm_count
    x, dy, weight, bias, added = make_inputs(shape, dtype)
    added = added if residual else None
    moments, *want = run_step(x, dy, weight, bias, added)
    for engine.config.capturing, engine.config.seed in ((False, 0), (True, 1), (False, 2)):
        got, kernels = run_step_by_single_launches(engine, x, dy, weight, bias, added)
        assert_same_bits(got, want)
        assert_same_bits(run_step(x, dy, weight, bias, added), (moments, *want))
    vectors = shape not in ("short_odd_planes", "rows_c3")
    assert kernels == [1, 1] if sm_count == 108 and vectors else all(n <= 2 for n in kernels)


def set_device_of_rounds(engine) -> None:
    engine.config.sm_count, engine.config.shared_per_sm = 6, 160 << 10


def count_tiles_of_rounds(engine, x: torch.Tensor, operands: int, reduced_operands: int) -> tuple[int, int]:
    """Returns the tiles of a single launch on set_device_of_rounds, and how many are walked at once."""
    smem = (160 << 10) // 2 - (32 << 10)  # as LaunchContext has it
    found = engine.plan(x.shape, x.stride(), 1, x.itemsize, operands, reduced_operands, 6, 2, smem)
    return found["tiles"], found["tiles_at_once"]


@pytest.mark.parametrize("residual", [False, True], ids=["in_place", "residual"])
@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES_OF_ROUNDS)
def test_single_launches_of_several_rounds_have_the_bits_of_two_ops(engine, shape, dtype, residual):
    """Tensors larger than all shared memory, tile by tile: one launch, with the bits of the two ops."""
    set_device_of_rounds(engine)
    x, dy, weight, bias, added = make_inputs(shape, dtype)
    added = added if residual else None
    tiles, at_once = count_tiles_of_rounds(engine, x, 2 + residual, 1)
    assert 1 < at_once < tiles and tiles % at_once, "the forward's last round is to be incomplete"
    tiles, at_once = count_tiles_of_rounds(engine, x, 3 + 2 * residual, 2 + residual)
    assert 0 < at_once < tiles
    _, *want = run_step(x, dy, weight, bias, added)
    for engine.config.capturing, engine.config.seed in ((False, 0), (True, 1), (False, 2)):
        got, kernels = run_step_by_single_launches(engine, x, dy, weight, bias, added)
        assert kernels == [1, 1]
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    "shape, channel_dim, channels_last, rounds",  # of forward, backward, and backward with a residual
    [
        ((128, 256, 56, 56), 1, False, (13, 32, 43)),
        ((128, 1024, 14, 14), 1, False, (4, 8, 10)),
        ((128, 1024, 14, 14), 1, True, (3, 8, 8)),
        ((128, 197, 768), 2, False, (2, 6, 6)),
        ((256, 197, 768), 2, False, (6, 0, 0)),
        ((32, 197, 768), 2, False, (1, 2, 2)),
        ((16, 256, 28, 28), 1, True, (1, 1, 1)),
        ((128, 256, 56, 56), 1, True, (0, 0, 0)),
        ((256, 64, 112, 112), 1, False, (22, 64, 0)),
    ],
    ids=str,
)
def test_shapes_of_the_benchmarks_take_their_rounds(engine, shape, channel_dim, channels_last, rounds):
    """The table in docs/benchmarks.md, in bf16, on 132 multiprocessors of 228 KiB. 0: two launches."""
    x = torch.empty(shape, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    smem = (228 << 10) // 2 - (32 << 10)  # as LaunchContext has it
    found = []
    for operands, reduced_operands in (2, 1), (3, 2), (5, 3):
        plan = engine.plan(x.shape, x.stride(), channel_dim, 2, operands, reduced_operands, 132, 2, smem)
        found.append(-(-plan["tiles"] // plan["tiles_at_once"]) if plan["tiles_at_once"] else 0)
    assert tuple(found) == rounds


@pytest.mark.skipif(os.environ.get("FASTVIT_CUDA_HOST") != "race", reason="only the race build counts bytes")
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", SHAPES_OF_ROUNDS)
def test_rounds_read_global_memory_once(engine, shape, residual):
    """Two launches read again what the first reduces. Parameters and results of slices are few bytes."""
    set_device_of_rounds(engine)
    engine.config.checks_races = False
    x, dy, weight, bias, added = make_inputs(shape, torch.float32)
    added = added if residual else None
    options, running = make_arguments(weight, bias)
    # With rows a channel has 1620 values here, and up to 8 slices, each with a result and parameters.
    limit = 0.03 if shape == "rows_of_tiles" else 0.02
    for engine.config.shared_per_sm, launches in ((160 << 10, 1), (0, 2)):

        def passes(op, *args, launches=launches, **kwargs):
            before, launched = engine.bytes(), engine.launches()
            result = op(*args, **kwargs)
            assert engine.launches() - launched == launches
            read, written = ((b - a) / x.nbytes for a, b in zip(before, engine.bytes(), strict=True))
            assert 0 <= read % 1 < limit * read and 0 <= written % 1 < 0.02 * written
            return int(read), int(written), result

        *forward, (_, saved) = passes(ops.bn_forward, x, **options, **running, residual=added)
        *backward, _ = passes(ops.bn_backward, x, dy, saved, **options, residual=added)
        assert forward == [launches + residual, 1]
        assert backward == [(2 + residual) * launches, 1 + residual]


@pytest.mark.parametrize("shape", ["long_planes", "rows"])
def test_without_room_for_a_single_launch_there_are_two(engine, shape):
    """Too little shared memory, or blocks that cannot all run at once: two launches, the same bits."""
    engine.config.sm_count = 6
    x, dy, weight, bias, _ = make_inputs(shape, torch.float32)
    want, kernels = run_step_by_single_launches(engine, x, dy, weight, bias)
    assert kernels == [1, 1]
    for name, value in (("shared_per_sm", 36 << 10), ("blocks_per_sm", 1), ("cooperative", False)):
        before = getattr(engine.config, name)
        setattr(engine.config, name, value)
        got, kernels = run_step_by_single_launches(engine, x, dy, weight, bias)
        setattr(engine.config, name, before)
        assert kernels == [2, 2], name
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kilobytes", [64, 100])
def test_graphics_cards_have_room_for_a_single_launch(engine, kilobytes):
    """With one block a multiprocessor, of a T4 or of an RTX 3090, whose 100 KB two would have to share."""
    engine.config.sm_count, engine.config.shared_per_sm = 40, kilobytes << 10
    x, dy, weight, bias, _ = make_inputs("rows", torch.bfloat16)
    _, *want = run_step(x, dy, weight, bias)
    got, kernels = run_step_by_single_launches(engine, x, dy, weight, bias)
    assert kernels == [1, 1]
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "rows"])
@pytest.mark.parametrize("n, c", [(64, 3), (12, 64)])
def test_few_channels_fill_the_device(engine, n, c, channels_last, dtype):
    """Three channels of 56x56 are divided among blocks of all multiprocessors too, most of which have two."""
    engine.config.sm_count = 132
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(n, c, 56, 56).to(dtype).contiguous(memory_format=layout)
    moments = ops.bn_stats(x)
    blocks = [engine.blocks()]
    _, saved = ops.bn_forward(x, moments=moments)
    blocks.append(engine.blocks())
    (sums,) = ops.bn_reduce(x, x, saved)
    blocks.append(engine.blocks())
    ops.bn_backward(x, x, saved, global_sums=sums)
    blocks.append(engine.blocks())
    assert min(blocks) >= 0.7 * 2 * engine.config.sm_count


def plan_tokens(
    engine, rows: int, channels: int, dtype: torch.dtype, sm_count: int = 132, smem: int = 0
) -> dict:
    """Returns how the planner divides an op over tokens, with two blocks a multiprocessor."""
    x = torch.empty(1, rows, channels, device="meta")
    return engine.plan(x.shape, x.stride(), 2, dtype.itemsize, 1, 1, sm_count, 2, smem)


@pytest.mark.parametrize("rows,vectors", [(2**31 - 1, True), (2**31, False)])
def test_rows_that_32_bits_do_not_count_have_no_vectors(engine, rows, vectors):
    found = plan_tokens(engine, rows, 8, torch.bfloat16)
    assert found["rows"] and bool(found["vector"]) is vectors and found["units"] == rows


@pytest.mark.parametrize("element_size", [2, 4])
def test_planes_have_vectors_if_they_have_two(engine, element_size):
    """A plane may begin between two boundaries of 16 bytes; one of two vectors has a whole one anyway."""
    width = 16 // element_size
    for inner in (width, 2 * width - 1, 2 * width, 2 * width + 1):
        x = torch.empty(1000, 3, 40, device="meta")[:, :, :inner]
        found = engine.plan(x.shape, x.stride(), 1, element_size, 2, 1, 132, 2, 0)
        assert not found["rows"] and bool(found["vector"]) is (inner >= 2 * width)


@pytest.mark.parametrize(
    "dtype, rows, channels, sm_count",  # 40 slices in groups of 32, of one tile and of two; 70 of 64
    [
        (torch.bfloat16, 2600, 128, 20),
        (torch.bfloat16, 2600, 256, 40),
        (torch.float32, 4480, 64, 35),
    ],
    ids=name_of,
)
def test_groups_of_slices_merge_to_the_bits_of_two_ops(engine, dtype, rows, channels, sm_count):
    """More slices than one block merges: in any order of blocks the same bits, by the local ops too."""
    assert plan_tokens(engine, rows, channels, dtype, sm_count, 80 << 10)["groups"]
    engine.config.sm_count = sm_count
    x, dy = (torch.randn(rows, channels, generator=torch.Generator().manual_seed(i)) + 5 for i in range(2))
    x, dy = x.to(dtype), dy.to(dtype)
    weight, bias = torch.linspace(-1.5, 1.5, channels) + 0.07, torch.linspace(-0.5, 0.5, channels)
    moments, *want = run_step(x, dy, weight, bias)
    exact = reference.bn_stats(x.double())
    torch.testing.assert_close(moments.double(), exact, rtol=1e-5, atol=1e-5)
    for engine.config.capturing, engine.config.seed in ((False, 0), (True, 1), (False, 2)):
        got, kernels = run_step_by_single_launches(engine, x, dy, weight, bias)
        assert kernels == [1, 1]
        assert_same_bits(got, want)
        assert_same_bits(run_step(x, dy, weight, bias), (moments, *want))


def test_a_gpu_without_code_is_refused_before_a_launch(engine):
    engine.config.sm_count, engine.config.built = 53, False  # a device that no other test uses
    before = engine.launches()
    for call in (ops.bn_stats, lambda x: ops.act_forward(x, activation="gelu")):
        with pytest.raises(RuntimeError, match="no code for this GPU; build .* TORCH_CUDA_ARCH_LIST"):
            call(torch.ones(4, 8, 2, 2))
    assert engine.launches() == before


@pytest.mark.parametrize("shared, launches", [(228 << 10, 1), (0, 2)], ids=["single_launch", "larger"])
def test_a_layers_step_launches_and_allocates_what_the_docs_say(engine, shared, launches):
    """The table in docs/benchmarks.md. The results of slices take scratch memory in each direction."""
    engine.config.sm_count, engine.config.shared_per_sm = 6, shared
    x, dy, *_ = make_inputs("long_planes", torch.float32)
    counts = engine.launches, engine.requests, engine.memsets, engine.queries

    def asked(work):
        before = [count() for count in counts]
        result = work()
        return [count() - b for count, b in zip(counts, before, strict=True)], result

    for layer, in_place in (fastvit.BatchNormAct(3, activation="relu"), False), (fastvit.InPlaceABN(3), True):
        for _ in range(2):  # the first step makes the stream's semaphores, and asks about kernels
            x_of_step = x.clone().requires_grad_() * 1
            forward, y = asked(functools.partial(layer, x_of_step))
            backward, _ = asked(functools.partial(y.backward, dy))
        # y unless in place, saved, the moments between two launches; dx, an empty dresidual, the sums
        assert forward == [launches, 2 + launches - in_place, 0, 0]
        assert backward == [launches, 4, 0, 0]


def run_layer_norm_step(x, dy, weight):
    y, saved = ops.layer_norm_forward(x, weight, weight, 1e-5, dy.dtype)
    return [y, saved, *ops.layer_norm_backward(x, dy, saved, weight)]


@pytest.mark.parametrize("sm_count,narrow", [(1, torch.float32), (5, torch.bfloat16)], ids=name_of)
@pytest.mark.parametrize("columns", [33, 192, 384, 768, 4100])  # teams of lanes, of warps; parts
def test_layer_norm_has_the_same_bits_in_any_order(engine, columns, narrow, sm_count):
    """The same bits in any order of teams, warps and blocks; right results at any number of blocks."""
    engine.config.sm_count = sm_count
    g = torch.Generator().manual_seed(0)
    x = torch.randn(90 if columns < 1000 else 30, columns, generator=g) * 2 + 3
    dy, weight = torch.randn(x.shape, generator=g).to(narrow), torch.linspace(-1.5, 1.5, columns)
    want = run_layer_norm_step(x, dy, weight)
    exact, saved = reference.layer_norm_forward(x, weight, weight, 1e-5, narrow)
    gradients = reference.layer_norm_backward(x, dy, saved, weight)
    for a, b in zip(want, (exact, saved, *gradients), strict=True):
        limits = {"rtol": 1e-2, "atol": 1e-3} if a.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(a, b, **limits)
    for engine.config.seed in (1, 2):
        assert all(map(torch.equal, run_layer_norm_step(x, dy, weight), want))


def test_ops_that_get_no_memory_write_nothing(engine):
    """Each of the requests of each op is refused in turn."""
    case = LayerInputs("tokens", torch.float32)
    calls = make_layer_calls(case)
    engine.config.sm_count = 6
    wide = make_inputs("wide_rows", torch.float32)[0]  # has slices, whose results take scratch memory
    calls += [("bn_stats", (wide,)), ("bn_forward", (wide,)), ("bn_backward", (wide, wide, torch.ones(1042)))]
    for op, arguments in calls:
        tensors = select_tensors(arguments)
        old_tensors = [t.clone() for t in tensors]
        number_of_requests = engine.requests()
        find_op(op)(*arguments)
        number_of_requests = engine.requests() - number_of_requests
        for t, old in zip(tensors, old_tensors, strict=True):
            t.copy_(old)
        for request in range(number_of_requests):
            engine.fail_request(request)
            with pytest.raises(RuntimeError, match="API call failed"):
                find_op(op)(*arguments)
            engine.fail_request(-1)
            assert all(map(torch.equal, tensors, old_tensors)), f"{op} wrote before request {request}"
        assert engine.allocations() == 0
