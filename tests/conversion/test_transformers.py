"""fastvit.convert in models without BatchNorm: the same bits, and less kept for backward."""

import contextlib
import copy

import pytest
import torch
from recompute.models import compare_and_measure_freed
from torch import nn

import fastvit
from conversion.vit_models import (
    BLOCK_CASES,
    DIM,
    Block,
    BlockModel,
    LayerScale,
    Mlp,
    compare_and_measure_kept,
    find_differing,
    make_autocast,
    make_patches,
    measure_kept_bytes,
    run_step,
)

pytestmark = pytest.mark.usefixtures("default_device")
CONTEXTS = {"fp32": contextlib.nullcontext, "bf16": make_autocast(), "fp16": make_autocast(torch.float16)}


@pytest.mark.parametrize("precision", CONTEXTS)
@pytest.mark.parametrize("block", BLOCK_CASES)
def test_the_same_bits_and_less_kept(block, precision, device):
    make_block, least_saving = BLOCK_CASES[block]
    if block == "rms of torch" and device == "cuda":
        least_saving = 0.37  # it is one op on CUDA, and eager keeps less of it
    before, after = compare_and_measure_kept(BlockModel(make_block), make_patches(16), CONTEXTS[precision])
    if precision == "fp32":
        assert after <= (1 - least_saving) * before, after / before


def test_a_layer_norm_of_ours_saves_as_much_as_torchs():
    for context in CONTEXTS.values():
        sizes = [
            compare_and_measure_kept(
                BlockModel(lambda norm=norm: Block(norm=lambda: norm(DIM))), make_patches(64), context
            )
            for norm in (nn.LayerNorm, fastvit.LayerNorm)
        ]
        assert all(ours <= 1.005 * theirs for theirs, ours in zip(*sizes, strict=True)), sizes


def test_autocast_keeps_less(device):
    """Casts of activations are recomputed; autocast's casts of weights are kept at any batch size."""
    before, after = compare_and_measure_kept(BlockModel(depth=2), make_patches(64), make_autocast())
    assert after < (0.68 if device == "cpu" else 0.7) * before, after / before


@pytest.mark.parametrize("block", ["plain", "rope, SwiGLU", "convnext", "separate, quick gelu"])
def test_matrix_products_on_demand(block):
    for context in CONTEXTS.values():
        before, after = compare_and_measure_kept(
            BlockModel(BLOCK_CASES[block].make_block), make_patches(16), context, matmuls=True
        )
        assert after < 0.42 * before or context is not CONTEXTS["fp32"]


def test_a_block_alone_and_features():
    tokens = torch.randn(16, 50, 64)
    for pick, x in ((lambda m: m.forward_features, make_patches(16)), (lambda m: m.blocks[1], tokens)):
        before, after = compare_and_measure_kept(BlockModel(), x, call=pick)
        assert after < 0.7 * before, after / before


def test_the_peak_of_a_step_falls_too():
    eager, x = BlockModel(depth=6), make_patches(16)
    model = fastvit.convert(copy.deepcopy(eager))
    peaks = []
    for m in (eager, model):
        for parameter in m.parameters():  # whose gradients are no activations
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        run_step(m, x)
        peaks.append(fastvit.memory.peak_bytes(lambda m=m: m(x).sum().backward(), x.device))
    assert peaks[1] - peaks[0] < 0.8 * (measure_kept_bytes(model, x) - measure_kept_bytes(eager, x))


def scale_block():
    return Block(scale=LayerScale)


def biases_alone(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x)) * 0.5


def lora(model):
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = LoRA(block.attn.qkv), LoRA(block.mlp.fc1)
    return model


def checkpointed(reentrant):
    def change(model):
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, f=inner: torch.utils.checkpoint.checkpoint(
                f, x, use_reentrant=reentrant
            )
        return model

    return change


def pinned(model):
    """The model holds views of a tensor that is recomputed, and does not write to them."""
    model.held = []
    model.blocks[0].mlp.act.register_forward_hook(lambda m, i, y: model.held.append(y[:, :1]))
    return model


def compiled_part(model):
    model.blocks[1].mlp = torch.compile(model.blocks[1].mlp, backend="aot_eager")
    return model


