"""Files of the optimizers of fastvit.compat: alone, under FP16_Optimizer and under amp, in fastvit's form and
in apex's.
"""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from compat.amp.models import initialized, train_step
from compat.half_models import loss_of_mlp, make_adam_of_bert, make_mlp
from compat.optimizer_steps import (
    MAKERS,
    adam_by_formula,
    assert_all_close,
    make_parameters,
    set_gradients,
    take_steps,
)
from fastvit.compat.apex import amp
from fastvit.compat.apex.optimizers import (
    FP16_Optimizer,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from fastvit.compat.apex.parallel import LARC

FLOAT16, FLOAT32 = torch.float16, torch.float32


class PlainRun:
    """An optimizer without a wrapper."""

    def __init__(self, make, dtype):
        self.parameters = make_parameters(dtype)
        self.optimizer = make(self.parameters)

    def step(self, seed, infinite):
        take_steps(self.optimizer, self.parameters, 1, first=seed)

    def checkpoint(self):
        return {"parameters": [p.detach() for p in self.parameters], "optimizer": self.optimizer.state_dict()}

    def restore(self, file):
        for parameter, value in zip(self.parameters, file["parameters"], strict=True):
            parameter.data.copy_(value)
        self.optimizer.load_state_dict(file["optimizer"])

    def scale(self):
        return None


class Fp16Run:
    """FusedAdam under FP16_Optimizer."""

    def __init__(self, options):
        self.model = make_mlp()
        self.optimizer = FP16_Optimizer(make_adam_of_bert(self.model), **options)

    def step(self, seed, infinite):
        self.optimizer.backward(loss_of_mlp(self.model, seed) * (float("inf") if infinite else 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpoint(self):
        state = self.optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": state, "masters": state["fp32_from_fp16"]}

    def restore(self, file):
        self.optimizer = FP16_Optimizer(make_adam_of_bert(self.model))
        self.model.load_state_dict(file["model"])
        self.optimizer.load_state_dict(file["optimizer"])
        masters = sum(self.optimizer.state_dict()["fp32_from_fp16"], [])
        assert len(masters) == 4 and {master.dtype for master in masters} == {FLOAT32}

    def scale(self):
        return self.optimizer.cur_scale, self.optimizer.dynamic_loss_scale


class AmpRun:
    """A model and an optimizer of `amp.initialize`, with the names on the optimizer that scripts use."""

    def __init__(self, level, make):
        self.model, self.optimizer = initialized(level, make, loss_scale="dynamic")

    def step(self, seed, infinite):
        train_step(self.model, self.optimizer, seed, infinite)

    def checkpoint(self):
        masters = [p.detach() for p in amp.master_params(self.optimizer)]
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer")}
        return {**states, "amp": amp.state_dict(), "masters": masters}

    def restore(self, file):
        assert {v.dtype for v in file["model"].values() if v.is_floating_point()} == {FLOAT32}
        self.optimizer._lazy_init_maybe_master_weights()
        self.optimizer._amp_stash.lazy_init_called = True
        self.model.load_state_dict(file["model"])
        self.optimizer.load_state_dict(file["optimizer"])
        for parameter, value in zip(amp.master_params(self.optimizer), file["masters"], strict=True):
            parameter.data.copy_(value)
        amp.load_state_dict(file["amp"])

    def scale(self):
        return amp.state_dict()


def keep_form(state):
    return state


def by_parameter(state):
    """Returns the form that has the step of FusedAdam, and the norm of FusedNovoGrad, by parameter."""
    (group,), entries = state["param_groups"], state["state"].values()
    norms = iter(torch.cat(group.pop("exp_avg_sq", [torch.empty(0)])))
    step = None if "grad_averaging" in group else group.pop("step", None)
    for entry in entries:
        entry |= {} if step is None else {"step": torch.tensor(float(step))}
        entry |= {} if "exp_avg_sq" in entry or "exp_avg" not in entry else {"exp_avg_sq": next(norms)}
    return state


def of_fp16_utils(state):
    """Returns the form of apex.fp16_utils, whose scaler is an object."""
    return state | {"loss_scaler": SimpleNamespace(**state["loss_scaler"])}


def of_contrib(state):
    """Returns the form of apex.contrib.optimizers."""
    masters = state.pop("fp32_from_fp16")
    return state | state["loss_scaler"] | {"fp32_groups": masters}


def make_larc(parameters):
    return LARC(torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1))


DYNAMIC, STATIC = {"dynamic_loss_scale": True}, {"static_loss_scale": 128.0}
CHECKPOINTS = {
    **{
        f"{kind}-float32-by_parameter": (PlainRun, (make, FLOAT32), by_parameter)
        for kind, make in MAKERS.items()
    },
    **{f"{kind}-bfloat16": (PlainRun, (make, torch.bfloat16), keep_form) for kind, make in MAKERS.items()},
    "fp16_optimizer-dynamic": (Fp16Run, (DYNAMIC,), keep_form),
    "fp16_optimizer-dynamic-of_fp16_utils": (Fp16Run, (DYNAMIC,), of_fp16_utils),
    "fp16_optimizer-dynamic-of_contrib": (Fp16Run, (DYNAMIC,), of_contrib),
    "fp16_optimizer-static": (Fp16Run, (STATIC,), keep_form),
    "fp16_optimizer-static-of_contrib": (Fp16Run, (STATIC,), of_contrib),
    "amp-O0-adam": (AmpRun, ("O0", torch.optim.Adam), keep_form),
    "amp-O1-sgd": (AmpRun, ("O1", None), keep_form),
    "amp-O2-fused_adam": (AmpRun, ("O2", lambda p: FusedAdam(p, weight_decay=0.01)), keep_form),
    "amp-O3-larc": (AmpRun, ("O3", make_larc), keep_form),
}


@pytest.mark.parametrize(("run_type", "arguments", "form"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_restores_a_run_exactly(amp_off, run_type, arguments, form):
    """Under a wrapper the first run overflows before its checkpoint, and both runs overflow after it."""
    run = run_type(*arguments)
    for seed in range(3):
        run.step(seed, infinite=seed == 1)
    file = io.BytesIO()
    torch.save(run.checkpoint(), file)
    scale_of_file = run.scale()
    for seed in range(3, 6):
        run.step(seed, infinite=seed == 4)
    expected, expected_scale = copy.deepcopy(run.checkpoint()), run.scale()
    del expected["optimizer"]  # Steps of equal bits show that its state is equal.
    assert arguments == (STATIC,) or run_type is PlainRun or expected_scale != scale_of_file

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    run = run_type(*arguments)
    run.restore(saved | {"optimizer": form(saved["optimizer"])})
    assert run.scale() == scale_of_file
    for seed in range(3, 6):
        run.step(seed, infinite=seed == 4)
    assert run.scale() == expected_scale
    actual = {name: value for name, value in run.checkpoint().items() if name in expected}
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_flat_masters_of_older_files_are_refused():
    with pytest.raises(RuntimeError, match="or 'fp32_groups', got .*fp32_groups_flat"):
        FP16_Optimizer(make_adam_of_bert(make_mlp())).load_state_dict({"fp32_groups_flat": []})


LAMB_OPTIONS = "lr bias_correction betas eps weight_decay grad_averaging max_grad_norm step"
NAMES_OF_APEX = (  # in release 25.05: optimizer, names in its groups and in the state of a parameter
    (FusedAdam, "lr bias_correction betas eps weight_decay step", "exp_avg exp_avg_sq"),
    (FusedLAMB, LAMB_OPTIONS, "exp_avg exp_avg_sq"),
    (FusedMixedPrecisionLamb, LAMB_OPTIONS, "exp_avg exp_avg_sq"),
    (FusedNovoGrad, f"{LAMB_OPTIONS} norm_type init_zero exp_avg_sq", "exp_avg"),
    (FusedSGD, "lr momentum dampening weight_decay nesterov", "momentum_buffer"),
)


def test_names_in_files_are_those_of_apex():
    for kind, names_of_group, names_of_parameter in NAMES_OF_APEX:
        for options in {FusedAdam: ({}, {"capturable": True}), FusedSGD: ({"momentum": 0.9},)}.get(
            kind, ({},)
        ):
            parameters = make_parameters()
            optimizer = kind(parameters, 0.1, **options)
            take_steps(optimizer, parameters, 1)
            state = optimizer.state_dict()
            names = state["param_groups"][0].keys() - {"max_grad_norm", "params"}
            assert names == {*names_of_group.split()} - {"max_grad_norm"}
            assert all(entry.keys() == {*names_of_parameter.split()} for entry in state["state"].values())


def test_norms_of_novograd_are_in_the_group():
    """Half parameters come before float32 ones, as apex's kernels take them; also after a parameter begins
    late, and in a file that comes back.
    """
    dtypes = [FLOAT32, FLOAT16, FLOAT32]
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    optimizer = FusedNovoGrad(parameters, 0.1)
    for parameter, size in zip(parameters[1:], (2.0, 3.0), strict=True):
        parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    half, single = optimizer.param_groups[0]["exp_avg_sq"]
    assert half.tolist() == [4.0] and single.tolist() == [6.0]
    parameters[0].grad = torch.full_like(parameters[0], 5.0)
    optimizer.step()
    half, single = optimizer.param_groups[0]["exp_avg_sq"]
    assert half.tolist() == [4.0] and single.tolist() == pytest.approx([10.0, 6.0])
    optimizer.param_groups[0]["exp_avg_sq"][1][0] = 1e9  # what a script writes counts
    before = parameters[0].detach().clone()
    for parameter in parameters:
        parameter.grad.zero_()
    optimizer.step()
    assert (parameters[0] - before).abs().max() < 1e-6


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_files_of_capturable_steps_load_in_others(saved, loads):
    parameters = make_parameters()
    optimizer = FusedAdam(parameters, 0.1, capturable=saved)
    take_steps(optimizer, parameters, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    again = FusedAdam(copies, 0.5, capturable=loads)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.is_tensor(again.param_groups[0]["step"]) == loads
    take_steps(again, copies, 2, first=3)
    assert_all_close(copies, adam_by_formula(range(1, 6)))


def test_momentum_that_is_none_in_files_of_torch_starts_anew():
    """torch.optim.SGD saves None if there is no momentum yet."""
    parameters = make_parameters()
    reference, optimizer = torch.optim.SGD(parameters, 0.1), FusedSGD(parameters, 0.1, 0.9)
    take_steps(reference, parameters, 1)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(reference.state_dict() | {"param_groups": groups})
    start = [p.detach().clone() for p in parameters]
    set_gradients(parameters, 1)
    optimizer.step()
    assert_all_close(parameters, [p - 0.1 * q.grad for p, q in zip(start, parameters, strict=True)])


def test_hooks_of_loading_see_the_state():
    (parameter,) = parameters = [nn.Parameter(torch.ones(3))]
    optimizer, buffers = FusedSGD(parameters, 0.1, 0.9), []
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())

    def double_momentum(optimizer, state):
        return state | {"state": {0: {"momentum_buffer": 2 * state["state"][0]["momentum_buffer"]}}}

    optimizer.register_load_state_dict_pre_hook(double_momentum)
    optimizer.register_load_state_dict_post_hook(
        lambda o: buffers.append(o.state[parameter]["momentum_buffer"])
    )
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((3,), 2.0))
    assert buffers[0] is optimizer.state[parameter]["momentum_buffer"]
