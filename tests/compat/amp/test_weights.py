"""fastvit.compat.apex.amp has one copy of the weights: what a script does with the weights and gradients of a
model does the same at every level as without amp.
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fastvit
from compat.amp.models import (
    HALF,
    LEVELS,
    backward,
    draw_batch,
    flat_gradients,
    flat_parameters,
    initialized,
    make_network,
    record_forwards,
    scaled_backward,
    train_step,
)
from fastvit.compat.apex import amp
from fastvit.compat.apex.fp16_utils import FP16_Optimizer

pytestmark = pytest.mark.usefixtures("amp_off")


def clips_gradients(model, optimizer, seed):
    optimizer.zero_grad()
    backward(model, optimizer, seed)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-2) > 0.1
    optimizer.step()


def drops_an_overflow(model, optimizer, seed):
    backward(model, optimizer, 100, factor=float("inf"))
    model.zero_grad(set_to_none=seed != 1)
    backward(model, optimizer, seed)
    optimizer.step()
    model.zero_grad()


def steps_by_hand(model, optimizer, seed):
    backward(model, optimizer, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
    model.zero_grad()


def perturbs_weights(model, optimizer, seed):
    """As SAM does: a gradient at weights that are put back before the step."""
    backward(model, optimizer, seed)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.data.clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.1)
    optimizer.zero_grad()
    backward(model, optimizer, seed)
    for parameter, before in zip(parameters, kept, strict=True):
        parameter.data = before
    optimizer.step()
    optimizer.zero_grad()


def replaces_a_layer(model, optimizer, seed):
    if seed == 1:
        torch.manual_seed(0)
        model[5] = nn.Linear(6 * 16, 4)
        optimizer.add_param_group({"params": model[5].parameters()})
    train_step(model, optimizer, seed)


@pytest.mark.parametrize(
    ("script", "level"),
    [
        *[(train_step, level) for level in LEVELS],
        *[(clips_gradients, "O0"), (clips_gradients, "O1")],
        *[(drops_an_overflow, "O0"), (drops_an_overflow, "O2")],
        *[(steps_by_hand, "O0"), (steps_by_hand, "O3")],
        *[(perturbs_weights, "O0"), (perturbs_weights, "O2")],
        *[(replaces_a_layer, "O0"), (replaces_a_layer, "O2")],
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_scripts_follow_float32(script, level):
    results = []
    for options in ({"enabled": False}, {"loss_scale": "dynamic"}):
        model, optimizer = initialized(level, **options)
        for seed in range(8 if script is train_step else 3):
            script(model, optimizer, seed)
        results.append(flat_parameters(model))
    plain, actual = results
    if level == "O0":  # a scale that is a power of two changes no digit
        assert torch.equal(actual, plain)
    assert not torch.equal(actual, actual.bfloat16().float())
    update = plain - flat_parameters(make_network())
    assert (actual - plain).norm() <= {"O0": 0, "O3": 0.3}.get(level, 0.1) * update.norm()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_averages_through_state_dict_keep_small_steps(level):
    """A copy averages the weights in steps that half precision would round away."""
    model, optimizer = initialized(level)
    average, before = copy.deepcopy(model), flat_parameters(model)
    train_step(model, optimizer)
    for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(mine * 0.9999 + theirs * 0.0001)
    expected = torch.lerp(before, flat_parameters(model), 1e-4)
    torch.testing.assert_close(flat_parameters(average), expected, rtol=0, atol=1e-7)
    assert not torch.equal(flat_parameters(average), before)
    for value in average.state_dict().values():
        value.zero_()
    assert not flat_parameters(average).any() and flat_parameters(model).any()
    assert not average(draw_batch()[0]).any()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_a_parameter_of_two_optimizers_is_unscaled_once(level, delay):
    model = make_network()
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    backward(model, optimizers, delay_unscale=delay)
    before = flat_parameters(model)
    if delay:
        optimizers[0].step()  # unscales, and so the second does not
        model.load_state_dict(make_network().state_dict())
    actual = flat_gradients(model)
    other, its_optimizer = initialized(level, loss_scale="dynamic")
    assert torch.equal(flat_parameters(other), before)
    backward(other, its_optimizer)
    assert torch.equal(actual, flat_gradients(other))
    optimizers[1].step()
    assert torch.equal(flat_gradients(model), actual)


@pytest.mark.parametrize(
    ("make", "level"),
    [(nn.Embedding, "O0"), (nn.Embedding, "O1"), (nn.Embedding, "O2"), (nn.EmbeddingBag, "O3")],
    ids=["Embedding-O0", "Embedding-O1", "Embedding-O2", "EmbeddingBag-O3"],
)
def test_sparse_gradients_stay_sparse(make, level):
    torch.manual_seed(0)
    plain = make(5, 4, sparse=True)
    model, optimizer = initialized(
        level, lambda p: torch.optim.SparseAdam(list(p), 0.1), copy.deepcopy(plain), loss_scale="dynamic"
    )
    reference = torch.optim.SparseAdam(list(plain.parameters()), 0.1)
    for indices in (torch.tensor([[1, 2], [2, 2]]), torch.tensor([[2, 4], [0, 1]])):
        for _ in range(2):
            plain(indices).square().sum().backward()
            scaled_backward(model(indices).square().sum(), optimizer)
        assert model.weight.grad.is_sparse
        reference.step(), optimizer.step()
        reference.zero_grad(), optimizer.zero_grad()
    torch.testing.assert_close(model.weight, plain.weight, rtol=0.02, atol=0.02)


class Blocks(nn.Module):
    """A checkpointed embedding and block, with a parameter of its own, tied weights and a sum of them."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
        self.block.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def run(self, function, *args):
        if self.reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def first_half(self, x):
        return self.block[0](x) * self.block[1](x)

    def forward(self, indices):
        x = self.run(self.embed, indices).clone().requires_grad_()
        x = x + self.run(self.block, x)
        x = x + self.run(self.first_half, x) * self.block.scale
        return self.head(x)


