"""fastvit.convert: BatchNorm, the addition of a residual, and the activation become one layer."""

import copy
import operator

import pytest
import torch
from convert_models import assert_same, conv, images, modes, spread, trained
from torch import nn

import fastvit
from fastvit.conversion import chain, deferred
from fastvit.memory import live_bytes


class Block(nn.Module):
    """act(bn(conv(z)) + z), with z an output that the convolution saves."""

    def __init__(self, act=nn.ReLU, add=operator.add, between=nn.Identity):
        super().__init__()
        self.first, self.conv, self.bn = conv(), conv(), nn.BatchNorm2d(8)
        self.between, self.act, self.out = between(), act(), conv()
        self.add = add

    def forward(self, x):
        z = self.first(x)
        return self.out(self.act(self.between(self.add(self.bn(self.conv(z)), z))))


def plus_in_place(y, z):
    y += z
    return y


ADDITIONS = {
    "y + z": operator.add,
    "z + y": lambda y, z: z + y,
    "y += z": plus_in_place,
    "torch.add(y, z)": torch.add,
    "torch.add(z, y)": lambda y, z: torch.add(z, y),
    "y.add(z)": torch.Tensor.add,
    "y.add_(z)": lambda y, z: y.add_(z),
}


def converted(make, memory="auto", **options):
    """A model in float64, its converted copy and the report."""
    model = spread(make()).double()
    return model, *fastvit.convert(copy.deepcopy(model), memory, **options)


def double_images(**sizes):
    return images(**sizes).double()


@pytest.mark.parametrize("add", ADDITIONS)
def test_every_way_to_add(add):
    x = double_images()
    model, other, report = converted(lambda: Block(add=ADDITIONS[add]), example_inputs=x)
    assert modes(report) == {"bn": "recompute"} and report["bn"].activation == "relu"
    assert report["bn"].reason == "its output and a residual go to act alone"
    for training in (True, False):
        assert_same(trained(other.train(training), x), trained(model.train(training), x))
    assert_same([b.double() for b in other.buffers()], [b.double() for b in model.buffers()])


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU, lambda: nn.ReLU(inplace=True)])
def test_the_bits_of_keep(act):
    steps = []
    for memory in ("keep", "recompute"):
        torch.manual_seed(0)
        model = spread(Block(act))
        _, report = fastvit.convert(model, memory)
        assert modes(report) == {"bn": memory}
        steps.append(trained(model, images()))
        assert fastvit.verify(model, images())
    assert all(map(torch.equal, *steps))


@pytest.mark.parametrize("act,tensors", [(nn.ReLU, 1), (nn.GELU, 2)])
def test_saved_bytes_are_what_the_report_says(act, tensors):
    model, x = spread(Block(act)), torch.randn(4, 8, 64, 64)
    other, report = fastvit.convert(copy.deepcopy(model), example_inputs=x)
    assert sum(layer.saved_bytes for layer in report) == tensors * x.nbytes
    kept = []
    for m in (model, other):
        m(x)
        kept.append(live_bytes(lambda m=m: m(x))[0])
    assert abs(kept[0] - kept[1] - report.saved_bytes) < x.nbytes / 20


class ByShape(Block):
    """Control flow that depends on shapes, which only torch.export follows."""

    def forward(self, x):
        return super().forward(x) if x.shape[-1] > 3 else x


@pytest.mark.parametrize("add", ADDITIONS)
def test_residuals_that_only_an_export_reaches(add):
    x = double_images()
    model, other, report = converted(lambda: ByShape(add=ADDITIONS[add]), example_inputs=x)
    assert modes(report) == {"bn": "recompute"} and report["bn"].activation == "relu", str(report)
    assert_same(trained(other, x), trained(model, x))


class Stack(nn.Module):
    """Each block's residual is the output of the one before: every second one can be rebuilt."""

    def __init__(self):
        super().__init__()
        self.first = conv()
        self.convs = nn.ModuleList(conv() for _ in range(4))
        self.bns = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.act, self.out = nn.ReLU(), conv()

    def forward(self, x):
        x = self.first(x)
        for convolution, bn in zip(self.convs, self.bns, strict=True):
            x = self.act(bn(convolution(x)) + x)
        return self.out(x)


def test_nothing_is_rebuilt_from_what_is_rebuilt():
    x = double_images()
    model, other, report = converted(Stack, example_inputs=x)
    assert list(modes(report).values()) == ["recompute", "left", "recompute", "left"]
    assert "is rebuilt too" in report["bns.1"].reason
    assert_same(trained(other, x), trained(model, x))


def test_in_place_is_not_for_residuals():
    _, _, report = converted(lambda: Block(nn.LeakyReLU), "inplace")
    assert modes(report) == {"bn": "left"} and "cannot be done in place" in report["bn"].reason


# --- reasons against fusion


class RunsBetween(Block):
    def forward(self, x):
        z = self.first(x)
        y = self.bn(self.conv(z))
        z = self.out(z)
        return self.act(y + z)


