"""fastvit.compat.apex.amp: loss scaling, accumulation, restarts, other optimizers and checkpoints."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import (
    backward,
    draw_batch,
    flat_gradients,
    flat_parameters,
    initialized,
    loss_of,
    make_network,
    train_step,
)
from fastvit.compat.apex import amp
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from fastvit.compat.apex.parallel import LARC

pytestmark = pytest.mark.usefixtures("amp_off")
X = torch.zeros(1)


def SGD(parameters, lr):  # noqa: N802
    return torch.optim.SGD(parameters, lr, momentum=0.9)


@pytest.mark.parametrize(
    ("level", "kind", "largest"),
    [
        ("O0", SGD, 2.0**24),
        ("O1", SGD, 2.0**24),
        ("O2", SGD, 2.0**24),
        ("O3", SGD, 2.0**24),
        ("O1", SGD, 1.0),
        ("O1", FusedLAMB, 2.0**24),
        ("O2", FusedNovoGrad, 2.0**24),
        ("O2", FusedAdam, 2.0**24),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_overflow_skips_the_step_and_says_so(level, kind, largest, capsys):
    """The optimizer's state and its count of steps, which bias corrections take, do not change."""
    schedules, scale = [], min(2.0**16, largest) / 2

    def make(parameters):
        optimizer = kind(parameters, 0.05)
        schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return optimizer

    model, optimizer = initialized(level, make, loss_scale="dynamic", max_loss_scale=largest)
    amp._amp_state.verbosity = 1
    train_step(model, optimizer, 0)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, 1, infinite=True)
    changed = [key for key in before if not torch.equal(before[key], model.state_dict()[key])]
    assert all("running" in key or "tracked" in key for key in changed)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], state["state"], rtol=0, atol=0)
    torch.testing.assert_close(after["param_groups"], state["param_groups"], rtol=0, atol=0)
    said = capsys.readouterr().out
    assert f"Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to {scale}" in said
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
    weights = flat_parameters(model)
    schedules[0].step()  # made before `initialize`
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    train_step(model, optimizer, 2)
    assert not torch.equal(weights, flat_parameters(model)) and flat_parameters(model).isfinite().all()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def overflows(scaler) -> bool:
    scaler.clear_overflow_state()
    scaler._overflow_buf = torch.ones(1, dtype=torch.int32)  # as a script sets it
    return scaler.update_scale()


def test_the_loss_scale_doubles_after_2000_steps_and_halves_on_overflow():
    scaler = amp.scaler.LossScaler("dynamic")
    assert scaler.loss_scale() == 2.0**16
    for _ in range(1999):
        assert not scaler.update_scale()
    assert scaler.loss_scale() == 2.0**16
    scaler.update_scale()
    assert scaler.loss_scale() == 2.0**17 and scaler._unskipped == 0
    assert overflows(scaler) and scaler._has_overflow and scaler.loss_scale() == 2.0**16
    scaler.clear_overflow_state()
    for _ in range(2000 * 20):
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**24  # the default ceiling
    for _ in range(200):
        assert overflows(scaler)
    assert scaler.loss_scale() > 0
    bounded = amp.scaler.LossScaler("dynamic", min_loss_scale=128, max_loss_scale=256)
    assert bounded.loss_scale() == 256
    for _ in range(5):
        overflows(bounded)
    assert bounded.loss_scale() == 128
    static = amp.scaler.LossScaler(64.0)
    assert not overflows(static) and static.loss_scale() == 64


