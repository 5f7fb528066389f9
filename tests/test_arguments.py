"""Checks of every op: what it names, one device, existing storage, a bounded number of elements."""

from inspect import signature

import pytest
import torch
from cases import CORE_LAYOUTS, Case, fresh
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops, reference

raw = torch.ops.fastvit


def every_call(case):
    """(name, arguments) of each op, with every tensor it can take, and with few."""
    d, w, b, x, dy, z = case.channel_dim, case.weight, case.bias, case.x, case.dy, case.z
    moments = ops.bn_stats(x, d)
    y, saved = ops.bn_forward(x, moments, w, b, channel_dim=d)
    (sums,) = ops.bn_reduce(x, dy, None, saved, w, b, channel_dim=d)
    _, rows = ops.layer_norm_forward(x)
    columns = torch.ones(x.shape[-1], device=x.device)
    buffers = tuple(case.buffers().values())
    relu, identity, leaky = (("relu", 0.0, d), ("identity", 0.0, d), ("leaky_relu", 0.1, d))
    return [
        ("bn_stats", (x, d)),
        ("bn_forward", (x, moments, w, b, z, *buffers, None, 1e-5, *relu)),
        ("bn_forward", (x, None, None, None, None, *buffers[:2], None, 0.1, 1e-5, *identity, False)),
        ("bn_apply", (x, saved, w, b, z, "gelu", 0.0, d)),
        ("abn_forward_", (fresh(x), moments, w, b, *buffers, 0.1, 1e-5, *leaky)),
        ("abn_forward", (x, moments, w, b, *buffers, 0.1, 1e-5, *leaky)),
        ("bn_reduce", (x, dy, z, saved, w, b, *relu)),
        ("abn_reduce", (y, dy, saved, w, b, "elu", 1.0, d)),
        ("bn_backward", (x, dy, z, saved, sums, w, b, *relu)),
        ("bn_backward", (x, dy, None, saved, None, w, b, *identity, False)),
        ("abn_backward", (y, dy, saved, sums, w, b, *leaky)),
        ("bn_forward", (x, None, w, b, z, *buffers, None, 1e-5, *relu)),
        ("bn_forward", (x, None, None, None, None, None, None, None, 0.1, 1e-5, *identity)),
        ("abn_forward_", (fresh(x), None, w, b, *buffers, 0.1, 1e-5, *leaky)),
        ("bn_backward", (x, dy, z, saved, None, w, b, *relu)),
        ("bn_backward", (x, dy, None, saved, None, w, b, *relu)),
        ("abn_backward", (y, dy, saved, None, w, b, *leaky)),
        ("layer_norm_forward", (x, columns, columns.half(), 1e-5, torch.bfloat16)),
        ("layer_norm_forward", (x, None, None, 1e-5)),
        ("layer_norm_backward", (x, dy, rows, columns, True)),
        ("layer_norm_backward", (x, dy.bfloat16(), rows, None, False)),
        ("act_forward", (x, "gelu_tanh", 0.0)),
        ("act_backward", (x, dy, "elu", 1.0)),
        ("glu_forward", (x, z, "silu", 0.0)),
        ("glu_backward", (x, z, dy, "gelu", 0.0)),
    ]


def every_tensor(case):
    """(op's name, its arguments, the place and the name of a tensor among them), for each tensor."""
    for op, arguments in every_call(case):
        names = [argument.name for argument in getattr(raw, op).default._schema.arguments]
        for at, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                yield op, list(arguments), at, names[at]


def test_the_reference_takes_the_arguments_of_the_ops():
    """Those of an op in place are bn's, with a flag."""
    names = {op for op, _ in every_call(Case("nchw", torch.float32, "cpu")) if not op.startswith("abn_")}
    for name in sorted(names):
        ours, theirs = (dict(signature(getattr(of, name)).parameters) for of in (ops, reference))
        ours.pop("exchange", None)
        theirs.pop("in_place", None)
        assert [(n, p.default) for n, p in theirs.items()] == [(n, p.default) for n, p in ours.items()], name


def tensors(values):
    return [value for value in values if isinstance(value, torch.Tensor)]


