"""Training of other kinds with `fastvit.convert`: the same bits, fewer bytes (see CONTRIBUTING.md)."""

import copy

import pytest
import torch
from packages import import_or_skip
from torch import nn
from torch.nn import functional as F

import fastvit
from conversion.stacks.models import (
    IMAGES,
    assert_row_of_page,
    assert_same_training,
    make_batches,
    make_timm_vit,
    measure_kept_kib,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def assert_converted_trains_alike(
    row, make, loss_of, *inputs, lr=1e-2, convert=fastvit.convert, part=None, **named
):
    """Trains a plain and a converted model, and asserts equal bits and the kept bytes of the page's row.

    The loss is `loss_of(model, images)`. The bytes are those of a forward with `inputs`, of the model or of
    its module `part`.
    """
    torch.manual_seed(0)
    plain = make()
    converted = copy.deepcopy(plain)
    convert(converted)
    results = []
    for model in (plain, converted):
        torch.manual_seed(1)
        results.append((train_model(model, loss_of, lr), model))
    assert_same_training(*results)
    sizes = []
    for model in (plain, converted):
        torch.manual_seed(2)
        sizes.append(measure_kept_kib(model[part] if part else model, *inputs, **named))
    assert_row_of_page(row, *sizes)


def train_model(model, loss_of, lr):
    """Trains a model for some steps, and returns the losses."""
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr), []
    for images, _ in make_batches(8):
        loss = loss_of(model, images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_discriminator(*widths, norm=nn.BatchNorm2d):
    layers = []
    for one, other in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(one, other, 3, 2, 1), norm(other), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(1))


def test_a_gan_with_an_r1_penalty():
    """The penalty takes second derivatives. Each network is converted: their container is never called."""

    def make():
        model = nn.ModuleDict(
            {
                "discriminator": make_discriminator(3, 16, 32, norm=lambda c: nn.GroupNorm(4, c)),
                "generator": nn.Sequential(nn.Linear(8, 3 * 32 * 32), nn.LayerNorm(3 * 32 * 32), nn.GELU()),
            }
        )
        model["discriminator"](IMAGES)
        return model

    def loss_of(model, images):
        fake = model["generator"](torch.randn(len(images), 8)).view_as(images)
        real = images.clone().requires_grad_()
        scores = model["discriminator"](real)
        slope = torch.autograd.grad(scores.sum(), real, create_graph=True)[0]
        loss = F.softplus(-scores).mean() + F.softplus(model["discriminator"](fake)).mean()
        return loss + 5.0 * slope.square().sum((1, 2, 3)).mean()

    def convert(model):
        return [fastvit.convert(network) for network in model.values()]

    row = "GAN with R1, the discriminator"
    assert_converted_trains_alike(row, make, loss_of, IMAGES, convert=convert, part="discriminator")


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = make_timm_vit()
        self.predictor = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, images):
        with torch.no_grad():
            expected = self.target(images.flip(-1))
        return F.mse_loss(self.predictor(self.online(images)), expected)

    @torch.no_grad()
    def update_target(self):
        for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
            own.lerp_(other, 0.1)


@pytest.mark.packages("timm")
def test_byol_with_a_target_network():
    def loss_of(model, images):
        model.update_target()
        return model(images)

    assert_converted_trains_alike("BYOL", Byol, loss_of, IMAGES)


@pytest.mark.packages("timm")
def test_dino_with_two_sizes():
    timm = import_or_skip("timm")
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4}

    def make():
        return timm.create_model("vit_tiny_patch16_224", num_classes=8, dynamic_img_size=True, **sizes)

    teachers = {}

    def loss_of(model, images):
        with torch.no_grad():
            teacher = teachers.get(model) or teachers.setdefault(model, copy.deepcopy(model))
            expected = teacher(images).softmax(-1)
        views = [model(images), model(images[..., :16, :16])]
        return -sum((expected * view.log_softmax(-1)).sum(-1).mean() for view in views)

    assert_converted_trains_alike("DINO, images of two sizes", make, loss_of, IMAGES)


@pytest.mark.packages("transformers")
def test_a_masked_autoencoder():
    transformers = import_or_skip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {f"decoder_{name}": 64 if "size" in name else 2 for name in list(sizes)}
    config = transformers.ViTMAEConfig(image_size=32, patch_size=4, **sizes)
    assert_converted_trains_alike(
        "transformers, MAE",
        lambda: transformers.ViTMAEForPreTraining(config),
        lambda model, images: model(images).loss,
        IMAGES,
    )


@pytest.mark.packages("diffusers")
def test_a_diffusion_transformer():
    diffusers = import_or_skip("diffusers")
    import_or_skip("diffusers.models")
    conditions = {"timestep": torch.arange(8) * 10, "class_labels": torch.arange(8) % 4}

    def make():
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=3, num_layers=2, sample_size=32,
            patch_size=4, num_embeds_ada_norm=4, out_channels=3, norm_num_groups=1,
        )  # fmt: skip

    def loss_of(model, images):
        return F.mse_loss(model(images, **conditions).sample, images)

    assert_converted_trains_alike("diffusers, DiT", make, loss_of, IMAGES[:8], **conditions)


@pytest.mark.packages("diffusers")
def test_a_diffusion_unet():
    diffusers = import_or_skip("diffusers")
    times = torch.arange(8) * 10

    def make():
        return diffusers.UNet2DModel(
            sample_size=32, block_out_channels=(16, 32), norm_num_groups=4, layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def loss_of(model, images):
        return F.mse_loss(model(images, times).sample, images)

    assert_converted_trains_alike("diffusers, UNet2D", make, loss_of, IMAGES[:8], times)


@pytest.mark.packages("torchvision")
def test_a_detector_with_a_frozen_backbone():
    torchvision = import_or_skip("torchvision")
    targets = [
        {"boxes": torch.tensor([[4.0, 4.0, 20.0, 28.0]]), "labels": torch.tensor([1])} for _ in range(8)
    ]

    def make():
        return torchvision.models.detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=3, trainable_backbone_layers=3,
            norm_layer=torchvision.ops.FrozenBatchNorm2d, min_size=32, max_size=32,
        )  # fmt: skip

    def loss_of(model, images):
        return sum(model(list(images), targets).values())

    row = "torchvision, RetinaNet with a frozen backbone"
    assert_converted_trains_alike(row, make, loss_of, list(IMAGES[:8]), targets, lr=1e-4)


@pytest.mark.packages("monai")
def test_swin_unetr_of_monai():
    monai = import_or_skip("monai")
    import_or_skip("monai.networks.nets")
    volume = torch.randn(1, 1, 64, 64, 64, generator=torch.Generator().manual_seed(0))

    def make():
        return monai.networks.nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12)

    assert_converted_trains_alike(
        "monai, SwinUNETR", make, lambda model, _: model(volume).square().mean(), volume
    )


@pytest.mark.packages("ultralytics")
def test_yolo_of_ultralytics(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))  # its import writes settings
    import_or_skip("ultralytics")
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    boxes = {"cls": torch.zeros(8, 1), "bboxes": torch.full((8, 4), 0.4), "batch_idx": torch.arange(8.0)}

    def make():
        model = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
        model.args = get_cfg()
        return model.train()

    def loss_of(model, images):
        return model.loss({"img": images, **boxes})[0].sum()

    assert_converted_trains_alike("ultralytics, YOLOv8n", make, loss_of, IMAGES, lr=1e-4)
