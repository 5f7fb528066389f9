"""The operations of fastvit.compat.amp_C: what subclasses of optimizers and scripts call themselves."""

import copy

import pytest
import torch

from compat.optimizer_steps import SHAPES, assert_all_close, make_parameters, set_gradients, take_steps
from fastvit.compat import amp_C
from fastvit.compat.apex.multi_tensor_apply import multi_tensor_applier
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int)


class OwnAdam(FusedAdam):
    """Steps by itself, with gradients and half parameters in float32, as scripts for translation do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        assert hasattr(self, "multi_tensor_adam")

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rows = []
            for p in group["params"]:
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(p.data, dtype=torch.float))
                wide = p.data.float()
                rows.append((p.grad.data.float(), wide, state["exp_avg"], state["exp_avg_sq"]))
            lists = [list(tensors) for tensors in zip(*rows, strict=True)]
            beta1, beta2 = group["betas"]
            options = [group["lr"], beta1, beta2, group["eps"], group["step"], self.adam_w_mode]
            options += [1 if group["bias_correction"] else 0, group["weight_decay"]]
            multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists, *options)
            for p, wide in zip(group["params"], lists[1], strict=True):
                p.data.copy_(wide)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"adam_w_mode": False}, torch.float16),
        ({"bias_correction": False}, torch.bfloat16),
    ],
    ids=str,
)
def test_a_subclass_of_adam_that_steps_by_itself_takes_the_steps_of_adam(dtype, options):
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    params, others = make_parameters(dtype), make_parameters(dtype)
    own, plain = OwnAdam(params, **options), FusedAdam(others, **options)
    take_steps(own, params, 3), take_steps(plain, others, 3)
    assert all(map(torch.equal, params, others))
    resumed = FusedAdam(params, **options)  # files go from one to the other
    resumed.load_state_dict(copy.deepcopy(own.state_dict()))
    take_steps(resumed, params, 2, first=3), take_steps(plain, others, 2, first=3)
    assert all(map(torch.equal, params, others)) and resumed.param_groups[0]["step"] == 5


def lamb_step(optimizer, group, flag, rows, state):
    norm = multi_tensor_applier(optimizer.multi_tensor_l2norm, flag, [rows[0]], False)[0]
    options = [group["lr"], *group["betas"], group["eps"], state["step"], group["bias_correction"]]
    options += [group["weight_decay"], group["grad_averaging"], optimizer.adam_w_mode, norm]
    lists = [*rows, state["m"], state["v"]]
    most = group["max_grad_norm"]
    multi_tensor_applier(optimizer.multi_tensor_lamb, flag, lists, *options, most, optimizer.use_nvlamb)


def novograd_step(optimizer, group, flag, rows, state):
    if "n" not in state:
        state["n"] = torch.stack([gradient.float().norm() for gradient in rows[0]])
    options = [state["n"], group["lr"], *group["betas"], group["eps"], state["step"]]
    options += [group["bias_correction"], group["weight_decay"], group["grad_averaging"]]
    options += [optimizer.moment_mode, group["norm_type"]]
    multi_tensor_applier(optimizer.multi_tensor_novograd, flag, [*rows, state["m"]], *options)


def sgd_step(optimizer, group, flag, rows, state):
    options = [group["weight_decay"], group["momentum"], group["dampening"], group["lr"], group["nesterov"]]
    options += [state["step"] == 1, optimizer.wd_after_momentum, 1.0 / optimizer.most_recent_scale]
    multi_tensor_applier(optimizer.multi_tensor_sgd, flag, [*rows, state["m"]], *options)


OWN_STEPS = {
    "lamb": (lambda p: FusedLAMB(p, 0.05, max_grad_norm=0.5), lamb_step),
    "nvlamb": (lambda p: FusedLAMB(p, 0.05, max_grad_norm=0.0, use_nvlamb=True, weight_decay=0.0), lamb_step),
    "novograd": (lambda p: FusedNovoGrad(p, 0.05, weight_decay=0.1), novograd_step),
    "sgd": (lambda p: FusedSGD(p, 0.05, 0.9, 0.5, weight_decay=0.1), sgd_step),
    "sgd_with_decay_after": (
        lambda p: FusedSGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True, wd_after_momentum=True),
        sgd_step,
    ),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "strided"),
    [
        ("lamb", torch.float32, True),
        ("lamb", torch.float16, False),
        ("nvlamb", torch.float32, False),
        ("novograd", torch.float32, False),
        ("novograd", torch.bfloat16, True),
        ("sgd", torch.float16, True),
        ("sgd", torch.bfloat16, False),
        ("sgd_with_decay_after", torch.float32, True),
    ],
    ids=str,
)
def test_operations_step_as_the_optimizer_does(kind, dtype, strided):
    """Parameters, gradients and moments have any dtype and strides. Other tests compare the optimizers
    themselves with formulas in float64.
    """
    make, own_step = OWN_STEPS[kind]
    params, others = make_parameters(dtype), make_parameters(dtype)
    optimizer = make(params)
    lists = [p.detach() for p in others]
    if strided:
        lists = [t.new_zeros((*t.shape, 2))[..., 0].copy_(t) for t in lists]
    state = {name: [torch.zeros(shape) for shape in SHAPES] for name in ("m", "v")}
    for step in range(3):
        take_steps(optimizer, params, 1, first=step)
        set_gradients(others, step)
        state["step"] = step + 1
        rows = [[p.grad for p in others], lists]
        own_step(optimizer, optimizer.param_groups[0], optimizer._dummy_overflow_buf, rows, state)
    assert_all_close(lists, params, rtol=1e-6, atol=1e-7)
    assert all(t.dtype == dtype for t in lists)
    set_gradients(params, 2)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    ("half", "gradient_dtype", "after"),
    [
        (torch.float16, torch.float32, False),
        (torch.float16, torch.float16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, True),
    ],
    ids=str,
)
def test_sgd_writes_copies_of_the_weights(half, gradient_dtype, after):
    """Four lists: gradients in half or float32, float32 weights and momentum, copies of the weights."""
    weights = [torch.randn(5), torch.randn(3, 2)]
    buffers, copies = [torch.zeros_like(w) for w in weights], [w.to(half) + 1 for w in weights]
    expected, momentum = [w.double() for w in weights], [None, None]
    flag = torch.zeros(1, dtype=torch.int)
    for step in range(3):
        gradients = [torch.randn_like(w).to(gradient_dtype) for w in weights]
        options = (0.1, 0.9, 0.25, 0.05, False, step == 0, after, 0.5)
        amp_C.multi_tensor_sgd(65536, flag, [gradients, weights, buffers, copies], *options)
        for i, gradient in enumerate(gradients):
            g = 0.5 * gradient.double() + (0 if after else 0.1 * expected[i])
            momentum[i] = g if momentum[i] is None else 0.9 * momentum[i] + 0.75 * g
            expected[i] = expected[i] - 0.05 * (momentum[i] + (0.1 * expected[i] if after else 0))
        assert_all_close(weights, expected)
        assert_all_close(buffers, momentum)
        assert all(torch.equal(c, w.to(half)) for c, w in zip(copies, weights, strict=True))


@pytest.mark.parametrize(
    ("operation", "dtype"), [("sgd", torch.float16), ("capturable", torch.float32)], ids=str
)
def test_a_flag_that_is_set_keeps_everything(operation, dtype):
    """As in apex, whose other steps write values that are not finite."""
    lists = [[torch.randn(4).to(dtype)], [torch.randn(4).to(dtype)], [torch.rand(4)], [torch.rand(4)]]
    before, flag = copy.deepcopy(lists), torch.ones(1, dtype=torch.int)
    if operation == "sgd":
        amp_C.multi_tensor_sgd(0, flag, lists, 0.1, 0.9, 0.0, 0.1, False, False, True, 1.0)
    else:
        rate, count = torch.tensor(0.1), torch.tensor([3], dtype=torch.int)
        scale = torch.tensor([0.5])
        amp_C.multi_tensor_adam_capturable(0, flag, lists, rate, 0.9, 0.99, 1e-8, count, 1, 1, 0.1, scale)
    assert all(map(torch.equal, sum(lists, []), sum(before, [])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capturable_adam_unscales_before_it_rounds(dtype):
    """Gradients are multiplied by the inverse scale before they are rounded, and keep that."""
    tensors = [[torch.randn(6).to(dtype) for _ in range(2)] for _ in range(2)]
    moments = [[torch.zeros(6) for _ in range(2)] for _ in range(2)]
    expected, flag = copy.deepcopy([*tensors, *moments]), torch.zeros(1, dtype=torch.int)
    options = 0.9, 0.99, 1e-8
    for step in (1, 2):
        amp_C.multi_tensor_adam(0, flag, expected, 0.1, *options, step, 0, 1, 0.1)
        scaled = [gradient.float() * 1024 for gradient in expected[0]]
        count = torch.tensor([step], dtype=torch.int)
        lists = [[g.to(dtype) for g in scaled], tensors[1], *moments]
        inverse = torch.tensor([1 / 1024])
        amp_C.multi_tensor_adam_capturable(
            0, flag, lists, torch.tensor(0.1), *options, count, 0, 1, 0.1, inverse
        )
        assert all(map(torch.equal, sum(lists, []), sum(expected, [])))


def test_unscale_l2norm_is_the_norm_after_unscaling():
    values, flag = [torch.full((4,), 8.0).half(), torch.full((2, 2), 6.0)], torch.zeros(1, dtype=torch.int)
    total, each = amp_C.multi_tensor_unscale_l2norm(0, flag, [values], torch.tensor([0.25]), True)
    assert total.tolist() == [5.0] and each.tolist() == [4.0, 3.0] and not flag.any()
    assert values[0][0] == 8.0
    values[1][0, 0] = float("inf")
    amp_C.multi_tensor_unscale_l2norm(0, flag, [values], torch.tensor([0.25]))
    assert flag.item() == 1


def draw_tensors(*dtypes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 7, generator=draw).to(d) for n, d in zip((3, 1, 40_000), dtypes, strict=False)]


def test_scale_scales_and_flags_overflow(flag):
    values = draw_tensors(torch.float32, torch.float16, torch.bfloat16)
    outputs = [torch.empty_like(v, dtype=torch.float16) for v in values]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [values, outputs], 0.5)
    for value, output in zip(values, outputs, strict=True):
        assert torch.equal(output, (value.float() * 0.5).half())
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [[torch.empty(0)], [torch.empty(0)]], 0.5)
    assert flag.item() == 0
    amp_C.multi_tensor_scale(65536, flag, [values, values], 3.0)  # in place
    assert torch.equal(values[1], (outputs[1].float() * 6.0).half())
    for bad in (float("inf"), float("nan")):
        values[1][0, 3] = bad
        multi_tensor_applier(amp_C.multi_tensor_scale, flag.zero_(), [values, outputs], 0.0)
        assert flag.item() == 1


def test_axpby_adds_and_flags_overflow(flag):
    for arg_to_check, bad, flagged in ((-1, 0, 1), (-1, 1, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)):
        x = draw_tensors(torch.float16, torch.bfloat16)
        y = draw_tensors(torch.float32, torch.float32, seed=1)
        outputs = [torch.empty_like(t) for t in y]
        amp_C.multi_tensor_axpby(65536, flag.zero_(), [x, y, outputs], 2.0, -0.5, arg_to_check)
        for one, other, output in zip(x, y, outputs, strict=True):
            torch.testing.assert_close(output, 2.0 * one.float() - 0.5 * other)
        assert flag.item() == 0
        (x, y)[bad][0][2, 1] = float("nan")
        amp_C.multi_tensor_axpby(65536, flag, [x, y, outputs], 2.0, -0.5, arg_to_check)
        assert flag.item() == flagged


def test_l2norm_does_not_overflow_in_half(flag):
    values = draw_tensors(torch.float32, torch.float16, torch.bfloat16)
    values[1] *= 10000  # the square is beyond half
    expected = torch.stack([v.double().norm() for v in values])
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values], True)
    torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), expected.norm().reshape(1), rtol=1e-5, atol=0)
    total, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values])
    assert total.shape == (1,) and each.shape == (0,) and flag.item() == 0
    values[0][0] = float("nan")
    multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [values], False)
    assert flag.item() == 1
