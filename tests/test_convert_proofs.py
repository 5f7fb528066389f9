"""Limits of a trace: other modes, calls and modules, checkpoints, tensors stored in attributes."""

import copy
import dataclasses

import pytest
import torch
from convert_models import assert_same, conv, images, modes, spread, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit


class Block(nn.Module):
    """conv -> bn -> act -> out; `read` is a part of the forward that reads y, bn's output."""

    def __init__(self, act=nn.SiLU):
        super().__init__()
        self.conv, self.bn, self.act, self.out = conv(), nn.BatchNorm2d(8), act(), conv()

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.out(self.act(y))


def converted(kind, *arguments, **options):
    """A model in float64, its converted copy and the report."""
    model = spread(kind(*arguments)).double()
    return model, *fastvit.convert(copy.deepcopy(model), **options)


def double_images(**sizes):
    return images(**sizes).double()


# --- modes


class OnlyTracedInEvaluation(Block):
    """y is read only in training, where a branch on a value ends the trace."""

    def forward(self, x):
        y = self.bn(self.conv(x))
        z = self.out(self.act(y))
        if self.training and y.sum().item() < 1e9:
            z = z + y
        return z


class OnlyExportedInEvaluation(OnlyTracedInEvaluation):
    """The branch on a shape leaves it to torch.export, which ends in training as well."""

    def forward(self, x):
        return super().forward(x) if x.shape[2] > 3 else x


@pytest.mark.parametrize("kind", [OnlyTracedInEvaluation, OnlyExportedInEvaluation])
def test_a_layer_that_is_proven_in_one_mode_is_converted_in_that_alone(kind):
    x = double_images()
    model, other, report = converted(kind, example_inputs=x)
    assert modes(report) == {"bn": "recompute"}
    assert_same(trained(other, x), trained(model, x))
    assert_same(trained(other.eval(), x), trained(model.eval(), x))
    assert other(x).grad_fn is not None


# --- modules


class LookAlike(nn.BatchNorm2d):
    """timm's BatchNormAct2d by its name, module and children: the activation is inside, without a trace."""

    def __init__(self):
        super().__init__(8)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


LookAlike.__name__, LookAlike.__module__ = "BatchNormAct2d", "timm.layers.norm_act"


def norm_with_children():
    return nn.Sequential(conv(), LookAlike(), conv())


