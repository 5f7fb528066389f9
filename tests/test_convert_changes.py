"""fastvit.convert and models that are patched or reconfigured, before or after it."""

import copy
import pickle
import types
import warnings

import pytest
import torch.nn.functional as F
from convert_models import assert_same, conv, images, modes, spread, trained
from test_convert_life import live_outputs
from test_convert_proofs import OnlyTracedInEvaluation
from torch import nn

import fastvit


class Config:
    """A configuration: an object with plain attributes."""

    def __init__(self):
        self.skip = False


def helper(module, z, y):
    return z + y if getattr(module, "from_helper", False) else z


class Block(nn.Module):
    """conv -> bn -> act -> out, with switches that add another reader of bn's output."""

    of_class = False

    def __init__(self, act=nn.SiLU):
        super().__init__()
        self.conv, self.bn, self.act, self.out = conv(), nn.BatchNorm2d(8), act(), conv()
        self.same = nn.Identity()
        self.flag, self.choices, self.config, self.calls = False, ["none"], Config(), 0

    def more(self, z, y):
        return z

    def forward(self, x):
        self.calls += 1
        self.seen = x.shape
        y = self.same(self.bn(self.conv(x)))
        z = helper(self, self.more(self.out(self.act(y)), y), y)
        if self.flag or self.of_class or "skip" in self.choices or self.config.skip or hasattr(self, "added"):
            z = z + y
        return z


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), conv()

    def forward(self, x):
        return self.head(self.block(x))


def pair(kind=Block, *arguments, **options):
    model = spread(kind(*arguments)).double()
    converted, report = fastvit.convert(copy.deepcopy(model), **options)
    return model, converted, report


X = images().double()


def wrapped(forward, seen):
    def timed(*args):
        out = forward(*args)
        seen.append(out.detach().clone())
        return out

    return timed


# --- before the conversion


@pytest.mark.parametrize("name", ["act", "bn", "same", "conv", "out"])
@pytest.mark.parametrize("act", [nn.SiLU, nn.LeakyReLU, nn.ReLU])
def test_a_forward_on_the_object_is_what_runs(name, act):
    model = spread(Block(act)).double()
    want = trained(copy.deepcopy(model), X)
    seen = []
    module = getattr(model, name)
    module.forward = wrapped(module.forward, seen)
    _, report = fastvit.convert(model, example_inputs=X)
    assert report["bn"].mode == "left" or name != "bn"
    seen.clear()
    assert_same(trained(model, X), want)
    assert len(seen) == 1 and seen[0].shape == X.shape


def test_a_block_whose_forward_was_replaced_is_traced_as_it_runs():
    model = spread(Nested()).double()

    def forward(block, x):
        y = block.bn(block.conv(x))
        return block.out(block.act(y)) + y

    model.block.forward = types.MethodType(forward, model.block)
    plain = copy.deepcopy(model)
    plain.block.forward = types.MethodType(forward, plain.block)
    _, report = fastvit.convert(model, example_inputs=X)
    assert report["block.bn"].activation == "identity"
    assert_same(trained(model, X), trained(plain, X))


def test_a_class_of_torch_that_was_patched(monkeypatch):
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: F.silu(x) * x)
    model, other, report = pair()
    assert report["bn"].activation == "identity"
    assert_same(trained(other, X), trained(model, X))


