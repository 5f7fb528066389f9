"""apex.amp's casts of functions under O1: autocast's, those of the user's functions, and changed lists."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import HALF, call_under_o1, initialized, record_forwards, scaled_backward
from fastvit.compat.apex import amp
from fastvit.compat.apex.amp._amp_state import maybe_print

pytestmark = pytest.mark.usefixtures("amp_off")
X, W = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize(
    ("kind", "level"),
    [(nn.LSTM, "O0"), (nn.RNN, "O1"), (nn.LSTM, "O1"), (nn.GRU, "O1"), (nn.LSTM, "O2"), (nn.GRU, "O3")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_gradients_of_recurrent_networks_follow_float32(kind, level):
    torch.manual_seed(0)
    plain, x = kind(3, 4, batch_first=True), torch.randn(5, 6, 3)
    plain(x)[0][:, -1].square().sum().backward()
    if level == "O1":
        try:
            with torch.autocast("cpu", HALF):
                plain(x)
        except RuntimeError as error:
            pytest.skip(f"torch's own autocast fails on this CPU: {error}")
    model, optimizer = initialized(level, model=copy.deepcopy(plain), loss_scale="dynamic")
    optimizer.zero_grad()
    scaled_backward(model(x)[0][:, -1].square().sum(), optimizer)
    masters = list(amp.master_params(optimizer))
    for master, flat, parameter in zip(masters, model._flat_weights, plain.parameters(), strict=True):
        torch.testing.assert_close(master.grad.float(), parameter.grad, rtol=0.1, atol=0.05)
        assert flat is master  # no cast is kept after the forward


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [(amp.half_function, HALF), (amp.float_function, torch.float32), (amp.promote_function, torch.float32)],
    ids=["half", "float", "promote"],
)
def test_decorated_functions_run_in_their_dtype(wrap, inside):
    @wrap
    def own(x, weight):
        """Documented."""
        return x.dtype, weight.dtype, torch.mm(x, weight).dtype

    assert own.__doc__ == "Documented." and own.__name__ == "own"
    # promote leaves autocast on, so that mm itself runs in half
    product = torch.float32 if wrap is amp.float_function else HALF
    seen = call_under_o1(lambda x: (*own(x, W), torch.mm(x, W).dtype), X.to(HALF))
    assert seen == (inside, inside, product, HALF)
    assert own(X.double(), W.double()) == (torch.float64,) * 3  # outside of forward nothing is cast


def test_registered_functions_run_in_their_dtype():
    library = SimpleNamespace(mm=torch.mm)
    amp.register_float_function(library, "mm")
    assert torch.equal(call_under_o1(lambda x: library.mm(x, W), X), X @ W)
    with pytest.raises(ValueError, match="has no function 'gemm'"):
        amp.register_half_function(library, "gemm")
    amp.register_half_function(library, "mm"), amp.register_promote_function(library, "mm")
    assert not torch.equal(call_under_o1(lambda x: library.mm(x, W), X), X @ W)


@pytest.mark.parametrize("rank", [0, 1])
def test_maybe_print_obeys_rank_and_verbosity(capsys, monkeypatch, rank):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    maybe_print("every rank")
    maybe_print("rank 0", rank0=True)
    amp._amp_state.verbosity = 0
    maybe_print("nobody")
    assert capsys.readouterr().out == "every rank\n" + "rank 0\n" * (rank == 0)


def test_the_handle_of_o1_stops_its_casts():
    initialized("O2")
    assert not hasattr(amp._amp_state, "handle")
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), opt_level="O1", verbosity=0)
    copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    seen = record_forwards(model[0])
    assert amp._amp_state.handle.is_active()
    model(X)
    with amp._amp_state.handle._disable_casts():
        assert torch.mm(X, W).dtype == torch.float32
    amp._amp_state.handle._clear_cache()
    amp._amp_state.handle._is_active = False
    assert not amp._amp_state.handle.is_active()
    model(X)
    with pytest.raises(AttributeError, match="no wrap_optimizer; use amp.scale_loss"):
        amp._amp_state.handle.wrap_optimizer(None)
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X)
    assert seen == [HALF, torch.float32, HALF]


@pytest.mark.parametrize(
    ("name", "into", "given", "expected"),
    [
        ("softmax", "FP16_FUNCS", torch.float32, HALF),  # as scripts for Tacotron 2 do
        ("softmax", None, HALF, HALF),
        ("softmax", None, torch.float32, torch.float32),
        ("relu", "FP16_FUNCS", torch.float32, HALF),
        ("relu", "FP16_FUNCS", HALF, HALF),
        ("relu", "FP32_FUNCS", torch.float32, torch.float32),
        ("relu", "FP32_FUNCS", HALF, torch.float32),
    ],
    ids=str,
)
def test_functions_in_changed_lists_run_in_their_dtype(monkeypatch, name, into, given, expected):
    lists, before = amp.lists.functional_overrides, getattr(F, name)
    monkeypatch.setattr(lists, "FP32_FUNCS", [other for other in lists.FP32_FUNCS if other != name])
    if into:
        monkeypatch.setattr(lists, into, [*getattr(lists, into), name, "no_such_function"])
    seen = call_under_o1(lambda x: [getattr(F, name)(x, 0).dtype, torch.mm(x, x).dtype], X.to(given))
    assert seen == [expected, HALF] and getattr(F, name) is not before
    assert getattr(F, name)(X, 0).dtype == torch.float32  # outside of forward nothing is cast
    amp.initialize([], enabled=False)
    assert getattr(F, name) is before
    with pytest.raises(AttributeError, match="no torch_overrides; use amp.register_half_function, see docs"):
        _ = amp.lists.torch_overrides
