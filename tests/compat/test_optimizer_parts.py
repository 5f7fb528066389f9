"""fastvit.compat.apex.optimizers: what subclasses and scripts take from apex's optimizers. The counts of the
groups, the operations of amp_C, the names in groups and state, and what is refused.
"""

import copy

import pytest
import torch
from torch import nn

from fastvit.compat import amp_C
from fastvit.compat.apex.multi_tensor_apply import multi_tensor_applier
from fastvit.compat.apex.optimizers import (
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

SHAPES = [(5, 7), (7,), (3, 2, 2)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def trained(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()
    return params


def assert_close(got, want, rtol=2e-5, atol=1e-6):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=rtol, atol=atol)


# The count of a group


def adam_by_formula(params, counts, lr=0.1, b1=0.9, b2=0.999, begins=()):
    """Adam in float64, whose steps have these counts; parameter i has gradients from step `begins[i]` on."""
    values = [p.detach().double() for p in params]
    moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
    copies = parameters()
    for step, count in enumerate(counts):
        give_gradients(copies, step)
        for index, (value, (m, v)) in enumerate(zip(values, moments, strict=True)):
            if begins and step < begins[index]:
                continue
            gradient = copies[index].grad.double()
            m.mul_(b1).add_((1 - b1) * gradient)
            v.mul_(b2).add_((1 - b2) * gradient**2)
            value -= lr * (m / (1 - b1**count)) / ((v / (1 - b2**count)).sqrt() + 1e-8)
    return values


@pytest.mark.parametrize("capturable", [False, True])
def test_a_count_that_a_script_writes_is_obeyed(capturable):
    params = parameters()
    optimizer = FusedAdam(params, 0.1, capturable=capturable)
    trained(optimizer, params, 2)
    assert optimizer.param_groups[0]["step"] == 2
    optimizer.param_groups[0]["step"] = torch.tensor([100], dtype=torch.int) if capturable else 100
    trained(optimizer, params, 1, first=2)
    assert optimizer.param_groups[0]["step"] == 101
    assert_close(params, adam_by_formula(parameters(), [1, 2, 101]))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_parameter_that_begins_later_has_the_count_of_its_group(capturable):
    params, begins = parameters(), (0, 2, 1)
    optimizer = FusedAdam(params, 0.1, capturable=capturable)
    for step in range(4):
        give_gradients(params, step)
        for parameter, begin in zip(params, begins, strict=True):
            parameter.grad = parameter.grad if step >= begin else None
        optimizer.step()
    assert_close(params, adam_by_formula(parameters(), [1, 2, 3, 4], begins=begins))


COUNTING = {
    "adam": FusedAdam,
    "capturable": lambda p: FusedAdam(p, capturable=True),
    "lamb": FusedLAMB,
    "mixed precision lamb": FusedMixedPrecisionLamb,
    "novograd": FusedNovoGrad,
}


@pytest.mark.parametrize("kind", COUNTING)
def test_every_group_counts(kind):
    """A group without gradients counts with the others; a step without any gradient counts nothing. A count
    that is a tensor is written in place, as a captured step needs it.
    """
    params = parameters()
    optimizer = COUNTING[kind]([{"params": params[:1]}, {"params": params[1:]}])
    before = optimizer.param_groups[0].get("step")
    trained(optimizer, params, 1)
    for parameter in params[1:]:
        parameter.grad = None
    optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [2, 2]
    params[0].grad = None
    optimizer.step()
    counts = [group["step"] for group in optimizer.param_groups]
    assert [int(count) for count in counts] == [2, 2]
    in_place = kind in ("capturable", "mixed precision lamb")
    assert all(torch.is_tensor(count) == in_place for count in counts)
    assert not in_place or counts[0] is before


# Names in groups and state, which files have


KEYS = {  # of apex 25.05: those of a group beside "params", and those of the state of a parameter
    "adam": ("lr bias_correction betas eps weight_decay step", "exp_avg exp_avg_sq"),
    "lamb": (
        "lr bias_correction betas eps weight_decay grad_averaging max_grad_norm step",
        "exp_avg exp_avg_sq",
    ),
    "novograd": (
        "lr bias_correction betas eps weight_decay grad_averaging norm_type init_zero step exp_avg_sq",
        "exp_avg",
    ),
    "sgd": ("lr momentum dampening weight_decay nesterov", "momentum_buffer"),
}
KEYS |= {"capturable": KEYS["adam"], "mixed precision lamb": KEYS["lamb"]}


@pytest.mark.parametrize("kind", KEYS)
def test_names_of_files_are_apexs(kind):
    params = parameters()
    optimizer = (COUNTING | {"sgd": lambda p: FusedSGD(p, 0.1, 0.9)})[kind](params)
    state = trained(optimizer, params, 1) and optimizer.state_dict()
    of_group, of_parameter = (set(names.split()) for names in KEYS[kind])
    (group,) = state["param_groups"]
    assert group.keys() - {"max_grad_norm"} == of_group - {"max_grad_norm"} | {"params"}
    assert all(entry.keys() == of_parameter for entry in state["state"].values())


def test_norms_of_novograd_are_in_the_group():
    """Half parameters before float32 ones, as apex's kernels take them; also after a parameter begins late,
    and in a file that comes back.
    """
    dtypes = [torch.float32, torch.float16, torch.float32]
    params = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    optimizer = FusedNovoGrad(params, 0.1)
    for parameter, size in zip(params[1:], (2.0, 3.0), strict=True):
        parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    half, single = optimizer.param_groups[0]["exp_avg_sq"]
    assert half.tolist() == [4.0] and single.tolist() == [6.0]
    params[0].grad = torch.full_like(params[0], 5.0)
    optimizer.step()
    half, single = optimizer.param_groups[0]["exp_avg_sq"]
    assert half.tolist() == [4.0] and single.tolist() == pytest.approx([10.0, 6.0])
    optimizer.param_groups[0]["exp_avg_sq"][1][0] = 1e9  # what a script writes counts
    before = params[0].detach().clone()
    params[0].grad.zero_(), params[1].grad.zero_(), params[2].grad.zero_()
    optimizer.step()
    assert (params[0] - before).abs().max() < 1e-6


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_files_of_capturable_steps_and_of_others(saved, loads):
    params = parameters()
    optimizer = FusedAdam(params, 0.1, capturable=saved)
    trained(optimizer, params, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    again = FusedAdam(copies, 0.5, capturable=loads)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.is_tensor(again.param_groups[0]["step"]) == loads
    trained(again, copies, 2, first=3)
    assert_close(copies, adam_by_formula(parameters(), range(1, 6)))


def test_momentum_of_torchs_files():
    """torch.optim.SGD saves None where there is no momentum yet."""
    params = parameters()
    theirs, ours = torch.optim.SGD(params, 0.1), FusedSGD(params, 0.1, 0.9)
    trained(theirs, params, 1)
    ours.load_state_dict(theirs.state_dict() | {"param_groups": ours.state_dict()["param_groups"]})
    start = [p.detach().clone() for p in params]
    give_gradients(params, 1)
    ours.step()
    assert_close(params, [p - 0.1 * q.grad for p, q in zip(start, params, strict=True)])


# Operations


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False}, {"bias_correction": False}])
def test_subclass_of_adam_that_steps_by_itself(dtype, options):
    options = {"lr": 0.1, "weight_decay": 0.1, **options}
    params, others = parameters(dtype), parameters(dtype)
    own, plain = OwnAdam(params, **options), FusedAdam(others, **options)
    trained(own, params, 3), trained(plain, others, 3)
    assert all(map(torch.equal, params, others))
    resumed = FusedAdam(params, **options)  # files go from one to the other
    resumed.load_state_dict(copy.deepcopy(own.state_dict()))
    trained(resumed, params, 2, first=3), trained(plain, others, 2, first=3)
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
    "novograd": (lambda p: FusedNovoGrad(p, 0.05, weight_decay=0.1), novograd_step),
    "sgd": (lambda p: FusedSGD(p, 0.05, 0.9, 0.5, weight_decay=0.1), sgd_step),
    "sgd with decay after": (
        lambda p: FusedSGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True, wd_after_momentum=True),
        sgd_step,
    ),
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", OWN_STEPS)
def test_operations_step_as_the_optimizer_does(kind, dtype, strided):
    """Parameters, gradients and moments have any dtype and strides. Other tests compare the optimizers
    themselves with formulas in float64.
    """
    make, own_step = OWN_STEPS[kind]
    params, others = parameters(dtype), parameters(dtype)
    optimizer = make(params)
    lists = [p.detach() for p in others]
    if strided:
        lists = [t.new_zeros((*t.shape, 2))[..., 0].copy_(t) for t in lists]
    state = {name: [torch.zeros(shape) for shape in SHAPES] for name in ("m", "v")}
    for step in range(3):
        trained(optimizer, params, 1, first=step)
        give_gradients(others, step)
        state["step"] = step + 1
        rows = [[p.grad for p in others], lists]
        own_step(optimizer, optimizer.param_groups[0], optimizer._dummy_overflow_buf, rows, state)
    assert_close(lists, params, rtol=1e-6, atol=1e-7)
    assert all(t.dtype == dtype for t in lists)
    give_gradients(params, 2)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, "half"])
