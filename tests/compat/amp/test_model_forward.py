"""fastvit.compat.apex.amp: what a model is after `initialize`, what goes in and comes out, and the iterables
of `initialize`.
"""

import collections
import copy
import dataclasses
import inspect
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compat.amp.models import draw_batch, initialized, loss_of, make_network, scaled_backward
from fastvit.compat.apex import amp
from fastvit.compat.apex.amp.forward import cast_floating

pytestmark = pytest.mark.usefixtures("amp_off")
X = torch.linspace(-1, 1, 8).view(2, 4)


class Registered(nn.Module):
    """A class that subclasses must give a name."""

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tag = tag


class Own(Registered, tag="own"):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, scale: float = 1.0):
        return self.last(torch.relu(self.inside(x))) * scale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_keeps_its_class_and_the_looks_of_its_forward(level):
    model, plain = initialized(level, model=Own())[0], Own()
    assert type(model) is Own and model.__class__ is Own and repr(model) == repr(plain)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(plain.forward)
    assert inspect.getsource(model.forward) == inspect.getsource(plain.forward)
    assert model.forward.__name__ == "forward"
    assert inspect.ismethod(model.forward) and model.forward.__self__ is model
    assert model.state_dict().keys() == plain.state_dict().keys()
    amp.initialize(model, enabled=False)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scripts_and_graphs_are_those_of_the_model(level):
    """torch.jit.script and torch.fx see the model without casts; a trace has them."""
    model = initialized(level, model=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))[0]
    given = X.to(next(model.parameters()).dtype)
    expected = model[2](model[1](model[0](given)))
    assert torch.equal(torch.jit.script(model)(given), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(given), expected)
    torch.jit.script(initialized(level, model=Own())[0])
    torch.testing.assert_close(torch.jit.trace(model, X)(X), model(X))


def replica_of(module):
    """As torch.nn.parallel.replicate makes one: parameters are attributes."""
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    replica._modules = {name: replica_of(child) for name, child in module.named_children()}
    for name, parameter in module._parameters.items():
        replica._former_parameters[name] = copied = parameter * 1
        setattr(replica, name, copied)
    return replica


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_pickles_and_replicas_have_a_forward_of_their_own(level):
    model = initialized(level, model=nn.Sequential(nn.LSTM(4, 4, batch_first=True)))[0]
    file, x = io.BytesIO(), torch.randn(2, 3, 4)
    torch.save(model, file)
    file.seek(0)
    replica, copied = replica_of(model), copy.deepcopy(copy.deepcopy(model))
    assert copied.forward.__self__ is copied
    replica(x)[0].sum().backward()
    assert model[0].weight_hh_l0.grad.abs().sum() > 0 and replica[0].weight_hh_l0.dtype == torch.float32
    for other in (copied, torch.load(file, weights_only=False), replica):
        assert type(other) is nn.Sequential and torch.equal(other(x)[0], model(x)[0])
        other._modules["0"] = nn.Identity()
        assert other(x).shape == x.shape and isinstance(model(x), tuple)


def test_states_with_other_names_of_the_casts_load():
    casts = amp.forward.ForwardCasts.__new__(amp.forward.ForwardCasts)
    casts.__setstate__({"options": None, "outputs": torch.float64, "running": 0, "nodes": [range(2)]})
    assert casts == amp.forward.ForwardCasts(None, torch.float64, 0, [range(2)])


class Box:
    """As of a detector's inputs: it casts all that it has."""

    def __init__(self, **fields):
        vars(self).update(fields)

    def to(self, *args):
        return Box(**{name: field.to(*args) for name, field in vars(self).items()})


class Output(dict):
    def __init__(self, y):
        super().__init__(y=y)


class Pair(collections.namedtuple("Pair", "y n")):
    @property
    def both(self):
        return self.y, self.n


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor
    n: torch.Tensor


class Items(list):
    def __init__(self, first, second):
        super().__init__((first, second))


N = torch.tensor([1])
CONTAINERS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, N),
    "list_with_dict": lambda y: [y, {"n": N}],
    "named_tuple": lambda y: Pair(y, N),
    "dict_subclass": lambda y: Output(y),
    "dict_subclass_with_list": lambda y: Output([y, N]),
    "defaultdict": lambda y: collections.defaultdict(list, y=y),
    "OrderedDict": lambda y: collections.OrderedDict(y=y, n=N),
    "UserDict": lambda y: collections.UserDict(y=y, n=N),
    "list_subclass": lambda y: Items(y, N),
    "frozen_dataclass": lambda y: Frozen(y, N),
    "object_with_to": lambda y: Box(y=y, n=N),
    "packed_sequence": lambda y: nn.utils.rnn.pack_sequence([y]),
    "result_of_sort": lambda y: torch.sort(y),
    "nested": lambda y: (y, [N, {"y": y}], "text", None),
}


