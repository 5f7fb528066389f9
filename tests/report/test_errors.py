"""Errors of `report`, `verify` and `convert`: options, inputs and models that they refuse."""

import re
import sys

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fastvit
from report.models import WIDTH, SmallViT, hold_graph_tensor

SIZE = (16, 48, WIDTH)


@pytest.fixture
def x():
    return torch.randn(SIZE)


# Options


def test_a_budget_that_is_neither_a_fraction_nor_bytes_is_refused(x):
    """A float above 1 is no number of bytes."""
    expected = "a fraction above 0 and at most 1, or bytes as an int or as '2 GiB', or 'least'"
    for budget in (
        *(0, 1.5, 2.0, 1e9, -0.5, float("nan"), float("inf"), torch.tensor(2), True, False, [0.5]),
        *("2.0", "1.5", "1e9", "2 GiBs", "1.2.3 GB", "1e400 GiB", "lots"),
    ):
        with pytest.raises(ValueError) as error:
            fastvit.convert(SmallViT(1), budget=budget, example_inputs=x)
        assert str(error.value) == f"convert: budget must be {expected}, got {budget!r}"


def test_wrong_options_of_convert_are_named():
    pairs = "skip must have pairs of a block's name and an op's name, "
    size = r"a tensor expected, such as torch.zeros\(8, 49, 64\), got the size"
    for options, error, message in (
        *(
            ({"matmuls": value}, ValueError, "matmuls is .*; True or False expected")
            for value in ("yes", "False", 1, 0, None, torch.tensor(True))
        ),
        ({"recompute_weight_casts": 1}, ValueError, "recompute_weight_casts is .*; True or False expected"),
        *(
            ({"skip": skip}, ValueError, pairs)
            for skip in ("blocks.0", {"blocks.0": "gelu"}, [("blocks.0",)], [("blocks.0", 1)], ["gelu"], None)
        ),
        ({"skip": 3}, ValueError, pairs),
        (
            {"skip": [("blocks.7", "gelu")]},
            ValueError,
            r"skip must have names of blocks \(\['', 'blocks.0'\]\), got 'blocks.7'",
        ),
        ({"example_inputs": 1}, ValueError, "budget and example_inputs expected together"),
        ({"budget": 0.5, "example_inputs": torch.Size((8, 49, 64))}, TypeError, size),
    ):
        with pytest.raises(error, match=f"convert: {message}"):
            fastvit.convert(SmallViT(1), **options)


def test_the_nearest_names_are_said_for_a_name_that_no_op_has():
    for op, nearest in (("geluu", "gelu"), ("LayerNorm", "layer_norm"), ("", r"\w+")):
        message = f"convert: skip must have names of ops .*, got {op!r}; the nearest names are .*'{nearest}'"
        with pytest.raises(ValueError, match=message):
            fastvit.convert(SmallViT(1), skip=[("", op)])


def test_wrong_options_of_verify_are_named(x):
    dtypes, numbers = "a floating-point torch.dtype or None", "a number of at least 0, or None,"
    for option, values, expected in (
        ("dtype", ("float64", torch.int64, float), dtypes),
        ("tolerance", ("0", -1, float("nan"), True), numbers),
    ):
        for value in values:
            message = f"verify: {option} is {re.escape(repr(value))}; {expected}"
            with pytest.raises(ValueError, match=message):
                fastvit.verify(SmallViT(1), x, **{option: value})


# Inputs


@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify])
def test_a_size_in_place_of_inputs_is_named(function):
    message = r": a tensor expected, such as torch.zeros\(16, 48, 64\), got the size"
    for inputs in ((torch.Size(SIZE),), (SIZE,), SIZE):
        with pytest.raises(TypeError, match=function.__name__ + message):
            function(SmallViT(), *inputs)
    with pytest.raises(TypeError, match="must be Tensor, not str"):  # torch's own
        function(SmallViT(), "x")


