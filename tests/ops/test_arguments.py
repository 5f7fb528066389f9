"""Every op names a wrong argument, and is traced."""

import re
from inspect import Parameter, signature

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops
from fastvit.sync.protocol import MAX_RANKS
from ops import reference
from ops.inputs import LayerInputs
from ops.matrix import CORE_LAYOUTS
from ops.op_calls import (
    CAPACITY,
    OTHER_OPS,
    call_op,
    find_op,
    make_exchange_calls,
    make_layer_calls,
    make_layer_calls_with_exchange,
    select_tensors,
)

pytestmark = pytest.mark.cuda_model


def test_the_table_of_calls_has_every_op_and_the_reference_its_arguments(device, registered_ops):
    layer_ops = {op for op, _ in make_layer_calls(LayerInputs("nchw", torch.float32, device))}
    exchange_ops = {op for op, _ in make_exchange_calls(device, registered_ops)}
    assert layer_ops == set(ops.__all__)
    assert layer_ops | exchange_ops == registered_ops - OTHER_OPS
    for op in sorted(layer_ops):
        parameters = signature(getattr(reference, op)).parameters
        expected = [
            (argument.name, argument.default_value if argument.has_default_value() else Parameter.empty)
            for argument in find_op(op)._schema.arguments
            if argument.name != "exchange"
        ]
        assert [(name, p.default) for name, p in parameters.items()] == expected, op


X, W = torch.randn(4, 3, 5), torch.ones(3)
MOMENTS, (_, ROWS) = ops.bn_stats(X), ops.layer_norm_forward(X)
_, SAVED = ops.bn_forward(X)
RUNNING = {"running_mean": W, "running_var": W}
FROM_OUTPUT = {"from_output": True, "activation": "leaky_relu"}
GRADIENT = {"input": X, "dy": X, "saved": SAVED}
NUMBERS = torch.zeros(6)


def make_descriptor(rank: int, world: int, capacity: int = CAPACITY, arenas: int = 0) -> torch.Tensor:
    """Returns an exchange without memory, for a call that is refused."""
    return torch.tensor([rank, world, capacity, *[0] * (5 + arenas)])