@pytest.mark.parametrize(
    ("level", "losses", "where"), [("O0", 3, 2), ("O1", 3, 1), ("O1", 1, 2), ("O2", 1, 1), ("O3", 3, 0)]
)
def test_an_overflow_of_one_loss_skips_its_optimizers_alone(level, losses, where):
    """Loss 0 trains model 0, loss 1 model 1, loss 2 both; one of them overflows in the second of three
    iterations. The same run in which the optimizers of that loss are not stepped is the reference.
    """
    touched = {0: (0,), 1: (1,), 2: (0, 1)}[where]

    def train(inject: bool) -> tuple[torch.Tensor, dict]:
        models = [make_network(0), make_network(1)]
        optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in models]
        options = {"num_losses": losses, "loss_scale": "dynamic", "verbosity": 0}
        models, optimizers = amp.initialize(models, optimizers, opt_level=level, **options)
        for iteration in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for index in range(3):
                images, labels = draw_batch(10 * iteration + index)
                used = (0, 1) if index == 2 else (index,)
                loss = sum(F.cross_entropy(models[i](images), labels) for i in used)
                chosen = [optimizers[i] for i in used]
                with amp.scale_loss(loss, chosen, loss_id=index % losses) as scaled:
                    scaled.backward()
                    if inject and iteration == 1 and index == where:
                        next(models[used[0]].parameters()).grad.view(-1)[0] = float("nan")
            for index, optimizer in enumerate(optimizers):
                if inject or iteration != 1 or index not in touched:
                    optimizer.step()
        return torch.cat([flat_parameters(model) for model in models]), amp.state_dict()

    weights, scales = train(True)
    expected_weights, _ = train(False)
    assert torch.equal(weights, expected_weights)
    expected = [2.0**16] * losses
    expected[where % losses] /= 2
    assert [scale["loss_scale"] for scale in scales.values()] == expected


@pytest.mark.parametrize(
    ("level", "delays"),
    [("O0", (1, 2)), ("O1", ()), ("O1", (0, 1)), ("O2", (0, 1)), ("O2", (1, 2)), ("O3", (1, 2))],
    ids=str,
)
def test_accumulated_gradients_equal_those_of_the_summed_loss(level, delays):
    """Backwards, some of whose gradients are left scaled, give the step of their sum; exact for float32
    gradients. Gradients that the model has zeroed do not come back.
    """
    model, optimizer = initialized(level, loss_scale="dynamic")
    backward(model, optimizer, 7, delay_unscale=bool(delays))
    model.zero_grad()
    plain, total = copy.deepcopy(model), 0
    for seed in range(3):
        plain.zero_grad()
        loss_of(plain, seed).backward()
        total = total + flat_gradients(plain)
        backward(model, optimizer, seed, delay_unscale=seed in delays)
        if seed == 1:  # another scale for the last
            state = amp.state_dict()
            state["loss_scaler0"]["loss_scale"] /= 4
            amp.load_state_dict(state)
    if 2 in delays:
        optimizer.step()  # unscales what was held
    exact = level in ("O0", "O1") or (level == "O2" and not delays)
    rtol, atol = (1e-6, 1e-7) if exact else (3e-2, 3e-3)
    torch.testing.assert_close(flat_gradients(model), total, rtol=rtol, atol=atol)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == {(): 4, (0, 1): 1, (1, 2): 2}[delays]


