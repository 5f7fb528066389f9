"""Converted models: copied, checkpointed, called with other arguments, compiled, exported, distributed."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from convert_models import Plain, assert_same, conv, images, spread, trained
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fastvit


@pytest.fixture
def pair():
    """A model in float64 and its converted copy."""
    model = spread(Plain()).double()
    converted, _ = fastvit.convert(copy.deepcopy(model))
    return model, converted


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy of a pickle": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how, pair):
    model, converted = pair
    copied = COPIES[how](converted)
    x = images().double()
    assert isinstance(copied.bn1, fastvit.BatchNormAct) and isinstance(copied, Plain)
    assert live_outputs(copied, x) == live_outputs(converted, x)
    assert_same(trained(copied, x), trained(model, x))
    assert type(fastvit.revert(copied)) is Plain and isinstance(converted.bn1, fastvit.BatchNormAct)


def live_outputs(model, x):
    """The bytes of the tensors that a forward saves for backward, each storage once."""
    storages, seen = {}, set()
    out = model(x)
    functions = [out.grad_fn]
    while functions:
        function = functions.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for name in dir(function):
            if name.startswith("_raw_saved_"):
                saved = getattr(function, name)
                # packed objects are read without unpacking, which would rebuild tensors
                for one in saved if isinstance(saved, (tuple, list)) else [saved]:
                    value = one.data if hasattr(one, "data") else one
                    tensor = getattr(value, "tensor", value)
                    if isinstance(tensor, torch.Tensor):
                        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        functions += [after for after, _ in function.next_functions]
    return sum(storages.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.tail = Plain(), Plain(nn.LeakyReLU)

        def forward(self, x):
            return self.tail(checkpoint(self.body, x, use_reentrant=reentrant))

    model = spread(Checkpointed()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert len(report.converted) == 6
    x = images().double().requires_grad_()
    assert_same(trained(converted, x), trained(model, x))


def test_an_exception_closes_the_scope(pair):
    _, converted = pair
    with pytest.raises(RuntimeError):
        converted(torch.randn(2, 5, 6, 6).double())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert converted.bn1(images().double()).grad_fn is not None


class OwnNames(Plain):
    """A method with a common name."""

    def _forward(self, x):
        return super().forward(x)

    def forward(self, x):
        return self._forward(x)


def test_a_model_keeps_its_methods():
    model = spread(OwnNames()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert len(report.converted) == 3
    x = images().double()
    assert_same(trained(converted, x), trained(model, x))


def test_outside_the_traced_forward_a_layer_is_what_it_was(pair):
    model, converted = pair
    x = images().double()
    assert torch.equal(converted.bn1(x), model.bn1(x))
    assert torch.equal(converted.act1(x), model.act1(x))


class Optional(Plain):
    """Returns intermediate tensors on request; the traced call does not request them."""

    def forward(self, x, between=False):
        z = self.bn1(self.conv1(x))
        y = self.head(self.act1(z))
        return (y, z) if between else y


@pytest.mark.parametrize("call", [lambda m, x: m(x, True), lambda m, x: m(x, between=True)])
def test_a_call_with_other_arguments_is_not_the_one_that_was_traced(call):
    model = spread(Optional()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert report["bn1"].mode == "recompute"
    x = images().double()
    for want, got in zip(call(model, x), call(converted, x), strict=True):
        assert torch.equal(want, got)
    torch.testing.assert_close(converted(x, False), model(x))


def test_modules_that_were_replaced_after_the_conversion(pair):
    model, converted = pair
    x = images().double()
    for changed in (model, converted):
        changed.act1 = nn.Tanh()
    assert_same(trained(converted, x), trained(model, x))


def test_modules_that_were_replaced_are_not_kept(pair):
    _, converted = pair
    replaced = [weakref.ref(module) for module in (converted.act1, converted.bn2, converted.head)]
    converted.act1, converted.bn2, converted.head = nn.Tanh(), nn.Identity(), nn.Identity()
    converted(images().double())
    gc.collect()  # what tracing left behind
    assert [reference() for reference in replaced] == [None] * 3


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("which", ["bn1", "conv1", "model"])
@pytest.mark.parametrize("ends", ["reverted", "removed"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrised(when, ends, which):
    """torch's parametrize changes classes too, before the conversion or after it."""
    model = spread(Plain()).double()
    model.weight = nn.Parameter(torch.ones(8).double())
    converted, x = copy.deepcopy(model), images().double()
    for changed in (model, converted):
        if when == "after" and changed is converted:
            fastvit.convert(changed)
        module = changed if which == "model" else getattr(changed, which)
        parametrize.register_parametrization(module, "weight", Halved())
        if when == "before" and changed is converted:
            fastvit.convert(changed)
    if when == "before":
        assert isinstance(converted.bn1, fastvit.BatchNormAct)
    assert_same(trained(converted, x), trained(model, x))
    module = converted if which == "model" else getattr(converted, which)
    if ends == "reverted":
        fastvit.revert(converted)
        assert parametrize.is_parametrized(module)
        assert [type(m).__name__ for m in converted.modules()] == [type(m).__name__ for m in model.modules()]
        assert_same(trained(converted, x), trained(model, x))
    parametrize.remove_parametrizations(module, "weight")
    parametrize.remove_parametrizations(model if which == "model" else getattr(model, which), "weight")
    assert_same(trained(converted, x), trained(model, x))
    fastvit.revert(converted)
    assert [type(m) for m in converted.modules()] == [type(m) for m in model.modules()]


