"""fastvit.compat.apex.amp: loss scaling, accumulation, clipping, groups, masters and checkpoints."""

import copy
import io
from unittest.mock import Mock

import pytest
import torch
from amp_models import LEVELS, data, network, same_state, start, step, values
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex import amp
from fastvit.compat.apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from fastvit.compat.apex.parallel import LARC


@pytest.fixture(autouse=True)
def quiet_and_clean():
    yield
    amp.initialize([], enabled=False)


# Loss scale


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_overflow_skips_the_step_and_says_so(level, capsys):
    model, optimizer = start(level, loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    step(model, optimizer, 0)
    before, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 1, infinite=True)
    changed = [key for key in before if not torch.equal(before[key], model.state_dict()[key])]
    assert all("running" in key or "tracked" in key for key in changed)
    after = optimizer.state_dict()
    assert all(
        torch.equal(moments["state"][i]["momentum_buffer"], after["state"][i]["momentum_buffer"])
        for i in moments["state"]
    )
    said = capsys.readouterr().out
    assert "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768.0" in said
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    weights = values(model)
    step(model, optimizer, 2)
    assert not torch.equal(weights, values(model)) and values(model).isfinite().all()
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


def test_schedule():
    scaler = amp.scaler.LossScaler("dynamic")
    assert scaler.loss_scale() == 2.0**16
    for _ in range(1999):
        assert not scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**16
    scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**17 and scaler.state_dict()["unskipped"] == 0
    assert scaler.update_scale(True) and scaler.loss_scale() == 2.0**16
    for _ in range(2000 * 20):
        scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**24  # the default ceiling
    for _ in range(200):
        assert scaler.update_scale(True)
    assert scaler.loss_scale() > 0
    bounded = amp.scaler.LossScaler("dynamic", min_loss_scale=128, max_loss_scale=256)
    assert bounded.loss_scale() == 256
    for _ in range(5):
        bounded.update_scale(True)
    assert bounded.loss_scale() == 128
    static = amp.scaler.LossScaler(64.0)
    assert not static.update_scale(True) and static.loss_scale() == 64


