"""Converted published models have eager's bits, and keep less (CONTRIBUTING.md says what to install)."""

import contextlib
import copy

import pytest
import torch
from real_models import create_model, random_inputs

import fastvit
from conversion.models import make_autocast
from conversion.vit_models import find_differing, measure_kept_bytes, run_step

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.packages("timm", "torchvision", "transformers"),
    pytest.mark.timeout(600),
]
# The least share of the kept bytes that conversion saves, by the name of the model.
LEAST_SAVINGS = {
    "vit_small_patch16_224": 0.36,
    "torchvision:vit_b_16": 0.36,
    "transformers:vit": 0.36,
    "transformers:siglip": 0.36,
    "transformers:clip": 0.29,
    "transformers:llama": 0.4,
    "transformers:gpt2": 0.4,
    "deit3_small_patch16_224": 0.395,
    "vit_small_patch14_dinov2": 0.4,
    "vit_small_patch16_dinov3": 0.45,
    "vit_small_plus_patch16_dinov3": 0.45,
    "eva02_small_patch14_224": 0.45,
    "convnext_tiny": 0.48,
    "convnextv2_tiny": 0.48,
    "mixer_s16_224": 0.46,  # at this batch, without the images
    "swin_tiny_patch4_window7_224": 0.33,
    "torchvision:swin_t": 0.33,
    "beit_base_patch16_224": 0.3,
    "swinv2_tiny_window8_256": 0.25,
    "pvt_v2_b1": 0.33,
    "maxvit_tiny_rw_224": 0.5,
    "mobilevit_s": 0.58,
    "efficientformer_l1": 0.58,
    "efficientvit_b1": 0.43,
    "levit_256": 0.35,
    "tresnet_m": 0.35,
    "resnet50": 0.42,
    "repvit_m1_1": 0.5,
    "mobilenetv4_hybrid_medium": 0.46,
    "densenet121": 0.46,
    "tiny_vit_11m_224": 0.48,
}


@pytest.mark.parametrize("name", LEAST_SAVINGS)
def test_a_published_model_has_eager_bits_and_keeps_less(name):
    torch.manual_seed(0)
    eager, size = create_model(name)
    x = random_inputs(name, 2, size)
    model = fastvit.convert(copy.deepcopy(eager))
    saving = 1 - measure_kept_bytes(model, x) / measure_kept_bytes(eager, x)
    assert saving >= LEAST_SAVINGS[name]
    for context in (contextlib.nullcontext, make_autocast()):
        assert not find_differing(run_step(model, x, context), run_step(eager, x, context))
