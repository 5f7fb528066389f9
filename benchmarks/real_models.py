"""Makes real models with random weights: timm's by `NAME`, and others by `LIBRARY:NAME`.

The libraries are torchvision and transformers. `frozen:NAME` is a model of timm or torchvision with frozen
weights.
"""

import importlib

import torch
from torch import nn


def import_torchvision():
    """Returns torchvision, even if its operators were built for another torch; models do not need them."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # torchvision refers to these operators while it is imported.
        for op in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        return importlib.import_module("torchvision")


class _TensorOutput(nn.Module):
    """A transformers model that returns one of its outputs alone: features of images, or logits of tokens."""

    def __init__(self, model: nn.Module, output_key: str):
        super().__init__()
        self.model, self.output_key = model, output_key

    def forward(self, x):
        return self.model(x)[self.output_key]


# Language models without dropout, whose training keeps about as many bytes as a small ViT's.
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True, "use_cache": False}
GPT2 = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 2048, "n_positions": 512, "use_cache": False}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
LANGUAGE_CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


def _create_transformers_model(name: str) -> nn.Module:
    import transformers

    if name in LANGUAGE_CONFIGS:
        kind = {"llama": "Llama", "gpt2": "GPT2"}[name]
        config = getattr(transformers, f"{kind}Config")(**LANGUAGE_CONFIGS[name], attn_implementation="sdpa")
        class_name = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[name]
        return _TensorOutput(getattr(transformers, class_name)(config), "logits")
    vit_small = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "patch_size": 16}
    vit_small |= {"image_size": 224, "num_hidden_layers": 12, "attn_implementation": "sdpa"}
    kinds = {"vit": "ViT", "siglip": "SiglipVision", "clip": "CLIPVision"}
    config = getattr(transformers, f"{kinds[name]}Config")(**vit_small)
    return _TensorOutput(getattr(transformers, f"{kinds[name]}Model")(config), "pooler_output")


class _LowRank(nn.Module):
    """LoRA: adds the output of two trained Linears, of rank 8, to that of a frozen Linear."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 8, bias=False)
        self.up = nn.Linear(8, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def _create_frozen_model(model_name: str) -> nn.Module:
    """Returns a frozen network: a CNN behind a trained layer, or a ViT with trained adapters."""
    if model_name in ("vgg16", "mobilenet_v2"):
        import torchvision

        features = getattr(torchvision.models, model_name)().features[:23].requires_grad_(False).eval()
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), features)
    import timm

    model = timm.create_model(model_name).train().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = _LowRank(block.attn.qkv)
    return model


def create_model(name: str) -> tuple[nn.Module, int]:
    """Returns the model in training mode, and the size of its images or the number of its tokens."""
    library, _, model_name = name.rpartition(":")
    import_torchvision()
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(model_name).train(), 224
    if library == "transformers":
        return _create_transformers_model(model_name).train(), 512 if model_name in LANGUAGE_CONFIGS else 224
    if library == "frozen":
        return _create_frozen_model(model_name), 224
    import timm

    options = {"img_size": 224} if "patch14_dinov2" in model_name else {}
    model = timm.create_model(model_name, **options).train()
    return model, options.get("img_size", model.pretrained_cfg["input_size"][-1])


def random_inputs(name: str, batch: int, size: int) -> torch.Tensor:
    """Returns a batch of random images, or of tokens for a language model."""
    if name.rpartition(":")[2] in LANGUAGE_CONFIGS:
        return torch.randint(2048, (batch, size))
    return torch.randn(batch, 3, size, size)
