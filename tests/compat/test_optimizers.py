"""fastvit.compat.apex.optimizers and LARC: against torch's optimizers, and against the papers' formulas in
float64.
"""

import copy

import pytest
import torch
from torch import nn

from fastvit.compat.apex._warn_once import warn_once
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from fastvit.compat.apex.parallel import LARC

STEPS = 6


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (7,), (3, 2, 2), (1,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(t.to(dtype)) for t in (*tensors, torch.zeros(4))]


def gradients(step: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * scale for p in parameters()]


def run(make, dtype=torch.float32, steps=STEPS, params=None, first=0, late=None):
    """Every parameter has a gradient in each step, but for the one with index `late`, in the first two."""
    params = parameters(dtype) if params is None else params
    optimizer = make(params)
    for step in range(first, first + steps):
        for index, gradient in enumerate(gradients(step)):
            params[index].grad = None if index == late and step < 2 else gradient.to(params[index].dtype)
        optimizer.step()
    return params, optimizer


def close(got, want, rtol=2e-5, atol=1e-6):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=rtol, atol=atol)


DECAY = {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("ours", "torchs", "arguments", "options", "own_options"),
    [
        (FusedAdam, torch.optim.Adam, (), {}, {}),
        (FusedAdam, torch.optim.AdamW, (0.1,), DECAY, {}),
        (FusedAdam, torch.optim.Adam, (0.1,), DECAY, {"adam_w_mode": False, "capturable": True}),
        (FusedSGD, torch.optim.SGD, (0.1,), {}, {}),
        (FusedSGD, torch.optim.SGD, (0.1, 0.9, 0.5, 0.1), {}, {}),
        (FusedSGD, torch.optim.SGD, (0.1, 0.9, 0.0, 0.1), {"nesterov": True}, {}),
    ],
)
def test_like_torch(ours, torchs, arguments, options, own_options):
    """A parameter without a gradient does not change, and its state begins at its first gradient. Adam's
    count is of the group, as apex has it, where torch counts for each parameter.
    """
    late = 1 if ours is FusedSGD else None
    got, _ = run(lambda p: ours(p, *arguments, **options, **own_options), late=late)
    close(got, run(lambda p: torchs(p, *arguments, **options), late=late)[0])


def by_formula(update, **options):
    """Runs `update(w, g, memory, step)` in float64, one parameter at a time."""
    values = [p.detach().double() for p in parameters()]
    memories = [{} for _ in values]
    for step in range(STEPS):
        grads = [g.double() for g in gradients(step)]
        total = torch.cat([g.flatten() for g in grads]).norm()
        values = [
            update(w, g, memory, step + 1, total)
            for w, g, memory in zip(values, grads, memories, strict=True)
        ]
    return values


def moments(g, memory, b1, b2, average=True):
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1 if average else 1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g * g
    return memory["m"], memory["v"]


def test_options_that_torch_has_not():
    def adam(w, g, memory, step, total):
        g = g / g.norm().clamp_min(1)
        m, v = moments(g, memory, 0.8, 0.9)
        return w * (1 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8)

    def sgd(w, g, memory, step, total):
        memory["b"] = 0.9 * memory["b"] + g if "b" in memory else g
        return w - 0.1 * (memory["b"] + 0.2 * w)

    def make(p):  # the largest norm is of each group
        groups = [{"params": [q]} for q in p]
        return FusedAdam(groups, 0.01, False, (0.8, 0.9), weight_decay=0.1, max_grad_norm=1.0)

    params, optimizer = run(make)
    close(params, by_formula(adam))
    assert all(group["step"] == STEPS for group in optimizer.param_groups)  # which checkpoints have
    params, _ = run(lambda p: FusedSGD(p, 0.1, 0.9, weight_decay=0.2, wd_after_momentum=True))
    close(params, by_formula(sgd))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(("decay", "nvlamb"), [(0.1, False), (0.0, False), (0.0, True)])