@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify])
def test_what_holds_the_inputs_is_named_with_what_to_pass(function, x):
    for batch, message in (
        ({"x": x}, r"a dict .*; pass what it holds as keyword arguments, \*\*batch"),
        ((x,), r"a tuple .*; pass what it holds as arguments, \*batch"),
        (
            torch.utils.data.DataLoader([0]),
            r"a DataLoader .*; pass a batch of it, next\(iter\(loader\)\)",
        ),
    ):
        with pytest.raises(TypeError, match=f"{function.__name__}: the model failed with {message}"):
            function(SmallViT(), batch)


# Models


def test_what_is_no_module_is_refused_by_every_function_of_models():
    for function in (
        fastvit.report,
        fastvit.verify,
        fastvit.convert,
        fastvit.revert,
        fastvit.fuse,
        fastvit.convert_syncbn_model,
        fastvit.revert_syncbn_model,
    ):
        message = f"{function.__name__}: model must be a torch.nn.Module, got .* type"
        with pytest.raises(TypeError, match=message):
            function(hold_graph_tensor)


def test_a_model_that_cannot_be_copied_is_named_and_converts_without_a_budget(x):
    model = hold_graph_tensor(SmallViT(1), x)
    message = r"a copy of the model is run, and copy.deepcopy\(model\) raised "
    with pytest.raises(ValueError, match=f"report: {message}"):
        fastvit.report(model, x)
    with pytest.raises(ValueError, match=f"convert: {message}"):
        fastvit.convert(model, budget=0.5, example_inputs=x)
    assert fastvit.convert(model) is model


def test_a_model_that_cannot_be_measured_is_named(x):
    message = "report: a model and inputs on the CPU or on CUDA expected, got meta"
    with pytest.raises(ValueError, match=message):
        fastvit.report(SmallViT().to("meta"), x.to("meta"))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fastvit.report(SmallViT(), torch.zeros(2, 3))  # an error of the model
    message = r"report: a recompute_scope\(\) is open; call report outside"
    with fastvit.recompute_scope(), pytest.raises(RuntimeError, match=message):
        fastvit.report(SmallViT(), x)


def test_a_model_without_a_tensor_or_of_one_dtype_cannot_be_verified(x):
    class ReturnsNothing(SmallViT):
        def forward(self, x):
            return None

    class Float32Linear(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    with pytest.raises(ValueError, match="verify: the model returned no tensor"):
        fastvit.verify(ReturnsNothing(1), x)
    with pytest.raises(RuntimeError, match="does not run in torch.float64 .*; pass dtype=None for its own"):
        fastvit.verify(Float32Linear(2, 2), torch.ones(1, 2))
    assert fastvit.verify(Float32Linear(2, 2), torch.ones(1, 2), dtype=None)


def test_wrapped_models_name_what_to_pass(tmp_path, x):
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="DistributedDataParallel cannot run .* pass its .module"):
            fastvit.report(DistributedDataParallel(SmallViT()), x)
        layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.SyncBatchNorm(8), fastvit.SyncBatchNorm(8), nn.GELU())
        assert fastvit.report(layers, torch.randn(4, 8, 16, 16)).freed_bytes > 0  # no exchange
        sharded = SmallViT()
        distributed.fsdp.fully_shard(sharded, mesh=distributed.init_device_mesh("cpu", (1,)))
        message = "FSDPSmallViT is sharded, .* pass the model before it is sharded"
        with pytest.raises(ValueError, match=message):
            fastvit.report(sharded, x)
    finally:
        distributed.destroy_process_group()


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"Report.plot: matplotlib cannot .*; pip install matplotlib, or in .* pip install '.\[train\]'"
    with pytest.raises(ImportError, match=message):
        fastvit.Report(1, 1).plot(tmp_path / "report.png")


def test_a_profiler_that_runs_goes_on(x):
    message = "a profiler of torch is running, and counting bytes on the CPU would end it"
    with torch.profiler.profile() as profile:
        with pytest.raises(RuntimeError, match=message):
            fastvit.report(fastvit.convert(SmallViT()), x)
    assert profile.key_averages()
