"""fastvit.compat.apex.amp: the dtypes of each level, and results against float32 torch."""

import copy
import platform

import pytest
import torch
from amp_models import HALF, LEVELS, data, loss_of, network, start, step, values
from torch import nn
from torch.nn import functional as F

from fastvit.compat.apex import amp
from fastvit.compat.apex.amp import forward


@pytest.fixture(autouse=True)
def quiet_and_clean():
    yield
    amp.initialize([], enabled=False)


# The dtypes of each level


@pytest.mark.parametrize(
    ("level", "conv", "norm", "inside"),
    [
        ("O0", torch.float32, torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32, HALF),
        ("O2", HALF, torch.float32, HALF),
        ("O3", HALF, HALF, HALF),
    ],
)
def test_levels(level, conv, norm, inside):
    model, optimizer = start(level)
    seen = {}
    for index, layer in enumerate(model):
        layer.register_forward_hook(
            lambda module, args, output, index=index: seen.update(
                {index: {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()}}
            )
        )
    model[4].register_forward_hook(lambda module, args, output: seen.update(output=output.dtype))
    output = model(data()[0])
    assert output.dtype == torch.float32 and seen["output"] == inside
    assert seen[0] == {conv} and seen[1] == seen[3] == {norm}
    at_rest = [*model.parameters(), *model.buffers(), *amp.master_params(optimizer)]
    assert {t.dtype for t in at_rest if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_training_follows_float32(level):
    plain = network()
    reference = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
    model, optimizer = start(level, loss_scale="dynamic")
    for seed in range(8):
        reference.zero_grad()
        loss_of(plain, seed).backward()
        reference.step()
        step(model, optimizer, seed)
    if level == "O0":  # a scale that is a power of two changes no digit
        assert torch.equal(values(model), values(plain))
    for stepped, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert stepped is parameter
    assert not torch.equal(values(model), values(model).bfloat16().float())
    moved = (values(plain) - values(network())).norm()
    assert (values(model) - values(plain)).norm() < {"O0": 0, "O3": 0.3}.get(level, 0.1) * moved + 1e-12


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_cast_model_type(level):
    model, _ = start(level, cast_model_type=torch.float16)
    seen = []
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model[0].register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    model(data()[0])
    assert seen == [torch.float16 if level == "O2" else torch.float32, torch.float16]


def dtype_in_forward(layer, level, **options):
    model, _ = start(level, **options)
    seen = []
    model[layer].register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    model(data()[0])
    return seen[0]


def test_half_on_the_cpu_is_said_once_and_chosen_by_the_environment(monkeypatch):
    forward.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="half precision is bfloat16; FASTVIT_HALF=float16") as caught:
        assert forward.half_type("cpu") is forward.half_type("cpu") is HALF
    slow = "20 to 30 times slower than O0" in str(caught[0].message)
    has_instructions = torch.cpu._is_avx512_bf16_supported() or platform.machine() not in ("x86_64", "AMD64")
    assert len(caught) == 1 and slow is not has_instructions
    monkeypatch.setenv("FASTVIT_HALF", "float16")
    assert dtype_in_forward(0, "O2") == forward.half_type("cpu") == torch.float16


def test_overrides():
    assert dtype_in_forward(3, "O2", keep_batchnorm_fp32="False") == HALF
    assert dtype_in_forward(3, "O3", keep_batchnorm_fp32=True) == torch.float32
    assert {p.dtype for p in start("O2", master_weights=False)[0].parameters()} == {torch.float32}
    assert start("O1", cast_model_outputs=torch.float64)[0](data()[0]).dtype == torch.float64
    plain = network()(data()[0])
    assert torch.equal(start("O1", patch_torch_functions=False)[0](data()[0]), plain)
    assert not torch.equal(start("O1")[0](data()[0]), plain)
    assert dtype_in_forward(0, "O2", cast_model_type=False) == torch.float32
    assert amp.initialize(network(), opt_level="O1", loss_scale="128.0", verbosity=0) is not None
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "02"}, RuntimeError, "opt_level takes 'O0', 'O1', 'O2' or 'O3', got '02'"),
        ({"opt_level": "O1", "master_weights": True}, RuntimeError, "master_weights has no effect under O1"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32 has no effect"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "patch_torch_functions=True"),
        (
            {"keep_batchnorm_fp32": "yes", "opt_level": "O2"},
            ValueError,
            "takes True, False or None, got 'yes'",
        ),
        ({"loss_scale": "static"}, ValueError, "loss_scale takes 'dynamic' or a number above 0"),
        ({"loss_scale": 0}, ValueError, "loss_scale takes 'dynamic' or a number above 0"),
        ({"cast_model_type": torch.int8}, ValueError, "cast_model_type takes a floating-point dtype"),
        ({"min_loss_scale": 2.0**30}, ValueError, "min_loss_scale"),
    ],
)
def test_contradictions_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        amp.initialize(network(), verbosity=0, **options)


