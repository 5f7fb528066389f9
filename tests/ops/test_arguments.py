"""Checks of every op: what it names, one device, existing storage, a bounded number of elements."""

import contextlib
import ctypes
import gc
import math
import re
from inspect import Parameter, signature

import pytest
import torch
from sync.one_process import make_exchange_of_one_rank
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops
from fastvit.sync.protocol import Tag
from ops import reference
from ops.inputs import CORE_LAYOUTS, LayerInputs, clone_with_strides

pytestmark = pytest.mark.cuda_model


def every_call(case):
    """(name, arguments) of each op, with every tensor it can take, and with few."""
    d, w, b, x, dy, residual = case.channel_dim, case.weight, case.bias, case.x, case.dy, case.residual
    moments = ops.bn_stats(x, d)
    y, saved = ops.bn_forward(x, w, b, channel_dim=d, moments=moments)
    (sums,) = ops.bn_reduce(x, dy, saved, w, b, channel_dim=d)
    _, rows = ops.layer_norm_forward(x)
    columns = torch.ones(x.shape[-1], device=x.device)
    mean, var, tracked = case.copy_buffers().values()
    identity, relu = (None, None, None, "identity", 0.0, d), (w, b, residual, "relu", 0.0, d)
    leaky = w, b, None, "leaky_relu", 0.1, d
    return [
        ("bn_stats", (x, d)),
        ("bn_forward", (x, *relu, moments, mean, var, tracked, None, 1e-5)),
        ("bn_forward", (x, *identity, None, mean, var, None, 0.1, 1e-5, False)),
        ("bn_forward", (x, *leaky, moments, mean, var, tracked, 0.1, 1e-5, True, True)),
        ("bn_forward", (x, *relu, None, mean, var, tracked, None, 1e-5)),
        ("bn_forward", (x, *identity)),
        ("bn_forward_inplace", (clone_with_strides(x), *leaky, moments, mean, var, tracked, 0.1, 1e-5)),
        ("bn_forward_inplace", (clone_with_strides(x), *leaky, None, mean, var, tracked, 0.1, 1e-5)),
        ("bn_forward_inplace", (clone_with_strides(x), *identity, None, mean, var, None, 0.1, 1e-5, False)),
        ("bn_apply", (x, saved, w, b, residual, "gelu", 0.0, d)),
        ("bn_reduce", (x, dy, saved, *relu)),
        ("bn_reduce", (y, dy, saved, w, b, None, "elu", 1.0, d, True)),
        ("bn_backward", (x, dy, saved, *relu, False, sums)),
        ("bn_backward", (x, dy, saved, *identity, False, None, False)),
        ("bn_backward", (y, dy, saved, *leaky, True, sums)),
        ("bn_backward", (x, dy, saved, *relu)),
        ("bn_backward", (x, dy, saved, w, b, None, "relu", 0.0, d)),
        ("bn_backward", (y, dy, saved, *leaky, True)),
        ("layer_norm_forward", (x, columns, columns.half(), 1e-5, torch.bfloat16)),
        ("layer_norm_forward", (x,)),
        ("layer_norm_backward", (x, dy, rows, columns, True)),
        ("layer_norm_backward", (x, dy.bfloat16(), rows, None, False)),
        ("act_forward", (x, None, "gelu_tanh", 0.0)),
        ("act_forward", (x, residual, "silu", 0.0)),
        ("act_backward", (x, dy, None, "elu", 1.0)),
        ("act_backward", (x, dy, residual, "gelu", 0.0)),
    ]


def calls_with_exchange(case, exchange):
    d, x, dy = case.channel_dim, case.x, case.dy
    _, saved = ops.bn_forward(x, channel_dim=d)
    tail = case.weight, case.bias, None, "leaky_relu", 0.1, d
    return [
        ("bn_stats", (x, d, exchange)),
        ("bn_reduce", (x, dy, saved, *tail, False, exchange)),
        ("bn_reduce", (x, dy, saved, *tail, True, exchange)),
    ]


def schema_of(op):
    return getattr(torch.ops.fastvit, op).default._schema


def every_tensor(case):
    """(op's name, its arguments, the place and the name of a tensor among them), for each tensor."""
    for op, arguments in every_call(case):
        names = [argument.name for argument in schema_of(op).arguments]
        for at, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                yield op, list(arguments), at, names[at]


def test_the_reference_takes_the_arguments_of_the_ops():
    names = {op for op, _ in every_call(LayerInputs("nchw", torch.float32, "cpu"))}
    assert names == set(ops.__all__)
    for name in sorted(names):
        theirs = [(n, p.default) for n, p in signature(getattr(reference, name)).parameters.items()]
        ours = [
            (argument.name, argument.default_value if argument.has_default_value() else Parameter.empty)
            for argument in schema_of(name).arguments
            if argument.name != "exchange"
        ]
        assert theirs == ours, name


