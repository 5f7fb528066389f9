"""fastvit.convert and verify restore a model after their trial runs."""

import copy
import random
import threading
import types

import pytest
import torch
from convert_models import Plain, conv, images, spread
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fastvit
from fastvit.conversion.untouched import untouched
from fastvit.memory import live_bytes

CALLS = []
COUNT = 0


class Counter:
    __slots__ = ("seen", "total")

    def __init__(self):
        self.total, self.seen = 0, []

    def __call__(self, *_):
        self.total += 1
        self.seen.append(self.total)


class Restless(nn.Module):
    """A forward with all kinds of side effects."""

    shared_cache = {}
    shared_count = 0

    def __init__(self):
        super().__init__()
        self.net = spread(Plain())
        self.momentum = copy.deepcopy(self.net)
        self.register_buffer("queue", torch.zeros(8, 16))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("view", torch.arange(4).expand(2, 4))
        self.register_buffer("replaced", torch.zeros(3))
        self.calls, self.history, self.caches = 0, [], {"deep": [{}]}
        self.counter, self.space = Counter(), types.SimpleNamespace(count=0)
        self.generator, self.python = torch.Generator(), random.Random(0)
        self.kept = torch.zeros(3)
        self.hidden = [nn.BatchNorm2d(8)]

    def forward(self, x):
        with torch.no_grad():
            for key, query in zip(self.momentum.parameters(), self.net.parameters(), strict=True):
                key.data.mul_(0.9).add_(query.data, alpha=0.1)
                key.requires_grad_(False)
            self.momentum.head.weight.data = self.momentum.head.weight.data * 2
        self.calls += 1
        self.history.append(self.calls)
        self.caches["deep"][0][self.calls] = self.training
        self.added = "new"
        self.counter()
        self.space.count += 1
        self.shared_cache[self.calls] = 1
        type(self).shared_count += 1
        self.kept += 1
        self.replaced = self.replaced + 1
        self.pointer[0] += 3
        torch.rand(1, generator=self.generator), self.python.random()
        torch.rand(1), random.random()
        self.net.head.weight.grad = torch.ones_like(self.net.head.weight)
        x = self.hidden[0](self.net(x))
        i = int(self.pointer)
        self.queue[:, i] = x.detach().mean((0, 2, 3))
        return x


def values(held):
    """The state of a model as plain values."""
    if isinstance(held, torch.Tensor):
        return held.tolist(), held.requires_grad, values(held.grad) if held.is_leaf else None
    if isinstance(held, torch.Generator):
        return held.get_state().tolist()
    if isinstance(held, random.Random):
        return held.getstate()
    if isinstance(held, dict):
        return {name: values(value) for name, value in held.items()}
    if isinstance(held, (list, tuple)):
        return [values(value) for value in held]
    if isinstance(held, Counter):
        return held.total, list(held.seen)
    if isinstance(held, (nn.Module, types.SimpleNamespace)):
        return type(held).__name__, values(vars(held))
    return held


def everything(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "held": values(fastvit.revert(model)),
        "class": (dict(Restless.shared_cache), Restless.shared_count),
        "identities": {name: (id(t), t.data_ptr()) for name, t in tensors.items()},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "hooks": (list(CALLS), COUNT),
    }


