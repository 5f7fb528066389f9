"""report and verify leave their arguments as they are, and take complex numbers."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import fastvit
from conversion.block_models import WIDTH, Layer, State


class LayerWithArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, it=None):
        if it is not None and isinstance(it, Counter):
            it.count += 1
        return self.layer(x)


class Counter:
    count = 0


class Locked(Counter):
    def __init__(self):
        self.lock = threading.Lock()


PLAIN_VALUES = 3, "a", None, torch.float32, len, copy, object(), {"a": (1, {2})}, threading.Lock()


@pytest.mark.parametrize("function", [fastvit.report, fastvit.verify], ids=["report", "verify"])
def test_iterators_and_objects_with_state_that_a_copy_would_change_are_refused(function):
    x, it, counter = torch.randn(2, 64, WIDTH), iter([1, 2]), Counter()
    message = (
        rf"{function.__name__}: argument 'it' is an iterator \(list_iterator\), which a forward of a copy"
    )
    with pytest.raises(TypeError, match=message):
        function(LayerWithArgument(), x, it)
    with pytest.raises(TypeError, match="argument 'it' has an iterator"):
        function(LayerWithArgument(), x, it={"a": [it]})
    assert list(it) == [1, 2]
    function(LayerWithArgument(), x, counter)
    assert counter.count == 0
    with pytest.raises(TypeError, match=r"argument 'it' is an object with state \(Locked\)"):
        function(LayerWithArgument(), x, Locked())
    for value in (*PLAIN_VALUES, State(x)):
        function(LayerWithArgument(), x, value)


def test_report_and_verify_draw_from_copies_of_generators():
    class NoisyLayer(LayerWithArgument):
        def forward(self, x, it):
            return self.layer(x * torch.rand(x.shape, generator=it))

    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    assert fastvit.verify(NoisyLayer(), torch.randn(2, 64, WIDTH), generator, dtype=None)
    fastvit.report(NoisyLayer(), torch.randn(2, 64, WIDTH), generator)
    assert torch.equal(generator.get_state(), state)


# --- complex numbers


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("angles", torch.polar(torch.ones(WIDTH // 2), torch.randn(WIDTH // 2)))
        self.phase = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x):
        pairs = torch.view_as_complex(self.norm(x).unflatten(-1, (-1, 2)))
        cos, sin = torch.view_as_real(self.angles).unbind(-1)
        return pairs * self.angles * self.phase, cos + sin


@pytest.mark.parametrize("dtype", [torch.float64, None], ids=["float64", "as it is"])
def test_verify_compares_complex_gradients(dtype):
    model, x = Rotary(), torch.randn(8, 16, WIDTH)
    with warnings.catch_warnings(action="error"):
        found = fastvit.verify(model, x, dtype=dtype)
    assert found and "gradient of phase" in found.differences and max(found.differences.values()) == 0


def test_verify_finds_a_wrong_imaginary_part():
    from fastvit.conversion.verification import _relative_difference

    a, b = torch.tensor([1 + 1j]), torch.tensor([1 - 5j])
    assert _relative_difference(a, b, 0.0) == pytest.approx(6 / 5)


def test_rows_of_a_report_add_up_to_at_most_its_headline():
    cached = torch.randn(64, WIDTH)

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.layer = nn.Conv2d(3, WIDTH, 8, 8), Layer()

        def forward(self, images):
            return self.layer(self.conv(images).flatten(2).transpose(1, 2) * cached)

    report = fastvit.report(Patches(), torch.randn(4, 3, 64, 64))
    assert sum(row.kept_bytes for row in report.tensors) <= report.kept_after