class OverwritesInput(Block):
    def forward(self, x):
        z = self.first(x)
        u = self.conv(z)
        y = self.bn(u)
        u.mul_(2)
        return self.out(self.act(y + z))


class OverwritesResidual(Block):
    def forward(self, x):
        z = self.first(x)
        s = self.bn(self.conv(z)) + z
        z.mul_(2)
        return self.out(self.act(s))


class OverwritesResidualLater(Block):
    """After the activation, through a view; only a fused layer saves the residual."""

    def __init__(self):
        super().__init__(nn.GELU)

    def forward(self, x):
        z = self.first(x)
        y = self.act(self.bn(self.conv(x)) + z)
        z[:, :1].mul_(2)
        return self.out(y)


class AddsToResidual(Block):
    def forward(self, x):
        z = self.first(x)
        y = self.bn(self.conv(z))
        z += y
        return self.out(self.act(z))


class ReadsSum(Block):
    def forward(self, x):
        z = self.first(x)
        s = self.bn(self.conv(z)) + z
        return self.out(self.act(s)) + s


class ReadsOutput(Block):
    def forward(self, x):
        z = self.first(x)
        y = self.bn(self.conv(z))
        return self.out(self.act(y + z)) + y


class AddsView(Block):
    def forward(self, x):
        z = self.first(x)[:, :, :, :]
        return self.out(self.act(self.bn(self.conv(z)) + z))


class ViewsOutput(Block):
    def forward(self, x):
        z = self.first(x)
        return self.out(self.act(self.bn(self.conv(z)).view(z.shape) + z))


class ViewsSum(Block):
    def forward(self, x):
        z = self.first(x)
        return self.out(self.act((self.bn(self.conv(z)) + z).view(z.shape)))


class AddsCallers(Block):
    def forward(self, x):
        return self.out(self.act(self.bn(self.conv(x)) + x))


class AddsTwice(Block):
    def forward(self, x):
        z = self.first(x)
        return self.out(self.act(self.bn(self.conv(z)) + z + z))


class AddsScaled(Block):
    def forward(self, x):
        z = self.first(x)
        return self.out(self.act(torch.add(self.bn(self.conv(z)), z, alpha=2)))


class AddsNumber(Block):
    def forward(self, x):
        return self.out(self.act(self.bn(self.conv(x)) + 1))


