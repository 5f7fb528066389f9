"""Wrong arguments and tensors of layers and functions: what is raised, and that nothing is written."""

import functools
import math
import re

import numpy as np
import pytest
import torch

import fastvit
from fastvit import BatchNormAct, BatchNormActSync, InPlaceABN, InPlaceABNSync, SyncBatchNorm, functional
from layers.pairs import BUFFERS, PARAMETERS, each_layer

ONES = torch.ones(2, 3)
NOT_FINITE = (math.nan, math.inf, -math.inf)
in_place = functools.partial(BatchNormAct, 3, memory="inplace")


def assert_raises(error: type[Exception], calls: list) -> None:
    """Raises unless each call, given with the words of its message, raises the error."""
    for call, message in calls:
        with pytest.raises(error, match=message):
            call()


def test_wrong_activations_raise_value_error():
    invertible = "activation is 'relu'; one of identity, leaky_relu, elu expected"
    calls = [
        (lambda: InPlaceABN(3, activation="relu"), f"InPlaceABN: {invertible}"),
        (lambda: in_place(), f"BatchNormAct: {invertible}"),
        (lambda: BatchNormAct(3, activation="tanh"), "Act: activation is 'tanh'; one of identity, relu"),
        (lambda: BatchNormAct(3, activation=["relu"]), r"activation is \['relu'\]; one of identity, relu"),
        (lambda: BatchNormAct(3, activation=None), "activation is None; one of identity, relu"),
        (lambda: functional.act(ONES, "tanh"), "act: activation is 'tanh'"),
    ]
    assert_raises(ValueError, calls)


def test_wrong_parameters_of_activations_raise_value_error():
    elu = {"activation": "elu"}
    no_tensors = [None] * 4
    calls = [
        (lambda: InPlaceABN(3, activation_param=0.0), "slope 0 is relu"),
        (lambda: InPlaceABN(3, activation_param=-0.1), "activation_param is -0.1; a number from 2"),
        (lambda: InPlaceABN(3, activation_param=1e-39), "activation_param is 1e-39; a number from 2"),
        (lambda: InPlaceABN(3, activation_param=math.nan), "activation_param is nan; a number from -2"),
        (lambda: InPlaceABN(3, activation_param=math.inf), "activation_param is inf; a number from -2"),
        (lambda: InPlaceABN(3, activation_param="0.1"), "activation_param is '0.1'; a number from -2"),
        (lambda: InPlaceABN(3, **elu, activation_param=0), r"from 2\*\*-126 to 2\*\*126 expected for elu in"),
        (lambda: BatchNormAct(3, **elu, activation_param="1"), "Act: activation_param is '1'"),
        (lambda: BatchNormAct(3, **elu, activation_param=math.nan), "activation_param is nan; a number"),
        (lambda: functional.inplace_abn(ONES, *no_tensors, activation_param=-0.0), "_param is -0.0; "),
    ]
    assert_raises(ValueError, calls)


def test_wrong_options_raise_value_error():
    make_group, group_size = fastvit.create_syncbn_process_group, "an int of at least 0 expected"
    calls = [
        (lambda: BatchNormAct(3, memory="auto"), "memory is 'auto'; one of recompute, inplace, keep"),
        (lambda: InPlaceABN(0), "InPlaceABN: num_features is 0; a positive int"),
        (lambda: SyncBatchNorm("3"), "SyncBatchNorm: num_features is '3'"),
        (lambda: SyncBatchNorm(True), "SyncBatchNorm: num_features is True; a positive int expected"),
        (lambda: fastvit.LayerNorm(3, output_dtype="float16"), "LayerNorm: output_dtype is 'float16'; a fl"),
        (lambda: fastvit.LayerNorm(3, output_dtype=torch.int), "LayerNorm: output_dtype is torch.int32; a"),
        (lambda: make_group("2"), f"group_size is '2'; {group_size}"),
        (lambda: make_group(-1), f"group_size is -1; {group_size}"),
        (lambda: make_group(True), f"group_size is True; {group_size}"),
    ]
    assert_raises(ValueError, calls)


