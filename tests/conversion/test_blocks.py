"""convert finds the blocks of a model, and the tensors that cross the border of a block."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fastvit
from conversion.block_models import LAYERS, WIDTH, Layer, LayerModel, State
from conversion.cases import add_in_turn
from conversion.models import WrappedNorm
from conversion.vit_models import measure_kept_bytes
from fastvit.conversion.blocks import find_blocks
from fastvit.conversion.nested_values import tensor_leaves
from fastvit.memory import peak_bytes


def measure_peak(model, x):
    model(x).sum().backward()
    return peak_bytes(lambda: model(x).sum().backward())


@pytest.mark.parametrize(
    ("kind", "holder"), [*add_in_turn(zip(LAYERS), ["attributes", "list"]), ("keywords", "attributes")]
)
def test_the_peak_of_the_least_does_not_depend_on_how_blocks_are_called(kind, holder):
    x = torch.randn(16, 64, WIDTH)
    expected = measure_peak(fastvit.convert(LayerModel(), budget="least"), x)
    model = LayerModel(kind, uses_list=holder == "list")
    actual = measure_peak(fastvit.convert(model, budget="least"), x)
    assert actual == pytest.approx(expected, rel=0.02)


def test_tensors_are_found_in_structures_once_and_in_order():
    a, b = torch.ones(2), torch.zeros(2)
    loop: list = [a]
    loop.append(loop)
    for values in ({"x": [a, (b,)]}, State([a, b]), OrderedDict(p=a, q={"r": b})):
        assert [id(one) for one in tensor_leaves(values)] == [id(a), id(b)]
    assert len(tensor_leaves(loop)) == 1
    assert [id(one) for one in tensor_leaves((a, None, 3, a))] == [id(a), id(a)]


def test_a_module_round_a_lone_normalisation_is_no_block():
    parts = [part for i in (3, 16, 16) for part in (nn.Conv2d(i, 16, 3), WrappedNorm(16), nn.SiLU())]
    model, x = nn.Sequential(*parts, nn.Conv2d(16, 4, 1)), torch.randn(4, 3, 24, 24)
    assert find_blocks(model) == []
    default, least = (fastvit.convert(copy.deepcopy(model), **how) for how in ({}, {"budget": "least"}))
    assert measure_kept_bytes(default, x) < measure_kept_bytes(model, x)
    assert measure_peak(least, x) <= measure_peak(default, x) < measure_peak(model, x)


def test_modules_of_one_class_beside_each_other_are_blocks():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.other = Layer(), Layer(), nn.TransformerDecoderLayer(8, 2)

    pair = Pair()
    assert find_blocks(pair) == [pair.left, pair.right]
    assert find_blocks(stack := nn.Sequential(pair, Pair())) == list(stack)
    alone = nn.Module()
    alone.layer = Layer()
    assert find_blocks(alone) == []
