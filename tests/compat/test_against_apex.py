"""SyncBatchNorm against NVIDIA apex's, InPlaceABN against mapillary's, and apex's parts in the trainer.

The comparisons need apex 25.05: FASTVIT_APEX=folder of its sources, nothing compiled. The comparisons
with mapillary's InPlaceABN need its sources on PYTHONPATH, with the extension compiled in place.
"""

import itertools
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from on_ranks import EACH_BACKEND, on_ranks
from packages import import_apex_or_skip
from training.runs import COMMON, error_of_run, rows_of, torchrun, train_on_rank, weights_of

import fastvit
import fastvit.compat.apex
from fastvit.training import model, nvidia_apex
from fastvit.training.config import Config

SHAPES = {"images": (6, 5, 4, 3), "rows": (16, 5), "sequences": (4, 5, 7), "volumes": (2, 5, 3, 2, 2)}


def run_three_steps(layer, inputs):
    """Returns outputs, gradients and buffers of two training steps and an evaluation."""
    found = {}
    for step, (x, dy) in enumerate(inputs):
        layer.train(step < 2).zero_grad()
        x = x.clone().requires_grad_()
        y = layer(x * 1)  # in place: not over the leaf
        named = {"y": y.detach().clone(), **dict(layer.named_buffers())}
        if layer.training:
            y.backward(dy)
            named |= {"dx": x.grad, **{f"d{name}": p.grad for name, p in layer.named_parameters()}}
        found |= {f"{name} of step {step}": value.clone() for name, value in named.items()}
    return found


def assert_equal_results(actual, expected, tolerance):
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def apex_parallel():
    """Skips a test without NVIDIA apex."""
    import_apex_or_skip("parallel")


@pytest.mark.packages("inplace_abn")
@pytest.mark.parametrize(
    ("activation", "slope", "shape", "dtype"),
    [
        ("leaky_relu", 0.01, "rows", torch.float64),
        ("elu", 0.7, "sequences", torch.float32),
        ("elu", 0.7, "images", torch.float64),
        ("identity", 0.0, "volumes", torch.float32),
    ],
    ids=str,
)
def test_every_output_and_gradient_is_that_of_mapillary(activation, slope, shape, dtype):
    import inplace_abn

    options = {"activation": activation, "activation_param": slope, "momentum": 0.3}
    theirs, ours = (layer(5, **options).to(dtype) for layer in (inplace_abn.InPlaceABN, fastvit.InPlaceABN))
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2)
        ours.bias.normal_()
        theirs.load_state_dict(ours.state_dict())
        theirs.weight -= theirs.eps  # its gamma is |weight| + eps
    inputs = [torch.randn(2, *SHAPES[shape], dtype=dtype).unbind() for _ in range(3)]
    expected, actual = run_three_steps(theirs, inputs), run_three_steps(ours, inputs)
    # mapillary's slope and eps are float32.
    assert_equal_results(actual, expected, {torch.float32: 2e-5, torch.float64: 1e-7}[dtype])


@on_ranks(2, statistics=EACH_BACKEND)
def test_every_output_and_gradient_is_that_of_apex(rank, world, statistics, apex_parallel):
    dtype = torch.float64 if statistics == "peer" else torch.float32
    not_affine = {"momentum": 0.3, "eps": 1e-3, "affine": False}
    for shape, options in itertools.product(SHAPES.values(), ({}, not_affine)):
        torch.manual_seed(1)
        theirs = nvidia_apex.import_apex("parallel").SyncBatchNorm(5, **options).to(dtype)
        ours = fastvit.SyncBatchNorm(5, **options).to(dtype)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, mean=0.7)
        ours.load_state_dict(theirs.state_dict())
        random = torch.Generator().manual_seed(rank)
        scale = torch.linspace(0.5, 3, 5, dtype=dtype).view(-1, *[1] * (len(shape) - 2))
        pairs = [torch.randn(2, *shape, generator=random, dtype=dtype) for _ in range(3)]
        inputs = [(scale * pair + rank).unbind() for pair in pairs]
        expected, actual = run_three_steps(theirs, inputs), run_three_steps(ours, inputs)
        assert_equal_results(actual, expected, 1e-12 if dtype == torch.float64 else 2e-5)


