"""Tests calls by the old names of ops, and graphs and files of layers that were saved with these names."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastvit
from fastvit import ops
from ops.compare import assert_same_bits
from ops.inputs import LayerInputs, clone_with_strides
from ops.matrix import CORE_DTYPES, name_of

FILE = Path(__file__).with_name("saved_layers.pt")
LEAKY = {"activation": "leaky_relu", "activation_param": 0.02}
SILU = {"activation": "silu", "activation_param": 0.0}


def make_old_calls(case):
    """Returns each old op's name, its arguments in order, and what the new op returns and writes."""
    x, dy, gate = case.x, case.dy, case.residual
    parameters, options = {"weight": case.weight, "bias": case.bias}, {"momentum": 0.2, "eps": 1e-3}
    tail = parameters | LEAKY
    moments, new = ops.bn_stats(x), case.copy_buffers()
    y, saved = ops.bn_forward(x, **tail, moments=moments, **new, **options, invertible=True)
    given = {"y": y, "dy": dy, "saved": saved}
    of_output = {"input": y, "dy": dy, "saved": saved, **tail, "from_output": True}
    sums = ops.bn_reduce(**of_output)
    dx, _, local_sums = ops.bn_backward(**of_output)
    from_global, _, none = ops.bn_backward(**of_output, global_sums=sums[0])

    def forward(x):
        end = LEAKY | {"channel_dim": 1, "training": True}
        return {"x": x, "moments": moments, **parameters, **case.copy_buffers(), **options, **end}

    def backward(sums):
        return given | {"sums": sums} | tail | {"channel_dim": 1, "training": True}

    return [
        ("abn_forward", forward(x), [y, saved, *new.values()]),
        ("abn_forward_", forward(clone_with_strides(x)), [saved, y, *new.values()]),
        ("abn_reduce", given | tail | {"channel_dim": 1}, [sums]),
        ("abn_backward", backward(None), [dx, local_sums]),
        ("abn_backward", backward(sums[0]), [from_global, none]),
        ("glu_forward", {"a": x, "b": gate, **SILU}, [ops.act_forward(x, gate, **SILU)]),
        ("glu_backward", {"a": x, "b": gate, "dy": dy, **SILU}, ops.act_backward(x, dy, gate, **SILU)),
    ]


def select_results(name, made, arguments):
    """Returns all that a call has returned, and has written into its arguments."""
    written = ["x"] * name.endswith("_") + ["running_mean", "running_var", "num_batches_tracked"]
    returned = made if isinstance(made, tuple) else (made,)
    return [*returned, *(arguments[argument] for argument in written if argument in arguments)]


CALLS = {
    "by_name": lambda name, arguments: getattr(ops, name)(**arguments),
    "by_place": lambda name, arguments: getattr(ops, name)(*arguments.values()),
    "in_a_graph": lambda name, arguments: getattr(torch.ops.fastvit, name)(*arguments.values()),
}


@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=name_of)
@pytest.mark.parametrize("how", CALLS)
def test_old_names_give_the_bits_of_the_new_ones(how, dtype, device):
    for name, arguments, want in make_old_calls(LayerInputs("nchw", dtype, device)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made = CALLS[how](name, arguments)
        assert_same_bits(select_results(name, made, arguments), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_old_names_raise_the_versions_of_what_they_write(training, device):
    """Running statistics are written in training alone."""
    for name, arguments, _ in make_old_calls(LayerInputs("nchw", torch.float32, device)):
        if not training and name.startswith("abn_forward"):
            arguments |= {"training": False, "moments": None}
        tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
        old_versions = {n: t._version for n, t in tensors.items()}
        getattr(ops, name)(**arguments)
        raised = {n for n, t in tensors.items() if t._version > old_versions[n]}
        running = {"running_mean", "running_var", "num_batches_tracked"} if training else set()
        assert raised == (running & set(arguments)) | ({"x"} if name.endswith("_") else set())


def test_old_names_warn(device):
    for name, arguments, _ in make_old_calls(LayerInputs("nchw", torch.float32, device)):
        with pytest.warns(DeprecationWarning, match=rf"fastvit: the op {name} is \w+ now"):
            getattr(ops, name)(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_names_have_the_defaults_of_the_new_ones(device):
    case = LayerInputs("nchw", torch.float32, device)
    x, dy, gate, leaky = case.x, case.dy, case.residual, {"activation": "leaky_relu"}
    y, saved = ops.bn_forward(x, **leaky, invertible=True)
    given = {**leaky, "from_output": True}
    assert_same_bits(ops.abn_forward(x), (y, saved))
    assert_same_bits([ops.abn_forward_(clone_with_strides(x))], [saved])
    assert_same_bits(ops.abn_reduce(y, dy, saved), ops.bn_reduce(y, dy, saved, **given))
    assert_same_bits(ops.abn_backward(y, dy, saved), ops.bn_backward(y, dy, saved, **given)[::2])
    assert_same_bits([ops.glu_forward(x, gate)], [ops.act_forward(x, gate, "silu")])
    assert_same_bits(ops.glu_backward(x, gate, dy), ops.act_backward(x, dy, gate, "silu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fakes_of_old_names_have_the_shapes_of_results(device):
    """A saved graph is traced by them. The schemas name what the ops write."""
    for name, arguments, want in make_old_calls(LayerInputs("nchw", torch.float32, device)):
        mode = FakeTensorMode()
        with mode:
            fakes = {
                n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()
            }
            made = getattr(torch.ops.fastvit, name)(*fakes.values())
        for a, b in zip(select_results(name, made, fakes), want, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        writes = [a.name for a in getattr(torch.ops.fastvit, name).default._schema.arguments if a.alias_info]
        expected = ["x"] * name.endswith("_") + ["running_mean", "running_var", "num_batches_tracked"]
        assert writes == [argument for argument in expected if argument in arguments]


def make_layers():
    return nn.Sequential(
        fastvit.InPlaceABN(3, activation="elu", activation_param=0.5),
        fastvit.BatchNormAct(3, activation="silu"),
        fastvit.SyncBatchNorm(3, fuse_relu=True),
        fastvit.BatchNormActSync(3, activation="leaky_relu", memory="inplace"),
        fastvit.LayerNorm(4),
    )


def test_layers_of_an_old_file_compute_what_new_ones_do():
    """A pickle names the classes of layers, and has their attributes."""
    old, new = torch.load(FILE, weights_only=False), make_layers()
    new.load_state_dict(old.state_dict())
    assert repr(old) == repr(new) and old[0].num_batches_tracked == 1
    x = torch.randn(8, 3, 4)
    for training in (True, False):
        results = []
        for model in (old.train(training), new.train(training)):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = model(leaf * 1)
            y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()])
        assert_same_bits(*results)