def two_networks(level: str, losses: int):
    models = [network(0), network(1)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in models]
    return amp.initialize(
        models, optimizers, opt_level=level, num_losses=losses, loss_scale="dynamic", verbosity=0
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("losses", [1, 3])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_several_models_optimizers_and_losses(level, losses, where):
    """Loss 0 trains model 0, loss 1 model 1, loss 2 both; one of them overflows in the second of three
    iterations. The same run in which the optimizers of that loss are not stepped is the reference.
    """
    touched = {0: (0,), 1: (1,), 2: (0, 1)}[where]

    def train(inject: bool) -> tuple[torch.Tensor, dict]:
        models, optimizers = two_networks(level, losses)
        for iteration in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for index in range(3):
                images, labels = data(10 * iteration + index)
                used = (0, 1) if index == 2 else (index,)
                loss = sum(F.cross_entropy(models[i](images), labels) for i in used)
                chosen = [optimizers[i] for i in used]
                with amp.scale_loss(
                    loss, chosen if len(chosen) > 1 else chosen[0], loss_id=index % losses
                ) as scaled:
                    scaled.backward()
                    if inject and iteration == 1 and index == where:
                        next(models[used[0]].parameters()).grad.view(-1)[0] = float("nan")
            for index, optimizer in enumerate(optimizers):
                if inject or iteration != 1 or index not in touched:
                    optimizer.step()
        return torch.cat([values(model) for model in models]), amp.state_dict()

    got, scales = train(True)
    want, _ = train(False)
    assert torch.equal(got, want)
    expected = [2.0**16] * losses
    expected[where % losses] /= 2
    assert [scale["loss_scale"] for scale in scales.values()] == expected


# Accumulation and clipping


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation(level, delay):
    """Three backwards give the step of their summed gradients; exact for float32 gradients."""
    model, optimizer = start(level, loss_scale="dynamic")
    plain, total = copy.deepcopy(model), None
    for seed in range(3):
        images, labels = data(seed)
        plain.zero_grad()
        F.cross_entropy(plain(images), labels).backward()
        gradients = [p.grad.float().clone() for p in plain.parameters()]
        total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        with amp.scale_loss(
            F.cross_entropy(model(images), labels), optimizer, delay_unscale=delay and seed < 2
        ) as scaled:
            scaled.backward()
    got = [p.grad.float() for p in amp.master_params(optimizer)]
    exact = level in ("O0", "O1") or (level == "O2" and not delay)
    for mine, theirs in zip(got, total, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6 if exact else 3e-2, atol=1e-7 if exact else 3e-3)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == (1 if delay else 3)


def test_delay_after_unscaled_gradients_and_a_step_without_unscaling():
    model, optimizer = start("O1")
    gradients = []
    for seed in range(3):
        images, labels = data(seed)
        with amp.scale_loss(
            F.cross_entropy(model(images), labels), optimizer, delay_unscale=seed > 0
        ) as scaled:
            scaled.backward()
    other, _ = start("O1")
    for seed in range(3):
        other.zero_grad()
        images, labels = data(seed)
        F.cross_entropy(other(images), labels).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in other.parameters()]))
    optimizer.step()  # unscales what was held
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(got, sum(gradients), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_that_fails_leaves_earlier_gradients(level):
    """As after an out-of-memory error, when the caller continues with the next batch."""
    model, optimizer = start(level, loss_scale="dynamic")
    for seed in range(3):
        images, labels = data(seed)
        loss = F.cross_entropy(model(images), labels)
        if seed == 1:
            with pytest.raises(MemoryError), amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                raise MemoryError
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
    other, its_optimizer = start(level, loss_scale="dynamic")
    for seed in (0, 2):
        images, labels = data(seed)
        with amp.scale_loss(F.cross_entropy(other(images), labels), its_optimizer) as scaled:
            scaled.backward()
    for mine, theirs in zip(amp.master_params(optimizer), amp.master_params(its_optimizer), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_gradients_that_the_model_zeroed_do_not_come_back():
    def backward(model, optimizer, seed, delay):
        images, labels = data(seed)
        with amp.scale_loss(F.cross_entropy(model(images), labels), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    model, optimizer = start("O1", loss_scale="dynamic")
    backward(model, optimizer, 0, False)
    backward(model, optimizer, 1, True)
    model.zero_grad()
    backward(model, optimizer, 2, False)
    other, its_optimizer = start("O1", loss_scale="dynamic")
    backward(other, its_optimizer, 2, False)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping(level):
    model, optimizer = start(level)
    images, labels = data()
    with amp.scale_loss(F.cross_entropy(model(images), labels), optimizer) as scaled:
        scaled.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    plain = network()
    F.cross_entropy(plain(images), labels).backward()
    unclipped = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(norm, unclipped, rtol=2e-2, atol=0)
    before = torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)])
    optimizer.step()
    moved = torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)]) - before
    torch.testing.assert_close(moved.norm(), torch.tensor(0.05 * 1e-3), rtol=1e-2, atol=0)


# Groups, restarts, checkpoints


