"""Small blocks as in timm, transformers and torchvision, and steps of them that are compared and measured."""

import contextlib
import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import fastvit
from conversion.models import has_same_bits, make_generator
from fastvit.memory import live_bytes

DIM, TOKENS, HEADS = 64, 50, 4  # features of a token, tokens of a sequence, heads of attention


class Attention(nn.Module):
    """timm's attention, in which one Linear makes queries, keys and values. A rope rotates pairs."""

    def __init__(self, norm=None, rope=False, cosine=False):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = (norm() if norm else nn.Identity() for _ in range(2))
        angles = torch.randn(TOKENS - 1, DIM // HEADS)
        self.register_buffer("sin", angles.sin() if rope else None)
        self.register_buffer("cos", angles.cos() if rope else None)
        self.cosine = cosine

    def rotate(self, x):
        tokens = x[:, :, 1:]
        rotated = torch.stack([-tokens[..., 1::2], tokens[..., ::2]], -1).reshape(tokens.shape)
        return torch.cat([x[:, :, :1], tokens * self.cos + rotated * self.sin], dim=2)

    def forward(self, x):
        n, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.sin is not None:
            q, k = self.rotate(q).type_as(v), self.rotate(k).type_as(v)
        if self.cosine:  # as Swin v2, but with a fixed scale of 10
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            x = (scores * 10).softmax(-1) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(n, length, dim))