def leaves(value):
    """The tensors in a value, in order."""
    found = []
    cast_floating(value, torch.float64)  # any cast leaves its argument alone
    amp.forward.map_tensors(value, lambda t: found.append(t) or t)
    return found


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_casts_keep_the_types_of_containers(make):
    value = make(X.half())
    actual = cast_floating(value, torch.float32)
    assert type(actual) is type(value) and actual is not value
    for mine, theirs in zip(leaves(actual), leaves(value), strict=True):
        expected = torch.float32 if theirs.is_floating_point() else theirs.dtype
        assert mine.dtype == expected and torch.equal(mine, theirs.to(expected))
    assert leaves(value)[0].dtype == torch.float16
    assert all(
        mine is theirs for mine, theirs in zip(leaves(actual), leaves(value), strict=True) if theirs is N
    )
    assert cast_floating(actual, torch.float32) is actual  # nothing to cast


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_inputs_and_outputs_in_containers_are_cast(level):
    """Outputs in half come back in float32, and others as they are."""

    class Takes(nn.Linear):
        def forward(self, box, *, more):
            y = super().forward(box.y) + super().forward(more["y"]) * box.n
            self.made = Output([y, N, y.double()])
            return self.made

    model, _ = initialized(level, model=Takes(4, 4))
    box = Box(y=X, n=N)
    output = model(box, more={"y": X})
    assert type(output) is Output and box.y is X
    assert [leaf.dtype for leaf in leaves(output)] == [torch.float32, torch.int64, torch.float64]
    assert level != "O0" or output is model.made


class Mixes(nn.Module):
    """Operands of both dtypes, which autocast on the CPU does not promote."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.first, self.function = nn.Linear(4, 4), function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        return self.function(self.first(x), x, *self.weights)


def write_rows(h, x):
    x = x.clone()
    x[torch.tensor([0, 1])] = h
    return x


MIXED = {
    "bilinear": Mixes(F.bilinear, (2, 4, 4), (2,)),
    "dot": Mixes(lambda h, x: torch.dot(h[0], x[0])),
    "mv": Mixes(lambda h, x, w: torch.mv(h, w), (4,)),
    "scatter_add": Mixes(lambda h, x: x.scatter_add(0, torch.zeros(2, 4, dtype=torch.int64), h)),
    "index_add_": Mixes(lambda h, x: torch.zeros(2, 4).index_add_(0, torch.tensor([0, 1]), h)),
    "setitem": Mixes(write_rows),
    "grid_sample": Mixes(
        lambda h, x: F.grid_sample(x.view(1, 1, 2, 4), h.view(1, 1, 4, 2), align_corners=False)
    ),
    "layer_norm": Mixes(lambda h, x: F.layer_norm(x, (4,), h[0])),
}


@pytest.mark.parametrize("model", MIXED.values(), ids=MIXED)
def test_operands_of_both_dtypes_are_promoted_under_o1(model):
    expected = copy.deepcopy(model)(X)
    model, optimizer = initialized("O1", model=copy.deepcopy(model))
    output = model(X)
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    scaled_backward(output.square().mean(), optimizer)
    assert model.first.weight.grad.isfinite().all()
    with pytest.raises(RuntimeError, match="size|shape"):
        initialized("O1", model=Mixes(lambda h, x: torch.dot(h[0], x[0, :2])))[0](X)


SEVERAL = {
    "values": lambda o: {"a": o}.values(),
    "generator": lambda o: (x for x in [o]),
    "set": lambda o: {o},
}


@pytest.mark.parametrize("several", SEVERAL.values(), ids=SEVERAL)
def test_optimizers_come_in_any_iterable(several):
    model, optimizer = initialized("O1")
    scaled_backward(loss_of(model), several(optimizer))
    optimizer.step()
    models, optimizers = amp.initialize(
        iter([make_network()]), several(optimizer), opt_level="O2", verbosity=0
    )
    assert models[0](draw_batch()[0]).dtype == torch.float32 and [*optimizers][0]._amp_stash
    with pytest.raises(RuntimeError, match="this dict was not given to amp.initialize"):
        with amp.scale_loss(torch.zeros(()), {"a": optimizer}):
            pass
