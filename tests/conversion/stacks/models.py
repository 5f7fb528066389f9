"""Tiny models of other libraries, their data, and comparisons of runs with docs/in-your-trainer.md."""

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
    import_torchvision()  # the frameworks import torchvision; no model here needs its operators

TRAINER_PAGE = Path(__file__).parents[3] / "docs/in-your-trainer.md"
IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 4  # 4 classes
TOKENS = torch.randint(97, (24, 32), generator=torch.Generator().manual_seed(0))


def run_page_block(title: str, **names: object) -> dict[str, object]:
    """Runs the code under a title of docs/in-your-trainer.md with `names`, and returns all names."""
    block = re.search(
        rf"^## {re.escape(title)}\n.*?^```python\n(.*?)^```$", TRAINER_PAGE.read_text(), re.M | re.S
    )
    names |= {"fastvit": fastvit}
    exec(compile(block[1], title, "exec"), names)
    return names


@contextlib.contextmanager
def disable_convert(adapter: object = None):
    """Makes `fastvit.convert` and the `convert` of an adapter return the model unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        for module in filter(None, (fastvit, adapter)):
            patch.setattr(module, "convert", lambda model, **options: model)
        yield


def make_transformers_vit(**options) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=4, **sizes, **options)
    return transformers.ViTForImageClassification(config)


def make_gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def make_timm_vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)


def make_batches(n: int = 4):
    """Returns an iterator of batches `(images, labels)` of n images."""
    return zip(IMAGES.split(n), LABELS.split(n), strict=True)


def train_in_plain_loop(
    model, optimizer=None, loss=F.cross_entropy, backward=torch.Tensor.backward
) -> list[float]:
    """Trains a model in a loop of torch alone, and returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = []
    for images, labels in make_batches():
        value = loss(model(images), labels)
        backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def measure_kept_kib(model, *inputs, **named) -> int:
    """Returns how many KiB a training forward leaves allocated."""
    model.train()
    for _ in range(2):  # the first forward also allocates one-time caches
        nbytes, _ = live_bytes(lambda: model(*inputs, **named))
    return nbytes // 1024


def assert_same_training(expected: tuple[list, nn.Module], actual: tuple[list, nn.Module]) -> None:
    """Raises unless two pairs `(losses, model)` have the same losses and the same bits of the state."""
    (expected_losses, expected_model), (actual_losses, actual_model) = expected, actual
    assert expected_losses == actual_losses and len(expected_losses) > 1
    expected_state, actual_state = expected_model.state_dict(), actual_model.state_dict()
    assert expected_state.keys() == actual_state.keys()
    assert not [name for name, t in expected_state.items() if not torch.equal(t, actual_state[name])]


def assert_row_of_page(stack: str, eager_kib: int, converted_kib: int) -> None:
    """Raises unless the row of docs/in-your-trainer.md is within 5 % of the measured kept KiB."""
    row = re.search(rf"^\| {re.escape(stack)} \| (\d+) KiB \| (\d+) KiB \|", TRAINER_PAGE.read_text(), re.M)
    assert converted_kib < eager_kib and row, f"| {stack} | {eager_kib} KiB | {converted_kib} KiB |"
    measured = [eager_kib, converted_kib]
    assert [int(n) for n in row.groups()] == pytest.approx(measured, rel=0.05), measured
