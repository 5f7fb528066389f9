"""fastvit.compat.apex.amp: a loss whose gradients reach parameters of optimizers that scale_loss was not
given. A script then does the same as without amp.
"""

import itertools

import pytest
import torch
from torch import nn

from compat.amp.models import flat_parameters, scaled_backward
from fastvit.compat.apex import amp
from fastvit.compat.apex.optimizers import FusedSGD
from fastvit.compat.apex.parallel import LARC

pytestmark = pytest.mark.usefixtures("amp_off")
X = torch.linspace(-1, 2, 12).view(3, 4)


class TwoHeads(nn.Module):
    """Two heads on one encoder; p steps the encoder and the first head, q the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, name):
        return getattr(self, name)(self.encoder(x)).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class SgdWithLarc(LARC):
    def __init__(self, parameters):
        super().__init__(FusedSGD(parameters, 0.1, momentum=0.9))

    def zero_grad(self, set_to_none=True):
        self.optim.zero_grad(set_to_none)


def initialize_two_optimizers(level="O0", scale="dynamic", losses=2, make=sgd, shared=False, **options):
    model = TwoHeads()
    p = make([*model.encoder.parameters(), *model.first.parameters()])
    q = make([*model.second.parameters(), *(model.encoder.parameters() if shared else ())])
    options = {"opt_level": level, "loss_scale": scale, "num_losses": losses, "verbosity": 0, **options}
    amp.initialize(model, [p, q], **options)
    if losses == 2 and scale == "dynamic" and options.get("enabled", True):
        amp._amp_state.loss_scalers[1]._loss_scale = 2.0**10
    return model, p, q


def second(model, optimizers, losses, **options):
    scaled_backward(model(X, "second"), optimizers, loss_id=losses - 1, **options)


def first_and_second(model, p, q, losses):
    scaled_backward(model(X, "first"), p)
    second(model, q, losses)
    p.step(), q.step()


def second_and_first(model, p, q, losses):
    second(model, q, losses)
    scaled_backward(model(X, "first"), p)
    p.step(), q.step()


def second_alone(model, p, q, losses):
    second(model, q, losses)
    p.step(), q.step()


def accumulates(model, p, q, losses):
    second(model, q, losses)
    second(model, q, losses)
    first_and_second(model, p, q, losses)


def clips(model, p, q, losses):
    second(model, q, losses)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-2) < 100
    p.step(), q.step()


def delays(model, p, q, losses):
    second(model, q, losses, delay_unscale=True)
    scaled_backward(model(X, "first"), p, delay_unscale=True)
    second(model, q, losses)
    p.step(), q.step()


def delays_all(model, p, q, losses):
    second(model, q, losses, delay_unscale=True)
    p.step(), q.step()


def adversaries(model, p, q, losses):
    """A discriminator's loss reaches the generator, whose gradients are dropped."""
    second(model, q, losses)
    q.step()
    p.zero_grad(set_to_none=losses == 2)
    scaled_backward(model(X, "first"), p)
    p.step()


def block_inside(model, p, q, losses):
    with amp.scale_loss(model(X, "first"), p) as outer:
        with amp.scale_loss(model.second(X).square().mean(), q, loss_id=losses - 1) as inner:
            outer.backward()
            inner.backward()
    p.step(), q.step()


def steps_inside(model, p, q, losses):
    with amp.scale_loss(model(X, "second"), q, loss_id=losses - 1) as scaled:
        scaled.backward()
        p.step(), q.step()


def drops_inside(model, p, q, losses):
    """In the block, as some scripts do, gradients of which its loss reaches the encoder's."""
    scaled_backward(model(X, "first"), p)
    with amp.scale_loss(model(X, "second"), q, loss_id=losses - 1) as scaled:
        p.zero_grad()
        scaled.backward()
    p.step(), q.step()


SCRIPTS = (first_and_second, second_and_first, second_alone, accumulates, clips, delays, delays_all)
SCRIPTS += (adversaries, block_inside, steps_inside, drops_inside)
SCRIPTS_WITHOUT_SHARED_PARAMETERS = (block_inside, drops_inside)
FACTORS = (("dynamic", 128.0), (1, 2), (sgd, SgdWithLarc), (False, True))  # scale, losses, make, shared
FIRST_ROWS = ((0, 1, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 1, 1))  # indices of values in FACTORS