def test_wrong_models_and_optimizers():
    with pytest.raises(RuntimeError, match="parameter 0.weight is torch.bfloat16; a float32 model expected"):
        amp.initialize(network().bfloat16(), verbosity=0)
    with pytest.raises(TypeError, match="models takes one torch.nn.Module or a list, got function"):
        amp.initialize(F.relu, verbosity=0)
    with pytest.raises(TypeError, match="optimizers takes one torch.optim.Optimizer or a list, got dict"):
        amp.initialize(network(), {}, verbosity=0)
    model, optimizer = start("O1")
    with pytest.raises(RuntimeError, match="loss_id 1 needs amp.initialize"), amp.scale_loss(0, optimizer, 1):
        pass
    with pytest.raises(RuntimeError, match="SGD was not given to amp.initialize"):
        step(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="optimizer.step takes no closure"):
        optimizer.step(lambda: 0.0)


def test_disabled():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    loss = torch.ones((), dtype=torch.float16)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {}
    step(model, optimizer)
    assert type(model) is nn.Sequential


def test_loss_is_scaled_in_float32():
    _, optimizer = start("O1")
    with amp.scale_loss(torch.tensor(3.0, dtype=torch.float16, requires_grad=True), optimizer) as scaled:
        assert scaled.item() == 3 * 2.0**16


# Functions of the user


class UsesOwn(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    ("wrap", "inside"),
    [(amp.half_function, HALF), (amp.float_function, torch.float32), (amp.promote_function, torch.float32)],
)
def test_functions(wrap, inside):
    seen = []

    @wrap
    def own(x, weight):
        """Documented."""
        product = torch.mm(x, weight)
        seen.append((x.dtype, weight.dtype, product.dtype))
        return product

    assert own.__doc__ == "Documented." and own.__name__ == "own"
    model = amp.initialize(UsesOwn(own), opt_level="O1", verbosity=0)
    assert model(torch.randn(2, 4, dtype=HALF)).dtype == torch.float32
    # promote leaves autocast on, so that mm itself runs in half
    assert seen == [(inside, inside, torch.float32 if wrap is amp.float_function else HALF)]
    own(torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64))
    assert seen[1] == (torch.float64,) * 3  # outside of forward nothing is cast


def test_register_functions():
    from types import SimpleNamespace

    library = SimpleNamespace(mm=torch.mm)
    amp.register_float_function(library, "mm")
    model = amp.initialize(UsesOwn(lambda x, w: library.mm(x, w)), opt_level="O1", verbosity=0)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), x @ model.weight)
    with pytest.raises(ValueError, match="no function named gemm"):
        amp.register_half_function(library, "gemm")
    amp.register_half_function(library, "mm"), amp.register_promote_function(library, "mm")
    assert torch.equal(model(x), x @ model.weight) is False


def test_disable_casts():
    seen = []

    def own(x, weight):
        with amp.disable_casts():
            seen.append(torch.mm(x, weight).dtype)
        seen.append(torch.mm(x, weight).dtype)
        return x

    amp.initialize(UsesOwn(own), opt_level="O1", verbosity=0)(torch.randn(2, 4))
    assert seen == [torch.float32, HALF]


# The casts of O1


@pytest.mark.parametrize("given", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda x, w: F.linear(x, w), HALF),
        (lambda x, w: torch.mm(x, w), HALF),
        (lambda x, w: x @ w, HALF),
        (lambda x, w: F.conv1d(x[None], w[:, :, None].transpose(0, 1)), HALF),
        (lambda x, w: F.mse_loss(x, w.to(x.dtype)), torch.float32),
        (lambda x, w: x.prod(), torch.float32),
        (lambda x, w: torch.cat([x, w]), torch.float32),  # the widest of both
        (lambda x, w: x + w, torch.float32),
        (lambda x, w: x.relu(), None),  # as it came
    ],
)
def test_casts_of_functions(function, result, given):
    seen = []

    def own(x, w):
        seen.append(function(x, w).dtype)
        return x

    model = amp.initialize(UsesOwn(own), opt_level="O1", verbosity=0)
    model(torch.randn(4, 4, dtype=given))
    assert seen == [result or given]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_networks(kind, level):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0][:, -1]

    torch.manual_seed(0)
    plain, x = Last(), torch.randn(5, 6, 3)
    plain(x).square().sum().backward()
    if level == "O1":
        try:
            with torch.autocast("cpu", HALF):
                plain(x)
        except RuntimeError as error:
            pytest.skip(f"torch's own autocast fails on this CPU: {error}")
    model = copy.deepcopy(plain)
    model, optimizer = start(level, model=model, loss_scale="dynamic")
    optimizer.zero_grad()
    with amp.scale_loss(model(x).square().sum(), optimizer) as scaled:
        scaled.backward()
    for master, parameter in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(master.grad.float(), parameter.grad, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled(level):
    """The casts are part of the graph."""
    images, _ = data()
    want = start(level)[0](images)
    compiled = torch.compile(start(level)[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(images), want)
