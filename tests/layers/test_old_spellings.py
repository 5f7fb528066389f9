"""Old spellings of public names work for one release, and warn at the line of their user."""

import inspect
import io
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

import fastvit
from fastvit import functional, memory

X = torch.randn(2, 3, 4)


def two_layers():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def sync_layer(**options):
    return fastvit.InPlaceABNSync(3, **options)


# The old spelling, the new one, and the words of the warning.
SPELLINGS = {
    "glu": (
        lambda: functional.glu(X, X),
        lambda: functional.gated_act(X, X),
        "fastvit.functional.glu is fastvit.functional.gated_act",
    ),
    "gated_act(a=)": (
        lambda: functional.gated_act(a=X, b=X),
        lambda: functional.gated_act(X, X),
        r"gated_act\(a=\) is gated_act\(x=\)",
    ),
    "InPlaceABN.forward(x=)": (
        lambda: fastvit.InPlaceABN(3)(x=X.clone()),
        lambda: fastvit.InPlaceABN(3)(X.clone()),
        r"InPlaceABN.forward\(x=\) is InPlaceABN.forward\(input=\)",
    ),
    "InPlaceABNSync(group=)": (
        lambda: sync_layer(group=None).process_group,
        lambda: sync_layer(process_group=None).process_group,
        r"InPlaceABNSync\(group=\) is InPlaceABNSync\(process_group=\)",
    ),
    "InPlaceABNSync.group": (
        lambda: sync_layer().group,
        lambda: sync_layer().process_group,
        "InPlaceABNSync.group is InPlaceABNSync.process_group",
    ),
    "set_group": (
        lambda: fastvit.SyncBatchNorm(3).set_group(None),
        lambda: fastvit.SyncBatchNorm(3).set_process_group(None),
        "SyncBatchNorm.set_group is SyncBatchNorm.set_process_group",
    ),
    "live_bytes(work=)": (
        lambda: memory.live_bytes(work=lambda: None),
        lambda: memory.live_bytes(function=lambda: None),
        r"live_bytes\(work=\) is live_bytes\(function=\)",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_an_old_spelling_does_as_the_new_one_and_warns(name):
    old, new, message = SPELLINGS[name]
    with pytest.warns(DeprecationWarning, match=message) as record:
        found = old()
    assert {warning.filename for warning in record} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        expected = new()
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif not isinstance(found, nn.Module):
        assert found == expected


# A user's script. Each line with the comment `old` has an old spelling, and no other line has one.
SCRIPT = """
import copy, torch, fastvit
from torch import nn
from fastvit import functional, memory, sync
from fastvit.training.config import Config

x = torch.randn(2, 8, 64)
layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
fastvit.convert(model, products=True)  # old
fastvit.convert(model, weight_casts=True)  # old
with fastvit.recompute_scope(products=True):  # old
    layer(x).sum().backward()
with fastvit.recompute_scope(weight_casts=True):  # old
    layer(x).sum().backward()
found = fastvit.report(model, x)
assert found.saved_bytes > 0  # old
assert sum(row.rebuilt_bytes for row in found.tensors) > 0  # old
checked = fastvit.verify(model, x, limit=1.0)  # old
fastvit.convert(model, skip=checked.sites)  # old
assert not checked.unsteady  # old
assert not checked.wrong  # old
assert checked.limit == 1.0  # old
y = functional.glu(x, x)  # old
images = torch.randn(2, 3, 8, 8)
in_place = fastvit.InPlaceABNSync(3, group=None)  # old
in_place(x=images.clone())  # old
from fastvit.fuse import unfuse  # old
from fastvit.sync_batchnorm import create_syncbn_process_group  # old
assert in_place.group is None  # old
in_place.group = None  # old
in_place.set_group(None)  # old
fastvit.InPlaceABN(3, activation="elu")  # old
nbytes, result = memory.live_bytes(work=lambda: x + 1)  # old
assert memory.peak_bytes(work=lambda: x + 1) >= nbytes > 0  # old
local = sync.LOCAL  # old
assert isinstance(local, sync.Local)  # old
moments, tag = local.moments(images, 1)  # old
local.sums(lambda exchange: moments, tag)  # old
sync.Shared, sync.transport_for  # old
key = sync.LayerKey("a layer", number=1, momentum=0.1)  # old
assert key.number == 1  # old
torch.ops.fastvit.abn_forward_(images)  # old
Config(memory="products")  # old
"""


def test_a_script_with_all_old_spellings_runs_with_warnings_alone(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        exec(compile(SCRIPT, path, "exec"), {"__name__": "__main__"})
    assert {warning.category for warning in record} <= {DeprecationWarning, FutureWarning}
    lines = enumerate(SCRIPT.splitlines(), 1)
    assert {warning.lineno for warning in record if warning.filename == str(path)} == {
        number for number, line in lines if line.endswith("# old")
    }


def test_both_spellings_of_one_argument_are_an_error():
    with pytest.raises(
        TypeError, match="InPlaceABNSync: group is the old name of process_group; one of them"
    ):
        sync_layer(group=None, process_group=None)


def test_signatures_have_the_new_spellings_alone():
    assert list(inspect.signature(functional.gated_act).parameters)[:2] == ["x", "gate"]
    assert list(inspect.signature(fastvit.InPlaceABN.forward).parameters) == ["self", "input"]


@pytest.mark.parametrize(
    "name",
    ["fuse.Absorbed", "fuse.GELU", "fuse.LayerNorm", "fuse.SyncBatchNormAct", "sync_batchnorm.SyncBatchNorm"],
)
def test_pickles_find_classes_by_the_modules_that_had_them(name):
    module, _, qualified_name = name.partition(".")
    __import__(f"fastvit.{module}")
    cls = getattr(sys.modules[f"fastvit.{module}"], qualified_name)
    by_old_name = f"cfastvit.{module}\n{qualified_name}\n.".encode()
    assert pickle.loads(by_old_name) is cls and callable(fastvit.fuse)


def test_a_pickled_layer_with_old_attributes_trains():
    layer = sync_layer()
    state = layer.__getstate__()
    state["group"], state["layer_number"] = state.pop("process_group"), state.pop("layer_id")
    restored = fastvit.InPlaceABNSync.__new__(fastvit.InPlaceABNSync)
    restored.__setstate__(state)
    assert restored.process_group is None and restored.layer_id > layer.layer_id
    assert not {"group", "layer_number"} & restored.__dict__.keys()
    assert torch.equal(restored(X.clone()), layer(X.clone()))
    file = io.BytesIO()
    torch.save(restored, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).layer_id > restored.layer_id


def test_pickled_results_with_old_fields_are_read():
    row = fastvit.TensorReport(("fc",), 1, 2, 3, "recomputed by gelu")
    state = vars(row) | {"rebuilt_bytes": 3}
    del state["recomputed_bytes"]
    restored = fastvit.TensorReport.__new__(fastvit.TensorReport)
    restored.__setstate__(state)
    assert restored == row
    result = fastvit.Verification({"output": 0.5}, 0.0, (("", "gelu"),), {"output": 1.0})
    new_names = {"limit": "tolerance", "sites": "skip", "unsteady": "nondeterministic"}
    restored = fastvit.Verification.__new__(fastvit.Verification)
    restored.__setstate__(
        {"differences": result.differences} | {old: getattr(result, new) for old, new in new_names.items()}
    )
    assert restored == result and str(restored) == str(result)


def test_an_old_pickle_of_a_converted_layer_is_reverted():
    layer = fastvit.convert_syncbn_model(nn.Sequential(fastvit.InPlaceABN(3)))[0]
    cls, old_attributes, names = layer._synchronised_from
    old_names = tuple({"process_group": "group", "layer_id": "layer_number"}.get(n, n) for n in names)
    state = vars(layer) | {"_synchronised_from": (cls, old_attributes, old_names), "group": None}
    del state["process_group"], state["layer_id"]
    restored = fastvit.InPlaceABNSync.__new__(fastvit.InPlaceABNSync)
    restored.__setstate__(state)
    fastvit.revert_syncbn_model(restored)
    assert vars(restored).keys() == vars(fastvit.InPlaceABN(3)).keys()


def test_mapillarys_layers_keep_their_arguments():
    from fastvit.compat import inplace_abn

    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for layer in (inplace_abn.InPlaceABN(3), inplace_abn.InPlaceABNSync(3, group=None)):
            assert layer(x=X.clone()).shape == X.shape
        layer.set_group(None)
        assert layer.group is None


def test_elu_in_place_names_its_new_default():
    with pytest.warns(FutureWarning, match="InPlaceABN: the alpha of elu is 1 by default") as record:
        layer = fastvit.InPlaceABN(3, activation="elu")
    assert layer.activation_param == 1.0 and record[0].filename == __file__
