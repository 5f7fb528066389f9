"""Steps of fastvit.compat.apex.optimizers and LARC follow torch's optimizers, and the papers' formulas in
float64.
"""

import copy

import pytest
import torch
from torch import nn

from compat.optimizer_steps import (
    MAKERS,
    adam_by_formula,
    assert_all_close,
    make_parameters,
    set_gradients,
    step_by_formula,
    take_steps,
    update_moments,
)
from fastvit.compat.apex.optimizers import (
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from fastvit.compat.apex.parallel import LARC

STEPS = 6


def train(make, dtype=torch.float32, steps=STEPS):
    """Returns parameters after `steps` steps."""
    parameters = make_parameters(dtype)
    return take_steps(make(parameters), parameters, steps)


@pytest.mark.parametrize(
    ("fused", "reference", "arguments", "options", "fused_options"),
    [
        pytest.param(FusedAdam, torch.optim.Adam, (), {}, {}, id="adam"),
        pytest.param(FusedAdam, torch.optim.AdamW, (0.1,), {"weight_decay": 0.1}, {}, id="adamw"),
        pytest.param(
            FusedAdam,
            torch.optim.Adam,
            (0.1,),
            {"weight_decay": 0.1},
            {"adam_w_mode": False, "capturable": True},
            id="capturable_adam_with_decay",
        ),
        pytest.param(FusedSGD, torch.optim.SGD, (0.1,), {}, {}, id="sgd"),
        pytest.param(FusedSGD, torch.optim.SGD, (0.1, 0.9, 0.5, 0.1), {}, {}, id="sgd_with_dampening"),
        pytest.param(
            FusedSGD, torch.optim.SGD, (0.1, 0.9, 0.0, 0.1), {"nesterov": True}, {}, id="sgd_nesterov"
        ),
    ],
)
def test_steps_equal_those_of_torch(fused, reference, arguments, options, fused_options):
    """A parameter of SGD has no gradient in the first two steps: it does not change, and its state begins at
    its first gradient. Adam's count is of the group, as apex has it, where torch counts for each parameter.
    """

    def train_with_late_gradient(kind, **options):
        parameters = make_parameters()
        optimizer = kind(parameters, *arguments, **options)
        for step in range(STEPS):
            set_gradients(parameters, step)
            if fused is FusedSGD and step < 2:
                parameters[1].grad = None
            optimizer.step()
        return parameters

    actual = train_with_late_gradient(fused, **options, **fused_options)
    assert_all_close(actual, train_with_late_gradient(reference, **options))


def test_options_that_torch_lacks_follow_their_formulas():
    def update_adam(w, g, memory, step, norm):
        g = g / g.norm().clamp_min(1)
        m, v = update_moments(g, memory, 0.8, 0.9)
        return w * (1 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8)

    def update_sgd(w, g, memory, step, norm):
        memory["b"] = 0.9 * memory["b"] + g if "b" in memory else g
        return w - 0.1 * (memory["b"] + 0.2 * w)

    parameters = make_parameters()
    groups = [{"params": [p]} for p in parameters]  # the largest norm is of each group
    adam = FusedAdam(groups, 0.01, False, (0.8, 0.9), weight_decay=0.1, max_grad_norm=1.0)
    take_steps(adam, parameters, STEPS)
    assert_all_close(parameters, step_by_formula(update_adam, STEPS))
    assert all(group["step"] == STEPS for group in adam.param_groups)  # which checkpoints have
    actual = train(lambda p: FusedSGD(p, 0.1, 0.9, weight_decay=0.2, wd_after_momentum=True))
    assert_all_close(actual, step_by_formula(update_sgd, STEPS))


@pytest.mark.parametrize(
    ("decoupled", "average", "decay", "nvlamb", "clip"),
    [  # each pair of values of two factors
        (True, True, 0.1, False, 1.0),
        (False, True, 0.1, False, 1e3),
        (True, False, 0.1, False, 0.0),
        (False, False, 0.0, False, 1.0),
        (True, True, 0.0, False, 1e3),
        (False, True, 0.0, False, 0.0),
        (True, True, 0.0, True, 1.0),
        (False, False, 0.0, True, 1e3),
        (True, True, 0.0, True, 0.0),
    ],
)
def test_lamb_follows_its_formula(decoupled, average, decay, nvlamb, clip):
    def update(w, g, memory, step, norm):
        g = g / (norm / clip).clamp_min(1) if clip else g
        g = g if decoupled else g + decay * w
        m, v = update_moments(g, memory, 0.8, 0.9, average)
        u = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
        u = u + decay * w if decoupled else u
        ratio = w.norm() / u.norm() if (decay or nvlamb) and w.norm() != 0 and u.norm() != 0 else 1.0
        return w - 0.05 * ratio * u

    options = {"weight_decay": decay, "adam_w_mode": decoupled, "grad_averaging": average}
    options |= {"max_grad_norm": clip, "use_nvlamb": nvlamb}
    actual = train(lambda p: FusedLAMB(p, 0.05, betas=(0.8, 0.9), **options))
    assert_all_close(actual, step_by_formula(update, STEPS))


@pytest.mark.parametrize(
    ("inside", "norm_type", "init_zero", "average", "correct"),
    [  # each pair of values of two factors
        (False, 0, False, False, False),
        (False, 0, True, False, True),
        (False, 2, False, True, False),
        (False, 2, True, True, True),
        (True, 0, False, True, True),
        (True, 0, True, True, False),
        (True, 2, False, False, True),
        (True, 2, True, False, False),
    ],
)
def test_novograd_follows_its_formula(inside, norm_type, init_zero, average, correct):
    def update(w, g, memory, step, norm):
        size = g.norm() if norm_type == 2 else g.abs().max()
        before = memory.get("n", torch.zeros(()).double() if init_zero else size)
        squared = (0.9 * before**2 + 0.1 * size**2).sqrt()
        memory["n"] = squared if norm_type == 2 else 0.9 * before + 0.1 * size
        c1, c2 = (1 - 0.8**step, (1 - 0.9**step) ** 0.5) if correct else (1, 1)
        divisor = memory["n"] / c2 + 1e-8
        g = g / divisor + 0.1 * w if inside else g
        memory["m"] = 0.8 * memory.get("m", 0) + (0.2 if average else 1) * g
        u = memory["m"] / c1
        return w - 0.05 * (u if inside else u / divisor + 0.1 * w)

    options = {"reg_inside_moment": inside, "grad_averaging": average}
    options |= {"norm_type": norm_type, "init_zero": init_zero, "weight_decay": 0.1}
    actual = train(lambda p: FusedNovoGrad(p, 0.05, correct, (0.8, 0.9), **options))
    assert_all_close(actual, step_by_formula(update, STEPS))


@pytest.mark.parametrize("clip", [True, False])
def test_larc_follows_its_formula(clip):
    def update(w, g, memory, step, norm):
        if w.norm() != 0 and g.norm() != 0:
            rate = 0.5 * w.norm() / (g.norm() + 0.1 * w.norm() + 1e-8)
            g = (g + 0.1 * w) * (min(rate / 0.2, 1.0) if clip else rate)
        memory["b"] = 0.9 * memory["b"] + g if "b" in memory else g
        return w - 0.2 * memory["b"]

    parameters = make_parameters()
    larc = LARC(torch.optim.SGD(parameters, 0.2, momentum=0.9, weight_decay=0.1), 0.5, clip)
    take_steps(larc, parameters, STEPS)
    larc.param_groups = groups = [*larc.param_groups]
    assert larc.optim.param_groups is groups
    assert_all_close(parameters, step_by_formula(update, STEPS))
    assert larc.param_groups[0]["weight_decay"] == 0.1
    assert copy.deepcopy(larc).state_dict().keys() == larc.optim.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[("adam", "bfloat16"), ("adam", "float64"), ("adam_without_correction", "float16")],
        *[("novograd", "float16"), ("novograd", "float64"), ("sgd", "bfloat16"), ("lamb", "float16")],
    ],
)
def test_half_parameters_have_float32_state(kind, dtype):
    """Half parameters are rounded once per step."""
    dtype = getattr(torch, dtype)
    parameters = make_parameters(dtype)
    optimizer = MAKERS[kind](parameters)
    take_steps(optimizer, parameters, STEPS)
    atol = 2e-2 if dtype == torch.bfloat16 else 4e-3
    assert_all_close(parameters, train(MAKERS[kind]), rtol=3e-2, atol=atol)
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    assert {v.dtype for v in state} <= {torch.float64 if dtype == torch.float64 else torch.float32}
    assert {p.dtype for p in parameters} == {dtype}


