"""The ViT and its one factory for BatchNorm and activation."""

import pytest
import torch
from torch.nn import functional as F

import fastvit
from fastvit.models import MLP_NORMS, NORMS, NormAct, ViT, vit_digits

KINDS = {
    "torch": torch.nn.BatchNorm2d,
    "torch-sync": torch.nn.SyncBatchNorm,
    "fastvit-sync": fastvit.SyncBatchNorm,
    "inplace-abn": fastvit.InPlaceABN,
    "inplace-abn-sync": fastvit.InPlaceABNSync,
}


def make_model(norm, mlp_norm="batch"):
    torch.manual_seed(0)
    return vit_digits(norm, mlp_norm)


@pytest.mark.parametrize("mlp_norm", MLP_NORMS)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_keys_and_initial_weights_do_not_depend_on_norm(norm, mlp_norm):
    expected, state = make_model("torch", mlp_norm).state_dict(), make_model(norm, mlp_norm).state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("norm,mlp_norm", [("inplace-abn", "batch"), ("fastvit-sync", "none")])
def test_a_training_step_with_each_norm_equals_torchs(norm, mlp_norm):
    """In float64 recovering the input from the output loses no relevant digit."""
    torch_model, model = make_model("torch", mlp_norm).double(), make_model(norm, mlp_norm).double()
    x, results = torch.randn(6, 1, 8, 8, dtype=torch.float64), []
    for one in (model, torch_model):
        logits = one(x)
        gradients = torch.autograd.grad(logits.square().sum(), list(one.parameters()))
        results.append([logits, *gradients, *one.buffers(), one.eval()(x)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("norm", KINDS)
def test_norm_act_equals_batch_norm_and_leaky_relu(norm):
    for tokens in (False, True):
        layer = NormAct(5, norm, tokens=tokens, slope=0.2)
        kind = torch.nn.BatchNorm1d if (norm, tokens) == ("torch", True) else KINDS[norm]
        assert type(layer.norm) is kind
        x = torch.randn(4, 7, 5) if tokens else torch.randn(4, 5, 3, 2)
        channels_first = x.transpose(1, 2) if tokens else x
        expected = F.leaky_relu(F.batch_norm(channels_first, None, None, training=True), 0.2)
        torch.testing.assert_close(layer(x.clone()), expected.transpose(1, 2) if tokens else expected)


def test_a_pickle_with_the_old_name_of_an_attribute_is_read():
    layer = NormAct(5, "torch", tokens=True)
    state = dict(layer.__dict__)
    state["flat"] = state.pop("flattens_tokens")
    old = NormAct.__new__(NormAct)
    old.__setstate__(state)
    assert torch.equal(old(torch.ones(2, 3, 5)), layer(torch.ones(2, 3, 5))) and not hasattr(old, "flat")


def test_the_norm_in_the_mlp_gets_no_view():
    """Autograd would copy the gradient of a view that is written in place."""
    mlp = make_model("inplace-abn").blocks[0].mlp
    assert not mlp.expand(torch.randn(2, 16, 64))._is_view()


def test_the_defaults_are_those_of_create_vit_and_wrong_names_and_sizes_raise():
    small = {"image_size": 8, "in_channels": 1, "num_classes": 3, "stem_channels": (4,), "stem_strides": (2,)}
    small |= {"patch": 2, "dim": 8, "depth": 1, "heads": 2}
    model = ViT(**small)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert isinstance(model.blocks[0].mlp.act, NormAct)
    for change, message in (
        ({"norm": "batch"}, "norm must be one of torch, .*got 'batch'"),
        ({"mlp_norm": "layer"}, "mlp_norm must be one of none, batch, got 'layer'"),
        ({"heads": 3}, "dim must be a multiple of heads"),
        ({"stem_strides": (1, 1)}, "same length"),
        ({"patch": 3}, "patch must divide the 4 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            ViT(**small | change)
