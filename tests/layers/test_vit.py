"""The ViT and its one factory for BatchNorm and activation."""

import pytest
import torch

import fastvit
from fastvit.models import MLP_NORMS, NORMS, NormAct, ViT, vit_digits

KINDS = {
    "torch": torch.nn.BatchNorm2d,
    "torch-sync": torch.nn.SyncBatchNorm,
    "fastvit-sync": fastvit.SyncBatchNorm,
    "inplace-abn": fastvit.InPlaceABN,
    "inplace-abn-sync": fastvit.InPlaceABNSync,
}


def make(norm, mlp_norm="batch"):
    torch.manual_seed(0)
    return vit_digits(norm, mlp_norm)


def images():
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mlp_norm", MLP_NORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_keys_and_initial_weights_do_not_depend_on_norm(norm, mlp_norm):
    expected, got = make("torch", mlp_norm).state_dict(), make(norm, mlp_norm).state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("mlp_norm", MLP_NORMS)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_training_step_equals_torch(norm, mlp_norm):
    # In fp64, where recovering the input from the output loses no relevant digit.
    expected, got = make("torch", mlp_norm).double(), make(norm, mlp_norm).double()
    batch, results = images().double(), []
    for model in (expected, got):
        logits = model(batch)
        logits.square().sum().backward()
        results.append(logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)
    for (name, a), b in zip(expected.named_parameters(), got.parameters(), strict=True):
        torch.testing.assert_close(
            b.grad, a.grad, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
    for (name, a), b in zip(expected.named_buffers(), got.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(got.eval()(batch), expected.eval()(batch), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("norm", KINDS)
def test_norm_act_equals_batch_norm_and_leaky_relu(norm, tokens):
    layer = NormAct(5, norm, tokens=tokens, slope=0.2)
    assert type(layer.norm) is (torch.nn.BatchNorm1d if (norm, tokens) == ("torch", True) else KINDS[norm])
    x = torch.randn(4, 7, 5) if tokens else torch.randn(4, 5, 3, 2)
    channels_first = x.transpose(1, 2) if tokens else x
    expected = torch.nn.functional.batch_norm(channels_first, None, None, training=True)
    expected = torch.nn.functional.leaky_relu(expected, 0.2)
    torch.testing.assert_close(layer(x.clone()), expected.transpose(1, 2) if tokens else expected)


def test_a_pickle_with_the_old_name_of_an_attribute_is_read():
    layer = NormAct(5, "torch", tokens=True)
    state = dict(layer.__dict__)
    state["flat"] = state.pop("flattens_tokens")
    old = NormAct.__new__(NormAct)
    old.__setstate__(state)
    assert torch.equal(old(torch.ones(2, 3, 5)), layer(torch.ones(2, 3, 5))) and not hasattr(old, "flat")


def test_the_norm_in_the_mlp_gets_no_view():
    # Autograd would copy the gradient of a view that is written in place.
    mlp = make("inplace-abn").blocks[0].mlp
    assert not mlp.expand(torch.randn(2, 16, 64))._is_view()


def test_wrong_names_and_sizes():
    small = {"image_size": 8, "in_channels": 1, "num_classes": 3, "stem_channels": (4,), "stem_strides": (2,)}
    small |= {"patch": 2, "dim": 8, "depth": 1, "heads": 2}
    model = ViT(**small)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert isinstance(model.blocks[0].mlp.act, NormAct)  # the default of create_vit and vit_digits too
    for change, message in (
        ({"norm": "batch"}, "norm must be one of torch, .*got 'batch'"),
        ({"mlp_norm": "layer"}, "mlp_norm must be one of none, batch, got 'layer'"),
        ({"heads": 3}, "dim must be a multiple of heads"),
        ({"stem_strides": (1, 1)}, "same length"),
        ({"patch": 3}, "patch must divide the 4 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            ViT(**small | change)