def test_masters_follow_small_steps_and_writes_of_a_script():
    """The steps are too small for bfloat16."""
    parameters = make_parameters(torch.bfloat16)
    singles = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = FusedAdam(parameters, 1e-4, master_weights=True)
    take_steps(optimizer, parameters, 30), take_steps(FusedAdam(singles, 1e-4), singles, 30)
    masters = [optimizer.state[p]["master_param"] for p in parameters]
    assert_all_close(masters, singles, rtol=0, atol=1e-4)  # up to the rounding of the gradients
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in zip(parameters, masters, strict=True))
    kept = masters[0][1:].clone()
    parameters[0].data[0].fill_(0.25)
    optimizer.param_groups[0]["lr"] = 1e-9
    optimizer.step()
    assert (parameters[0][0] == 0.25).all() and (masters[0][0] - 0.25).abs().max() < 1e-7
    torch.testing.assert_close(masters[0][1:], kept, rtol=0, atol=1e-7)


def test_zero_grad_and_closures_are_those_of_apex():
    parameters, others = make_parameters(), make_parameters()
    sgd, adam = FusedSGD(parameters, 0.1), FusedAdam(others)
    take_steps(sgd, parameters, 1), take_steps(adam, others, 1)
    sgd.zero_grad(), adam.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in parameters)
    assert all(p.grad is None for p in others)
    sgd.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in parameters)

    def closure():
        loss = (parameters[0] ** 2).sum()
        loss.backward()
        return loss

    before = parameters[0].detach().clone()
    assert sgd.step(closure).item() == pytest.approx((before**2).sum().item())
    torch.testing.assert_close(parameters[0].detach(), before * 0.8)