WAYS = {
    "example": lambda model: fastvit.convert(model, example_inputs=images()),
    "no example": fastvit.convert,
    "evaluation": lambda model: fastvit.convert(model.eval(), example_inputs=images()),
    "verify": lambda model: fastvit.verify(model, images(), dtype=None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_what_it_was(way):
    inputs, state = images(), torch.get_rng_state()  # drawn before, which is not the model's doing
    model = Restless()
    if way == "evaluation":
        model.eval()
    model.net.conv1.weight.grad = torch.ones_like(model.net.conv1.weight)
    closed = []

    def count(*_):
        global COUNT
        COUNT += 1
        CALLS.append(1)
        closed.append(1)

    model.net.head.register_forward_hook(count)
    model.net.act1.register_forward_pre_hook(Counter())
    torch.set_rng_state(state)
    before = everything(model)
    torch.manual_seed(3)  # what the examples are made by is not compared
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "images", lambda: inputs)
        state = torch.get_rng_state()
        WAYS[way](model)
        assert torch.equal(torch.get_rng_state(), state)
    after = everything(model)
    for what in before.keys() - {"random"}:
        assert after[what] == before[what], what
    assert after["random"][1] == before["random"][1] and not closed


def test_numpy_is_drawn_from_in_vain():
    numpy = pytest.importorskip("numpy")

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.anchors, self.own = Plain(), numpy.zeros(3), numpy.random.default_rng(0)

        def forward(self, x):
            self.anchors += numpy.random.rand()
            return self.net(x) * self.own.random()

    model = Draws()
    state, own = numpy.random.get_state()[1].tolist(), copy.deepcopy(model.own)
    fastvit.convert(model, example_inputs=images())
    assert numpy.random.get_state()[1].tolist() == state and model.anchors.tolist() == [0, 0, 0]
    assert model.own.random() == own.random()


def test_a_model_that_cannot_be_copied():
    model = Restless()
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(model)
    before = {name: b.clone() for name, b in model.named_buffers()}
    _, report = fastvit.convert(model, example_inputs=images())
    assert report.saved_bytes > 0 and model.calls == 0
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_it_is_put_back_after_an_error():
    class Fails(Restless):
        def forward(self, x):
            super().forward(x)
            raise KeyError("as always")

    model = Fails()
    before = everything(model)
    with pytest.raises(KeyError, match="as always"):
        fastvit.convert(model, example_inputs=images())
    assert everything(model)["held"] == before["held"]


def test_a_lazy_layer_is_still_lazy():
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    fastvit.convert(model, example_inputs=images())
    assert type(model[0]) is nn.LazyConv2d and model[0].has_uninitialized_params()
    assert model(images()).shape == (4, 8, 4, 4) and type(model[0]) is nn.Conv2d


def test_the_inputs_are_what_they_were():
    class Overwrites(Plain):
        def forward(self, x):
            return super().forward(x.mul_(2))

    x = images()
    before = x.clone()
    fastvit.convert(Overwrites(), example_inputs=x)
    assert torch.equal(x, before)


class CachesInEvaluation(nn.Module):
    """As in attention with relative positions: a lookup is cached until training continues."""

    def __init__(self):
        super().__init__()
        self.net, self.bias, self.cache = Plain(), nn.Parameter(torch.randn(8, 1, 1)), {}

    def forward(self, x):
        if self.training:
            return self.net(x) + self.bias
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias * 1
        return self.net(x) + self.cache["bias"]


def test_no_cache_is_left_of_weights_that_may_change():
    model, later = CachesInEvaluation(), CachesInEvaluation()
    fastvit.convert(model, example_inputs=images())
    model.load_state_dict(later.state_dict())
    x = images()
    torch.testing.assert_close(model.eval()(x), later.eval()(x), rtol=1e-4, atol=1e-5)


def test_parameters_are_copied_only_when_something_writes_to_them():
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1000))
    size = sum(p.nbytes for p in model.parameters())
    guard = untouched(model)
    taken, _ = live_bytes(guard.__enter__)
    assert taken < size / 50
    taken, _ = live_bytes(lambda: model(torch.ones(2, 1000)).sum().backward())
    model[0].weight.data.zero_()
    guard.__exit__(None, None, None)
    assert model[0].weight.abs().sum() > 0 and model[0].weight.grad is None


def test_the_model_as_it_was_is_run_without_keeping_anything():
    alive = []  # of the outputs of 24 layers, at the end of each forward

    class Looks(nn.Sequential):
        def forward(self, x):
            made = []
            for layer in self:
                x = layer(x)
                if isinstance(x, torch.Tensor):  # and no stand-in of a tracer
                    made.append(StorageWeakRef(x.untyped_storage()))
            if made:
                alive.append(sum(not reference.expired() for reference in made))
            return x

    fastvit.convert(
        Looks(*(m for _ in range(8) for m in (conv(), nn.BatchNorm2d(8), nn.SiLU()))), example_inputs=images()
    )
    assert alive[0] == 1 and 8 <= alive[-1] < 24  # as it was, and converted


def test_verify_draws_the_same_python_numbers_twice():
    class Draws(Plain):
        def forward(self, x):
            return super().forward(x) * random.random()

    random.seed(0)
    state = random.getstate()
    assert fastvit.verify(Draws(), images()) and random.getstate() == state


def test_casts_of_weights_are_not_what_a_conversion_saves():
    """Autocast caches them until its region ends."""
    model, x, kept = Plain(), images(), []
    with torch.autocast("cpu", torch.bfloat16):
        other, report = fastvit.convert(copy.deepcopy(model), example_inputs=x)
        other(x).float().sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    for net in (model, other):
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(live_bytes(lambda net=net: net(x))[0])
    assert report.saved_bytes == pytest.approx(kept[0] - kept[1], rel=0.05)


def _converts_alone(rank, world):
    net = nn.Sequential(conv(), fastvit.SyncBatchNorm(8), nn.SiLU(), conv(), nn.SyncBatchNorm(8), nn.GELU())
    if rank == 0:
        _, report = fastvit.convert(net, example_inputs=images())
        assert report.measured_bytes > 0, report


def test_no_rank_waits_for_another_that_does_not_convert(ranks):
    ranks.run(2, _converts_alone)