@pytest.mark.parametrize("after", [False, True])
def test_sgd_with_copies_of_the_weights(half, given, after):
    """Four lists: gradients in half or float32, float32 weights and momentum, copies of the weights."""
    weights = [torch.randn(5), torch.randn(3, 2)]
    buffers, copies = [torch.zeros_like(w) for w in weights], [w.to(half) + 1 for w in weights]
    want, momentum = [w.double() for w in weights], [None, None]
    flag = torch.zeros(1, dtype=torch.int)
    for step in range(3):
        gradients = [torch.randn_like(w).to(half if given == "half" else given) for w in weights]
        options = (0.1, 0.9, 0.25, 0.05, False, step == 0, after, 0.5)
        amp_C.multi_tensor_sgd(65536, flag, [gradients, weights, buffers, copies], *options)
        for i, gradient in enumerate(gradients):
            g = 0.5 * gradient.double() + (0 if after else 0.1 * want[i])
            momentum[i] = g if momentum[i] is None else 0.9 * momentum[i] + 0.75 * g
            want[i] = want[i] - 0.05 * (momentum[i] + (0.1 * want[i] if after else 0))
        assert_close(weights, want)
        assert_close(buffers, momentum)
        assert all(torch.equal(c, w.to(half)) for c, w in zip(copies, weights, strict=True))


