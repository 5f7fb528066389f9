"""fastvit.compat.apex.amp.init, whose casts are in torch's functions, its handle, and the lists of O1."""

import copy
import io

import pytest
import torch
from amp_models import HALF, data, network, start, values
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex import amp
from fastvit.compat.apex.amp import utils, wrap
from fastvit.compat.apex.amp._amp_state import maybe_print


@pytest.fixture(autouse=True)
def quiet_and_clean():
    yield
    amp.init(enabled=False)
    amp._amp_state.handle, amp._amp_state.verbosity = None, 1
    amp.initialize([], enabled=False)


def test_state():
    """Names that scripts use besides the functions."""
    assert amp._amp_state.handle is None and amp._amp_state.allow_incoming_model_not_fp32 is False
    start("O2")
    assert amp._amp_state.handle is None
    start("O1")
    assert amp._amp_state.handle.is_active()


def test_maybe_print(capsys, monkeypatch):
    maybe_print("every rank")
    amp._amp_state.verbosity = 0
    maybe_print("nobody")
    amp._amp_state.verbosity = 1
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    maybe_print("rank 0", rank0=True)
    maybe_print("every rank too")
    assert capsys.readouterr().out == "every rank\nevery rank too\n"


# init


X, W = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize("given", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda x: F.linear(x, W), HALF),
        (lambda x: x @ W.to(x.dtype), HALF),
        (lambda x: W.mm(x), HALF),
        (lambda x: F.conv1d(x[None], weight=W[:, :, None]), HALF),
        (lambda x: F.softmax(x, 0), torch.float32),
        (lambda x: F.mse_loss(x, W), torch.float32),
        (lambda x: x**2, torch.float32),
        (lambda x: 2**x, torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: torch.exp(x), torch.float32),
        (lambda x: torch.cat([x, W]), torch.float32),
        (lambda x: torch.stack((x, x)), None),
        (lambda x: torch.atan2(x, W), torch.float32),
        (lambda x: x + W, torch.float32),
        (lambda x: x.clone().addcmul_(W, W), None),
        (lambda x: F.relu(x), None),
        (lambda x: x.double() @ W.double(), HALF),
        (lambda x: nn.LSTMCell(4, 4)(x)[0], HALF),
        (lambda x: nn.GRU(4, 4)(x[None])[0], HALF),
        (lambda x: nn.RNN(4, 4)(nn.utils.rnn.pack_sequence([x]))[0].data, HALF),
    ],
)
def test_casts(function, result, given):
    handle = amp.init()
    x = X.to(given, copy=True).requires_grad_()
    y = function(x)
    assert y.dtype == (result or given)
    y.float().square().sum().backward()
    assert x.grad.dtype == given
    with amp.disable_casts():
        assert F.linear(X, W).dtype == F.softmax(X, 0).dtype == torch.float32
        assert F.softmax(X.to(HALF), 0).dtype == HALF
    handle._is_active = False
    assert F.linear(X, W).dtype == torch.float32


def test_torch_gets_its_functions_back():
    places = (torch, F, torch.Tensor, torch._VF, nn.LSTM, nn.GRU, nn.RNN)
    before = [dict(vars(place)) for place in places]
    amp.init()
    amp.init()
    assert F.linear is not before[1]["linear"]
    amp.init(enabled=False)
    for place, names in zip(places, before, strict=True):
        assert dict(vars(place)) == names
    assert F.linear(X, W).dtype == torch.float32
    assert not amp._amp_state.handle.is_active()


def test_what_half_tensors_are_refused_for():
    amp.init()
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        nn.BCELoss()(torch.rand(3, dtype=HALF), torch.rand(3))
    nn.BCELoss()(torch.rand(3), torch.rand(3))
    for write in (lambda x: x.exp_(), torch.exp_):
        write(torch.rand(3))
        with pytest.raises(NotImplementedError, match="exp_ takes no half tensors"):
            write(torch.rand(3, dtype=HALF))
    amp.init(allow_banned=True)
    assert nn.BCELoss()(torch.rand(3, dtype=HALF), torch.rand(3)).dtype == torch.float32


def test_own_functions():
    """Registered and decorated functions cast everywhere after `init`."""
    seen = []

    @amp.float_function
    def exact(x, w):
        seen.append((x.dtype, (x @ w).dtype))

    half = amp.half_function(lambda x: x.dtype)
    exact(X, W.to(HALF).float())
    assert half(X) == torch.float32
    handle = amp.init()
    exact(X.to(HALF), W)
    assert half(X) == HALF
    assert seen == [(torch.float32, torch.float32)] * 2
    handle._deactivate()
    assert half(X) == torch.float32


def test_casts_of_weights_are_kept_until_they_are_written(capsys):
    handle = amp.init(verbose=True)
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        linear(X)
    loss = linear(X).float().sum() + linear(X).float().sum()
    assert capsys.readouterr().out.count("FloatTensor -> BFloat16Tensor (linear)") == 3 + 2 + 2
    assert set(handle.cache) == {linear.weight, linear.bias}
    loss.backward()
    want = 2 * X.to(HALF).float().sum(0).expand(4, 4)
    torch.testing.assert_close(linear.weight.grad, want, rtol=2e-2, atol=5e-2)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(linear(X), linear.bias.to(HALF).expand(4, 4))
    handle.remove_cache(linear.weight)
    assert set(handle.cache) == {linear.bias}