def test_wrong_inputs_raise_value_error():
    several_values = "Expected more than 1 value per channel"
    calls = [
        (lambda: in_place(activation="elu")(ONES, ONES), "Act: got a residual with memory='inplace'; '"),
        (lambda: InPlaceABN(3)(torch.randn(2, 4, 5)), r"weight has shape \(3,\), .* dimension 1, got 4"),
        (lambda: InPlaceABN(3, channel_last=True)(torch.randn(2, 3, 4)), r"\(3,\), .* dimension 2, got 4"),
        (lambda: BatchNormAct(3)(torch.randn(2, 4)), r"batch_norm_act: weight has shape \(3,\)"),
        (lambda: SyncBatchNorm(3)(torch.randn(3)), "sync_batch_norm: expected an input of 2 to 5 dim.*1D"),
        (lambda: SyncBatchNorm(3)(ONES.long()), "expected a floating-point input, got torch.int64"),
        (lambda: SyncBatchNorm(3)(torch.ones(1, 3)), several_values),
        (lambda: InPlaceABN(3)(torch.ones(1, 3, 1, 1)), several_values),
        (lambda: functional.layer_norm(ONES, (2,)), r"layer_norm: x has shape \(2, 3\); "),
        (lambda: functional.layer_norm(ONES, (3, 3)), r"layer_norm: x has shape \(2, 3\); "),
        (lambda: functional.layer_norm(ONES, ()), r"layer_norm: x has shape \(2, 3\); "),
    ]
    assert_raises(ValueError, calls)


@pytest.mark.parametrize("layer_class", [InPlaceABN, BatchNormAct, SyncBatchNorm, fastvit.LayerNorm])
def test_an_eps_that_is_no_number_of_its_range_is_refused(layer_class):
    for eps in ("1e-5", None, -1e-5, *NOT_FINITE, True):
        message = rf"{layer_class.__name__}: eps is {re.escape(repr(eps))}; a number from 0 to 2\*\*126"
        with pytest.raises(ValueError, match=message):
            layer_class(3, eps=eps)
    for eps in (np.float32(1e-3), 0):
        assert layer_class(3, eps=eps).eps == eps


@pytest.mark.parametrize("layer_class", [InPlaceABN, BatchNormAct, SyncBatchNorm])
def test_a_momentum_that_is_no_number_of_its_range_is_refused(layer_class):
    for momentum in ("0.1", 2.0, -0.1, *NOT_FINITE, True):
        message = f"{layer_class.__name__}: momentum is {momentum!r}; a number from 0 to 1, or None, expected"
        with pytest.raises(ValueError, match=re.escape(message)):
            layer_class(3, 1e-5, momentum)
    for momentum in (None, 0, 1, 0.1):
        assert layer_class(3, momentum=momentum).momentum == momentum


@pytest.mark.parametrize("layer_class", [InPlaceABN, BatchNormAct, SyncBatchNorm, fastvit.LayerNorm])
def test_an_eps_or_momentum_that_became_wrong_is_refused_before_anything_is_written(layer_class):
    for name, value in [("eps", -1.0), ("eps", math.nan), ("momentum", math.inf)]:
        layer, x = layer_class(3), torch.randn(4, 3)
        if name == "momentum" and layer_class is fastvit.LayerNorm:
            continue
        setattr(layer, name, value)
        old_values = [t.clone() for t in (x, *layer.buffers())]
        with pytest.raises((ValueError, RuntimeError), match=rf"\w+: {name} is {value:g}(\.0)?; "):
            layer(x)
        assert all(map(torch.equal, (x, *layer.buffers()), old_values))


@pytest.mark.parametrize("name,value", [("eps", -1.0), ("momentum", math.nan)])
def test_an_eps_or_momentum_that_became_wrong_is_refused_before_ranks_send(name, value, monkeypatch):
    """Else the other ranks would go on, and wait for this one at their next exchange."""
    sent = []
    transport = type("Transport", (), {"compute_moments": lambda _, *arguments: sent.append(arguments)})()
    monkeypatch.setattr(fastvit.sync, "default_group", lambda group: group)
    monkeypatch.setattr(fastvit.sync, "get_transport", lambda *_: transport)
    layer = SyncBatchNorm(3, process_group=object())
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=f"sync_batch_norm: {name} is {value}"):
        layer(torch.randn(4, 3))
    assert not sent


