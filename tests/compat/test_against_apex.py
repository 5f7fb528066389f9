"""SyncBatchNorm against NVIDIA apex's, InPlaceABN against mapillary's, and apex's parts in the trainer.

The comparisons need apex 25.05: FASTVIT_APEX=folder of its sources, nothing compiled. The comparisons
with mapillary's InPlaceABN need its sources on PYTHONPATH, with the extension compiled in place.
"""

import os
import sys
from importlib.util import find_spec

import pytest
import torch
from packages import import_apex_or_skip, import_or_skip
from training.runs import COMMON, error_of_run, rows_of, torchrun, train_on_rank, weights_of

import fastvit
import fastvit.compat.apex
from fastvit.training import model, nvidia_apex
from fastvit.training.config import Config

SHAPES = {"images": (6, 5, 4, 3), "rows": (16, 5), "sequences": (4, 5, 7), "volumes": (2, 5, 3, 2, 2)}


def steps(layer, inputs):
    """Outputs, gradients and buffers of two training steps and an evaluation."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation, slope", [("leaky_relu", 0.01), ("elu", 0.7), ("identity", 0.0)])
def test_every_output_and_gradient_is_that_of_mapillary(activation, slope, shape, dtype):
    peer = import_or_skip("inplace_abn")
    options = {"activation": activation, "activation_param": slope, "momentum": 0.3}
    theirs, ours = (layer(5, **options).to(dtype) for layer in (peer.InPlaceABN, fastvit.InPlaceABN))
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2)
        ours.bias.normal_()
        theirs.load_state_dict(ours.state_dict())
        theirs.weight -= theirs.eps  # its gamma is |weight| + eps
    inputs = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(3)]
    expected, found = steps(theirs, inputs), steps(ours, inputs)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-7}[dtype]  # its slope and eps are float32
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def _layers(dtype, **options):
    """apex's and fastvit's layer, with the same parameters on every rank."""
    torch.manual_seed(1)
    theirs = nvidia_apex.import_apex("parallel").SyncBatchNorm(5, **options).to(dtype)
    ours = fastvit.SyncBatchNorm(5, **options).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.7)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _compare(rank, world, shape, dtype, options):
    random = torch.Generator().manual_seed(rank)
    scale = torch.linspace(0.5, 3, 5, dtype=dtype).view(-1, *[1] * (len(shape) - 2))
    inputs = [
        [scale * torch.randn(shape, generator=random, dtype=dtype) + rank for _ in range(2)] for _ in range(3)
    ]
    theirs, ours = (steps(layer, inputs) for layer in _layers(dtype, **options))
    assert list(theirs) == list(ours)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    return float(ours["running_mean of step 1"].sum())


@pytest.mark.parametrize(
    ("dtype", "statistics"), [(torch.float32, "collective"), (torch.float64, "peer")], ids=str
)
def test_every_output_and_gradient_is_that_of_apex(ranks, dtype, statistics):
    import_apex_or_skip("parallel")
    for shape in SHAPES.values():
        for options in ({}, {"momentum": 0.3, "eps": 1e-3, "affine": False}):
            means = ranks.run(2, _compare, shape, dtype, options, statistics=statistics)
            assert means[0] == means[1]


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
    """A stand-in for the package apex."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != os.environ.get("FASTVIT_APEX")])
    monkeypatch.delenv("FASTVIT_APEX", raising=False)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "apex"}
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "fastvit" not in type(f).__module__])
    if find_spec("apex"):
        pytest.skip("an apex is installed")
    yield monkeypatch
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]
    sys.modules.update(kept)


def put(no_apex, folder, files):
    for name, text in files.items():
        (folder / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / name).write_text(text)
    no_apex.setenv("FASTVIT_APEX", str(folder))


def test_apex_sync_is_the_layer_of_apex(no_apex, tmp_path):
    put(no_apex, tmp_path, {"__init__.py": "", "parallel/__init__.py": FAKE})
    config = Config(norm="apex-sync")
    layers = [type(layer) for layer in model.build_model(config, (1, 8, 8), 10).modules()]
    norms = {layer.__module__ for layer in layers if layer.__name__ == "SyncBatchNorm"}
    assert norms == {"apex.parallel"}
    torch.cuda.nvtx.range_push("marks nothing where torch has no NVTX")
    torch.cuda.nvtx.range_pop()


def test_apex_sync_without_apex_says_what_it_needs(no_apex, tmp_path, capsys):
    arguments = ["--norm", "apex-sync", "--out", str(tmp_path / "run")]
    said = error_of_run(capsys, *arguments)
    assert "--norm apex-sync needs apex.parallel of NVIDIA apex 25.05 or older" in said
    assert "No module named 'apex'" in said
    assert "set the variable FASTVIT_APEX to a folder of its sources" in said
    put(no_apex, tmp_path, {"__init__.py": ""})  # of a later release
    assert "No module named 'apex.parallel'" in error_of_run(capsys, *arguments)


def test_the_look_alike_is_not_apex(no_apex):
    no_apex.setitem(sys.modules, "apex", fastvit.compat.apex)
    no_apex.setitem(sys.modules, "apex.parallel", fastvit.compat.apex.parallel)
    with pytest.raises(ImportError, match="apex.parallel is fastvit.compat.apex.parallel of fastvit"):
        nvidia_apex.import_apex("parallel")


def test_two_ranks_train_with_the_layer_of_apex(ranks, tmp_path):
    """From equal weights and batches the results agree with fastvit's up to rounding of the statistics."""
    import_apex_or_skip("parallel")
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