def test_a_global_hook_sees_what_it_saw(pair):
    model, converted = pair
    x, seen = images().double(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, _, out: seen.append(out.detach()))
    try:
        model(x)
        converted(x)
    finally:
        handle.remove()
    for want, got in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unusual_models():
    block = [conv(), nn.BatchNorm2d(8), nn.SiLU(), conv()]
    weighed = nn.utils.parametrizations.weight_norm(conv())
    models = {
        "script inside": nn.Sequential(torch.jit.script(nn.Sequential(*copy.deepcopy(block))), *block),
        "graph module inside": nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(*copy.deepcopy(block)))),
        "parametrised": nn.Sequential(weighed, *copy.deepcopy(block[1:])),
        "data parallel": nn.DataParallel(nn.Sequential(*copy.deepcopy(block))),
    }
    x = images()
    for name, model in models.items():
        want = copy.deepcopy(spread(model))(x)
        _, report = fastvit.convert(model)
        assert report.converted, name
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    part = models["script inside"][1:3]  # a slice is made by the class of the whole
    torch.testing.assert_close(part(x), part[1](part[0](x)))


def test_a_converted_model_inside_another():
    model = spread(nn.Sequential(Plain(), nn.BatchNorm2d(8), nn.GELU(), Plain())).double()
    x = images().double()
    want = trained(copy.deepcopy(model), x)
    fastvit.convert(model[0])
    assert_same(trained(model, x), want)
    fastvit.convert(model)
    assert_same(trained(model, x), want)


def test_autocast():
    model = spread(Plain())
    converted, _ = fastvit.convert(copy.deepcopy(model))
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        want, got = model(x), converted(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    got.float().sum().backward()


def test_compiled_as_plain_ops(pair):
    model, converted = pair
    x = images().double()
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    assert_same(trained(torch.compile(converted, backend=backend, fullgraph=True), x), trained(model, x))
    assert len(graphs) == 1 and not any("fastvit" in target for target in graphs[0])


class Broken(Plain):
    def forward(self, x):
        z = self.bn1(self.conv1(x))
        torch._dynamo.graph_break()
        return self.act1(z)


def test_compiled_in_pieces():
    model = spread(Broken()).double()
    converted, report = fastvit.convert(copy.deepcopy(model))
    assert report["bn1"].mode == "recompute"
    x = images().double()
    want = model(x)
    torch.testing.assert_close(torch.compile(converted, backend="eager")(x), want)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["act1", "bn1"])
def test_a_part_compiled_by_itself(name, pair):
    model, converted = pair
    x = images().double()
    getattr(converted, name).compile(backend="eager")
    torch.testing.assert_close(converted(x), model(x))


def test_export_of_the_evaluated_model_is_plain(pair):
    model, converted = pair
    x = images().double()
    program = torch.export.export(converted.eval(), (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("fastvit" in target for target in targets)
    assert any("batch_norm" in target for target in targets)
    torch.testing.assert_close(program.module()(x), model.eval()(x))
    traced = torch.jit.trace(converted, x)
    torch.testing.assert_close(traced(x), model(x))


def _train_ddp(rank, world, synchronised):
    torch.manual_seed(0)
    model = spread(Plain()).double()
    if synchronised:
        fastvit.convert_syncbn_model(model)
    x = torch.randn(2 * world, 8, 6, 6, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    fastvit.convert(model)
    assert_same(trained(nn.parallel.DistributedDataParallel(model), x), trained(plain, x))


@pytest.mark.parametrize("synchronised", [False, True])
def test_distributed_data_parallel(synchronised, ranks):
    ranks.run(2, _train_ddp, synchronised)