@pytest.mark.parametrize("level", LEVELS)
def test_add_param_group(level):
    """A group that is added later trains exactly as one that had rate 0 before."""

    def train(late: bool) -> torch.Tensor:
        model = network()
        head, body = list(model[5].parameters()), list(model[:5].parameters())
        first = [{"params": body, "lr": 0.05}] + ([] if late else [{"params": head, "lr": 0.0}])
        model, optimizer = amp.initialize(
            model, torch.optim.SGD(first, 0.05), opt_level=level, loss_scale=128.0, verbosity=0
        )
        for seed in range(4):
            if seed == 2:
                if late:
                    optimizer.add_param_group({"params": head, "lr": 0.05})
                else:
                    optimizer.param_groups[1]["lr"] = 0.05
            optimizer.zero_grad()
            model.zero_grad()
            step(model, optimizer, seed)
        return values(model)

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_initialize_again(first, second):
    model, optimizer = start(first)
    step(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    model, optimizer = amp.initialize(model, optimizer, opt_level=second, verbosity=0)
    assert same_state(model.state_dict(), state)
    images, _ = data()
    fresh, other = start(second)
    fresh.load_state_dict(state)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(fresh.eval()(images), model.eval()(images))
    step(model.train(), optimizer, 1), step(fresh.train(), other, 1)
    assert torch.equal(values(model), values(fresh))
    model = amp.initialize(model, opt_level="O0", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_initialize_again_with_a_shared_layer():
    norm = nn.BatchNorm1d(4, affine=False)
    models = [nn.Sequential(nn.Linear(4, 4), norm) for _ in range(2)]
    seen = []
    norm.register_forward_hook(lambda module, args, output: seen.append(module.running_mean.dtype))
    amp.initialize(models, opt_level="O3", verbosity=0)
    for model in models:
        model(torch.randn(3, 4))
    amp.initialize(models[0], enabled=False)
    models[1](torch.randn(3, 4))
    amp.initialize(models, enabled=False)
    models[1](torch.randn(3, 4))
    assert seen == [torch.bfloat16] * 3 + [torch.float32] and norm.num_batches_tracked == 4


class Wrapper(torch.optim.Optimizer):
    """A wrapper of another optimizer, without Optimizer.__init__, as in implementations of Lookahead."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, 0.05)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class Derived(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, 0.05)

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [Wrapper, Derived])
def test_optimizers_that_step_another(make, level, capsys):
    torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))], 0.1
    )  # torch hooks the step of a class with its first object
    model, optimizer = start(level, make)
    images, labels = data()
    before = values(model)
    for infinite in (False, True):
        loss = F.cross_entropy(model(images), labels) * (float("inf") if infinite else 1.0)
        amp._amp_state.verbosity = 1
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        gradients = [p.grad for p in amp.master_params(optimizer)]
        optimizer.step()
        for parameter, gradient in zip(amp.master_params(optimizer), gradients, strict=True):
            assert parameter.grad is gradient
        after = values(model)
        assert torch.equal(before, after) == infinite
        before = after
        model.zero_grad()
    assert capsys.readouterr().out.count("Gradient overflow") == 1


@pytest.mark.parametrize("level", LEVELS)
def test_weights_written_after_initialize(level):
    """Weights that a script writes, before or between steps, are trained."""
    model, optimizer = start(level, lambda parameters: torch.optim.SGD(parameters, 1e-9))
    for value in (0.125, 1 / 3):
        model[2].weight.data.fill_(value)
        step(model, optimizer)
        torch.testing.assert_close(
            model[2].weight, torch.full_like(model[2].weight, value), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_afterwards(level):
    """Changes of an earlier call are undone: a plain step trains the model again."""
    model, optimizer = start(level)
    step(model, optimizer)
    model, optimizer = amp.initialize(model, optimizer, enabled=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = values(model).clone()
    step(model, optimizer)
    assert not torch.equal(values(model), before)
    assert {id(p) for p in amp.master_params(optimizer)} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("make", ["sgd", "adam", "fused_adam"])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoint_restores_exactly(level, make):
    maker = {
        "sgd": None,
        "adam": lambda p: torch.optim.Adam(p, 1e-2),
        "fused_adam": lambda p: FusedAdam(p, 1e-2, weight_decay=0.01),
    }[make]
    model, optimizer = start(level, maker, loss_scale="dynamic")
    for seed in range(3):
        step(model, optimizer, seed, infinite=seed == 1)
    file = io.BytesIO()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(saved, file)
    for seed in range(3, 6):
        step(model, optimizer, seed)
    end = copy.deepcopy(model.state_dict())
    scale = amp.state_dict()

    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {v.dtype for v in loaded["model"].values() if v.is_floating_point()} == {torch.float32}
    again, optimizer = start(level, maker, network(7), loss_scale="dynamic")
    again.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    assert amp.state_dict() == saved["amp"] != scale
    for seed in range(3, 6):
        step(again, optimizer, seed)
    assert same_state(again.state_dict(), end)
    assert amp.state_dict() == scale


def test_checkpoint_moves_between_levels():
    model, optimizer = start("O2")
    step(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    plain = network(3)
    plain.load_state_dict(state)  # float32, the masters' digits
    for parameter, master in zip(plain.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(parameter, master)
    model2, optimizer2 = start("O2", model=plain)
    for mine, theirs in zip(amp.master_params(optimizer2), amp.master_params(optimizer), strict=True):
        assert torch.equal(mine, theirs)
    assert same_state(model2.state_dict(), state)


def test_old_amp_files(capsys):
    start("O1", num_losses=2)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 4096.0, "unskipped": 17},
            "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0},
        }
    )
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4096.0, "unskipped": 17}
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4096.0, 2.0]
    amp._amp_state.verbosity = 1
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert "1 loss scalers in the file, 2 here" in capsys.readouterr().out
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [8.0, 2.0]
    with pytest.raises(RuntimeError, match="unexpected keys 'scaler'"):
        amp.load_state_dict({"scaler": {}})


def test_copies_and_pickles_run_their_own_forward():
    model, optimizer = start("O2")
    step(model, optimizer)
    ema = copy.deepcopy(model)
    step(model, optimizer, 1)
    images, _ = data()
    assert not torch.equal(ema.eval()(images), model.eval()(images))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(images), model(images)) and type(loaded) is type(model)
    replica = model._replicate_for_data_parallel()
    replica._parameters = {}
    replica._modules = {name: layer for name, layer in model.named_children() if name != "5"}
    assert replica(images).shape != model(images).shape
    amp.initialize(copied := copy.deepcopy(model), enabled=False)
    assert type(copied) is nn.Sequential and type(model) is type(loaded)


def test_errors_leave_no_autocast():
    """Not even an interrupt, of which module hooks are not told."""
    model = nn.Sequential(nn.Identity())
    model[0].forward = Mock(side_effect=KeyboardInterrupt)
    model = amp.initialize(model, opt_level="O1", verbosity=0)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2))
    assert not torch.is_autocast_enabled("cpu")


def test_a_class_above():
    """torch's FSDP and parametrize give a model a class of their own."""
    model, _ = start("O2")
    images, _ = data()
    want = model(images)
    model.__class__ = above = type("Above", (type(model),), {})
    assert torch.equal(model(images), want)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert torch.equal(model(images), start("O1")[0](images))
    amp.initialize(model, enabled=False)
    assert type(model) is above and torch.equal(model(images), network()(images))


def test_forward_on_the_instance_and_scheduler_made_before():
    model = network()
    own = model.forward
    model.forward = lambda images: own(images) * 2
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    images, _ = data()
    assert torch.equal(model(images), start("O2")[0](images) * 2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = values(model)
    step(model, optimizer, infinite=True)
    scheduler.step()
    assert torch.equal(values(model), before)
    step(model, optimizer)
    assert not torch.equal(values(model), before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_larc(level, inside):
    """LARC before or after amp: a layer's step is trust_coefficient * |w| long."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    weight = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    if inside:
        model, optimizer = amp.initialize(
            model, LARC(optimizer, clip=False), opt_level=level, loss_scale=128.0, verbosity=0
        )
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        optimizer = LARC(optimizer, clip=False)
    with amp.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (master,) = amp.master_params(optimizer)
    moved = (master.float() - weight).norm() / weight.norm()
    assert moved.item() == pytest.approx(0.02, rel=0.2 if level == "O3" else 1e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_with_held_gradients(level):
    """Its rates use unscaled gradients, whenever these are unscaled."""
    results = []
    for delay in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8))
        optimizer = LARC(torch.optim.SGD(model.parameters(), 1.0, weight_decay=0.1), clip=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.scale_loss(
            model(torch.ones(4, 8)).square().mean(), optimizer, delay_unscale=delay
        ) as scaled:
            scaled.backward()
        optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad, FusedAdam])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_skipped_steps_are_not_counted(level, kind):
    """Bias corrections depend on the step count, mostly in the first steps."""
    results = []
    for skips in (0, 3):
        model, optimizer = start(level, lambda p: kind(p, lr=0.05), loss_scale="dynamic")
        for seed in (*[0] * skips, 1, 2):
            step(model.eval(), optimizer, seed, infinite=seed == 0)
        results.append(torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)]))
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0 ** (16 - skips)
    assert torch.equal(*results)
    assert not torch.equal(results[0], values(network()))


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.EmbeddingBag(10, 4, sparse=True)
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    model, optimizer = start("O0", lambda p: torch.optim.SGD(p, 0.1), model, loss_scale="dynamic")
    for indices in (torch.tensor([[1, 2], [2, 2]]), torch.tensor([[1, 5], [0, 9]])):
        optimizer.zero_grad(), reference.zero_grad()
        for _ in range(2):
            with amp.scale_loss(model(indices).square().sum(), optimizer) as scaled:
                scaled.backward()
            plain(indices).square().sum().backward()
        optimizer.step(), reference.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=1e-7)