@pytest.mark.parametrize("clip", [1.0, 1e3, 0.0])
def test_lamb(decoupled, average, decay, nvlamb, clip):
    def update(w, g, memory, step, total):
        g = g / (total / clip).clamp_min(1) if clip else g
        g = g if decoupled else g + decay * w
        m, v = moments(g, memory, 0.8, 0.9, average)
        u = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
        u = u + decay * w if decoupled else u
        ratio = w.norm() / u.norm() if (decay or nvlamb) and w.norm() != 0 and u.norm() != 0 else 1.0
        return w - 0.05 * ratio * u

    options = {"weight_decay": decay, "adam_w_mode": decoupled, "grad_averaging": average}
    options |= {"max_grad_norm": clip, "use_nvlamb": nvlamb}
    close(run(lambda p: FusedLAMB(p, 0.05, betas=(0.8, 0.9), **options))[0], by_formula(update))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("init_zero", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("correct", [True, False])
def test_novograd(inside, norm_type, init_zero, average, correct):
    def update(w, g, memory, step, total):
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
    close(run(lambda p: FusedNovoGrad(p, 0.05, correct, (0.8, 0.9), **options))[0], by_formula(update))


@pytest.mark.parametrize("clip", [True, False])
def test_larc(clip):
    def update(w, g, memory, step, total):
        if w.norm() != 0 and g.norm() != 0:
            rate = 0.5 * w.norm() / (g.norm() + 0.1 * w.norm() + 1e-8)
            g = (g + 0.1 * w) * (min(rate / 0.2, 1.0) if clip else rate)
        memory["b"] = 0.9 * memory["b"] + g if "b" in memory else g
        return w - 0.2 * memory["b"]

    sgd = lambda p: torch.optim.SGD(p, 0.2, momentum=0.9, weight_decay=0.1)  # noqa: E731
    params, larc = run(lambda p: LARC(sgd(p), 0.5, clip))
    larc.param_groups = groups = [*larc.param_groups]
    assert larc.optim.param_groups is groups
    close(params, by_formula(update))
    assert larc.param_groups[0]["weight_decay"] == 0.1
    assert copy.deepcopy(larc).state_dict().keys() == larc.optim.state_dict().keys()


MAKERS = [
    lambda p: FusedAdam(p, 1e-2, weight_decay=0.1),
    lambda p: FusedAdam(p, 1e-2, bias_correction=False),
    lambda p: FusedSGD(p, 1e-2, 0.9, weight_decay=0.1),
    lambda p: FusedLAMB(p, 1e-2),
    lambda p: FusedNovoGrad(p, 1e-2, weight_decay=0.1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", MAKERS)
def test_dtypes(make, dtype):
    """Half parameters are rounded once per step; their state is float32."""
    params, optimizer = run(make, dtype)
    close(params, run(make)[0], rtol=3e-2, atol=2e-2 if dtype == torch.bfloat16 else 4e-3)
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    assert {v.dtype for v in state} <= {torch.float64 if dtype == torch.float64 else torch.float32}
    assert {p.dtype for p in params} == {dtype}


def by_parameter(state):
    """The state in the form that has the step of FusedAdam, and the norm of FusedNovoGrad, by parameter."""
    state = copy.deepcopy(state)
    (group,), entries = state["param_groups"], state["state"].values()
    norms = iter(torch.cat(group.pop("exp_avg_sq", [torch.empty(0)])))
    step = None if "grad_averaging" in group else group.pop("step", None)
    for entry in entries:
        entry |= {} if step is None else {"step": torch.tensor(float(step))}
        entry |= {} if "exp_avg_sq" in entry or "exp_avg" not in entry else {"exp_avg_sq": next(norms)}
    return state


@pytest.mark.parametrize("form", [copy.deepcopy, by_parameter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS)
def test_state_restores_exactly(make, dtype, form):
    params, optimizer = run(make, dtype, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    again = make(copies)
    again.load_state_dict(form(optimizer.state_dict()))
    run(lambda p: optimizer, params=params, first=3)
    run(lambda p: again, params=copies, first=3)
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


def test_master_weights():
    """They follow steps that are too small for bfloat16, and what a script writes."""
    params, optimizer = run(lambda p: FusedAdam(p, 1e-4, master_weights=True), torch.bfloat16, 30)
    start = parameters(torch.bfloat16)
    full = run(lambda p: FusedAdam(p, 1e-4), steps=30, params=[nn.Parameter(p.float()) for p in start])[0]
    masters = [optimizer.state[p]["master_param"] for p in params]
    close(masters, full, rtol=0, atol=1e-4)  # up to the rounding of the gradients
    assert all(torch.equal(p, master.to(p.dtype)) for p, master in zip(params, masters, strict=True))
    kept = masters[0][1:].clone()
    params[0].data[0].fill_(0.25)
    optimizer.param_groups[0]["lr"] = 1e-9
    optimizer.step()
    assert (params[0][0] == 0.25).all() and (masters[0][0] - 0.25).abs().max() < 1e-7
    torch.testing.assert_close(masters[0][1:], kept, rtol=0, atol=1e-7)


def test_hooks_of_loading_see_the_state():
    (parameter,) = params = [nn.Parameter(torch.ones(3))]
    optimizer, seen = FusedSGD(params, 0.1, 0.9), []
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())

    def doubled(optimizer, state):
        return state | {"state": {0: {"momentum_buffer": 2 * state["state"][0]["momentum_buffer"]}}}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[parameter]["momentum_buffer"]))
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((3,), 2.0))
    assert seen[0] is optimizer.state[parameter]["momentum_buffer"]


def test_zero_grad_and_closures():
    params, keeps = run(lambda p: FusedSGD(p, 0.1), steps=1)
    others, drops = run(lambda p: FusedAdam(p), steps=1)
    keeps.zero_grad(), drops.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
    assert all(p.grad is None for p in others)
    keeps.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)

    def closure():
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    before = params[0].detach().clone()
    assert keeps.step(closure).item() == pytest.approx((before**2).sum().item())
    torch.testing.assert_close(params[0].detach(), before * 0.8)


def test_what_is_refused():
    warn_once.cache_clear()
    for kind in (FusedAdam, FusedLAMB, FusedNovoGrad):
        with pytest.raises(RuntimeError, match=f"{kind.__name__} takes amsgrad=False"):
            kind(parameters(), amsgrad=True)
    with pytest.raises(RuntimeError, match="norm_type takes 2 or 0"):
        FusedNovoGrad(parameters(), norm_type=1)
    with pytest.raises(ValueError, match="nesterov needs momentum above 0 and dampening 0"):
        FusedSGD(parameters(), 0.1, nesterov=True)
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        FusedSGD(parameters(), -1)
    with pytest.warns(UserWarning, match="materialize_master_grads=False has no effect"):
        FusedSGD(parameters(), 0.1, materialize_master_grads=False)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="FusedAdam takes dense real gradients"):
        FusedAdam(embedding.parameters()).step()
    complex_one = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_one.grad = torch.ones_like(complex_one)
    with pytest.raises(RuntimeError, match=r"dense real gradients.*torch.optim.Adam for complex"):
        FusedAdam([complex_one]).step()
    with pytest.raises(RuntimeError, match="LARC.step takes no closure"):
        LARC(torch.optim.SGD(parameters(), 0.1)).step(lambda: 0)
