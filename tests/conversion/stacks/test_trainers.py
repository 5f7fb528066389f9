"""Trainers with `fastvit.convert`, by the lines of docs/in-your-trainer.md (see CONTRIBUTING.md)."""

import contextlib
import copy
import io
import subprocess
import sys

import pytest
import torch
from packages import import_or_skip
from torch import nn
from torch.nn import functional as F

import fastvit
from conversion.stacks.models import (
    IMAGES,
    LABELS,
    TOKENS,
    assert_row_of_page,
    assert_same_training,
    disable_convert,
    make_gpt2,
    make_timm_vit,
    make_transformers_vit,
    measure_kept_kib,
    run_page_block,
    train_in_plain_loop,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


class ColumnDataset(torch.utils.data.Dataset):
    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


IMAGE_ROWS, TOKEN_ROWS = (
    ColumnDataset(pixel_values=IMAGES, labels=LABELS),
    ColumnDataset(input_ids=TOKENS, labels=TOKENS),
)


def run_without_and_with_convert(run, adapter=None):
    """Returns the results of `run()` without and with the conversion."""
    with disable_convert(adapter):
        plain = run()
    return plain, run()


@pytest.mark.packages("timm")
def test_timms_loop_trains_the_same_bits():
    """As timm's train.py: optimizer, EMA, bf16 and accumulation."""
    optim, utils = import_or_skip("timm.optim"), import_or_skip("timm.utils")

    def train():
        model = make_timm_vit()
        run_page_block("A loop of your own, timm's train.py", model=model)
        optimizer = optim.create_optimizer_v2(model, "adamw", 1e-2, weight_decay=0.05)
        ema, losses = utils.ModelEmaV3(model, decay=0.5), []
        for step, (images, labels) in enumerate(zip(IMAGES.split(4), LABELS.split(4), strict=True)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            losses.append(loss.item())
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                ema.update(model)
        return losses, nn.ModuleList([model, ema])

    expected, actual = run_without_and_with_convert(train)
    assert_same_training(expected, actual)
    with torch.autocast("cpu", torch.bfloat16):
        assert_row_of_page(
            "timm, bf16", *(measure_kept_kib(modules[0], IMAGES) for _, modules in (expected, actual))
        )


def train_by_transformers(folder, model, data, steps=6, resume=False, **options):
    transformers = import_or_skip("transformers")
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=steps, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_steps=3, **options,
    )  # fmt: skip
    trainer = run_page_block("transformers", transformers=transformers, model=model, args=args, data=data)[
        "trainer"
    ]
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.model


@pytest.mark.packages("transformers")
@pytest.mark.parametrize(
    ("row", "make", "data", "options"),
    [
        ("ViT", make_transformers_vit, IMAGE_ROWS, {}),
        ("GPT2", make_gpt2, TOKEN_ROWS, {}),
        ("ViT, bf16", make_transformers_vit, IMAGE_ROWS, {"bf16": True}),
        ("ViT, gradient checkpointing", make_transformers_vit, IMAGE_ROWS, {"gradient_checkpointing": True}),
        (None, make_transformers_vit, IMAGE_ROWS, {"gradient_accumulation_steps": 2}),
    ],
    ids=["ViT", "GPT2", "bf16", "gradient checkpointing", "gradient accumulation"],
)
def test_transformers_trains_the_same_bits(tmp_path, row, make, data, options):
    from fastvit.adapters import transformers as adapter

    expected, actual = run_without_and_with_convert(
        lambda: train_by_transformers(tmp_path, make(), data, **options), adapter
    )
    assert_same_training(expected, actual)
    batch = data[:]
    if row:
        assert_row_of_page(
            f"transformers, {row}", *(measure_kept_kib(model, **batch) for _, model in (expected, actual))
        )


@pytest.mark.packages("transformers")
def test_transformers_resumes_from_checkpoints_of_either_kind(tmp_path):
    """From a file of either kind, in either way."""
    from fastvit.adapters import transformers as adapter

    folders, resumed = [tmp_path / "eager", tmp_path / "converted"], []
    with disable_convert(adapter):
        train_by_transformers(folders[0], make_transformers_vit(), IMAGE_ROWS)
    train_by_transformers(folders[1], make_transformers_vit(), IMAGE_ROWS)
    for folder in folders:
        resumed += run_without_and_with_convert(
            lambda folder=folder: train_by_transformers(
                folder, make_transformers_vit(), IMAGE_ROWS, resume=True
            ),
            adapter,
        )
    for run in resumed[1:]:
        assert_same_training(resumed[0], run)


@pytest.mark.packages("transformers")
def test_a_saved_model_of_transformers_is_converted_again(tmp_path):
    model = fastvit.convert(make_transformers_vit())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with disable_convert():
        expected = train_by_logits(make_transformers_vit())
    assert_same_training(expected, train_by_logits(fastvit.convert(again.train())))


def train_by_logits(model):
    return train_in_plain_loop(
        model, loss=lambda output, labels: F.cross_entropy(output.logits, labels)
    ), model


@pytest.mark.packages("accelerate", "timm")
@pytest.mark.parametrize("after", [False, True], ids=["before prepare", "after prepare"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_the_same_bits(after, precision):
    accelerate = import_or_skip("accelerate")

    def train():
        accelerate.state.AcceleratorState._reset_state(True)  # the precision of another test
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        model = make_timm_vit()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), 4)
        names = {"model": model, "optimizer": optimizer, "loader": loader, "accelerator": accelerator}
        if after:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            fastvit.convert(model)
        else:
            ran = run_page_block("accelerate", **names)
            model, optimizer, loader = ran["model"], ran["optimizer"], ran["loader"]
        losses = []
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, model

    expected, actual = run_without_and_with_convert(train)
    assert_same_training(expected, actual)
    before, less = (measure_kept_kib(model, IMAGES) for _, model in (expected, actual))
    assert less < before
    if precision == "no":
        assert_row_of_page("accelerate", before, less)


def train_on_rank_by_accelerate(rank, world, converts):
    """Losses and weights of a rank."""
    import accelerate

    def train():
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == world
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), 4)
        model = make_timm_vit()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        ran = run_page_block(
            "accelerate", model=model, optimizer=optimizer, loader=loader, accelerator=accelerator
        )
        losses = []
        for images, labels in ran["loader"]:
            loss = F.cross_entropy(ran["model"](images), labels)
            accelerator.backward(loss)
            ran["optimizer"].step()
            ran["optimizer"].zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict()

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in numbers.items():  # the ranks are there
            patch.setenv(name, str(number))
        patch.setenv("ACCELERATE_USE_CPU", "true")
        accelerate.state.AcceleratorState._reset_state(True)
        with contextlib.nullcontext() if converts else disable_convert():
            return train()


