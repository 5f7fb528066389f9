"""Tiny models from configurations, data from generators, and what a run of a trainer leaves."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from real_models import import_torchvision
from torch import nn
from torch.nn import functional as F

import fastvit
from fastvit.memory import live_bytes

with contextlib.suppress(ImportError):
    import_torchvision()  # the frameworks import it, and no model here needs an operator of its

PAGE = Path(__file__).parents[1] / "docs/in-your-trainer.md"
IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 4
TOKENS = torch.randint(97, (24, 32), generator=torch.Generator().manual_seed(0))


def lines(title: str, **names: object) -> dict[str, object]:
    """Runs the block under a title of docs/in-your-trainer.md with `names`; returns all names."""
    block = re.search(rf"^## {re.escape(title)}\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names |= {"fastvit": fastvit}
    exec(compile(block[1], title, "exec"), names)
    return names


@contextlib.contextmanager
def without_convert(adapter: object = None):
    """Inside, `fastvit.convert` and that of an adapter return the model as it is."""
    with pytest.MonkeyPatch.context() as patch:
        for module in filter(None, (fastvit, adapter)):
            patch.setattr(module, "convert", lambda model, **options: model)
        yield


def vit(**options) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=4, **sizes, **options)
    return transformers.ViTForImageClassification(config)


def gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def timm_vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)


def batches(n: int = 4):
    """Pairs of images and labels."""
    return zip(IMAGES.split(n), LABELS.split(n), strict=True)


def trained(model, optimizer=None, loss=F.cross_entropy, backward=torch.Tensor.backward) -> list[float]:
    """Losses of a plain loop."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = []
    for images, labels in batches():
        value = loss(model(images), labels)
        backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def kept(model, *inputs, **named) -> int:
    """KiB that a training forward leaves allocated."""
    model.train()
    for _ in range(2):
        count, _ = live_bytes(lambda: model(*inputs, **named))
    return count // 1024


def same(want: tuple[list, nn.Module], got: tuple[list, nn.Module]) -> None:
    """Losses, parameters and buffers with the same bits."""
    assert want[0] == got[0] and len(want[0]) > 1
    state, other = want[1].state_dict(), got[1].state_dict()
    assert state.keys() == other.keys()
    assert not [name for name in state if not torch.equal(state[name], other[name])]


def table(stack: str, before: int, after: int) -> None:
    """The row of docs/in-your-trainer.md is what was measured, within a twentieth."""
    row = re.search(rf"^\| {re.escape(stack)} \| (\d+) KiB \| (\d+) KiB \|", PAGE.read_text(), re.M)
    assert after < before and row, f"| {stack} | {before} KiB | {after} KiB |"
    assert [int(n) for n in row.groups()] == pytest.approx([before, after], rel=0.05), (before, after)
