"""apex.amp's state, and the handle and the lists of O1."""

import copy
import io

import pytest
import torch
from amp_models import HALF, start
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex import amp
from fastvit.compat.apex.amp._amp_state import maybe_print


@pytest.fixture(autouse=True)
def quiet_and_clean():
    yield
    amp.initialize([], enabled=False, verbosity=1)


def test_maybe_print(capsys, monkeypatch):
    amp._amp_state.verbosity = 1
    maybe_print("every rank")
    amp._amp_state.verbosity = 0
    maybe_print("nobody")
    amp._amp_state.verbosity = 1
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    maybe_print("rank 0", rank0=True)
    maybe_print("every rank too")
    assert capsys.readouterr().out == "every rank\nevery rank too\n"


X = torch.randn(4, 4)


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        self.seen = x.dtype, F.softmax(x, 0).dtype
        return x


def test_handle_of_o1():
    start("O2")
    assert amp._amp_state.handle is None and amp._amp_state.allow_incoming_model_not_fp32 is False
    model = amp.initialize(Softmax(), opt_level="O1", verbosity=0)
    assert amp._amp_state.handle._is_active
    model(X)
    assert model.seen[0] == HALF
    amp._amp_state.handle._is_active = False
    model(X)
    assert model.seen[0] == torch.float32
    copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X)
    assert model.seen[0] == HALF


@pytest.mark.parametrize(
    ("out_of", "into", "given", "want"),
    [
        ("FP32_FUNCS", "FP16_FUNCS", torch.float32, HALF),  # as scripts for Tacotron 2 do
        ("FP32_FUNCS", None, HALF, HALF),
        ("FP32_FUNCS", None, torch.float32, torch.float32),
    ],
)
def test_changed_lists(monkeypatch, out_of, into, given, want):
    lists = amp.lists.functional_overrides
    for name in {out_of, into} - {None}:
        monkeypatch.setattr(lists, name, list(getattr(lists, name)))
    getattr(lists, out_of).remove("softmax")
    if into:
        getattr(lists, into).append("softmax")
    before = F.softmax
    seen = []
    model = nn.Identity()
    model.forward = lambda x: seen.append(F.softmax(x, 0).dtype) or x
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X.to(given))
    assert seen == [want] and F.softmax is not before
    assert F.softmax(X, 0).dtype == torch.float32  # outside of forward nothing is cast
    amp.initialize(model, enabled=False)
    assert F.softmax is before


@pytest.mark.parametrize("kind", ["FP32_FUNCS", "FP16_FUNCS"])
def test_added_to_lists(monkeypatch, kind):
    lists = amp.lists.functional_overrides
    monkeypatch.setattr(lists, kind, [*getattr(lists, kind), "relu", "no_such_function"])
    seen = []
    model = nn.Identity()
    model.forward = lambda x: seen.extend([F.relu(x).dtype, torch.mm(x, x).dtype]) or x
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X)
    model(X.to(HALF))
    assert seen[1::2] == [HALF] * 2
    assert seen[::2] == [HALF if kind == "FP16_FUNCS" else torch.float32] * 2
    with pytest.raises(AttributeError, match="no torch_overrides; use amp.register_half_function, see docs"):
        _ = amp.lists.torch_overrides
