"""fastvit.compat.apex.amp: the attributes of apex's objects that public scripts read and write."""

import copy

import pytest
import torch
from torch import nn

from compat.amp.models import flat_parameters, initialized, loss_of, train_step
from fastvit.compat import amp_C
from fastvit.compat.apex import amp
from fastvit.compat.apex.amp._amp_state import AmpState, _amp_state
from fastvit.compat.apex.amp.frontend import opt_levels

pytestmark = pytest.mark.usefixtures("amp_off")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_options_are_a_mapping_and_attributes(level):
    """Written either way, they are read either way; what forward does was decided by `initialize`."""
    model, optimizer = initialized(level)
    properties, options = _amp_state.opt_properties, _amp_state.opt_properties.options
    assert list(options) == [
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    ]
    assert all(getattr(properties, name) == value for name, value in options.items())
    assert options["opt_level"] == level and options["enabled"] is True
    x = torch.randn(8, 1, 8, 8)
    expected = model.eval()(x)
    options["loss_scale"], properties.patch_torch_functions, properties.cast_model_type = 4.0, False, None
    assert properties.loss_scale == 4.0 and options["patch_torch_functions"] is False
    assert torch.equal(model(x), expected)
    assert opt_levels[level].loss_scale in ("dynamic", 1.0)
    properties.enabled = False
    with amp.scale_loss("untouched", optimizer) as scaled:
        assert scaled == "untouched"


def test_the_state_is_there_from_initialize_on():
    """Scripts ask by hasattr whether amp is in use."""
    fresh = AmpState()
    assert not any(hasattr(fresh, name) for name in ("opt_properties", "loss_scalers", "handle"))
    assert fresh.allow_incoming_model_not_fp32 is False and fresh.verbosity == 1
    initialized("O1", min_loss_scale=2.0, max_loss_scale=2.0**20, num_losses=2)
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 2.0**20)
    assert len(_amp_state.loss_scalers) == 2 and _amp_state.handle.is_active()
    initialized("O2")
    assert not hasattr(_amp_state, "handle")


@pytest.mark.parametrize(
    ("name", "value", "scales"),
    [
        ("_scale_seq_len", 3, [8, 8, 16, 16]),
        ("_unskipped", 1998, [8, 16, 16, 16]),
        ("_max_loss_scale", 8.0, [8, 8, 8, 8]),
        ("_loss_scale", 4.0, [4, 4, 4, 4]),
        ("dynamic", False, [8, 8, 8, 8]),
    ],
    ids=["_scale_seq_len", "_unskipped", "_max_loss_scale", "_loss_scale", "dynamic"],
)
def test_what_a_script_writes_to_a_scaler_has_its_effect(name, value, scales):
    model, optimizer = initialized("O1", loss_scale="dynamic")
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale = 8.0
    if name == "_max_loss_scale":
        scaler._scale_seq_len = 1
    setattr(scaler, name, value)
    seen = []
    for seed in range(4):
        train_step(model, optimizer, seed)
        seen.append(scaler.loss_scale())
    assert seen == scales and not scaler._has_overflow


def test_a_floor_that_a_script_writes_bounds_the_scale():
    model, optimizer = initialized("O1", loss_scale="dynamic")
    scaler = _amp_state.loss_scalers[0]
    scaler._min_loss_scale = scaler._loss_scale = 8.0
    train_step(model, optimizer, infinite=True)
    assert scaler.loss_scale() == 8.0 and scaler._has_overflow and scaler._unskipped == 0


@pytest.mark.parametrize("infinite", [False, True])
def test_a_script_that_reduces_gradients_and_checks_for_overflow_itself(infinite):
    """As for BERT: with delay_overflow_check the scale changes when the script says so, by its own flag."""
    model, optimizer = initialized("O2", loss_scale="dynamic")
    scaler, before = _amp_state.loss_scalers[0], flat_parameters(model)
    with amp.scale_loss(2 * loss_of(model), optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
        if infinite:
            model[0].weight.grad[0] = float("inf")
    assert scaler._overflow_buf.item() == infinite and scaler._loss_scale == 2.0**16
    gradients = [p.grad for p in amp.master_params(optimizer)]
    scaler._overflow_buf = flag = torch.zeros(1, dtype=torch.int32)
    amp_C.multi_tensor_scale(65536, flag, [gradients, gradients], 0.5)
    assert scaler.update_scale() is infinite
    if infinite:
        assert _amp_state.opt_properties.master_weights
        for parameter in optimizer._amp_stash.all_fp32_from_fp16_params:
            parameter.grad = None
        assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert torch.equal(flat_parameters(model), before) is infinite
    assert scaler.loss_scale() == 2.0 ** (15 if infinite else 16)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lists_of_the_stash_have_the_stepped_weights(level):
    """Under O2 each parameter is a half parameter and its own master: what a script copies from one
    list to the other, names or averages is the weight that is stepped.
    """
    model, optimizer = initialized(level)
    stash = optimizer._amp_stash
    assert stash.lazy_init_called is False
    optimizer._amp_lazy_init()
    assert stash.lazy_init_called is True
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    groups = [group["params"] for group in optimizer.param_groups]
    half, full = (groups, [[], []]) if level == "O2" else ([[], []], groups)
    assert stash.fp16_groups == stash.fp32_from_fp16_groups == half and stash.fp32_from_fp32_groups == full
    assert [*map(id, stash.all_fp16_params)] == [*map(id, sum(half, []))]
    assert [*map(id, stash.all_fp32_from_fp16_params)] == [*map(id, sum(half, []))]
    assert [*map(id, stash.all_fp32_params)] == [*map(id, sum(full, []))]
    assert [*map(id, stash.all_fp32_from_fp32_params)] == [*map(id, sum(full, []))]
    names = {p: name for name, p in model.named_parameters()}
    pairs = zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)
    masters = {master: names.get(parameter) for parameter, master in pairs}
    assert level == "O1" or all(p in masters for p in amp.master_params(optimizer))
    optimizer._master_params_to_model_params()
    amp.initialize(model, optimizer, enabled=False)
    names = ("_amp_stash", "_amp_lazy_init", "_lazy_init_maybe_master_weights")
    assert not any(name in vars(optimizer) for name in names)


def test_what_is_not_there_names_the_line_to_write():
    _, optimizer = initialized("O1")
    for owner, name, line in (
        (optimizer._amp_stash, "all_fp16_grad_stash", "use optimizer.param_groups"),
        (optimizer._amp_stash, "params_have_scaled_gradients", "use amp.scale_loss"),
        (_amp_state.handle, "wrap_optimizer", "use amp.scale_loss"),
        (_amp_state.loss_scalers[0], "unscale_python", "use amp.scale_loss, which unscales"),
        (amp.frontend, "O1", "use amp.frontend.opt_levels"),
        (amp.handle, "NoOpHandle", "use amp.initialize"),
        (amp.scaler, "scale_check_overflow_python", "use amp_C.multi_tensor_scale"),
    ):
        with pytest.raises(AttributeError, match=f"fastvit has no {name}; {line}"):
            getattr(owner, name)
    copy.deepcopy(_amp_state.loss_scalers)


def test_a_loss_that_is_no_tensor_is_refused():
    _, optimizer = initialized("O1")
    for loss in ([torch.ones(())], 1.0, None):
        message = f"amp.scale_loss: loss takes a tensor, got {type(loss).__name__}; "
        with pytest.raises(TypeError, match=message), amp.scale_loss(loss, optimizer):
            pass
