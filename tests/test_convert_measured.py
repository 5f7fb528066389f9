"""The report's bytes against measurements, and the call of the example inputs."""

import copy
import logging
import warnings

import pytest
import torch
from convert_models import Plain, conv, images, modes, spread, trained
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from fastvit.memory import live_bytes


def kept(model, *args, **kwargs):
    model(*args, **kwargs)
    return live_bytes(lambda: model(*args, **kwargs))[0]


def stack(*acts):
    return nn.Sequential(*(m for act in acts for m in (conv(), nn.BatchNorm2d(8), act())))


class Optional(nn.Module):
    """All arguments have defaults, as in Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.net = stack(nn.SiLU, nn.GELU, nn.SiLU)

    def forward(self, pixel_values=None, mask=None, scale=1.0, *, double=False):
        x = pixel_values
        for layer in self.net:
            x = layer(x)
        if mask is not None:
            x = x * mask
        return {"logits": (x + x if double else x) * scale}


SPELLED = {
    "positional": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"pixel_values": x}),
    "defaults given": lambda x: ((x, None), {"scale": 1.0, "double": False}),
}


@pytest.mark.parametrize("given", ["positional", "keyword"])
@pytest.mark.parametrize("called", SPELLED)
def test_an_argument_with_a_default_is_what_the_example_gives(given, called):
    x, model = images(size=32), Optional()
    args, kwargs = SPELLED[given](x)
    other, report = fastvit.convert(copy.deepcopy(model), example_inputs=kwargs or args)
    args, kwargs = SPELLED[called](x)
    saved = kept(model, *args, **kwargs) - kept(other, *args, **kwargs)
    assert saved > 4 * x.nbytes and report.saved_bytes == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("changed", [{"mask": torch.ones(1)}, {"scale": 2.0}, {"double": True}])
def test_another_call_than_the_example_is_plain(changed):
    x, model = images(), Optional()
    other, _ = fastvit.convert(copy.deepcopy(model), example_inputs=x)
    assert torch.equal(other(x, **changed)["logits"], model(x, **changed)["logits"])
    assert not any(layer._ran for layer in other.modules() if isinstance(layer, fastvit.BatchNormAct))
    with pytest.raises(TypeError):
        other(None)


@pytest.mark.parametrize("example", [{"mask": True}, {"scale": 2.0}, {"double": True}])
def test_the_call_that_is_given_is_the_one_that_is_converted(example):
    x, model = images(size=32), Optional()
    given = {name: torch.ones(1) if name == "mask" else value for name, value in example.items()}
    other, report = fastvit.convert(copy.deepcopy(model), example_inputs={"pixel_values": x, **given})
    saved = kept(model, x, **given) - kept(other, x, **given)
    assert saved > 4 * x.nbytes and report.saved_bytes == pytest.approx(saved, rel=0.02)
    assert kept(other, x) > kept(other, x, **given)  # without it is another call


class Blocks(nn.Module):
    """A forward that cannot be traced calls blocks with arguments other than their defaults."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(2))

    def forward(self, x, returns=None):
        if not bool(x.mean() > 1e9):
            for block in self.blocks:
                x = block(pixel_values=x, scale=0.5, double=returns is None)["logits"]
        return x


def test_blocks_are_traced_as_they_are_called():
    x, model = images(size=32), Blocks()
    other, report = fastvit.convert(copy.deepcopy(model), example_inputs=x)
    saved = kept(model, x) - kept(other, x)
    assert saved > 8 * x.nbytes and report.saved_bytes == pytest.approx(saved, rel=0.02)


class CalledTwice(Blocks):
    def forward(self, x):
        if not bool(x.mean() > 1e9):
            for scale in (0.5, 0.25):
                x = self.blocks[0](x, scale=scale)["logits"]
        return x


def test_layers_that_do_not_run_as_converted_save_nothing():
    x, model = images(size=32), CalledTwice()
    other, report = fastvit.convert(copy.deepcopy(model), example_inputs=x)
    saved = kept(model, x) - kept(other, x)
    assert report.saved_bytes == pytest.approx(saved, rel=0.02)
    absent = report["blocks.1.net.1"]  # no forward reaches it
    assert absent.mode == "recompute" and "with the example inputs it runs as the original" in absent.reason
    assert not absent.saved_bytes


def test_layers_that_need_no_activation_module_count():
    class WithFunctions(Plain):
        def forward(self, x):
            return self.head(nn.functional.gelu(self.bn1(self.conv1(x))))

    x = images(size=32)
    _, report = fastvit.convert(WithFunctions(), "recompute", x)
    assert report["bn1"].saved_bytes == x.nbytes and report["bn1"].reason == "its output is saved by gelu"
    assert report.saved_bytes == pytest.approx(2 * x.nbytes, rel=0.02)  # gelu's too, as the graph tells