def tensors(values):
    return [value for value in values if isinstance(value, torch.Tensor)]


X, W = torch.randn(4, 3, 5), torch.ones(3)
MOMENTS, (_, ROWS) = ops.bn_stats(X), ops.layer_norm_forward(X)
_, SAVED = ops.bn_forward(X)
BACKWARD = {"input": X, "dy": X, "saved": SAVED}
VALID = {
    "bn_stats": {"x": X},
    "bn_forward": {"x": X, "moments": MOMENTS},
    "bn_forward_inplace": {"x": X, "moments": MOMENTS},
    "bn_apply": {"x": X, "saved": SAVED},
    "bn_reduce": BACKWARD,
    "bn_backward": BACKWARD,
    "act_forward": {"x": X},
    "act_backward": {"x": X, "dy": X},
    "layer_norm_forward": {"x": X},
    "layer_norm_backward": {"x": X, "dy": X, "saved": ROWS},
}
RUNNING = {"running_mean": W, "running_var": W}
FROM_OUTPUT = {"from_output": True, "activation": "leaky_relu"}


@pytest.mark.parametrize(
    "op,change,message",
    [
        ("bn_stats", {"x": X.long()}, "x has dtype Long; float16"),
        ("bn_stats", {"x": X[0, 0]}, r"x has shape \(5\); 2 to 5"),
        ("bn_stats", {"x": X[None, None, None]}, "x has shape .*; 2 to 5"),
        ("bn_stats", {"channel_dim": 3}, r"channel_dim is 3; 0 to 2 expected"),
        ("bn_forward", {"weight": W[:2]}, r"weight has shape \(2\); \(3,\)"),
        ("bn_forward", {"weight": W.int()}, "weight has dtype Int"),
        ("bn_forward", {"bias": torch.ones(6)[::2]}, "bias is not contiguous"),
        ("bn_forward", {"moments": MOMENTS[:5]}, r"moments has shape \(5\); \(8,\) expected"),
        ("bn_forward", {"moments": MOMENTS.double()}, "moments has dtype Double; Float expected"),
        ("bn_forward", {"moments": None, "training": False}, "running_mean is None; without training"),
        (
            "bn_forward",
            RUNNING | {"training": False},
            "moments are given; None expected without training",
        ),
        (
            "bn_backward",
            {"global_sums": MOMENTS[:6], "training": False},
            "global_sums are given; None expected without",
        ),
        ("bn_forward", {"running_mean": W}, ".* must be given together"),
        ("bn_forward", RUNNING | {"momentum": None}, "momentum is None .* needs num_batches_tracked"),
        ("bn_forward", {"num_batches_tracked": W[0]}, r"num_batches_tracked is Float \(\); one int64 number"),
        ("bn_forward", {"residual": X[:2]}, r"residual has shape \(2, 3, 5\); \(4, 3, 5\) expected"),
        ("bn_forward", {"residual": X.double()}, "residual has dtype Double; Float expected"),
        ("bn_forward", {"residual": X, "invertible": True}, "residual is given; None expected"),
        ("bn_forward_inplace", {"residual": X}, "residual is given; None expected"),
        ("bn_reduce", {"residual": X} | FROM_OUTPUT, "residual is given; None expected"),
        ("bn_backward", {"residual": X} | FROM_OUTPUT, "residual is given; None expected"),
        ("bn_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
        ("bn_forward_inplace", RUNNING | {"bias": W[:2]}, r"bias has shape \(2\); \(3,\)"),
        ("bn_forward_inplace", {"activation": "relu"}, "activation is relu, which cannot be inverted"),
        (
            "bn_forward_inplace",
            {"activation": "leaky_relu", "activation_param": 0.0},
            "activation_param is 0; > 0 expected",
        ),
        ("bn_forward_inplace", {"x": X[:1].expand(4, 3, 5)}, "x is expanded"),
        ("bn_apply", {"saved": SAVED[1:]}, r"saved has shape \(7\); \(8,\) expected"),
        ("bn_forward", {"invertible": True, "activation": "gelu"}, "activation is gelu, which cannot be"),
        ("bn_reduce", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\)"),
        ("bn_reduce", {"input": X.long()}, "input has dtype Long; float16"),
        ("bn_reduce", {"input": None}, "input is None; a tensor expected"),
        ("bn_reduce", {"saved": None}, "saved is None; a tensor expected"),
        ("bn_backward", {"dy": None}, "dy is None; a tensor expected"),
        ("act_backward", {"dy": None}, "dy is None; a tensor expected"),
        ("layer_norm_backward", {"dy": None}, "dy is None; a tensor expected"),
        ("bn_reduce", {"saved": SAVED[1:]} | FROM_OUTPUT, r"saved has shape \(7\); \(8,\)"),
        ("bn_reduce", FROM_OUTPUT | {"activation": "silu"}, "activation is silu, which cannot be inverted"),
        ("bn_backward", {"global_sums": SAVED} | FROM_OUTPUT, r"global_sums has shape \(8\); \(6,\)"),
        ("act_forward", {"x": X.long()}, "x has dtype Long; float16"),
        ("act_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
        ("act_backward", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\); \(4, 3, 5\) expected"),
        ("act_forward", {"gate": X[0]}, r"gate has shape \(3, 5\); \(4, 3, 5\) expected"),
        ("act_forward", {"gate": X.half()}, "gate has dtype Half; Float expected"),
        ("act_backward", {"gate": X, "dy": X.half()}, "dy has dtype Half; Float expected"),
        ("act_backward", {"gate": X[0]}, r"gate has shape \(3, 5\); \(4, 3, 5\) expected"),
        ("layer_norm_forward", {"x": X.long()}, "x has dtype Long; float16"),
        ("layer_norm_forward", {"x": X[..., :0]}, r"x has shape \(4, 3, 0\); 1 to 2\^30 values"),
        ("layer_norm_forward", {"x": X[0, 0, 0]}, r"x has shape \(\); 1 to"),
        ("layer_norm_forward", {"weight": W}, r"weight has shape \(3\); \(5,\) expected"),
        ("layer_norm_forward", {"bias": W.int()}, "bias has dtype Int"),
        (
            "layer_norm_forward",
            {"output_dtype": torch.float64},
            "output_dtype is Double; Float expected, as x's, or 16 bits",
        ),
        (
            "layer_norm_forward",
            {"x": X.half(), "output_dtype": torch.bfloat16},
            "output_dtype is BFloat16; Half expected, as x's",
        ),
        ("layer_norm_backward", {"dy": X.double()}, "dy is Double; Float expected"),
        ("layer_norm_backward", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\); \(4, 3, 5\)"),
        ("layer_norm_backward", {"saved": ROWS[1:]}, r"saved has shape \(23\); \(24,\)"),
    ],
)
def test_bad_input_is_named(op, change, message):
    given = VALID[op] | change
    before = [t.clone() for t in tensors(given.values())]
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        getattr(ops, op)(**given)
    assert all(map(torch.equal, tensors(given.values()), before))


NOT_FINITE = (-math.inf, math.inf, math.nan)
WRONG_EPS = [
    ({"eps": v}, re.escape(f"eps is {v:g}; a number from 0 to 2**126 expected"))
    for v in (-1e-5, 1e39, *NOT_FINITE)
]
WRONG_MOMENTUM = [
    ({"momentum": v}, f"momentum is {v:g}; 0 to 1, or None, expected") for v in (-0.1, 1.1, *NOT_FINITE)
]


@pytest.mark.parametrize(
    "op,wrong,message",
    [
        *(("layer_norm_forward", *one) for one in WRONG_EPS),
        *(("bn_forward", *one) for one in WRONG_EPS + WRONG_MOMENTUM),
        *(("bn_forward_inplace", *one) for one in WRONG_EPS + WRONG_MOMENTUM),
    ],
    ids=str,
)
def test_an_eps_or_a_momentum_that_is_none(op, wrong, message):
    """They are refused also where they are not used."""
    evaluated = RUNNING | {"moments": None, "training": False}
    for more in [{}] if op == "layer_norm_forward" else [{}, RUNNING, evaluated]:
        given = VALID[op] | more
        before = [t.clone() for t in tensors(given.values())]
        with pytest.raises(RuntimeError, match=f"{op}: {message}"):
            getattr(ops, op)(**given, **wrong)
        assert all(map(torch.equal, tensors(given.values()), before))


def test_zeros_as_eps_and_momentum(device):
    """Allowed: statistics that are not updated, and a constant channel whose deviation has no bound."""
    x = torch.randn(8, 3, device=device)
    x[:, 1] = 2
    given = {"weight": torch.ones(3, device=device), "bias": torch.zeros(3, device=device), "eps": 0.0}
    ours, theirs = (
        {"running_mean": torch.zeros(3, device=device), "running_var": torch.ones(3, device=device)}
        for _ in range(2)
    )
    for module, running in ((ops, ours), (reference, theirs)):
        y, saved = module.bn_forward(x, **given, **running, momentum=0.0)
        assert saved[3:6].isinf().tolist() == [False, True, False]
        assert y.isnan().any(0).tolist() == [False, True, False]
        assert running["running_mean"].tolist() == [0.0] * 3 and running["running_var"].tolist() == [1.0] * 3
    y, saved = ops.layer_norm_forward(x.t()[:2], eps=0.0)
    assert saved[2:].isinf().tolist() == [False, True] and y.isnan().any(1).tolist() == [False, True]


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def test_a_call_frees_what_it_takes(device):
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("glibc 2.33 counts allocated bytes")
    mallinfo.restype = MallocInfo
    case = LayerInputs("nchw", torch.float32, device)
    exchange, _arena = make_exchange_of_one_rank(device)
    wrong = ("act_forward", (case.x, None, "an activation of more than 15 characters"))
    gc.collect()
    for op, arguments in (*every_call(case), *calls_with_exchange(case, exchange.with_tag(Tag(0, 1))), wrong):
        left = []
        for _ in range(4):  # the first makes what stays; others in the process make and free objects
            before = mallinfo().uordblks
            for _ in range(500):
                with contextlib.suppress(RuntimeError if arguments is wrong[1] else ()):
                    getattr(ops, op)(*arguments)
            left.append((mallinfo().uordblks - before) / 500)
        assert sorted(left[1:])[1] < 16, f"{op}: {left} bytes a call"


@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_opcheck(layout, device):
    case = LayerInputs(layout, torch.float32, device)
    exchange, _arena = make_exchange_of_one_rank(device)
    for op, arguments in (*every_call(case), *calls_with_exchange(case, exchange.with_tag(Tag(0, 1)))):
        torch.library.opcheck(
            getattr(ops, op),
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize("traced", [False, True])
def test_an_argument_on_meta_beside_others_is_refused(traced, device):
    """torch calls the fake when one tensor is on meta, and its result would be uninitialised memory."""
    mode = FakeTensorMode()
    for op, arguments, at, name in every_tensor(LayerInputs("nchw", torch.float32, device)):
        here, first = arguments[0].device, arguments[0]
        if len(tensors(arguments)) == 1:
            continue
        arguments[at] = arguments[at].to("meta")
        expected = rf"{op}: \w+ is on {here}; meta expected, where (x|input) is"
        if at:
            expected = rf"{op}: {name} is on meta; {here} expected, where (x|input) is"
        kept = first.clone()
        with pytest.raises(RuntimeError, match=expected):
            if traced:
                arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            getattr(ops, op)(*arguments)
        assert torch.equal(first, kept)


def test_all_on_meta_gives_shapes(device):
    for op, arguments in every_call(LayerInputs("nhwc_c13", torch.float32, device)):
        moved = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        got, want = getattr(ops, op)(*moved), getattr(ops, op)(*arguments)
        got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
        for a, b in zip(got, want, strict=True):
            assert a.is_meta and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("layout", ["nchw", "cropped"])
@pytest.mark.parametrize("left", ["nothing", "all but a byte"])
def test_freed_and_shrunk_storage_is_refused(left, layout, device):
    for op, arguments, at, name in every_tensor(LayerInputs(layout, torch.float32, device)):
        t = arguments[at]
        others = [(a, a.clone()) for a in tensors(arguments) if a is not t]
        arguments[at] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
        storage = arguments[at].untyped_storage()
        storage.resize_(0 if left == "nothing" else storage.nbytes() - 1)
        message = (
            rf"{op}: {name} has shape .*, but its storage was freed or shrunk to {storage.nbytes()} bytes"
        )
        with pytest.raises(RuntimeError, match=message):
            getattr(ops, op)(*arguments)
        assert all(torch.equal(a, kept) for a, kept in others), f"{op} wrote before it looked at {name}"


def test_storage_is_counted_from_where_the_tensor_begins(device):
    base = torch.randn(40, device=device)
    x = base[4:].view(3, 4, 3)[:, :3, :2]  # its last number is base[4 + 35 - 4]
    want = ops.bn_stats(x)
    base.untyped_storage().resize_(4 * 36)
    assert torch.equal(ops.bn_stats(x), want)
    base.untyped_storage().resize_(4 * 35)
    with pytest.raises(RuntimeError, match="bn_stats: x has shape .*freed or shrunk to 140 bytes"):
        ops.bn_stats(x)


def test_an_empty_tensor_needs_no_storage(device):
    x = torch.randn(0, 3, device=device)
    x.untyped_storage().resize_(0)
    y, saved = ops.bn_forward(x, moments=ops.bn_stats(x))
    assert y.shape == (0, 3) and saved[-2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    "shape",
    [(2**40, 2, 2**21), (2**31, 2, 2**30), (2**48, 2), (1, 2**62), (0, 2**62)],
    ids=str,
)
def test_more_elements_than_can_be_counted_are_refused(shape, device):
    x = torch.zeros(4, device=device).as_strided(shape, [0] * len(shape))
    for call in (ops.bn_stats, ops.bn_forward):
        with pytest.raises(RuntimeError, match=r"bn_\w+: x has shape \(\d+, .*; at most 2\^48 elements"):
            call(x)