X, W = torch.randn(4, 3, 5), torch.ones(3)
MOMENTS, (_, ROWS) = ops.bn_stats(X), ops.layer_norm_forward(X)
_, SAVED = ops.bn_forward(X, MOMENTS)
VALID = {
    "bn_stats": {"x": X},
    "bn_forward": {"x": X, "moments": MOMENTS},
    "abn_forward_": {"x": X, "moments": MOMENTS},
    "bn_apply": {"x": X, "saved": SAVED},
    "bn_reduce": {"x": X, "dy": X, "z": None, "saved": SAVED},
    "abn_reduce": {"y": X, "dy": X, "saved": SAVED},
    "abn_backward": {"y": X, "dy": X, "saved": SAVED},
    "act_forward": {"x": X},
    "act_backward": {"x": X, "dy": X},
    "glu_forward": {"a": X, "b": X},
    "glu_backward": {"a": X, "b": X, "dy": X},
    "layer_norm_forward": {"x": X},
    "layer_norm_backward": {"x": X, "dy": X, "saved": ROWS},
}
RUNNING = {"running_mean": W, "running_var": W}


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
        ("bn_forward", RUNNING | {"training": False}, "moments are given; None expected without training"),
        ("abn_backward", {"sums": MOMENTS[:6], "training": False}, "sums are given; None expected without"),
        ("bn_forward", {"running_mean": W}, ".* must be given together"),
        ("bn_forward", RUNNING | {"momentum": None}, "momentum is None .* needs num_batches_tracked"),
        ("bn_forward", {"num_batches_tracked": W[0]}, r"num_batches_tracked is Float \(\); one int64 number"),
        ("bn_forward", {"z": X[:2]}, r"z has shape \(2, 3, 5\); \(4, 3, 5\) expected"),
        ("bn_forward", {"z": X.double()}, "z has dtype Double; Float expected"),
        ("bn_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
        ("abn_forward_", RUNNING | {"bias": W[:2]}, r"bias has shape \(2\); \(3,\)"),
        ("abn_forward_", {"activation": "relu"}, "activation is relu, which cannot be inverted"),
        ("abn_forward_", {"activation_param": 0.0}, "activation_param is 0; > 0 expected"),
        ("abn_forward_", {"x": X[:1].expand(4, 3, 5)}, "x is expanded"),
        ("bn_apply", {"saved": SAVED[1:]}, r"saved has shape \(7\); \(8,\) expected"),
        ("bn_reduce", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\)"),
        ("abn_reduce", {"saved": SAVED[1:]}, r"saved has shape \(7\); \(8,\)"),
        ("abn_backward", {"sums": SAVED}, r"sums has shape \(8\); \(6,\)"),
        ("act_forward", {"x": X.long()}, "x has dtype Long; float16"),
        ("act_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
        ("act_backward", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\); \(4, 3, 5\) expected"),
        ("glu_forward", {"b": X[0]}, r"b has shape \(3, 5\); \(4, 3, 5\) expected"),
        ("glu_forward", {"b": X.half()}, "b has dtype Half; Float expected"),
        ("glu_backward", {"dy": X.half()}, "dy has dtype Half; Float expected"),
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


@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_opcheck(layout, device):
    for op, arguments in every_call(Case(layout, torch.float32, device)):
        torch.library.opcheck(
            getattr(raw, op).default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize("traced", [False, True])
def test_an_argument_on_meta_beside_others_is_refused(traced, device):
    """torch calls the fake when one tensor is on meta, and its result would be uninitialised memory."""
    mode = FakeTensorMode()
    for op, arguments, at, name in every_tensor(Case("nchw", torch.float32, device)):
        here, first = arguments[0].device, arguments[0]
        if len(tensors(arguments)) == 1:
            continue
        arguments[at] = arguments[at].to("meta")
        expected = rf"{op}: \w+ is on {here}; meta expected, where [axy] is"
        if at:
            expected = rf"{op}: {name} is on meta; {here} expected, where [axy] is"
        kept = first.clone()
        with pytest.raises(RuntimeError, match=expected):
            if traced:
                arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            getattr(raw, op)(*arguments)
        assert torch.equal(first, kept)


def test_all_on_meta_gives_shapes(device):
    for op, arguments in every_call(Case("nhwc_c13", torch.float32, device)):
        moved = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        got, want = getattr(raw, op)(*moved), getattr(raw, op)(*arguments)
        got, want = (value if isinstance(value, tuple) else (value,) for value in (got, want))
        for a, b in zip(got, want, strict=True):
            assert a.is_meta and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("layout", ["nchw", "cropped"])
@pytest.mark.parametrize("left", ["nothing", "all but a byte"])
def test_freed_and_shrunk_storage_is_refused(left, layout, device):
    for op, arguments, at, name in every_tensor(Case(layout, torch.float32, device)):
        t = arguments[at]
        others = [(a, a.clone()) for a in tensors(arguments) if a is not t]
        arguments[at] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
        storage = arguments[at].untyped_storage()
        storage.resize_(0 if left == "nothing" else storage.nbytes() - 1)
        message = (
            rf"{op}: {name} has shape .*, but its storage was freed or shrunk to {storage.nbytes()} bytes"
        )
        with pytest.raises(RuntimeError, match=message):
            getattr(raw, op)(*arguments)
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
    y, saved = ops.bn_forward(x, ops.bn_stats(x))
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