@pytest.mark.parametrize(("level", "reentrant"), [("O2", False), ("O3", True)])
def test_checkpoints_in_a_model_run_again_with_the_same_results(level, reentrant):
    """A block runs once more in backward, outside of the model's forward."""
    results = []
    for option in (None, reentrant):
        model, optimizer = initialized(level, model=Blocks(option), loss_scale=128.0)
        scaled_backward(model(torch.tensor([[1, 2, 5]])).square().mean(), optimizer)
        if reentrant:  # which has no gradient for what takes only indices
            model.embed.weight.grad = None
        results.append([None if p.grad is None else p.grad for p in model.parameters()])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    for mine, theirs in zip(*results, strict=True):
        assert mine is theirs is None or (mine - theirs).norm() < 0.01 * mine.norm()


def child(model, run, x):
    return run(model.block, x)


def nested_child(model, run, x):
    return model.block[3](run(model.block[0], x))


def sequence_of_parts(model, run, x):
    if run is plainly:
        return model.block(x)
    return checkpoint_sequential(model.block, 2, x, use_reentrant=run.keywords["use_reentrant"])


def function_of_parts(model, run, x):
    return run(lambda x: model.block[3](model.block[0](x).tanh()), x)


def indices(model, run, x):
    """A part without an input that has a dtype to tell by."""
    return run(lambda x: model.embed(torch.tensor([1, 2])) * x, x)


def also_in_the_model(model, run, x):
    """The same parts run both ways, and the model's last, before one backward."""
    y = function_of_parts(model, run, x) + indices(model, run, x)
    return y.square().mean() + model(torch.tensor([[1, 2, 5]])).square().mean()


def plainly(function, *args):
    return function(*args)


