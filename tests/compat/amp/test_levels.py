"""fastvit.compat.apex.amp: the dtypes of each level, what is refused, and results against float32 torch."""

import platform

import pytest
import torch
from torch.nn import functional as F

from compat.amp.models import (
    HALF,
    backward,
    draw_batch,
    flat_gradients,
    flat_parameters,
    initialized,
    loss_of,
    make_network,
    record_forwards,
    train_step,
)
from fastvit.compat.apex import amp
from fastvit.compat.apex.amp import forward

pytestmark = pytest.mark.usefixtures("amp_off")
F16, F32 = torch.float16, torch.float32


def floating(module, output=None) -> set[torch.dtype]:
    return {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}


@pytest.mark.parametrize(
    ("level", "options", "conv", "norm", "inside"),
    [
        ("O0", {}, F32, F32, F32),
        ("O1", {}, F32, F32, HALF),
        ("O2", {}, HALF, F32, HALF),
        ("O3", {}, HALF, HALF, HALF),
        ("O1", {"cast_model_type": F16}, F32, F32, F16),
        ("O1", {"cast_model_outputs": torch.float64}, F32, F32, HALF),
        ("O1", {"patch_torch_functions": False}, F32, F32, F32),
        ("O2", {"cast_model_type": F16}, F16, F32, F16),
        ("O2", {"cast_model_type": False}, F32, F32, F32),
        ("O2", {"master_weights": False}, HALF, F32, HALF),
        ("O2", {"keep_batchnorm_fp32": "False"}, HALF, HALF, HALF),
        ("O3", {"keep_batchnorm_fp32": True}, HALF, F32, HALF),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value).removeprefix("torch."),
)
def test_each_level_uses_its_dtypes(level, options, conv, norm, inside):
    model, optimizer = initialized(level, **options)
    layers, flat = [record_forwards(layer, floating) for layer in model], record_forwards(model[4])
    assert model(draw_batch()[0]).dtype == options.get("cast_model_outputs", F32) and flat == [inside]
    assert layers[0] == [{conv}] and layers[1] == layers[3] == [{norm}]
    assert floating(model) == {p.dtype for p in amp.master_params(optimizer)} == {F32}


def test_half_on_the_cpu_is_said_once_and_chosen_by_the_environment(monkeypatch):
    forward.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="half precision is bfloat16; FASTVIT_HALF=float16") as caught:
        assert forward.half_dtype("cpu") is forward.half_dtype("cpu") is HALF
    slow = "20 to 30 times slower than O0" in str(caught[0].message)
    has_instructions = torch.cpu._is_avx512_bf16_supported() or platform.machine() not in ("x86_64", "AMD64")
    assert len(caught) == 1 and slow is not has_instructions
    monkeypatch.setenv("FASTVIT_HALF", "float16")
    model, _ = initialized("O2")
    seen = record_forwards(model[0], floating)
    model(draw_batch()[0])
    assert seen == [{F16}] and forward.half_dtype("cpu") == F16


def test_contradictions_are_refused():
    for options, error, message in (
        ({"opt_level": "02"}, RuntimeError, "opt_level takes 'O0', 'O1', 'O2' or 'O3', got '02'"),
        ({"opt_level": "O1", "master_weights": True}, RuntimeError, "master_weights has no effect under O1"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32 has no effect"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "patch_torch_functions=True"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, ValueError, "True, False or None, got 'yes'"),
        ({"loss_scale": "static"}, ValueError, "loss_scale takes 'dynamic' or a number above 0"),
        ({"loss_scale": 0}, ValueError, "loss_scale takes 'dynamic' or a number above 0"),
        ({"cast_model_type": torch.int8}, ValueError, "cast_model_type takes a floating-point dtype"),
        ({"min_loss_scale": 2.0**30}, ValueError, "min_loss_scale"),
    ):
        with pytest.raises(error, match=message):
            amp.initialize(make_network(), verbosity=0, **options)


def test_wrong_models_and_optimizers_are_refused():
    with pytest.raises(TypeError, match="models takes one torch.nn.Module or a list, got function"):
        amp.initialize(F.relu, verbosity=0)
    with pytest.raises(TypeError, match="optimizers takes one torch.optim.Optimizer or a list, got dict"):
        amp.initialize(make_network(), {}, verbosity=0)
    model, optimizer = initialized("O1")
    with pytest.raises(RuntimeError, match="loss_id 1 needs amp.initialize"), amp.scale_loss(0, optimizer, 1):
        pass
    with pytest.raises(RuntimeError, match="SGD was not given to amp.initialize"):
        train_step(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="SGD.step takes no closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_weights_on_arrival_need_a_flag(level):
    """Refused by name, unless allow_incoming_model_not_fp32 is set; then they are float32 but under O1."""

    def mixed():
        model = make_network()
        model[2].half()
        return model

    with pytest.raises(RuntimeError, match="parameter 2.weight is torch.float16; a float32 model expected"):
        initialized(level, model=mixed())
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = initialized(level, model=mixed())
    assert model[2].weight.dtype == (F16 if level == "O1" else F32)
    if level != "O1":
        before = flat_parameters(model)
        train_step(model, optimizer)
        assert not torch.equal(before, flat_parameters(model))


def test_amp_that_is_disabled_changes_nothing():
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = torch.ones((), dtype=F16)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_backward_that_fails_leaves_earlier_gradients_alone(level, fails):
    """As after an out-of-memory error, when the caller continues with the next batch."""
    model, optimizer = initialized(level, loss_scale="dynamic")
    other, its_optimizer = initialized(level, loss_scale="dynamic")
    for seed in range(3):
        if seed != fails:
            backward(model, optimizer, seed), backward(other, its_optimizer, seed)
            continue
        with pytest.raises(MemoryError), amp.scale_loss(loss_of(model, seed), optimizer) as scaled:
            scaled.backward()
            raise MemoryError
        assert seed or all(p.grad is None for p in model.parameters())
    assert torch.equal(flat_gradients(model), flat_gradients(other))


@pytest.mark.parametrize(
    ("level", "scale"), [("O0", 0.5), ("O1", 0.5), ("O1", 1.0), ("O1", "2.0"), ("O2", "2.0"), ("O3", 0.5)]
)
def test_a_static_scale_multiplies_the_loss_alone(level, scale):
    """A loss is multiplied by any scale but 1, in float32, and the gradients are those without it."""
    other, its_optimizer = initialized(level, loss_scale=1.0)
    backward(other, its_optimizer)
    model, optimizer = initialized(level, loss_scale=scale)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": float(scale), "unskipped": 0}}
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == loss.item() * float(scale)
        scaled.backward()
    rtol = 0 if level in ("O0", "O1") else 2e-2
    torch.testing.assert_close(flat_gradients(model), flat_gradients(other), rtol=rtol, atol=1e-6)
    assert {p.grad.dtype for p in model.parameters()} == {F32}
    with amp.scale_loss(torch.tensor(60000.0, dtype=F16, requires_grad=True), optimizer) as scaled:
        assert scaled.item() == 60000.0 * float(scale)
    assert optimizer.step(lambda: 7.0) == 7.0  # no overflow is looked for