def script_cases():
    """Returns two cases for each script, which have each value of a factor; the other products are nightly.

    Four scripts in a row have each pair of values of two factors.
    """
    cases = []
    for number, script in enumerate(SCRIPTS):
        num_factors = 3 if script in SCRIPTS_WITHOUT_SHARED_PARAMETERS else 4
        first_row = FIRST_ROWS[number % 4][:num_factors]
        push_rows = (first_row, tuple(1 - index for index in first_row))
        for row in itertools.product((0, 1), repeat=num_factors):
            values = [values[index] for values, index in zip(FACTORS, row, strict=False)]
            scale, losses, make, shared = values if num_factors == 4 else (*values, False)
            name = f"{script.__name__}-{scale}-{losses}_losses-{make.__name__}{'-shared' * shared}"
            marks = () if row in push_rows else pytest.mark.nightly
            cases.append(pytest.param(script, scale, losses, make, shared, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("script", "scale", "losses", "make", "shared"), script_cases())
def test_scripts_follow_those_without_amp(script, scale, losses, make, shared):
    """Scales that are powers of two change no digit.

    Two scripts share no parameters: apex, too, confuses two scales in one gradient, and keeps what is
    dropped in the block of its own optimizer.
    """
    results = []
    for options in ({"enabled": False}, {}):
        model, p, q = initialize_two_optimizers(
            scale=scale, losses=losses, make=make, shared=shared, **options
        )
        for _ in range(2):
            script(model, p, q, losses)
            p.zero_grad(), q.zero_grad()
        results.append(flat_parameters(model))
    assert torch.equal(*results)


def test_gradients_that_are_not_reduced_yet_stay_scaled(monkeypatch):
    """A DDP model in `no_sync` has such gradients. The step unscales them."""
    results = []
    for options in ({"enabled": False}, {}):
        model, p, q = initialize_two_optimizers(**options)
        with monkeypatch.context() as patch:
            patch.setattr(
                amp.handle, "parameters_without_sync", lambda model=model: set(model.encoder.parameters())
            )
            second(model, q, 2)
        if not options:
            assert model.encoder.weight.grad.abs().max() > 100 > model.second.weight.grad.abs().max()
        second_alone(model, p, q, 2)
        results.append(flat_parameters(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("drops", [False, True])
def test_an_overflow_of_the_other_optimizer_skips_its_step_unless_dropped(drops, capsys):
    """The overflow also halves the scale of the loss."""
    model, p, q = initialize_two_optimizers()
    before = flat_parameters(model)
    with amp.scale_loss(model(X, "second"), q, loss_id=1) as scaled:
        scaled.backward()
        model.encoder.weight.grad[0] = float("nan")
    assert p._amp_stash.already_patched and not q._amp_stash.already_patched
    amp._amp_state.verbosity = 1
    if drops:
        p.zero_grad()
        scaled_backward(model(X, "first"), p)
    p.step(), q.step()
    parts = [
        not torch.equal(*pair)
        for pair in zip(before.split(20), flat_parameters(model).split(20), strict=True)
    ]
    assert parts == [drops, True]
    assert ("loss scaler 1 reducing loss scale to 512.0" in capsys.readouterr().out) is not drops
    scales = [scale["loss_scale"] for scale in amp.state_dict().values()]
    assert scales == [2.0**16, 2.0**10 if drops else 2.0**9]
    p.zero_grad()
    second_alone(model, p, q, 2)
    assert flat_parameters(model).isfinite().all()


def test_an_overflow_in_both_halves_the_scale_once():
    model, p, q = initialize_two_optimizers()
    before = flat_parameters(model)
    with amp.scale_loss(model(X, "second"), q, loss_id=1) as scaled:
        scaled.backward()
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * float("inf")
    p.step(), q.step()
    assert torch.equal(flat_parameters(model), before)
    assert amp._amp_state.loss_scalers[1].loss_scale() == 2.0**9


def test_parameters_of_no_optimizer_keep_the_scale():
    """As with apex, so that scripts which divide by the scale are right."""
    model, p, q = initialize_two_optimizers()
    extra = nn.Parameter(torch.ones(()))
    scaled_backward(model(X, "second") * 0 + extra, q, loss_id=1)
    assert extra.grad == 2.0**10


@pytest.mark.parametrize("loss", ["first", "second"])
def test_gradients_of_a_flat_buffer_stay_in_it(loss):
    """Gradients of both optimizers stay in the buffer, whether the loss reaches them or not."""
    model, p, q = initialize_two_optimizers()
    sizes = [p.numel() for p in model.parameters()]
    buffer = torch.ones(sum(sizes))
    for parameter, part in zip(model.parameters(), buffer.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    scaled_backward(model(X, loss), q, loss_id=1)
    reference = TwoHeads()
    reference(X, loss).backward()
    reached = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    torch.testing.assert_close(buffer, 1 + torch.cat([gradient.flatten() for gradient in reached]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_leaves_the_gradients_of_other_optimizers_as_without_amp(when):
    """Gradients of the optimizers that scale_loss was given are restored."""
    model, p, q = initialize_two_optimizers()
    second(model, q, 2)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(MemoryError), amp.scale_loss(model(X, "second"), q) as scaled:
        if when == "after":
            scaled.backward()
        raise MemoryError
    encoder = 2 if when == "after" else 1  # times the gradient of one backward
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for one, gradient, times in zip(before, after, [encoder] * 2 + [1] * 2, strict=True):
        assert torch.equal(gradient, times * one)