class SeparateAttention(nn.Module):
    """transformers' attention, with a Linear each for queries, keys and values. A rope rotates halves."""

    def __init__(self, rope=False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.output = nn.Linear(DIM, DIM)
        angles = torch.randn(TOKENS, DIM // HEADS)
        self.register_buffer("sin", angles.sin() if rope else None)
        self.register_buffer("cos", angles.cos() if rope else None)

    def rotate(self, x):
        if self.sin is None:
            return x
        a, b = x.chunk(2, dim=-1)
        return (x * self.cos) + (torch.cat((-b, a), dim=-1) * self.sin)

    def forward(self, x):
        shape = (*x.shape[:-1], HEADS, DIM // HEADS)
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.query, self.key, self.value))
        x = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return self.output(x.transpose(1, 2).reshape(*x.shape[:-3], TOKENS, DIM).contiguous())


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class RMSNorm(nn.Module):
    """transformers' RMSNorm, which computes in float32 and then multiplies by its weight."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), 1e-6

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Mlp(nn.Module):
    def __init__(self, act=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(DIM, 4 * DIM), act(), nn.Linear(4 * DIM, DIM)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class SwiGLU(nn.Module):
    """timm's SwiGLU, which has a Linear for the gate and one for x."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.fc1_g, self.fc1_x = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM)
        self.act, self.norm, self.fc2 = nn.SiLU(), norm(4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.fc2(self.norm(self.act(self.fc1_g(x)) * self.fc1_x(x)))


class FastvitAct(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return fastvit.functional.act(x, self.activation)


class FastvitSwiGLU(SwiGLU):
    def forward(self, x):
        return self.fc2(self.norm(fastvit.functional.gated_act(self.fc1_g(x), self.fc1_x(x))))


class PackedSwiGLU(nn.Module):  # one Linear makes the gate and x
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 8 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        gate, x = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * x)


class LayerScale(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(torch.full((DIM,), 0.5)), inplace

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Block(nn.Module):
    """timm's block: attention and an MLP, each after a norm and beside a skip connection."""

    def __init__(self, attention=Attention, mlp=Mlp, scale=nn.Identity, norm=lambda: nn.LayerNorm(DIM, 1e-6)):
        super().__init__()
        self.norm1, self.attn, self.ls1 = norm(), attention(), scale()
        self.norm2, self.mlp, self.ls2 = norm(), mlp(), scale()

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class GlobalResponseNorm(nn.Module):
    """timm's norm in the MLP of ConvNeXt v2, over `(N, H, W, 4 * DIM)`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * DIM))
        self.bias = nn.Parameter(torch.randn(4 * DIM))

    def forward(self, x):
        norms = x.norm(p=2, dim=(1, 2), keepdim=True)
        factor = norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias.view(1, 1, 1, -1), self.weight.view(1, 1, 1, -1), x * factor)


class ConvBlock(nn.Module):
    """ConvNeXt's block over 7 x 7 tokens. The first of the 50 tokens passes unchanged."""

    def __init__(self, grn=False, scale=True):
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM), nn.LayerNorm(DIM, 1e-6)
        self.fc1, self.act, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        self.grn = GlobalResponseNorm() if grn else nn.Identity()
        self.gamma = nn.Parameter(torch.full((DIM,), 0.5)) if scale else None

    def forward(self, tokens):
        shortcut = tokens[:, 1:].transpose(1, 2).unflatten(2, (7, 7))
        x = self.norm(self.conv_dw(shortcut).permute(0, 2, 3, 1))
        x = self.fc2(self.grn(self.act(self.fc1(x)))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            x = x.mul(self.gamma.reshape(1, -1, 1, 1))
        x = (x + shortcut).flatten(2).transpose(1, 2)
        return torch.cat([tokens[:, :1], x], 1)


def make_torch_layer():
    return nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, 0.0, F.gelu, batch_first=True, norm_first=True)


def make_head_norm():
    return nn.LayerNorm(DIM // HEADS)


class BlockCase(NamedTuple):
    """A block of BlockModel, and how much memory conversion must save."""

    make_block: Callable[[], nn.Module]
    least_saving: float  # a share of the bytes that a training forward keeps


BLOCK_CASES = {
    "plain": BlockCase(Block, 0.35),
    "layer scale": BlockCase(lambda: Block(scale=LayerScale), 0.38),
    "layer scale in place": BlockCase(lambda: Block(scale=lambda: LayerScale(inplace=True)), 0.3),
    "rope": BlockCase(
        lambda: Block(lambda: Attention(norm=make_head_norm, rope=True), scale=LayerScale), 0.4
    ),
    "rope, SwiGLU": BlockCase(lambda: Block(lambda: Attention(rope=True), SwiGLU), 0.4),
    "separate, rope of halves": BlockCase(
        lambda: Block(lambda: SeparateAttention(rope=True), PackedSwiGLU), 0.25
    ),
    "separate, quick gelu": BlockCase(lambda: Block(SeparateAttention, lambda: Mlp(QuickGELU)), 0.45),
    "tanh gelu": BlockCase(lambda: Block(mlp=lambda: Mlp(lambda: nn.GELU(approximate="tanh"))), 0.35),
    "rms of transformers": BlockCase(lambda: Block(norm=RMSNorm), 0.4),
    "rms of torch": BlockCase(lambda: Block(norm=lambda: nn.RMSNorm(DIM)), 0.4),
    "fastvit's gelu": BlockCase(lambda: Block(mlp=lambda: Mlp(lambda: FastvitAct("gelu_tanh"))), 0.35),
    "fastvit's SwiGLU": BlockCase(lambda: Block(lambda: Attention(rope=True), FastvitSwiGLU), 0.4),
    "without affine": BlockCase(
        lambda: Block(norm=lambda: nn.LayerNorm(DIM, elementwise_affine=False)), 0.35
    ),
    "cosine attention": BlockCase(lambda: Block(lambda: Attention(cosine=True)), 0.4),
    "convnext": BlockCase(ConvBlock, 0.4),
    "convnext v2": BlockCase(lambda: ConvBlock(grn=True, scale=False), 0.6),
    "torch": BlockCase(make_torch_layer, 0.3),
}


class BlockModel(nn.Module):
    """A model of equal blocks between a Linear and a norm with a head. `block()` makes a block."""

    def __init__(self, block=Block, depth=3):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(12, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.2)

    def forward_features(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x):
        return self.head(self.forward_features(x)[:, 0])


def make_patches(n=4):
    """Returns the input of a BlockModel, `(n, TOKENS, 12)`."""
    return torch.randn(n, TOKENS, 12, generator=make_generator(7))


def run_step(model, x, context=contextlib.nullcontext, call=None):
    """Takes a step; returns the output, the gradients of input and parameters, and the buffers, by name.

    `call(x)` is the forward in `context()`, or `model(x)` by default.
    """
    model.zero_grad()
    leaf = x.clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(5)
    with context():
        y = (call or model)(leaf)
        loss = (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if leaf.requires_grad:
        gradients["input"] = leaf.grad
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {"output": y.detach(), **gradients, **buffers}


def find_differing(actual, expected):
    """Returns the names of the tensors of two steps whose bits differ."""
    names = expected.keys() | actual.keys()
    return [name for name in names if not has_same_bits(actual[name], expected[name])]


def measure_kept_bytes(model, x, context=contextlib.nullcontext, call=None):
    """Returns the bytes that a training forward leaves allocated."""

    def forward():
        torch.manual_seed(5)  # dropped paths change the running statistics
        with context():
            return (call or model)(x)

    forward()  # one-time caches must not be counted
    return live_bytes(forward, x.device)[0]


def compare_and_measure_kept(eager, x, context=contextlib.nullcontext, call=lambda model: model, **options):
    """Returns the kept bytes of a model and of its converted copy; raises unless their steps agree."""
    models = eager, fastvit.convert(copy.deepcopy(eager), **options)
    expected, actual = (run_step(model, x, context, call(model)) for model in models)
    assert not find_differing(actual, expected)
    return [measure_kept_bytes(model, x, context, call(model)) for model in models]