FAKE = """\
from torch import nn

class SyncBatchNorm(nn.BatchNorm2d):
    pass

def convert_syncbn_model(model):
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.BatchNorm2d):
                setattr(module, name, SyncBatchNorm(layer.num_features))
    return model
"""


@pytest.fixture
def no_apex(monkeypatch):
    """Hides an installed apex, and the import hook of fastvit.compat."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != os.environ.get("FASTVIT_APEX")])
    monkeypatch.delenv("FASTVIT_APEX", raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "fastvit" not in type(f).__module__])
    for name in loaded_modules_of_apex():
        monkeypatch.delitem(sys.modules, name)
    if find_spec("apex"):
        pytest.skip("an apex is installed")
    yield monkeypatch
    for name in loaded_modules_of_apex():
        del sys.modules[name]


def loaded_modules_of_apex() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "apex"]


def test_apex_sync_is_the_layer_of_an_apex_that_has_it(no_apex, tmp_path, capsys):
    arguments = ["--norm", "apex-sync", "--out", str(tmp_path / "run")]
    message = error_of_run(capsys, *arguments)
    assert "--norm apex-sync needs apex.parallel of NVIDIA apex 25.05 or older" in message
    assert "No module named 'apex'" in message
    assert "set the variable FASTVIT_APEX to a folder of its sources" in message
    for files in ({"__init__.py": ""}, {"__init__.py": "", "parallel/__init__.py": FAKE}):
        folder = tmp_path / str(len(files))
        for name, text in files.items():
            (folder / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "apex" / name).write_text(text)
        no_apex.setenv("FASTVIT_APEX", str(folder))
        if len(files) == 1:  # a later release
            assert "No module named 'apex.parallel'" in error_of_run(capsys, *arguments)
        for name in loaded_modules_of_apex():
            del sys.modules[name]
    layers = model.build_model(Config(norm="apex-sync"), (1, 8, 8), 10).modules()
    assert {type(m).__module__ for m in layers if type(m).__name__ == "SyncBatchNorm"} == {"apex.parallel"}
    torch.cuda.nvtx.range_push("marks nothing where torch has no NVTX")
    torch.cuda.nvtx.range_pop()
    for name in loaded_modules_of_apex():
        del sys.modules[name]
    no_apex.setitem(sys.modules, "apex", fastvit.compat.apex)
    no_apex.setitem(sys.modules, "apex.parallel", fastvit.compat.apex.parallel)
    with pytest.raises(ImportError, match="apex.parallel is fastvit.compat.apex.parallel of fastvit"):
        nvidia_apex.import_apex("parallel")


def test_two_ranks_train_with_the_layer_of_apex(ranks, tmp_path, apex_parallel):
    """Results from equal weights and batches agree with fastvit's up to rounding of the statistics."""
    recipe = ["--epochs", "1", "--batch-size", "180", "--warmup-epochs", "0", "--lr", "1e-4"]
    status, out, err = torchrun(tmp_path, *COMMON, *recipe, "--norm", "apex-sync", "--out", "apex")
    assert status == 0, out + err
    assert "Python fallback for SyncBatchNorm" in out and "Traceback" not in err  # apex says so itself
    ranks.run(2, train_on_rank, [*recipe, "--norm", "fastvit-sync", "--out", str(tmp_path / "ours")])
    theirs, ours = weights_of(tmp_path / "apex"), weights_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys() and not all(torch.equal(theirs[n], ours[n]) for n in ours)
    for name, value in theirs.items():
        torch.testing.assert_close(value, ours[name], rtol=1e-3, atol=1e-4)
    rows = [rows_of(tmp_path / name)[0] for name in ("apex", "ours")]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-4)