class AddsItself(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.out(self.act(y + y))


class KeepsForItself(Block):
    """relu saves only its result, so the residual would be kept in its place."""

    def forward(self, x):
        z = self.first(x)
        return self.out(self.act(self.bn(self.conv(x)) + z))


AGAINST = {
    RunsBetween: "out (Conv2d) runs in between",
    OverwritesInput: "mul runs in between",
    OverwritesResidual: "mul runs in between",
    OverwritesResidualLater: "mul overwrites the residual",
    AddsToResidual: "read by iadd",
    ReadsSum: "no activation module follows",
    ReadsOutput: "read by add",
    AddsView: "the residual comes from getitem, which may return a view",
    ViewsOutput: "there is a view in between",
    ViewsSum: "there is a view in between",
    AddsCallers: "the residual belongs to the caller",
    AddsTwice: "no activation module follows",
    AddsScaled: "read by add",
    AddsNumber: "read by add",
    AddsItself: "read by add",
    KeepsForItself: "no other op saves: no memory is freed",
}


@pytest.mark.parametrize("kind", AGAINST)
def test_not_added_where_that_is_not_proven(kind):
    x = double_images()
    model, other, report = converted(kind, example_inputs=x)
    assert modes(report) == {"bn": "left"} and AGAINST[kind] in report["bn"].reason, str(report)
    torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize("kind", [RunsBetween, AddsView, AddsCallers])
def test_without_the_proof_the_result_is_still_right(kind, monkeypatch):
    monkeypatch.setattr(chain, "against_adding", lambda *_: None)
    x = double_images()
    model, other, report = converted(kind, "keep")
    assert modes(report) == {"bn": "keep"}
    assert_same(trained(other, x), trained(model, x))


@pytest.mark.parametrize(
    "kind,message",
    [
        (OverwritesInput, "an input of it was overwritten"),
        (OverwritesResidual, "an input of it was overwritten"),
        (OverwritesResidualLater, "modified by an inplace operation"),
    ],
)
def test_without_the_proof_an_overwritten_tensor_is_an_error(kind, message, monkeypatch):
    monkeypatch.setattr(chain, "against_adding", lambda *_: None)
    x = double_images()
    _, other, report = converted(kind, "keep")
    assert modes(report) == {"bn": "keep"}
    with pytest.raises(RuntimeError, match=message):
        other(x).sum().backward()


# --- what a trace does not show: values, modes, hooks, attributes


class Broadcasts(Block):
    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool2d(6)

    def forward(self, x):
        z = self.pool(self.first(x))
        return self.out(self.act(self.bn(self.conv(x)) + z)) + self.out(z)


def test_a_residual_that_is_broadcast():
    x = double_images()
    model, other, report = converted(Broadcasts)
    assert modes(report) == {"bn": "recompute"}
    assert_same(trained(other, x), trained(model, x))


@pytest.mark.parametrize(
    "change", [torch.Tensor.float, lambda z: z.to(memory_format=torch.channels_last)], ids=["dtype", "format"]
)
def test_a_residual_of_another_dtype_or_memory_format(change):
    x = double_images()
    model, other, report = converted(lambda: Block(add=ADDITIONS["z + y"]))
    assert modes(report) == {"bn": "recompute"}
    results = []
    for m in (model, other):
        # inside of the modules, where neither a trace nor a hook sees it
        first, second = m.first._conv_forward, m.conv._conv_forward
        m.first._conv_forward = lambda *given, first=first: change(first(*given))
        m.conv._conv_forward = lambda z, *given, second=second: second(z.double().contiguous(), *given)
        results.append(m(x))
    want, got = results
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


class ReadsSizes(Block):
    def forward(self, x):
        z = self.first(x)
        y = self.bn(self.conv(z))
        n, dimensions = y.size(0), y.dim()
        s = y + z
        return self.out(self.act(s)).view(n, -1) * dimensions / s.dim()


def test_sizes_can_be_read_in_between(monkeypatch):
    x = double_images()
    model, other, report = converted(ReadsSizes)
    assert modes(report) == {"bn": "recompute"}
    monkeypatch.setattr(deferred.Deferred, "computed", lambda _: pytest.fail("computed for its size"))
    assert_same(trained(other, x), trained(model, x))


def test_with_a_default_device():
    """A mode that sees every function before the deferred tensor does."""
    x = double_images()
    model, other, _ = converted(Block)
    with torch.device("cpu"):
        assert_same(trained(other, x), trained(model, x))


class WithoutGradients(Block):
    """Disables gradients around one of the three ops, which a symbolic trace does not record."""

    around = "bn"

    def forward(self, x):
        z = self.first(x)
        u = self.conv(z)
        with torch.set_grad_enabled(self.around != "bn"):
            y = self.bn(u)
        with torch.set_grad_enabled(self.around != "add"):
            s = y + z
        with torch.set_grad_enabled(self.around != "act"):
            a = self.act(s)
        return self.out(a) + self.out(z)


@pytest.mark.parametrize("around", ["bn", "add", "act"])
def test_gradients_that_are_cut_stay_cut(around, monkeypatch):
    monkeypatch.setattr(WithoutGradients, "around", around)
    x = double_images()
    model, other, report = converted(WithoutGradients)
    assert modes(report) == {"bn": "recompute"}
    assert_same(trained(other, x), trained(model, x))


@pytest.mark.parametrize("name", ["bn", "between", "act"])
def test_hooks_see_what_they_saw(name):
    x, seen = double_images(), []
    model, other, report = converted(Block)
    assert modes(report) == {"bn": "recompute"}
    for m in (model, other):
        getattr(m, name).register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
        m(x)
    for want, got in zip(*seen, strict=True):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


READ = {"what": None}


class Switched(Block):
    """A module-level variable, which is neither traced nor watched, changes the forward."""

    def forward(self, x):
        z = self.first(x)
        y = self.bn(self.conv(z))
        if READ["what"] == "function":
            return Doubled.apply(y) + z
        if READ["what"] == "output":
            return y * 2
        s = y + z
        if READ["what"] == "sum":
            return self.out(torch.nn.functional.pad(s, (1, 1)))
        if READ["what"] == "both":
            return self.act(s) + s
        return self.out(self.act(s))


@pytest.mark.parametrize("read", ["output", "sum"])
def test_an_output_that_is_read_after_all_has_its_values(read, monkeypatch):
    x = double_images()
    model, other, report = converted(Switched)
    assert modes(report) == {"bn": "recompute"}
    monkeypatch.setitem(READ, "what", read)
    want, got = model(x), other(x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert other.bn.weight.grad is not None
    assert torch.equal(other.bn.num_batches_tracked, model.bn.num_batches_tracked)


def test_a_sum_that_is_read_once_more_is_an_error(monkeypatch):
    _, other, _ = converted(Switched)
    monkeypatch.setitem(READ, "what", "both")
    with pytest.raises(RuntimeError, match="its output is read again.*convert the model again"):
        other(double_images())


def test_a_function_that_reads_an_output_after_all_loses_no_gradient_in_silence(monkeypatch):
    model, other, _ = converted(Switched)
    monkeypatch.setitem(READ, "what", "function")
    x = double_images()
    out = other(x)
    torch.testing.assert_close(out, model(x))
    with pytest.raises(RuntimeError, match="convert the model again"):
        out.sum().backward()


def test_evaluation_without_gradients():
    x = double_images()
    model, other, _ = converted(Block)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(other.eval()(x), model.eval()(x))