@pytest.mark.parametrize(
    ("first", "second"),
    [("O1", "O1"), ("O1", "O2"), ("O1", None), ("O2", "O0"), ("O2", "O1"), ("O2", "O3"), ("O2", None)],
)
def test_a_second_initialize_leaves_nothing_of_the_first(first, second):
    """The second has the same or another level, or `enabled=False`."""
    options = {"opt_level": second} if second else {"enabled": False}
    model, optimizer = initialized(first)
    train_step(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    fresh = make_network()
    other = torch.optim.SGD(fresh.parameters(), 0.05, momentum=0.9)
    fresh, other = amp.initialize(fresh, other, verbosity=0, **options)
    fresh.load_state_dict(state)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    images, _ = draw_batch()
    assert torch.equal(fresh.eval()(images), model.eval()(images))
    train_step(model.train(), optimizer, 1), train_step(fresh.train(), other, 1)
    assert torch.equal(flat_parameters(model), flat_parameters(fresh))


def test_a_second_initialize_keeps_the_casts_of_a_shared_layer():
    norm = nn.BatchNorm1d(4, affine=False)
    models = [nn.Sequential(nn.Linear(4, 4), norm) for _ in range(2)]
    seen = []
    norm.register_forward_hook(lambda module, args, output: seen.append(module.running_mean.dtype))
    amp.initialize(models, opt_level="O2", verbosity=0)
    for model in models:
        model(torch.randn(3, 4))
    amp.initialize(models[0], enabled=False)
    models[1](torch.randn(3, 4))
    amp.initialize(models, enabled=False)
    models[1](torch.randn(3, 4))
    assert seen == [torch.bfloat16] * 3 + [torch.float32] and norm.num_batches_tracked == 4


def test_files_with_another_number_of_scalers_load(capsys):
    initialized("O1", num_losses=2)
    saved = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": 17} for i in range(2)}
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    amp._amp_state.verbosity = 1
    changed = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    amp.load_state_dict(changed)
    assert "got 1 loss scalers; amp.initialize made 2" in capsys.readouterr().out
    assert amp.state_dict() == saved | changed
    with pytest.raises(RuntimeError, match="unexpected keys 'scaler'"):
        amp.load_state_dict({"scaler": {}})


def test_errors_leave_no_casts():
    """Not even an interrupt, of which module hooks are not told."""
    for level in ("O1", "O2"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
        model[1].forward = Mock(side_effect=KeyboardInterrupt)
        amp.initialize(model, opt_level=level, verbosity=0)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")
        assert isinstance(model[0].weight, nn.Parameter) and model[0].weight.dtype == torch.float32


def test_a_forward_that_is_set_on_the_instance_is_called():
    model, (images, _) = make_network(), draw_batch()
    own = model.forward
    model.forward = lambda images: own(images) * 2
    model, _ = initialized("O2", model=model)
    assert torch.equal(model(images), initialized("O2")[0](images) * 2)
    inner = model.forward
    model.forward = lambda images: inner(images) + 1
    for options in ({"opt_level": "O0", "verbosity": 0}, {"enabled": False}):
        amp.initialize(model, **options)
        assert torch.equal(model(images), make_network()(images) * 2 + 1)


class Wrapper(torch.optim.Optimizer):
    """A wrapper of another optimizer, without Optimizer.__init__, as in implementations of Lookahead."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, 0.05)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Inner(torch.optim.Optimizer):
    """SAM in short: its step is that of an optimizer inside, which the script calls."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.05)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "level"),
    [(Wrapper, "O1"), (Derived, "O1"), (Inner, "O1"), (Wrapper, "O2")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_overflow_skips_the_step_of_optimizers_that_step_another(make, level, capsys):
    """The script replaces the gradients too."""
    torch.optim.SGD([nn.Parameter(X)], 0.1)  # torch hooks the step of a class with its first object
    model, optimizer = initialized(level, make)
    before = flat_parameters(model)
    for infinite in (False, True, False):
        amp._amp_state.verbosity = 1
        backward(model, optimizer, factor=float("inf") if infinite else 1.0)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        kept = [p.grad for p in model.parameters()]
        getattr(optimizer, "base", optimizer).step()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            assert parameter.grad is gradient
        after = flat_parameters(model)
        assert torch.equal(before, after) == infinite and after.isfinite().all()
        before = after
        model.zero_grad()
    assert capsys.readouterr().out.count("Gradient overflow") == 1


def larc(parameters):
    return LARC(torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1))


@pytest.mark.parametrize(
    ("level", "inside", "delay"),
    [
        ("O0", True, False),
        ("O0", False, False),
        ("O0", True, True),
        ("O1", True, True),
        ("O2", True, False),
        ("O3", False, False),
    ],
)
def test_larc_takes_its_rates_from_unscaled_gradients(level, inside, delay):
    """Its rates are of unscaled gradients, whether amp was given LARC or the optimizer inside."""

    def trained(level, **options):
        model = make_network()
        optimizer = larc(model.parameters())
        given = optimizer if inside else optimizer.optim
        amp.initialize(model, given, opt_level=level, verbosity=0, **options)
        backward(model, optimizer, delay_unscale=delay)
        optimizer.step()
        return flat_parameters(model) - flat_parameters(make_network())

    expected = trained("O0", loss_scale=1.0)
    difference = trained(level, loss_scale=128.0) - expected
    assert difference.norm() < {"O0": 1e-5, "O3": 0.3}.get(level, 0.1) * expected.norm()