EXCHANGED = {"numbers": NUMBERS, "exchange": make_descriptor(0, 2, arenas=2)}
COLLECTED = {"numbers": NUMBERS, "exchange": make_descriptor(0, 2)}
# The smallest valid call of each op.
VALID = {
    "bn_stats": {"x": X},
    "bn_forward": {"x": X, "moments": MOMENTS},
    "bn_forward_inplace": {"x": X, "moments": MOMENTS},
    "bn_apply": {"x": X, "saved": SAVED},
    "bn_reduce": GRADIENT,
    "bn_backward": GRADIENT,
    "act_forward": {"x": X},
    "act_backward": {"x": X, "dy": X},
    "layer_norm_forward": {"x": X},
    "layer_norm_backward": {"x": X, "dy": X, "saved": ROWS},
    "arena_bytes": {"world": 2, "capacity": CAPACITY},
    "exchange_merge": EXCHANGED,
    "exchange_wait": {"result": NUMBERS, "exchange": EXCHANGED["exchange"]},
    "exchange_abandon": {"exchange": EXCHANGED["exchange"]},
    "merge_received": {"messages": torch.zeros(1, 10).int(), **COLLECTED},
    "pack_message": COLLECTED,
    "merge_messages": {"messages": torch.zeros(2 * CAPACITY), **COLLECTED},
}
GPU_OPS = "pack_message", "merge_messages"
# An op, the arguments that are changed, and the message after the op's name.
BAD_ARGUMENTS = [
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
    ("bn_forward", {"running_mean": W}, ".* must be given together"),
    ("bn_forward", RUNNING | {"momentum": None}, "momentum is None .* needs num_batches_tracked"),
    ("bn_forward", {"num_batches_tracked": W[0]}, r"num_batches_tracked is Float \(\); one int64 number"),
    ("bn_forward", {"residual": X[:2]}, r"residual has shape \(2, 3, 5\); \(4, 3, 5\) expected"),
    ("bn_forward", {"residual": X.double()}, "residual has dtype Double; Float expected"),
    ("bn_forward", {"residual": X, "invertible": True}, "residual is given; None expected"),
    ("bn_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
    ("bn_forward", {"invertible": True, "activation": "gelu"}, "activation is gelu, which cannot be"),
    ("bn_forward_inplace", {"residual": X}, "residual is given; None expected"),
    ("bn_forward_inplace", RUNNING | {"bias": W[:2]}, r"bias has shape \(2\); \(3,\)"),
    ("bn_forward_inplace", {"activation": "relu"}, "activation is relu, which cannot be inverted"),
    (
        "bn_forward_inplace",
        {"activation": "leaky_relu", "activation_param": 0.0},
        "activation_param is 0; > 0 expected",
    ),
    ("bn_forward_inplace", {"x": X[:1].expand(4, 3, 5)}, "x is expanded"),
    ("bn_apply", {"saved": SAVED[1:]}, r"saved has shape \(7\); \(8,\) expected"),
    ("bn_reduce", {"residual": X} | FROM_OUTPUT, "residual is given; None expected"),
    ("bn_reduce", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\)"),
    ("bn_reduce", {"input": X.long()}, "input has dtype Long; float16"),
    ("bn_reduce", {"input": None}, "input is None; a tensor expected"),
    ("bn_reduce", {"saved": None}, "saved is None; a tensor expected"),
    ("bn_reduce", {"saved": SAVED[1:]} | FROM_OUTPUT, r"saved has shape \(7\); \(8,\)"),
    ("bn_reduce", FROM_OUTPUT | {"activation": "silu"}, "activation is silu, which cannot be inverted"),
    (
        "bn_backward",
        {"global_sums": MOMENTS[:6], "training": False},
        "global_sums are given; None expected without",
    ),
    ("bn_backward", {"residual": X} | FROM_OUTPUT, "residual is given; None expected"),
    ("bn_backward", {"dy": None}, "dy is None; a tensor expected"),
    ("bn_backward", {"global_sums": SAVED} | FROM_OUTPUT, r"global_sums has shape \(8\); \(6,\)"),
    ("act_forward", {"x": X.long()}, "x has dtype Long; float16"),
    ("act_forward", {"activation": "tanh"}, "activation is 'tanh'; one of identity, relu"),
    ("act_forward", {"gate": X[0]}, r"gate has shape \(3, 5\); \(4, 3, 5\) expected"),
    ("act_forward", {"gate": X.half()}, "gate has dtype Half; Float expected"),
    ("act_backward", {"dy": None}, "dy is None; a tensor expected"),
    ("act_backward", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\); \(4, 3, 5\) expected"),
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
    ("layer_norm_backward", {"dy": None}, "dy is None; a tensor expected"),
    ("layer_norm_backward", {"dy": X.double()}, "dy is Double; Float expected"),
    ("layer_norm_backward", {"dy": X[:3]}, r"dy has shape \(3, 3, 5\); \(4, 3, 5\)"),
    ("layer_norm_backward", {"saved": ROWS[1:]}, r"saved has shape \(23\); \(24,\)"),
    ("bn_stats", {"exchange": torch.zeros(8)}, "exchange is not a contiguous row of at least 8 int64"),
    ("bn_stats", {"exchange": make_descriptor(2, 2, arenas=2)}, "exchange has rank 2 of 2"),
    ("bn_reduce", {"exchange": make_descriptor(0, 2)}, "exchange has 2 ranks and no peer memory"),
    ("exchange_merge", {"numbers": NUMBERS.half()}, r"numbers is Half \(6\); moments \(2C \+ 2,\) or sums"),
    ("exchange_merge", {"numbers": NUMBERS[:5]}, r"numbers is Float \(5\); moments"),
    ("exchange_merge", {"numbers": NUMBERS.view(2, 3)}, r"numbers is Float \(2, 3\); moments"),
    (
        "exchange_merge",
        {"numbers": torch.zeros(70)},
        "exchange is for 70 numbers, that is 35 packets; an even n > 0 and at most 34 packets expected",
    ),
    (
        "exchange_merge",
        {"exchange": make_descriptor(0, MAX_RANKS + 1, arenas=MAX_RANKS + 1)},
        f"exchange has {MAX_RANKS + 1} ranks .*; at most {MAX_RANKS} ranks",
    ),
    *(
        ("exchange_merge", {"exchange": make_descriptor(*descriptor, arenas=2)}, f"exchange has rank {said}")
        for descriptor, said in (
            ((2, 2), "2 of 2, capacity 34, 10 numbers"),
            ((-1, 2), "-1 of 2"),
            ((0, 0), "0 of 0"),
            ((0, 2, 0), "0 of 2, capacity 0"),
            ((0, 3), "0 of 3, capacity 34, 10 numbers"),
        )
    ),
    *(
        (
            "exchange_merge",
            {"exchange": make_descriptor(0, 2, capacity, arenas=2)},
            f"exchange is for 2 ranks, capacity {capacity}",
        )
        for capacity in (2**59, 2**60, 2**63 - 1)
    ),
    (
        "exchange_wait",
        {"result": NUMBERS.view(1, 6)},
        r"result has shape \(1, 6\); \(2C \+ 2,\) or \(2, 2C\)",
    ),
    ("exchange_abandon", {"exchange": make_descriptor(0, 2)}, "exchange has 2 ranks and no peer memory"),
    *(
        ("arena_bytes", sizes, f"world is for {sizes['world']} ranks and {sizes['capacity']} packets")
        for number in (2**59, 2**60, 2**63 - 1)
        for sizes in ({"world": 2, "capacity": number}, {"world": number, "capacity": 2})
    ),
    *(
        (
            "merge_received",
            {"messages": messages.int(), "exchange": make_descriptor(0, 3)},
            r"messages is Int .*; Int \(2, 10\) or wider",
        )
        for messages in (torch.zeros(2, 8), torch.zeros(3, 10), torch.zeros(2, 11), torch.zeros(20))
    ),
    ("merge_received", {"messages": torch.zeros(1, 10)}, "messages is Float"),
    ("merge_received", {"numbers": NUMBERS.half()}, "numbers is Half"),
    (
        "pack_message",
        {"exchange": make_descriptor(0, 2, capacity=4)},
        r"numbers is Float \(6\); at most 4 numbers of float32",
    ),
    (
        "pack_message",
        {"numbers": NUMBERS.double()},
        r"numbers is Double \(6\); at most 34 numbers of float32",
    ),
    (
        "merge_messages",
        {"messages": torch.zeros(21), "exchange": make_descriptor(0, 2, capacity=14)},
        r"messages is Float \(21\); 32 numbers expected, .* of 2 ranks",
    ),
]


def make_case_name(case: tuple) -> str:
    op, _, message = case
    return f"{op}-{'_'.join(re.findall(r'[a-zA-Z0-9_]+', message)[:6])}"


def assert_refused(op: str, arguments: dict, message: str) -> None:
    """Raises unless the op names the fault before it writes anything."""
    tensors = select_tensors(arguments.values())
    old_tensors = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        find_op(op)(**arguments)
    assert all(map(torch.equal, tensors, old_tensors))


def make_bad_cases() -> list:
    """Returns the rows of BAD_ARGUMENTS. On the model of CUDA a push runs those of ops of GPUs alone."""
    marks = {
        case[0]: [] if case[0] in GPU_OPS else [pytest.mark.cuda_model("nightly")] for case in BAD_ARGUMENTS
    }
    return [pytest.param(*case, marks=marks[case[0]], id=make_case_name(case)) for case in BAD_ARGUMENTS]


@pytest.mark.parametrize("op,changed,message", make_bad_cases())
def test_bad_arguments_are_named(op, changed, message, device_option, registered_ops):
    if op not in registered_ops | {"arena_bytes"}:
        pytest.skip(f"{op} is no op of {device_option}")
    arguments = VALID[op] | changed
    if device_option == "cuda" and op in GPU_OPS:
        moved = {name: t.cuda() for name, t in arguments.items() if name != "exchange"}
        arguments |= moved
    assert_refused(op, arguments, message)


INFINITIES_AND_NAN = [float("-inf"), float("inf"), float("nan")]
WRONG_NUMBERS = {
    "eps": ([-1e-5, 1e39, *INFINITIES_AND_NAN], "a number from 0 to 2**126 expected"),
    "momentum": ([-0.1, 1.1, *INFINITIES_AND_NAN], "0 to 1, or None, expected"),
}


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("argument", WRONG_NUMBERS)
@pytest.mark.parametrize("op", ["bn_forward", "bn_forward_inplace", "layer_norm_forward"])
def test_wrong_eps_and_momentum_are_refused_even_where_unused(op, argument):
    if (op, argument) == ("layer_norm_forward", "momentum"):
        pytest.skip("layer_norm_forward has no momentum")
    in_evaluation = RUNNING | {"moments": None, "training": False}
    numbers, expected = WRONG_NUMBERS[argument]
    for number in numbers:
        for others in [{}] if op == "layer_norm_forward" else [{}, RUNNING, in_evaluation]:
            message = re.escape(f"{argument} is {number:g}; {expected}")
            assert_refused(op, VALID[op] | others | {argument: number}, message)


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize(
    "shape", [(2**40, 2, 2**21), (2**31, 2, 2**30), (2**48, 2), (1, 2**62), (0, 2**62)], ids=str
)
def test_more_elements_than_can_be_counted_are_refused(shape, device):
    x = torch.zeros(4, device=device).as_strided(shape, [0] * len(shape))
    for op in (ops.bn_stats, ops.bn_forward):
        with pytest.raises(RuntimeError, match=r"bn_\w+: x has shape \(\d+, .*; at most 2\^48 elements"):
            op(x)


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("layout", CORE_LAYOUTS)
def test_schemas_and_fakes_agree_with_the_ops(layout, device):
    case = LayerInputs(layout, torch.float32, device)
    for op, arguments in (*make_layer_calls(case), *make_layer_calls_with_exchange(case)):
        torch.library.opcheck(find_op(op), arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.cuda_model("nightly")
@pytest.mark.parametrize("calls", ["one_of_each_op", pytest.param("all", marks=pytest.mark.nightly)])
def test_ops_are_traced_with_dynamic_shapes(calls, device):
    case = LayerInputs("nchw", torch.float32, device)
    layer_calls, traced_ops = [*make_layer_calls(case), *make_layer_calls_with_exchange(case)], set()
    for op, arguments in layer_calls:
        if calls == "all" or op not in traced_ops:
            torch.library.opcheck(find_op(op), arguments, test_utils="test_aot_dispatch_dynamic")
        traced_ops.add(op)


def test_schemas_of_exchange_ops_name_what_they_write(device, registered_ops):
    for op, arguments in make_exchange_calls(device, registered_ops):
        torch.library.opcheck(find_op(op), arguments, test_utils="test_schema")


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_an_argument_on_meta_beside_others_is_refused(is_traced, device):
    """torch calls the fake when one tensor is on meta, and its result would be uninitialised memory."""
    mode = FakeTensorMode()
    for op, arguments in make_layer_calls(LayerInputs("nchw", torch.float32, device)):
        first, names = arguments[0], [argument.name for argument in find_op(op)._schema.arguments]
        places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        for place in places if len(places) > 1 else ():
            expected = rf"{op}: \w+ is on {first.device}; meta expected, where (x|input) is"
            if place:
                expected = rf"{op}: {names[place]} is on meta; {first.device} expected, where (x|input) is"
            moved, old_first = list(arguments), first.clone()
            moved[place] = moved[place].to("meta")
            with pytest.raises(RuntimeError, match=expected):
                if is_traced:
                    moved = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in moved]
                find_op(op)(*moved)
            assert torch.equal(first, old_first)


def test_all_on_meta_gives_shapes(device):
    for op, arguments in make_layer_calls(LayerInputs("nhwc_c13", torch.float32, device)):
        moved = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        for a, b in zip(call_op(op, moved), call_op(op, arguments), strict=True):
            assert a.is_meta and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
