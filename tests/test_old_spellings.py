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


def test_elu_in_place_names_its_new_default():
    with pytest.warns(FutureWarning, match="InPlaceABN: the alpha of elu is 1 by default") as record:
        layer = fastvit.InPlaceABN(3, activation="elu")
    assert layer.activation_param == 1.0 and record[0].filename == __file__