class Called(nn.BatchNorm2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_layer_that_is_called_in_its_own_way():
    model, other, report = pair(lambda: nn.Sequential(conv(), Called(8), nn.SiLU(), conv()))
    assert modes(report) == {"1": "left"}
    assert_same(trained(other, X), trained(model, X))


# --- afterwards


def another_more(self, z, y):
    return z + 3 * y


def on_the_activation(model, patch):
    model.act.forward = lambda x: 3 * F.silu(x)


def on_the_layer(model, patch):
    forward = model.bn.forward
    model.bn.forward = lambda x: 3 * forward(x)


def on_identity(model, patch):
    model.same.forward = lambda x: 3 * x


def on_a_method(model, patch):
    model.more = types.MethodType(another_more, model)


def on_the_class_of_the_model(model, patch):
    patch.setattr(Block, "forward", lambda self, x: self.out(self.act(z := self.bn(self.conv(x)))) + z)


def on_a_method_of_the_class(model, patch):
    patch.setattr(Block, "more", another_more)


def on_the_class_of_the_activation(model, patch):
    patch.setattr(nn.SiLU, "forward", lambda self, x: 3 * F.silu(x))


def on_the_class_of_the_layer(model, patch):
    patch.setattr(nn.BatchNorm2d, "forward", lambda self, x: 3 * x)


def on_every_call(model, patch):
    call = nn.Module.__call__
    patch.setattr(
        nn.Module, "__call__", lambda self, x: (1 + isinstance(self, nn.BatchNorm2d)) * call(self, x)
    )


def the_slope(model, patch):
    model.act.negative_slope = 0.3


def a_flag(model, patch):
    model.flag = True


def a_flag_of_the_class(model, patch):
    patch.setattr(Block, "of_class", True)


def a_list(model, patch):
    model.choices.append("skip")


def a_configuration(model, patch):
    model.config.skip = True


def an_attribute_that_was_not_there(model, patch):
    model.added = None


def one_that_a_helper_reads(model, patch):
    model.from_helper = True


PATCHES = [
    on_the_activation, on_the_layer, on_identity, on_a_method, on_the_class_of_the_model,
    on_a_method_of_the_class, on_the_class_of_the_activation, on_the_class_of_the_layer, on_every_call,
]  # fmt: skip
CHANGES = [
    the_slope, a_flag, a_flag_of_the_class, a_list, a_configuration, an_attribute_that_was_not_there,
    one_that_a_helper_reads,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:fastvit.convert")
@pytest.mark.parametrize("change", PATCHES + CHANGES)
@pytest.mark.parametrize("memory", ["auto", "recompute"])
def test_what_changes_afterwards_runs_as_it_would_have(memory, change, monkeypatch):
    act = nn.LeakyReLU if change is the_slope else nn.SiLU
    model, other, report = pair(Block, act, memory=memory)
    assert report["bn"].mode != "left" and report["bn"].activation != "identity"
    assert_same(trained(other, X), trained(model, X))
    for changed in (model, other):
        change(changed, monkeypatch if changed is other else types.SimpleNamespace(setattr=lambda *_: None))
    assert_same(trained(other, X), trained(model, X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_flag_that_changes_when_the_model_is_copied(copied, when):
    model, other, _ = pair(Nested)
    if when == "before":
        other.block.flag = True
    other = copied(other)
    other.block.flag = model.block.flag = True
    with pytest.warns(
        UserWarning, match="fastvit.convert: flag of block has changed since Nested was converted"
    ):
        got = trained(other, X)
    assert_same(got, trained(model, X))


def test_a_change_is_told_of_once_and_taken_back():
    model, other, _ = pair(Nested)
    less = live_outputs(other, X)
    other.block.config.skip = True
    with pytest.warns(UserWarning, match=r"skip in config of block has changed.*convert the model again"):
        assert live_outputs(other, X) > less
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(X)
        other.block.config.skip = False
        assert live_outputs(other, X) == less


def test_what_a_forward_changes_itself_and_what_nobody_reads_is_no_change():
    model, other, _ = pair(Nested)
    less = live_outputs(other, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (6, 8, 6):
            other(images(size=size).double())
            other.block.noted, other.head.padding_of_somebody, other.block.bn.eps = size, size, 1e-5
        assert other.block.calls > 2 and live_outputs(other, X) == less
        other.forward = wrapped(other.forward, [])  # around the whole
        assert live_outputs(other, X) == less


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = OnlyTracedInEvaluation(), conv()

    def forward(self, x):
        return self.head(self.block(x))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_block_that_is_proven_in_one_mode_within_a_model_that_is_in_both(outer, inner):
    model, other, report = pair(Outer)
    assert report["block.bn"].mode == "recompute"
    for changed in (model, other):
        changed.train(outer)
        changed.block.train(inner)
    assert_same(trained(other, X), trained(model, X))


# --- errors that a forward catches


class Catches(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        z = self.out(self.act(y))
        try:
            if float(y.detach().sum()) > -1e9:
                z = z + y
        except Exception:
            pass
        return z


class Careful(Block):
    """Errors of hasattr and optional imports do not end a trace."""

    def forward(self, x):
        try:
            scale = self.nothing_of_the_kind
        except AttributeError:
            scale = 1.0
        return self.out(self.act(self.bn(self.conv(x)))) * scale


@pytest.mark.parametrize("example", [None, X])
def test_a_forward_that_catches_what_a_trace_raises_is_not_proven(example):
    model, other, report = pair(Catches, example_inputs=example)
    assert report["bn"].mode == "left" and report.untraced == ["Catches"]
    assert_same(trained(other, X), trained(model, X))
    whole = nn.Sequential(Catches(), nn.BatchNorm2d(8), nn.SiLU(), conv())
    model, other, report = pair(lambda: whole, example_inputs=example)
    assert modes(report) == {"0.bn": "left", "1": "recompute"} and report.untraced == ["0"]
    assert_same(trained(other, X), trained(model, X))
    assert modes(pair(Careful)[2]) == {"bn": "recompute"}