def test_a_wrong_residual_is_refused_before_statistics_are_written():
    layer = SyncBatchNorm(3)
    message = r"residual is \(4, .\), torch.float32, on .*; \(4, 3\), torch.float32, on cpu"
    for residual in (torch.randn(4, 2), torch.randn(4, 3, device="meta")):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(4, 3), residual)
    assert layer.num_batches_tracked == 0 and layer.running_mean.tolist() == [0.0] * 3


def assert_refused(layer, tensor_name: str, error: type[Exception], message: str) -> None:
    """Raises unless a forward in training raises an error and writes neither the input nor the mean."""
    x = torch.randn(4, 3)
    old_x = x.clone()
    with pytest.raises(error, match=message):
        layer(x)
    assert torch.equal(x, old_x)
    if tensor_name == "num_batches_tracked":
        assert layer.running_mean.tolist() == [0.0] * 3
        layer.eval()(x)  # An evaluation does not count.


@each_layer
def test_a_parameter_or_buffer_on_another_device_is_refused(layer_class):
    """load_state_dict(assign=True) of an old file leaves the count of a meta model."""
    for name in (*PARAMETERS, *BUFFERS):
        layer = layer_class(3)
        tensors = layer._parameters if name in PARAMETERS else layer._buffers
        tensors[name] = tensors[name].detach().to("meta")
        message = f"the input is on cpu and {name} on meta; one device expected"
        assert_refused(layer, name, ValueError, message)


@each_layer
def test_a_parameter_or_buffer_whose_storage_was_freed_or_shrunk_is_refused(layer_class):
    """FSDP frees parameters."""
    for name in (*PARAMETERS, *BUFFERS):
        for nbytes in (0, 1):
            layer = layer_class(3)
            getattr(layer, name).untyped_storage().resize_(nbytes)
            message = rf"{name} has shape .*freed or shrunk to {nbytes} bytes"
            assert_refused(layer, name, RuntimeError, message)


def test_arrays_and_numbers_for_tensors_raise_type_error():
    array, strided = "a tensor expected, got an object of type ndarray; torch.from_numpy", ONES[0, ::2]
    batch_norm_act, none = functional.batch_norm_act, [None]
    layers = InPlaceABN(3), BatchNormAct(3), SyncBatchNorm(3), fastvit.LayerNorm(3)
    assert_raises(TypeError, [(functools.partial(layer, np.zeros((2, 3))), array) for layer in layers])
    count = {"momentum": None, "num_batches_tracked": 1}
    calls = [
        (lambda: BatchNormAct(3)(ONES, 1.0), "batch_norm_act: residual: a tensor expected, got an"),
        (lambda: batch_norm_act(ONES, 1.0, *none * 3), "batch_norm_act: weight: a tensor"),
        (lambda: functional.sync_batch_norm(ONES, *none * 3, 1), "sync_batch_norm: running_var: a tensor"),
        (lambda: batch_norm_act(ONES, strided, None, 1, None), "batch_norm_act: running_mean: a tensor"),
        (lambda: functional.inplace_abn(ONES, 1.0, *none * 3, abs_weight=True), "abn: weight: a tensor"),
        (lambda: batch_norm_act(ONES, *none * 4, **count), "batch_norm_act: num_batches_tracked: a tensor"),
        (lambda: functional.act(1.0), "act: a tensor expected"),
        (lambda: functional.gated_act(ONES, 1.0), "gated_act: gate: a tensor expected"),
    ]
    assert_raises(TypeError, calls)
    with pytest.raises(RuntimeError, match="layer_norm_forward.* argument 'weight'"):
        functional.layer_norm(ONES, (3,), 1.0)
    assert InPlaceABN(np.int64(3))(torch.randn(2, 3)).shape == (2, 3)


def test_ranks_for_a_process_group_raise_type_error():
    ranks = r"process_group is \[0, 1\]; a group expected, as torch.distributed.new"
    calls = [
        (lambda: SyncBatchNorm(3, process_group=[0, 1]), f"SyncBatchNorm: {ranks}"),
        (lambda: BatchNormActSync(3, process_group=[0, 1]), f"BatchNormActSync: {ranks}"),
        (lambda: InPlaceABNSync(3, process_group=2), "InPlaceABNSync: process_group is 2; a group expected"),
    ]
    assert_raises(TypeError, calls)