@pytest.mark.parametrize("child", ["drop", "act"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_the_children_of_a_layer_are_called(child, when):
    seen, x = [], double_images()
    model = spread(norm_with_children()).double()
    other = copy.deepcopy(model)
    if when == "after":
        _, report = fastvit.convert(other)
        assert modes(report) == {"1": "recompute"} and isinstance(other[1], fastvit.BatchNormAct)
    handle = getattr(other[1], child).register_forward_hook(lambda *_: seen.append(1))
    if when == "before":
        fastvit.convert(other)
    assert_same(trained(other, x), trained(model, x))
    assert seen == [1]
    handle.remove()
    assert_same(trained(other, x), trained(model, x))


@pytest.mark.parametrize("child,by", [("act", nn.Tanh), ("drop", nn.Tanh)])
def test_children_of_a_layer_that_are_replaced(child, by):
    model, other, _ = converted(norm_with_children)
    for changed in (model, other):
        setattr(changed[1], child, by())
    x = double_images()
    assert_same(trained(other, x), trained(model, x))


def test_a_layer_that_is_the_whole_model():
    x = images().double()
    model = spread(LookAlike()).double()
    other, report = fastvit.convert(copy.deepcopy(model))
    assert modes(report) == {"": "recompute"} and isinstance(other, fastvit.BatchNormAct)
    assert_same(trained(copy.deepcopy(other), x), trained(copy.deepcopy(model), x))
    fastvit.revert(other)
    assert type(other) is LookAlike and other.__dict__.keys() == model.__dict__.keys()


class InStages(Block):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(self.conv, self.bn)

    def forward(self, x):
        return self.out(self.act(self.stem(x)))


def test_a_module_that_is_appended():
    """A module between the layer and its activation, which would activate the wrong tensor."""
    model, other, report = converted(InStages)
    assert report["bn"].mode == "recompute"
    extra = conv().double()
    for changed in (model, other):
        changed.stem.append(copy.deepcopy(extra))
    x = double_images()
    assert_same(trained(other, x), trained(model, x))


def test_a_forward_that_was_patched_between_two_conversions():
    class Patched(Block):
        pass

    fastvit.convert(Patched())  # makes the class of converted ones
    Patched.forward = lambda self, x: 100 * self.out(self.act(self.bn(self.conv(x))))
    x = double_images()
    model, other, _ = converted(Patched)
    assert_same(trained(other, x), trained(model, x))


# --- calls


class ByShape(Block):
    """Only torch.export follows the branch, and its graph holds for the example only."""

    def forward(self, x, simple=False):
        y = self.bn(self.conv(x))
        z = self.out(self.act(y))
        return z + y if x.shape[-1] > 8 or not simple else z


class ByShapeAlone(ByShape):
    def forward(self, x):
        return super().forward(x, True)


@pytest.mark.parametrize(
    "kind,example,size,options",
    [
        (ByShapeAlone, {}, 16, {}),
        (ByShape, {"simple": True}, 6, {"simple": False}),
        (ByShape, {"simple": True}, 6, {}),
    ],
    ids=["another shape", "another value", "the default"],
)
def test_an_export_proves_one_call(kind, example, size, options):
    model, other, report = converted(kind, example_inputs={"x": double_images(), **example})
    assert modes(report) == {"bn": "recompute"}
    x = double_images(size=size)
    torch.testing.assert_close(other(x, **options), model(x, **options))
    x = double_images()
    torch.testing.assert_close(other(x, **example), model(x, **example))


class PositionalOnly(Block):
    def forward(self, x, skip=False, /):
        y = self.bn(self.conv(x))
        z = self.out(self.act(y))
        return z + y if skip else z


class NoneGiven(Block):
    def forward(self, x, other):
        y = self.bn(self.conv(x))
        z = self.out(self.act(y))
        return z + y if other is None else z + other


@pytest.mark.parametrize("kind,given", [(PositionalOnly, True), (NoneGiven, None)])
def test_arguments_by_position_alone_and_none(kind, given):
    model, other, report = converted(kind)
    assert report["bn"].mode == "recompute"
    x = double_images()
    torch.testing.assert_close(other(x, given), model(x, given))


# --- checkpoints


class Checkpointed(nn.Module):
    """The activation is inside of the checkpoint, its BatchNorm outside."""

    def __init__(self, reentrant):
        super().__init__()
        self.conv, self.bn, self.reentrant = conv(), nn.BatchNorm2d(8), reentrant
        self.tail = nn.Sequential(nn.SiLU(), conv())

    def forward(self, x):
        return checkpoint(self.tail, self.bn(self.conv(x)), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_activation_inside_a_checkpoint_and_its_layer_outside(reentrant):
    model, other, report = converted(Checkpointed, reentrant)
    assert report["bn"].mode != "recompute"  # with the activation, which would see what the checkpoint kept
    x = double_images()
    assert_same(trained(other, x), trained(model, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_as_it_ran(reentrant):
    """A call outside of the proof, and before its backward another one inside of it."""
    results = []
    pair = converted(PositionalOnly)[:2]
    x = double_images()
    for model in pair:
        leaf = x.clone().requires_grad_()
        out = checkpoint(model, leaf, True, use_reentrant=reentrant)
        model(x)
        out.square().mean().backward()
        results.append([leaf.grad, *(p.grad for p in model.parameters())])
    assert_same(*reversed(results))


# --- tensors that a forward leaves in a module


class Kept(Block):
    """`where`: in an attribute, one that is there before, or a list that is one."""

    where = "attribute"

    def __init__(self, act=nn.SiLU):
        super().__init__(act)
        self.all = []
        if self.where == "declared attribute":
            self.kept = None

    def keep(self, tensor):
        if self.where == "list":
            self.all.append(tensor)
        else:
            self.kept = tensor

    def last(self):
        return self.all[-1] if self.where == "list" else self.kept


class KeptOutput(Kept):
    def forward(self, x):
        y = self.bn(self.conv(x))
        self.keep(y)
        return self.out(self.act(y))


class KeptInput(Kept):
    """The input of the layer, which in place is overwritten."""

    def forward(self, x):
        y = self.conv(x)
        self.keep(y)
        return self.out(self.act(self.bn(y)))


class KeptInputByShape(KeptInput):
    def forward(self, x):
        return super().forward(x) if x.shape[2] > 3 else x


class KeptOutputByShape(KeptOutput):
    def forward(self, x):
        return super().forward(x) if x.shape[2] > 3 else x


@pytest.mark.parametrize("where", ["attribute", "declared attribute", "list"])
@pytest.mark.parametrize("kind", [KeptOutput, KeptInput, KeptOutputByShape, KeptInputByShape])
def test_a_tensor_that_is_left_in_a_module(kind, where, monkeypatch):
    monkeypatch.setattr(Kept, "where", where)
    x = double_images()
    model, other, report = converted(kind, nn.LeakyReLU, example_inputs=x)
    assert report["bn"].activation == "identity" or "Input" in kind.__name__
    assert report["bn"].mode != "inplace" or "Output" in kind.__name__
    want, got = trained(model, x), trained(other, x)
    assert_same(got, want)
    torch.testing.assert_close(other.last(), model.last())


# --- verify


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class GivesDataclass(Block):
    def forward(self, x):
        return Output(super().forward(x))


def test_verify_looks_into_dataclasses():
    model = spread(GivesDataclass())
    fastvit.convert(model)
    assert fastvit.verify(model, images())
    model.bn.activation = "relu"
    assert "output 0" in str(fastvit.verify(model, images()))


class GivesInfinity(Block):
    def forward(self, x):
        z = super().forward(x)
        wrong = isinstance(self.bn, fastvit.BatchNormAct) and self.bn.activation == "relu"
        return z, torch.full((2,), -torch.inf if wrong else torch.inf)


def test_verify_tells_infinities_apart():
    model = spread(GivesInfinity())
    fastvit.convert(model)
    assert fastvit.verify(model, images())
    model.bn.activation = "relu"
    assert fastvit.verify(model, images()).differences["output 1"] == float("inf")


class GivesNoTensor(Block):
    def forward(self, x):
        self.result = super().forward(x)


def test_verify_needs_tensors_to_compare():
    with pytest.raises(ValueError, match="verify: the model returned no tensor"):
        fastvit.verify(GivesNoTensor(), images())