@pytest.mark.parametrize("operation", ["sgd", "capturable"])
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_capturable_adam_unscales(dtype):
    """Gradients are multiplied by the inverse scale before they are rounded, and keep that."""
    tensors = [[torch.randn(6).to(dtype) for _ in range(2)] for _ in range(2)]
    moments = [[torch.zeros(6) for _ in range(2)] for _ in range(2)]
    want, flag = copy.deepcopy([*tensors, *moments]), torch.zeros(1, dtype=torch.int)
    options = 0.9, 0.99, 1e-8
    for step in (1, 2):
        amp_C.multi_tensor_adam(0, flag, want, 0.1, *options, step, 0, 1, 0.1)
        scaled = [gradient.float() * 1024 for gradient in want[0]]
        count = torch.tensor([step], dtype=torch.int)
        lists = [[g.to(dtype) for g in scaled], tensors[1], *moments]
        inverse = torch.tensor([1 / 1024])
        amp_C.multi_tensor_adam_capturable(
            0, flag, lists, torch.tensor(0.1), *options, count, 0, 1, 0.1, inverse
        )
        assert all(map(torch.equal, sum(lists, []), sum(want, [])))


def test_norm_after_unscaling():
    values, flag = [torch.full((4,), 8.0).half(), torch.full((2, 2), 6.0)], torch.zeros(1, dtype=torch.int)
    total, each = amp_C.multi_tensor_unscale_l2norm(0, flag, [values], torch.tensor([0.25]), True)
    assert total.tolist() == [5.0] and each.tolist() == [4.0, 3.0] and not flag.any()
    assert values[0][0] == 8.0
    values[1][0, 0] = float("inf")
    amp_C.multi_tensor_unscale_l2norm(0, flag, [values], torch.tensor([0.25]))
    assert flag.item() == 1


def test_attributes_of_sgd():
    """A scale that a script leaves divides the gradients of one step; buffers are made when asked for."""
    params = parameters()
    optimizer = FusedSGD(params, 0.1, 0.9)
    assert optimizer.materialize_master_grads and not optimizer.scale_set_by_backward
    buffers, first = optimizer.get_momentums(iter(params))
    assert first and not any(buffer.any() for buffer in buffers)
    again, first = optimizer.get_momentums(params)
    assert not first and all(map(torch.equal, again, buffers))
    start = [p.detach().clone() for p in params]
    give_gradients(params, 0)
    optimizer.most_recent_scale, optimizer.scale_set_by_backward = 8.0, True
    optimizer.step()
    assert_close(params, [p - 0.1 * q.grad / 8 for p, q in zip(start, params, strict=True)])
    assert optimizer.most_recent_scale == 1.0 and not optimizer.scale_set_by_backward


# Options that are refused


@pytest.mark.parametrize("name", ["eps_inside_sqrt", "use_mt", "amp_scale_adjustment"])
def test_options_of_an_older_adam(name):
    with pytest.raises(TypeError, match=rf"FusedAdam takes no {name}; leave out.*{name}"):
        FusedAdam(parameters(), **{name: False})


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms", "grad_scaler"])
def test_steps_of_an_older_adam(name):
    params = parameters()
    give_gradients(params, 0)
    optimizer, before = FusedAdam(params), params[0].detach().clone()
    place = ["grads", "output_params", "scale", "grad_norms", "grad_scaler"].index(name)
    for call in (lambda: optimizer.step(**{name: 1}), lambda: optimizer.step(None, *[None] * place, 1)):
        with pytest.raises(RuntimeError, match=rf"takes a closure alone, got {name}; write p.grad ="):
            call()
    assert torch.equal(params[0], before)
    optimizer.step(None, *[None] * 5)
    assert not torch.equal(params[0], before)


def test_attributes_that_are_not_there_say_what_to_use():
    optimizer = FusedAdam(parameters(), capturable=True, master_weights=True)
    with pytest.raises(AttributeError, match=r'no param_groups_master; use optimizer.state\[parameter\]\["m'):
        _ = optimizer.param_groups_master
    with pytest.raises(AttributeError, match="use amp_C.multi_tensor_adam_capturable, see docs"):
        _ = amp_C.multi_tensor_adam_capturable_master
    with pytest.raises(TypeError, match="amp_C.multi_tensor_adam takes chunk_size.*got 2 arguments after"):
        amp_C.multi_tensor_adam(0, torch.zeros(1), [[], [], [], []], 0.1, 0.9)
