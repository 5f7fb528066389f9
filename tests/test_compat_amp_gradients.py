"""fastvit.compat.apex.amp: gradients of a backward that fails, from before `initialize` and under static
scales, what the state_dict of half weights holds, and models that come with half weights.
"""

import copy

import pytest
import torch
from amp_models import HALF, LEVELS, backward, gradients, loss_of, network, same_state, start, step, values
from torch import nn

from fastvit.compat.apex import amp


@pytest.fixture(autouse=True)
def quiet_and_clean():
    yield
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp.initialize([], enabled=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fails", [0, 1])
def test_a_backward_that_fails_leaves_earlier_gradients_alone(level, fails):
    """As after an out-of-memory error, when the caller continues with the next batch."""
    model, optimizer = start(level, loss_scale="dynamic")
    other, its_optimizer = start(level, loss_scale="dynamic")
    for seed in range(3):
        if seed != fails:
            backward(model, optimizer, seed), backward(other, its_optimizer, seed)
            continue
        with pytest.raises(MemoryError), amp.scale_loss(loss_of(model, seed), optimizer) as scaled:
            scaled.backward()
            raise MemoryError
        assert seed or all(p.grad is None for p in model.parameters())
    assert torch.equal(gradients(model), gradients(other))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_from_before_initialize_stay(level):
    """They are added to, as torch does."""
    plain, model = network(), network()
    loss_of(model, 7).backward()
    first = gradients(model)
    model, optimizer = start(level, model=model, loss_scale=128.0)
    other, its_optimizer = start(level, model=plain, loss_scale=128.0)
    other.load_state_dict(model.state_dict())
    backward(model, optimizer), backward(other, its_optimizer)
    assert torch.equal(gradients(model), first + gradients(other))


def test_a_dynamic_scale_of_1_still_finds_overflows():
    model, optimizer = start("O1", loss_scale="dynamic", max_loss_scale=1.0)
    before = values(model)
    step(model, optimizer, infinite=True)
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, "2.0"])
@pytest.mark.parametrize("level", LEVELS)
def test_static_scales(level, scale):
    """A loss is multiplied by any scale but 1, and the gradients are those without it."""
    other, its_optimizer = start(level, loss_scale=1.0)
    backward(other, its_optimizer)
    model, optimizer = start(level, loss_scale=scale)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == loss.item() * float(scale)
        scaled.backward()
    rtol = 0 if level in ("O0", "O1") else 2e-2
    torch.testing.assert_close(gradients(model), gradients(other), rtol=rtol, atol=1e-6)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class Everything(nn.Module):
    """Of each kind of parameter and buffer one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3, bias=False)
        self.register_buffer("kept", torch.tensor([1.0, 1 / 3]))
        self.register_buffer("dropped", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("index", torch.arange(3))

    def forward(self, x):
        return self.linear(self.norm(x)) * self.kept[0]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_state_dict_is_that_of_the_float32_model(level, norm):
    torch.manual_seed(0)
    plain = nn.Sequential(Everything(), nn.Linear(3, 2))
    model = amp.initialize(copy.deepcopy(plain), opt_level=level, keep_batchnorm_fp32=norm, verbosity=0)
    seen = []
    model[0].register_forward_hook(
        lambda module, *_: seen.extend(
            [module.kept.dtype, module.dropped.dtype, module.norm.running_mean.dtype, module.index.dtype]
        )
    )
    model.eval()(torch.randn(2, 3))
    assert seen == [HALF, HALF, torch.float32 if norm else HALF, torch.int64]
    assert same_state(model.state_dict(), plain.state_dict())


# Models that come with half weights


@pytest.mark.parametrize("level", LEVELS)
def test_half_weights_on_arrival(level):
    """Refused by name, unless allow_incoming_model_not_fp32 is set; then they are float32 but under O1."""

    def mixed():
        model = network()
        model[2].half()
        return model

    with pytest.raises(RuntimeError, match="parameter 2.weight is torch.float16"):
        start(level, model=mixed())
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = start(level, model=mixed())
    assert model[2].weight.dtype == (torch.float16 if level == "O1" else torch.float32)
    if level != "O1":
        before = values(model)
        step(model, optimizer)
        assert not torch.equal(before, values(model))