@pytest.mark.packages("accelerate", "timm")
def test_accelerate_trains_the_same_bits_on_two_ranks(ranks):
    expected, actual = (ranks.run(2, train_on_rank_by_accelerate, converts) for converts in (False, True))
    for (losses, weights), (others, others_weights) in zip(expected, actual, strict=True):
        assert losses == others and len(losses) == 3
        assert all(map(torch.equal, weights.values(), others_weights.values()))


@pytest.mark.packages("peft", "transformers")
def test_adapters_of_peft_train_the_same_bits():
    peft = import_or_skip("peft")

    def train():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        torch.manual_seed(0)
        model = run_page_block("peft", model=make_transformers_vit(), config=config, peft=peft)["model"]
        return train_by_logits(model)

    expected, actual = run_without_and_with_convert(train)
    assert_same_training(expected, actual)
    assert_row_of_page("peft, LoRA", *(measure_kept_kib(model, IMAGES) for _, model in (expected, actual)))
    early = peft.get_peft_model(fastvit.convert(make_transformers_vit()), actual[1].peft_config["default"])
    assert measure_kept_kib(early, IMAGES) == measure_kept_kib(actual[1], IMAGES)  # before or after


@pytest.mark.packages("lightning", "timm")
def test_lightning_trains_the_same_bits(tmp_path):
    lightning = import_or_skip("lightning")
    from fastvit.adapters import lightning as adapter

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = make_timm_vit(), []

        def forward(self, images):
            return self.model(images)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), 4)
    options = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "default_root_dir": tmp_path}
    options |= {"enable_progress_bar": False, "accumulate_grad_batches": 2, "enable_model_summary": False}

    def train():
        module = Module()
        trainer = run_page_block("Lightning", lightning=lightning, options=options)["trainer"]
        trainer.fit(module, loader)
        return module.losses, module

    expected, actual = run_without_and_with_convert(train, adapter)
    assert_same_training(expected, actual)
    assert_row_of_page("Lightning", *(measure_kept_kib(module, IMAGES) for _, module in (expected, actual)))


