"""Activations and gates against the float64 reference: every layout, dtype and activation."""

import pytest
import torch
from cases import ACTIVATIONS, DTYPES, LAYOUTS, PARAM, Case, check_threads, generator
from tolerances import check

from fastvit import functional, ops, reference

SMOOTH = ["gelu", "gelu_tanh", "silu", "elu"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout,activation",
    [
        (layout, a)
        for layout in LAYOUTS
        for a in (ACTIVATIONS if layout == "tokens" else ["gelu_tanh", "silu"])
    ],
)
def test_ops(layout, activation, dtype, device):
    case = Case(layout, dtype, device)
    x, dy, z = case.x - 3, case.dy, case.z
    y, dx = ops.act_forward(x, activation, PARAM), ops.act_backward(x, dy, activation, PARAM)
    assert y.stride() == dx.stride() == torch.empty_like(x).stride()
    check("act_forward", y, reference.act_forward(x, activation, PARAM))
    check("act_backward", dx, reference.act_backward(x, dy, activation, PARAM))
    check(
        "glu_forward",
        ops.glu_forward(x, z, activation, PARAM),
        reference.glu_forward(x, z, activation, PARAM),
    )
    got = ops.glu_backward(x, z, dy, activation, PARAM)
    for a, b in zip(got, reference.glu_backward(x, z, dy, activation, PARAM), strict=True):
        check("glu_backward", a, b)


def views():
    g = generator()
    packed = torch.randn(6, 7, 48, generator=g)
    return {
        "halves": packed.chunk(2, -1),
        "halves along the middle": (packed[:, :3], packed[:, 4:]),
        "a transposed": (packed.transpose(0, 1), packed.permute(1, 0, 2).contiguous()),
        "b expanded": (packed, packed[:, :1].expand(6, 7, 48)),
        "every other": (packed[..., ::2], packed[..., 1::2]),
        "a scalar": (packed[0, 0, 0], packed[0, 0, 1]),
        "six dimensions": (packed.view(2, 3, 7, 2, 4, 6), packed.flip(0).view(2, 3, 7, 2, 4, 6)),
        "six dimensions with gaps": (
            packed.view(2, 3, 7, 2, 4, 6)[..., ::2],
            packed.view(2, 3, 7, 2, 4, 6)[..., 3:],
        ),
        "empty": (packed[:0], packed[:0]),
        "not at 16 bytes": (packed.flatten()[1:-2], packed.flatten()[3:]),
        "one long row": (packed.flatten(), packed.flip(0).flatten()),
    }


@pytest.mark.parametrize("name", views())
def test_operands_that_lie_otherwise(name, device):
    a, b = (t.to(device) for t in views()[name])
    for dy in (b, a.flip(0) if a.dim() else a, b.new_ones(()).expand_as(b)):
        check("act_forward", ops.act_forward(a, "silu"), reference.act_forward(a, "silu"))
        check("act_backward", ops.act_backward(a, dy, "silu"), reference.act_backward(a, dy, "silu"))
        check("glu_forward", ops.glu_forward(a, b, "gelu"), reference.glu_forward(a, b, "gelu"))
        for got, want in zip(
            ops.glu_backward(a, b, dy, "gelu"), reference.glu_backward(a, b, dy, "gelu"), strict=True
        ):
            check("glu_backward", got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", SMOOTH)
def test_all_16_bit_values(activation, dtype, device):
    """Every finite one: rounded once, but for 2^-16 of a value."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)].to(device)
    rounding = torch.finfo(dtype).eps / 2 + 2**-16
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 2**-30
    want = reference.act_forward(x.double(), activation, PARAM)
    y = ops.act_forward(x, activation, PARAM)
    assert ((y.double() - want).abs() <= rounding * want.abs() + least).all()
    want = reference.act_backward(x.double(), torch.ones_like(x).double(), activation, PARAM)
    dx = ops.act_backward(x, torch.ones_like(x), activation, PARAM)
    assert ((dx.double() - want).abs() <= rounding * want.abs() + 1e-5).all()


def test_repeats_and_threads_give_the_same_bits(device):
    a, b, dy = torch.randn(3, 40, 2100, device=device).unbind(0)

    def run():
        return ops.act_forward(a), ops.act_backward(a, dy), ops.glu_forward(a, b), *ops.glu_backward(a, b, dy)

    check_threads(run)


def bad_calls():
    x = torch.randn(4, 8)
    return [
        (lambda: ops.act_forward(x.long()), "act_forward: x has dtype Long; float16"),
        (lambda: ops.act_forward(x, "tanh"), "act_forward: activation is 'tanh'; one of identity, relu"),
        (lambda: ops.act_backward(x, x[:3]), r"act_backward: dy has shape \(3, 8\); \(4, 8\) expected"),
        (lambda: ops.glu_forward(x, x[0]), r"glu_forward: b has shape \(8\); \(4, 8\) expected"),
        (lambda: ops.glu_forward(x, x.half()), "glu_forward: b has dtype Half; Float expected"),
        (lambda: ops.glu_backward(x, x, x.half()), "glu_backward: dy has dtype Half; Float expected"),
    ]


@pytest.mark.parametrize("call,message", bad_calls())
def test_bad_input_is_named(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        functional.act(torch.ones(2), "tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, device):
    a, b = (torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a: functional.act(a, activation, PARAM), a)
    assert torch.autograd.gradcheck(lambda a, b: functional.glu(a, b, activation, PARAM), (a, b))


def results(call, *leaves):
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = call(*leaves)
    return y, *torch.autograd.grad(y.square().sum(), leaves)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(backend, device):
    a, b = torch.randn(2, 6, 40, device=device).unbind(0)
    for call, given in ((lambda a: functional.act(a, "gelu_tanh"), (a,)), (functional.glu, (a, b))):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        for got, want in zip(results(compiled, *given), results(call, *given), strict=True):
            check("layer", got, want)


def test_a_gate_keeps_its_operands_alone(device):
    a, b = torch.randn(2, 6, 40, device=device, requires_grad=True).unbind(0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.glu(a, b)
    assert [t.data_ptr() for t in kept] == [a.data_ptr(), b.data_ptr()]
