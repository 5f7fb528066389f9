"""Real models by name: timm's, and `LIBRARY:NAME` of torchvision, transformers, frozen; random weights."""

import importlib

import torch
from torch import nn


def import_torchvision():
    """torchvision; without its operators where those were compiled for another torch. Models need none."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision")


class _Plain(nn.Module):
    """A transformers model that takes a tensor and returns one: images and features, or tokens and logits."""

    def __init__(self, model: nn.Module, result: str):
        super().__init__()
        self.model, self.result = model, result

    def forward(self, x):
        return self.model(x)[self.result]


# Language models whose training keeps about as many bytes as a small ViT's, without dropout.
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True, "use_cache": False}
GPT2 = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 2048, "n_positions": 512, "use_cache": False}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
LANGUAGE = {"llama": LLAMA, "gpt2": GPT2}


def _transformers(name: str) -> nn.Module:
    import transformers

    if name in LANGUAGE:
        kind = {"llama": "Llama", "gpt2": "GPT2"}[name]
        config = getattr(transformers, f"{kind}Config")(**LANGUAGE[name], attn_implementation="sdpa")
        causal = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[name]
        return _Plain(getattr(transformers, causal)(config), "logits")
    small = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "patch_size": 16}
    small |= {"image_size": 224, "num_hidden_layers": 12, "attn_implementation": "sdpa"}
    kinds = {"vit": "ViT", "siglip": "SiglipVision", "clip": "CLIPVision"}
    config = getattr(transformers, f"{kinds[name]}Config")(**small)
    return _Plain(getattr(transformers, f"{kinds[name]}Model")(config), "pooler_output")


class _LowRank(nn.Module):
    """LoRA: a frozen Linear, and a trained product of rank 8 beside it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 8, bias=False)
        self.up = nn.Linear(8, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def _frozen(plain: str) -> nn.Module:
    """A frozen network behind a trained layer, as under a perceptual loss, or with trained adapters."""
    if plain in ("vgg16", "mobilenet_v2"):
        import torchvision

        features = getattr(torchvision.models, plain)().features[:23].requires_grad_(False).eval()
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), features)
    import timm

    model = timm.create_model(plain).train().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = _LowRank(block.attn.qkv)
    return model


def create(name: str) -> tuple[nn.Module, int]:
    """The model in training, and the size of the images, or the number of tokens, that it takes."""
    library, _, plain = name.rpartition(":")
    import_torchvision()
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(plain).train(), 224
    if library == "transformers":
        return _transformers(plain).train(), 512 if plain in LANGUAGE else 224
    if library == "frozen":
        return _frozen(plain), 224
    import timm

    sized = {"img_size": 224} if "patch14_dinov2" in plain else {}
    model = timm.create_model(plain, **sized).train()
    return model, sized.get("img_size", model.pretrained_cfg["input_size"][-1])


def inputs(name: str, batch: int, size: int) -> torch.Tensor:
    """A batch of random images, or of tokens for a language model."""
    if name.rpartition(":")[2] in LANGUAGE:
        return torch.randint(2048, (batch, size))
    return torch.randn(batch, 3, size, size)