CHANGES = {
    "biases alone": biases_alone,
    "LoRA": lora,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "views that pin": pinned,
    "compiled part": compiled_part,
    "evaluation": nn.Module.eval,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_bits_when_something_else_goes_on(change, precision, when):
    torch._dynamo.reset()
    context, x = CONTEXTS[precision], make_patches()
    eager = CHANGES[change](BlockModel(scale_block, 2))
    model = BlockModel(scale_block, 2)
    if when == "before":
        model = fastvit.convert(CHANGES[change](model))
    else:
        model = CHANGES[change](fastvit.convert(model))
    names = [name for name, _ in eager.named_parameters()]
    model.load_state_dict(eager.state_dict())
    assert [name for name, _ in model.named_parameters()] == names
    assert not find_differing(run_step(model, x, context), run_step(eager, x, context))


@pytest.mark.parametrize("n", [0, 1])
def test_small_batches(n):
    compare_and_measure_kept(BlockModel(scale_block, 1), torch.randn(n, 50, 12))


def test_retain_graph_and_partial_gradients():
    eager, x = BlockModel(scale_block, 2), make_patches()
    model = fastvit.convert(copy.deepcopy(eager))
    results = []
    for m in (eager, model):
        loss = m(x).square().sum()
        some = [m.blocks[0].mlp.fc2.weight, m.blocks[1].attn.qkv.weight]
        parameters = list(m.parameters())
        got = [torch.autograd.grad(loss, which, retain_graph=True) for which in (some, parameters, some[:1])]
        got.append(torch.autograd.grad(loss, parameters))
        results.append([gradient for gradients in got for gradient in gradients])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputed_tensors_are_not_held():
    """After a backward with retain_graph."""
    model, x = fastvit.convert(BlockModel(depth=2)), make_patches(16)
    loss = model(x).sum()

    def backward():
        loss.backward(retain_graph=True)
        model.zero_grad()

    backward()
    assert abs(fastvit.memory.live_bytes(backward, x.device)[0]) < 4096


@pytest.mark.parametrize(
    ("what", "casts"),
    [("norm1.weight", False), ("norm2.bias", False), ("ls1.gamma", False), ("mlp.fc2.weight", True)],
)
def test_weights_changed_before_backward_are_an_error(what, casts):
    """Also where a weight was cast, and is to be cast again."""
    model = fastvit.convert(BlockModel(scale_block, 2), recompute_weight_casts=casts)
    with make_autocast(enabled=casts)():
        loss = model(make_patches()).float().sum()
    with torch.no_grad():
        model.blocks[1].get_parameter(what).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bias_that_nobody_has_saved_may_change():
    eager, x = BlockModel(lambda: BLOCK_CASES["convnext v2"].make_block(), 1), make_patches()
    model = fastvit.convert(copy.deepcopy(eager))
    gradients = []
    for m in (eager, model):
        loss = m(x).square().sum()
        with torch.no_grad():
            m.blocks[0].grn.bias.add_(1)
        gradients.append(torch.autograd.grad(loss, list(m.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_conjugated_views_are_not_taken_for_their_memory():
    linear, x = nn.Linear(64, 64), torch.randn(64, 64, requires_grad=True)

    def forward():
        z = torch.complex(linear(x), linear(x) + 1) @ torch.eye(64, dtype=torch.complex64)
        w = z.conj() * torch.complex(x, x)
        return ((-z * w) * w.abs()).abs()

    compare_and_measure_freed(forward, [x, linear.weight], measures=False)


def test_where_another_mechanism_decides():
    """save_on_cpu and non-reentrant checkpoints around it see every tensor, and the scope has no effect."""
    eager, x = BlockModel(depth=2), make_patches(16)
    model = fastvit.convert(copy.deepcopy(eager))
    want = run_step(eager, x)
    assert not find_differing(run_step(model, x, torch.autograd.graph.save_on_cpu), want)

    def call(m):
        return lambda x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)

    assert not find_differing(run_step(model, x, call=call(model)), want)
    assert measure_kept_bytes(model, x, call=call(model)) == measure_kept_bytes(eager, x, call=call(eager))


@pytest.mark.parametrize("precision", CONTEXTS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_mask_of_dropout_takes_a_bit_an_element(inplace, precision):
    def make(p=0.1):
        block = Block(mlp=lambda: Mlp(drop=p))
        block.mlp.drop.inplace = inplace
        return block

    context, x = CONTEXTS[precision], make_patches(16)
    _, after = compare_and_measure_kept(BlockModel(make), x, context)
    _, without = compare_and_measure_kept(BlockModel(lambda: make(0.0)), x, context)
    masks = 3 * 16 * 50 * 4 * 64 // 8
    assert after == pytest.approx(without + masks, rel=0.01)


def test_a_dropout_that_is_another_is_left(monkeypatch):
    dropout = nn.functional.dropout

    def scaled(x, p, training, inplace):
        return x * (0.5 + torch.rand_like(x)) if training else dropout(x, p, training, inplace)

    monkeypatch.setattr(nn.functional, "dropout", scaled)
    compare_and_measure_kept(BlockModel(lambda: Block(mlp=lambda: Mlp(drop=0.1)), 1), make_patches(16))


def test_weight_casts_are_made_again():
    """The copies are not kept: 2 bytes for each element of a matrix, at any batch size."""
    eager = BlockModel(scale_block, 3)
    copies = sum(2 * p.numel() for name, p in eager.blocks.named_parameters() if p.ndim == 2)
    for n in (8, 16):
        (_, before), (_, after) = (
            compare_and_measure_kept(eager, make_patches(n), make_autocast(), recompute_weight_casts=casts)
            for casts in (False, True)
        )
        assert before - after == pytest.approx(copies, rel=0.05)
    for context in (contextlib.nullcontext, make_autocast(torch.float16)):
        compare_and_measure_kept(eager, make_patches(16), context, recompute_weight_casts=True)


def test_weight_casts_in_a_scope_around_a_model():
    model, x = BlockModel(scale_block, 2), make_patches(16)

    def forward():
        with make_autocast()():
            return model(x)

    parameters, scope = list(model.parameters()), lambda: fastvit.recompute_scope(recompute_weight_casts=True)
    assert compare_and_measure_freed(forward, parameters, scope) > compare_and_measure_freed(
        forward, parameters
    )