MEASURED = {
    "relu6 in place": lambda: stack(lambda: nn.ReLU6(True), lambda: nn.ReLU6(True), nn.ReLU6),
    "pooled": lambda: nn.Sequential(stack(nn.SiLU, nn.GELU), nn.MaxPool2d(2), stack(nn.ReLU)),
    "dropout": lambda: nn.Sequential(stack(nn.SiLU), nn.Dropout(0.5), stack(nn.ReLU)),
    "frozen": lambda: stack(nn.SiLU, nn.GELU).requires_grad_(False),
    "half frozen": lambda: nn.Sequential(stack(nn.SiLU, nn.GELU).requires_grad_(False), stack(nn.SiLU)),
    "residual": Plain,
    "in place": lambda: stack(nn.LeakyReLU, nn.ELU, nn.LeakyReLU),
    "nothing to convert": lambda: nn.Sequential(conv(), nn.SiLU()),
}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("mode", ["training", "evaluation", "no_grad", "inference"])
def test_what_is_said_is_what_a_step_saves(name, mode):
    x, model = images(size=48), spread(MEASURED[name]())
    other = copy.deepcopy(model).train(mode != "evaluation")
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        _, report = fastvit.convert(other, example_inputs=x)
    torch.manual_seed(0)
    saved = kept(model, x) - kept(other.train(), x)
    assert abs(report.saved_bytes - saved) < max(0.1 * saved, 4096), report
    assert report.estimated == "" and "(measured)" in report.summary()


def test_while_somebody_profiles():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        _, report = fastvit.convert(Plain(), example_inputs=images())
    assert report.measured_bytes > 0


class WantsTargets(Plain):
    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets expected in training")
        return super().forward(x)


class RunsBackward(Plain):
    def forward(self, x):
        x = super().forward(x)
        if self.training:
            torch.autograd.grad(x.sum(), self.head.weight)
        return x


@pytest.mark.parametrize("kind", [WantsTargets, RunsBackward])
def test_what_cannot_be_measured_is_said_to_be_an_estimate(kind):
    _, report = fastvit.convert(kind(), example_inputs=images())
    assert report.measured_bytes is None and report.saved_bytes == sum(row.saved_bytes for row in report) > 0
    assert "(estimated: a training forward raised" in str(report)


def test_a_wrapper_is_not_run_in_training(tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Plain())
        _, report = fastvit.convert(model, example_inputs=images())
        assert "estimated: the forward of a DistributedDataParallel cannot be run without" in report.summary()
        for _ in range(2):
            trained(model, images())
    finally:
        distributed.destroy_process_group()


def test_a_converted_model_that_fails_is_the_original_again():
    class Reads(nn.Module):
        """Overwrites a tensor with which its layer is fused, by an op that no trace shows."""

        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act, self.head = conv(), nn.BatchNorm2d(8), nn.SiLU(), conv()

        def forward(self, x):
            return self.head(self.act(self.bn(self.conv(x))))

    model = Reads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastvit.BatchNormAct, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fastvit.convert(model, example_inputs=images())
    assert type(model.bn) is nn.BatchNorm2d and type(model) is Reads


# --- the meta device


@pytest.mark.parametrize("example", [None, "meta", "cpu"])
@pytest.mark.parametrize("memory", ["auto", "inplace", "recompute"])
def test_a_model_on_the_meta_device(memory, example):
    with torch.device("meta"):
        model = stack(nn.LeakyReLU, nn.SiLU, nn.GELU)
    x = images()
    _, report = fastvit.convert(model, memory, None if example is None else x.to(example))
    expected = "left" if memory == "inplace" else "recompute"
    assert set(modes(report).values()) == {expected}, str(report)
    assert report["1"].reason.endswith("on the meta device, so its size is unknown") or (
        memory == "recompute"
    )
    if example:
        assert "estimated: the model is on the meta device" in report.summary()
        assert (report.saved_bytes > 0) == (memory != "inplace")
    original = spread(stack(nn.LeakyReLU, nn.SiLU, nn.GELU))
    model.to_empty(device="cpu").load_state_dict(original.state_dict())
    for got, want in zip(trained(model, x), trained(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


# --- torch.export


class BranchesOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = Plain(), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.last(self.net(x))
        print("printed by the model")
        logging.getLogger("my.model").warning("logged by the model")
        warnings.warn("warned by the model", stacklevel=1)
        if x.sum() > 0:
            x = x + 1
        return x


def test_the_exporter_is_quiet_and_the_model_is_not(capfd, caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fastvit.convert(BranchesOnValues(), example_inputs=images())
    shown = capfd.readouterr()
    assert shown.err.count("\n") == shown.err.count("logged by the model")
    assert set(shown.out.splitlines()) == {"printed by the model"}
    assert {str(warning.message) for warning in caught} == {"warned by the model"}
    # two runs, two traces, two exports, in each of which the forward gets that far
    assert len(caught) >= 6 and len(caplog.records) == len(caught)
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(BranchesOnValues(), (images(),), strict=False)
    assert "def forward" in capfd.readouterr().err  # of others it is shown again