# The count of a group


@pytest.mark.parametrize("capturable", [False, True])
def test_a_count_that_a_script_writes_is_obeyed(capturable):
    parameters = make_parameters()
    optimizer = FusedAdam(parameters, 0.1, capturable=capturable)
    take_steps(optimizer, parameters, 2)
    assert optimizer.param_groups[0]["step"] == 2
    optimizer.param_groups[0]["step"] = torch.tensor([100], dtype=torch.int) if capturable else 100
    take_steps(optimizer, parameters, 1, first=2)
    assert optimizer.param_groups[0]["step"] == 101
    assert_all_close(parameters, adam_by_formula([1, 2, 101]))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_parameter_that_begins_later_has_the_count_of_its_group(capturable):
    parameters, begins = make_parameters(), (0, 2, 1, 0, 3)
    optimizer = FusedAdam(parameters, 0.1, capturable=capturable)
    for step in range(4):
        set_gradients(parameters, step)
        for parameter, begin in zip(parameters, begins, strict=True):
            parameter.grad = parameter.grad if step >= begin else None
        optimizer.step()
    assert_all_close(parameters, adam_by_formula([1, 2, 3, 4], begins))


COUNTING = {
    "adam": FusedAdam,
    "capturable_adam": lambda p: FusedAdam(p, capturable=True),
    "lamb": FusedLAMB,
    "mixed_precision_lamb": FusedMixedPrecisionLamb,
    "novograd": FusedNovoGrad,
}


@pytest.mark.parametrize("kind", COUNTING)
def test_every_group_counts_each_step_that_has_a_gradient(kind):
    """A group without gradients counts with the others; a step without any gradient counts nothing. A count
    that is a tensor is written in place, as a captured step needs it.
    """
    parameters = make_parameters()
    optimizer = COUNTING[kind]([{"params": parameters[:1]}, {"params": parameters[1:]}])
    before = optimizer.param_groups[0].get("step")
    take_steps(optimizer, parameters, 1)
    for parameter in parameters[1:]:
        parameter.grad = None
    optimizer.step()
    assert [int(group["step"]) for group in optimizer.param_groups] == [2, 2]
    parameters[0].grad = None
    optimizer.step()
    counts = [group["step"] for group in optimizer.param_groups]
    assert [int(count) for count in counts] == [2, 2]
    in_place = kind in ("capturable_adam", "mixed_precision_lamb")
    assert all(torch.is_tensor(count) == in_place for count in counts)
    assert not in_place or counts[0] is before