@pytest.mark.parametrize(
    ("called", "level", "dtype", "reentrant"),
    [
        (child, "O2", torch.float32, True),
        (child, "O2", HALF, False),
        (nested_child, "O3", HALF, True),
        (sequence_of_parts, "O2", torch.float32, True),
        (sequence_of_parts, "O3", HALF, False),
        (function_of_parts, "O3", torch.float32, False),
        (function_of_parts, "O2", HALF, True),
        (indices, "O2", torch.float32, True),
        (indices, "O2", HALF, False),
        (also_in_the_model, "O2", torch.float32, False),
        (also_in_the_model, "O2", HALF, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_part_under_a_checkpoint_of_the_script_runs_again_as_it_ran(called, dtype, reentrant, level):
    """The gradients are those without the checkpoint, whatever the input's type."""
    results = []
    for run in (plainly, functools.partial(checkpoint, use_reentrant=reentrant)):
        model, optimizer = initialized(
            level, model=Blocks(None if run is plainly else False), loss_scale=128.0
        )
        x = torch.linspace(-1, 1, 8).view(2, 4).to(dtype).requires_grad_()
        output = called(model, run, x)
        assert called is also_in_the_model or output.dtype == (torch.float32 if called is indices else dtype)
        scaled_backward(output.float().square().mean(), optimizer)
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert any(gradient is not None for gradient in results[0][1:])
    for mine, theirs in zip(*results, strict=True):
        assert (mine is theirs is None) or torch.equal(mine, theirs)


def test_a_part_that_is_called_alone_has_the_dtype_of_its_input():
    model, _ = initialized("O2", model=Blocks(None))
    for dtype in (torch.float32, HALF):
        x = torch.randn(2, 4, dtype=dtype)
        assert model.block(x).dtype == model.head(x).dtype == dtype
    saved = copy.deepcopy(model.block)
    assert saved(x).dtype == HALF and saved[0].weight.dtype == torch.float32
    amp.initialize(model, enabled=False)
    assert not any("forward" in vars(module) for module in model.modules())


class Writes(nn.Module):
    """Its forward writes a weight, a buffer in place, and a buffer by assignment."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("mean", torch.full((4,), 1 / 3))
        self.register_buffer("dropped", torch.tensor([1 / 3]), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("index", torch.arange(3))

    def forward(self, x):
        if self.training:
            self.linear.weight.data.clamp_(-0.25, 0.25)
            with torch.no_grad():
                self.linear.bias.fill_(0.5)
        self.counts[1:] += 1
        self.mean = self.mean * 0.5
        return self.linear(x)


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_what_a_forward_writes_is_kept(level):
    model, optimizer = initialized(level, model=Writes())
    seen = record_forwards(
        model.linear, lambda *_: [t.dtype for t in (model.mean, model.dropped, model.index)]
    )
    unclamped = model.linear.weight.detach().clone()
    model(torch.ones(2, 4))
    assert torch.equal(model.linear.bias, torch.full((4,), 0.5))
    assert torch.equal(model.linear.weight, unclamped.clamp(-0.25, 0.25))  # with all other digits
    model.eval()(torch.ones(2, 4))
    inside = HALF if level in ("O2", "O3") else torch.float32
    assert seen == [[inside, inside, torch.int64]] * 2 and model.index.tolist() == [0, 1, 2]
    assert model.counts.tolist() == [0, 2, 2, 2] and model.dropped.item() == torch.tensor(1 / 3).item()
    torch.testing.assert_close(model.mean, torch.full((4,), 1 / 12), rtol=0.01, atol=0)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    assert model.linear.weight is next(iter(amp.master_params(optimizer)))


def test_spectral_norm_and_pruning_after_initialize_keep_their_buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    model, optimizer = initialized("O2", model=model)
    prune.l1_unstructured(model[1], "weight", 2)
    before = model[0].weight_u.clone()
    scaled_backward(model(torch.randn(2, 4)).square().mean(), optimizer)
    assert not torch.equal(model[0].weight_u, before) and model[0].weight_u.dtype == torch.float32
    assert (model[1].weight_orig.grad == 0).sum() == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_casts_keep_gradients_under_convert_compile_and_a_second_derivative(level):
    images, labels = draw_batch()

    def trained(prepare=lambda model: model):
        model, optimizer = initialized(level)
        called = prepare(model) or model
        scaled_backward(F.cross_entropy(called(images), labels), optimizer)
        return flat_gradients(model)

    expected = trained()
    for casts in (False, True):
        assert torch.equal(
            trained(lambda m, casts=casts: fastvit.convert(m, recompute_weight_casts=casts)), expected
        )
    torch.testing.assert_close(
        trained(lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)),
        expected,
        rtol=0.05,
        atol=0.01,
    )
    model, optimizer = initialized(level, model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.ones(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    scaled_backward((slope.norm(dim=1) - 1).square().mean(), optimizer)
    assert model[0].weight.grad.abs().sum() > 0
    with torch.inference_mode():
        assert model.eval()(x).dtype == torch.float32


def test_script_modules_are_refused_where_weights_are_cast():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match="script the model after amp.initialize"):
        initialized("O2", model=model)
    assert initialized("O1", model=model)[0](torch.ones(1, 4)).dtype == torch.float32


def test_fp16_optimizer_follows_what_a_script_clips_drops_and_writes():
    """Gradients are clipped and dropped as the model's. Masters follow what a script writes, and keep the
    digits of the others.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2).half(), torch.ones(2, 4).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.1), static_loss_scale=1024.0)
    optimizer.backward(100 * model(x).float().square().mean())
    model.zero_grad()
    optimizer.backward(model(x).float().square().mean())
    plain = nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    plain(x.float()).square().mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, expected, rtol=0.01, atol=0)
    before = flat_parameters(model)
    optimizer.step()
    masters = torch.cat([m.flatten() for m in optimizer.state_dict()["fp32_from_fp16"][0]])
    assert (masters - before).norm().item() == pytest.approx(0.001, rel=1e-3)
    optimizer.zero_grad()
    for written in (0.25, 0.125):
        model.weight.data[0].fill_(written)
        kept = optimizer.state_dict()["fp32_from_fp16"][0][0][1].clone()
        optimizer.backward(1e-3 * model(x)[:, 1].float().mean())
        optimizer.step()
        optimizer.zero_grad()
        assert (model.weight[0] == written).all() and model.weight.dtype == torch.float16
        master = optimizer.state_dict()["fp32_from_fp16"][0][0]
        assert (master[0] == written).all()
        torch.testing.assert_close(master[1], kept - 1e-4, rtol=0, atol=1e-7)