def train_on_rank_by_lightning(rank, world, size, folder):
    """The weights after an epoch, and the layer's class in training and after it."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(1800, 4)
            )

        def training_step(self, batch, index):
            self.trained_by = type(self.model[1])
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), size)
    options = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "default_root_dir": folder}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    module = Module()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))  # the ranks are there
        options |= {"devices": world, "strategy": "ddp"}
        run_page_block("Lightning", lightning=lightning, options=options)["trainer"].fit(module, loader)
    return module.state_dict(), module.trained_by, type(module.model[1])


@pytest.mark.packages("lightning")
def test_lightning_synchronises_batch_norms(ranks, tmp_path):
    """Two ranks with half of each batch are one with all of it."""
    ((expected, _, _),) = ranks.run(1, train_on_rank_by_lightning, 8, tmp_path)
    for actual, during, after in ranks.run(2, train_on_rank_by_lightning, 4, tmp_path):
        torch.testing.assert_close(expected, actual)
        assert during is fastvit.SyncBatchNorm and after is nn.BatchNorm2d


@pytest.mark.packages("lightning", "timm")
@pytest.mark.parametrize("before", [False, True], ids=["after setup", "before setup"])
def test_fabric_trains_the_same_bits(before):
    lightning = import_or_skip("lightning")

    def train():
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model = make_timm_vit()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if before:
            model, optimizer = fabric.setup(fastvit.convert(model), optimizer)
        else:
            ran = run_page_block("Fabric", fabric=fabric, model=model, optimizer=optimizer)
            model, optimizer = ran["model"], ran["optimizer"]
        return train_in_plain_loop(model, optimizer, backward=fabric.backward), model

    expected, actual = run_without_and_with_convert(train)
    assert_same_training(expected, actual)
    assert_row_of_page("Fabric", *(measure_kept_kib(model, IMAGES) for _, model in (expected, actual)))


@pytest.mark.packages("mmengine", "timm")
def test_mmengine_trains_the_same_bits(tmp_path):
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    from fastvit.adapters import mmengine as adapter

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.model, self.losses = make_timm_vit(), []

        def forward(self, image, label=None, mode="tensor"):
            logits = self.model(image)
            if mode != "loss":
                return logits
            loss = F.cross_entropy(logits, label)
            self.losses.append(loss.item())
            return {"loss": loss}

    rows = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]

    def train():
        loader = torch.utils.data.DataLoader(rows, 4)
        hooks = run_page_block("mmengine")["custom_hooks"]
        name = f"run{len(list(tmp_path.iterdir()))}"
        runner = Runner(
            Model(), str(tmp_path / name), loader, train_cfg={"by_epoch": True, "max_epochs": 2},
            optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2}, "accumulative_counts": 2},
            custom_hooks=hooks, experiment_name=name, log_level="ERROR", randomness={"seed": 0},
        )  # fmt: skip
        runner.train()
        ema = next(hook.ema_model for hook in runner.hooks if hasattr(hook, "ema_model"))
        return runner.model.losses, nn.ModuleList([runner.model, ema])

    expected, actual = run_without_and_with_convert(train, adapter)
    assert_same_training(expected, actual)
    assert_row_of_page("mmengine", *(measure_kept_kib(models[0], IMAGES) for _, models in (expected, actual)))


@pytest.mark.packages("torchtitan", "timm")
def test_torchtitan_trains_the_same_bits():
    import_or_skip("torchtitan.distributed.activation_checkpoint")
    from torchtitan.distributed.activation_checkpoint import FullAC

    from fastvit.adapters import torchtitan as adapter

    class Model(nn.Module):  # the policies of torchtitan look for `layers`
        def __init__(self):
            super().__init__()
            self.whole = make_timm_vit()
            self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(self.whole.blocks)})
            del self.whole.blocks

        def forward(self, images):
            x = self.whole._pos_embed(self.whole.patch_embed(images))
            for block in self.layers.values():
                x = block(x)
            return self.whole.forward_head(self.whole.norm(x))

    def train():
        model = Model()
        run_page_block("torchtitan")["policy"].build().apply(model)
        return train_in_plain_loop(model), model

    expected, actual = run_without_and_with_convert(train, adapter)
    assert_same_training(expected, actual)
    assert_row_of_page(
        "torchtitan, `matmuls=True`", *(measure_kept_kib(model, IMAGES) for _, model in (expected, actual))
    )
    full = Model()
    FullAC.Config().build().apply(full)
    assert fastvit.convert(full) is full and train_in_plain_loop(full) == expected[0]


def train_on_rank_by_fsdp(rank, world, how, folder):
    """Losses, KiB and the weights of a rank."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    mesh = init_device_mesh("cpu", (world,))

    def fully_shard(module):
        return shard(module, mesh=mesh)

    model = make_timm_vit()
    if how == "before":
        fastvit.convert(model)
    if how == "after":
        run_page_block("FSDP2", model=model, fully_shard=fully_shard)
    else:
        with disable_convert():
            run_page_block("FSDP2", model=model, fully_shard=fully_shard)
    losses = train_in_plain_loop(model)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=f"{folder}/{how}")
    other = make_timm_vit()
    for block in [*other.blocks, other]:
        fully_shard(block)
    restored = get_model_state_dict(other)
    dcp.load(restored, checkpoint_id=f"{folder}/{how}")
    set_model_state_dict(other, restored)
    weights = {name: value.full_tensor() for name, value in get_model_state_dict(other).items()}
    return losses, measure_kept_kib(model, IMAGES), weights


@pytest.mark.packages("timm")
def test_fsdp2_trains_the_same_bits(ranks, tmp_path):
    expected = ranks.run(2, train_on_rank_by_fsdp, "never", tmp_path)
    for how in ("after", "before"):
        actual = ranks.run(2, train_on_rank_by_fsdp, how, tmp_path)
        for one, other in zip(expected, actual, strict=True):
            assert one[0] == other[0] and len(one[0]) > 1
            assert not [name for name in one[2] if not torch.equal(one[2][name], other[2][name])]
        assert_row_of_page("FSDP2, a rank of two", expected[0][1], actual[0][1])


def test_a_whole_module_needs_fastvit_to_be_loaded(tmp_path):
    model = fastvit.convert(copy.deepcopy(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
    torch.save(model, tmp_path / "model.pt")
    code = "import sys, torch; sys.modules['fastvit'] = None; torch.load('model.pt', weights_only=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode and "fastvit" in done.stderr.splitlines()[-1]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.load(io.BytesIO(file.getvalue()))  # weights alone