def test_old_scripts_train(capsys):
    """`handle.scale_loss`, and an overflow that skips a step."""
    model, plain = network(), network()
    handle = amp.init()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    reference = torch.optim.SGD(plain.parameters(), 0.05)
    for seed in range(6):
        images, labels = data(seed)
        optimizer.zero_grad()
        with handle.scale_loss(F.cross_entropy(model(images), labels), optimizer) as loss:
            loss.backward()
            if seed == 3:
                next(model.parameters()).grad.fill_(float("nan"))
        before = values(model)
        optimizer.step()
        assert torch.equal(values(model), before) == (seed == 3)
        if seed != 3:
            with amp.disable_casts():
                reference.zero_grad()
                F.cross_entropy(plain(images), labels).backward()
                reference.step()
    assert "Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out
    moved = values(plain) - values(network())
    assert (values(model) - values(plain)).norm() < 0.1 * moved.norm()
    handle.wrap_optimizer(optimizer)
    with (
        pytest.raises(RuntimeError, match="use the wrapper's scale_loss"),
        handle.scale_loss(loss, optimizer),
    ):
        pass


def test_wrapped_optimizer(capsys):
    """Two losses with a scale each; the gradients of a clean iteration are their sum."""
    model = network()
    plain = copy.deepcopy(model)
    handle = amp.init(enabled=True)
    handle._is_active = False  # the casts; scales are tested here
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.05), num_loss=2)
    with optimizer.scale_loss(torch.ones(())) as loss:
        assert loss.item() == 1
    handle._is_active = True
    for overflow in (True, False):
        optimizer.zero_grad()
        for seed in range(2):
            with handle._disable_casts():
                images, labels = data(seed)
                plain_loss = F.cross_entropy(model(images), labels)
            with optimizer.scale_loss(plain_loss) as loss:
                loss.backward()
                if overflow and seed == 1:
                    next(model.parameters()).grad.fill_(float("inf"))
        if overflow:
            with pytest.raises(RuntimeError, match="num_loss=3"), optimizer.scale_loss(loss):
                pass
        before = values(model)
        with pytest.raises(NotImplementedError, match="takes no closure"):
            optimizer.step(lambda: 0)
        optimizer.step()
        assert torch.equal(values(model), before) == overflow
    assert "loss scaler 1 reducing loss scale to 32768.0" in capsys.readouterr().out
    handle._deactivate()
    sum(F.cross_entropy(plain(data(s)[0]), data(s)[1]) for s in range(2)).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.05 and "SGD" in repr(optimizer)
    assert copy.deepcopy(optimizer).state_dict() == optimizer.state_dict()


def test_disabled():
    handle = amp.init(enabled=False)
    optimizer = handle.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.5))
    loss = torch.ones(())
    with handle.scale_loss(loss, optimizer) as one, optimizer.scale_loss(loss) as two:
        assert one is two is loss
    assert optimizer.step(lambda: 3) == 3
    assert not handle.has_cache and not handle.is_active()


# O1


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        self.seen = x.dtype, F.softmax(x, 0).dtype
        return x


def test_handle_of_o1():
    model = amp.initialize(Softmax(), opt_level="O1", verbosity=0)
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
    lists = amp.lists.torch_overrides
    monkeypatch.setattr(lists, kind, [*getattr(lists, kind), "relu", "no_such_function"])
    seen = []
    model = nn.Identity()
    model.forward = lambda x: seen.extend([torch.relu(x).dtype, torch.mm(x, x).dtype]) or x
    amp.initialize(model, opt_level="O1", verbosity=0)
    model(X)
    model(X.to(HALF))
    assert seen[1::2] == [HALF] * 2
    assert seen[::2] == [HALF if kind == "FP16_FUNCS" else torch.float32] * 2


# utils and wrap, as an extension of apex uses them


def test_utils():
    assert utils.is_fp_tensor([X, (X, X)]) and not utils.is_fp_tensor([X, 1]) and not utils.is_fp_tensor("x")
    assert utils.should_cache(nn.Parameter(X)) and not utils.should_cache(X)
    assert not utils.should_cache([nn.Parameter(X), nn.Parameter(X.half())])
    assert utils.type_string(X.half()) == "HalfTensor"
    assert utils.collect_fp_tensor_types([X, 1], {"a": [X.half(), X.double()]}) == {
        "FloatTensor",
        "HalfTensor",
        "DoubleTensor",
    }
    options = {"a": X, "n": 3}
    args = utils.casted_args(utils.maybe_half, [X, "s", (X, X)], options)
    assert args[0].dtype == args[2][1].dtype == options["a"].dtype == HALF
    assert args[1] == "s" and options["n"] == 3
    assert list(utils.as_inplace(["exp"])) == ["exp_"] and utils.is_cuda_enabled() == bool(torch.version.cuda)
    assert utils.get_cuda_version() == tuple(int(n) for n in (torch.version.cuda or "").split(".") if n)


def test_wrap():
    class Library:
        scale = staticmethod(lambda x, y=None: x)

    table = {"join": lambda x, y: (x.dtype, y.dtype)}
    handle = amp._amp_state.handle = amp.init()
    own = Library.__dict__["scale"]
    wrap.cached_cast(Library, "scale", utils.maybe_half, handle, verbose=False)
    wrap.cached_cast(Library, "not_there", utils.maybe_half, handle)
    wrap.promote(table, "join", handle)
    assert Library.scale(X).dtype == HALF
    assert table["join"](X, X.half()) == (torch.float32,) * 2
    assert table["join"](X.half(), X.half()) == (torch.float16,) * 2
    assert table["join"](X.half(), X.double()) == (torch.float16, torch.float64)
    wrap.disable_casts(table, "join", handle)
    assert table["join"](X, X.half()) == (torch.float32, torch.float16)
    handle._deactivate()
    assert Library.scale(X) is X and Library.scale is own.__func__
    assert table["join"](X, X.half()) == (torch.float32, torch.float16)
