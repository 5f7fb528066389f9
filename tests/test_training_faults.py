"""What goes wrong in a run, and what the trainer says and keeps: bad data, bad checkpoints, bad requests."""

import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from PIL import Image
from training_runs import LIMIT, rows_of, train_on_rank

from fastvit.training import checkpoint, loaders
from fastvit.training.__main__ import main
from fastvit.training.config import Config
from fastvit.training.errors import MissingPackage, check_packages

SMALL = ["--epochs", "2", "--batch-size", "256", "--norm", "torch"]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of one epoch out of two; tests copy it."""
    directory = tmp_path_factory.mktemp("started")
    arguments = [*SMALL, "--stop-after", "1", "--out", str(directory / "run"), "--threads", "1"]
    assert main([*arguments, "--device", "cpu"]) == 0
    return directory / "run"


@pytest.fixture
def copied(started, tmp_path):
    return shutil.copytree(started, tmp_path / "run", symlinks=True)


def fails(capsys, *arguments):
    """What the trainer says when it fails."""
    assert main([*arguments, "--device", "cpu", "--threads", "1"]) == 1
    return capsys.readouterr().err


# Losses and data


def _poisoned(rank, world, arguments):
    def batch(self, key, read=loaders._Batches.__getitem__):
        images, labels = read(self, key)
        return (images.fill_(float("nan")) if rank == 1 else images), labels

    original, loaders._Batches.__getitem__ = loaders._Batches.__getitem__, batch
    try:
        return train_on_rank(rank, world, arguments)
    finally:
        loaders._Batches.__getitem__ = original


def test_a_loss_that_is_not_finite_stops_every_rank(ranks, tmp_path):
    # The statistics of this norm are local, so the poison stays on its rank.
    arguments = ["--norm", "inplace-abn", "--epochs", "1", "--out", str(tmp_path / "run")]
    said = ranks.run(2, _poisoned, arguments)
    assert said[0] == said[1] and said[0].startswith("epoch 1, step 1: the loss is nan on rank 1;")
    assert not (tmp_path / "run" / "checkpoints").exists()


def make_folder(path, classes=("cat", "dog"), images=8, side=12):
    for split in ("train", "val"):
        for number, name in enumerate(classes):
            (path / split / name).mkdir(parents=True)
            for index in range(images):
                colour = (40 * number + index, 255 - index, 17 * index)
                Image.new("RGB", (side + index, side), colour).save(path / split / name / f"{index}.png")
    return path


SMALL_IMAGES = ["--image-size", "8", "--model", "vit_digits", "--batch-size", "4"]
FOLDER = ["--data", "folder", "--workers", "0", *SMALL_IMAGES]


def _loses_its_data(rank, world, path, arguments):
    read = loaders._Batches.__getitem__

    def batch(self, key):
        if rank == 1 and key[1] is not None and len(served) == 3:
            shutil.rmtree(path)
        served.append(key)
        return read(self, key)

    served, loaders._Batches.__getitem__ = [], batch
    try:
        return train_on_rank(rank, world, arguments)
    finally:
        loaders._Batches.__getitem__ = read


def test_data_that_vanishes_stops_every_rank_and_leaves_the_checkpoint(ranks, tmp_path):
    path = make_folder(tmp_path / "data")
    arguments = [*FOLDER, "--epochs", "3", "--data-path", str(path), "--out", str(tmp_path / "run")]
    said = ranks.run(2, _loses_its_data, path, arguments)
    assert said[0] == said[1] and "No such file or directory" in said[0] and str(path) in said[0]
    weights, state = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    assert state["epoch"] == 1 and all(value.isfinite().all() for value in weights["model"].values())


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_damaged_image_is_named(tmp_path, capsys, split, workers):
    path = make_folder(tmp_path / "data")
    image = path / split / "cat" / "0.png"
    Image.effect_noise((300, 300), 50).save(image)  # large enough for two chunks of pixels
    pixels = bytearray(image.read_bytes())
    pixels[pixels.rindex(b"IDAT")] = 0
    image.write_bytes(pixels)
    with pytest.raises(SyntaxError), Image.open(image) as file:  # which is no OSError
        file.load()
    arguments = [*FOLDER, "--epochs", "1", "--data-path", str(path), "--workers", workers]
    said = fails(capsys, *arguments, "--out", str(tmp_path / "run"))
    assert f"{image} is damaged: broken PNG file" in said


@pytest.mark.parametrize("workers", ["0", "1"])
def test_folder_trains_and_another_number_of_classes_cannot_resume(tmp_path, capsys, workers):
    path = make_folder(tmp_path / "data")
    start = [*FOLDER, "--epochs", "2", "--data-path", str(path), "--workers", workers]
    out = str(tmp_path / "run")
    assert main([*start, "--out", out, "--stop-after", "1", "--device", "cpu", "--threads", "1"]) == 0
    for split in ("train", "val"):
        shutil.copytree(path / split / "cat", path / split / "cow")
    said = fails(capsys, "--resume", out)
    assert "trained on 2 classes (cat, dog), the data has 3 (cat, cow, dog)" in said
    shutil.rmtree(path / "val" / "cow")
    assert "train and val must hold the same classes; cow are in one" in fails(capsys, "--resume", out)
    shutil.rmtree(path)
    assert f"must hold a folder train for --data folder, got {path}" in fails(capsys, "--resume", out)


def test_class_count_below_the_data(capsys, tmp_path):
    said = fails(capsys, *SMALL, "--classes", "5", "--out", str(tmp_path / "run"))
    assert "--classes must be at least the 10 classes of the data, got 5" in said


# Checkpoints


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("share", [0.5, 0.0, None])
def test_damaged_checkpoint(copied, capsys, name, share):
    path = copied / "checkpoints" / "epoch-0001" / name
    whole = path.read_bytes()
    if share is None:
        path.unlink()
    else:
        path.write_bytes(whole[: int(len(whole) * share)])
    assert f"{path} is missing, cut off or damaged" in fails(capsys, "--resume", str(copied))
    assert [row["epoch"] for row in rows_of(copied)] == [1]


def test_damaged_checkpoint_by_a_relative_path(copied, capsys, monkeypatch):
    shutil.copytree(copied / "checkpoints" / "epoch-0001", copied / "checkpoints" / "epoch-0000")
    monkeypatch.chdir(copied / "checkpoints")
    (copied / "checkpoints" / "epoch-0001" / "state.pt").write_bytes(b"cut off")
    said = fails(capsys, "--resume", "epoch-0001")
    path = copied / "checkpoints" / "epoch-0001" / "state.pt"
    assert f"{path} is missing, cut off or damaged" in said and "resume from epoch-0000 beside it" in said


def test_files_of_two_checkpoints_are_told_apart(copied, tmp_path):
    one = checkpoint.load_checkpoint(copied / "checkpoints" / "last")
    checkpoint.save_checkpoint(tmp_path, one[0], one[1] | {"step": 7})
    shutil.copy(copied / "checkpoints" / "last" / "state.pt", tmp_path / "checkpoints" / "last" / "state.pt")
    with pytest.raises(checkpoint.TrainingError, match="model.safetensors is of epoch-0001-step-000007 and"):
        checkpoint.load_checkpoint(tmp_path / "checkpoints" / "last")


def test_full_disk_keeps_the_previous_checkpoint(copied):
    # A limit on the size of files fails a write as a full disk does: in the middle, by the system.
    script = textwrap.dedent(
        f"""
        import resource, sys
        from fastvit.training.__main__ import main
        resource.setrlimit(resource.RLIMIT_FSIZE, ({400 << 10}, {400 << 10}))
        sys.exit(main(["--resume", {str(copied)!r}, "--device", "cpu", "--threads", "1"]))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1, done.stderr
    assert "cannot write the checkpoint" in done.stderr and "epoch-0001 is intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert checkpoint.load_checkpoint(copied / "checkpoints" / "last")[1]["epoch"] == 1
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["best", "epoch-0001", "last"]


def test_newest_and_best_are_kept(tmp_path):
    weights, names = {"model": {"w": torch.zeros(2)}}, tmp_path / "checkpoints"

    def save(epoch, **options):
        checkpoint.save_checkpoint(tmp_path, weights, {"epoch": epoch, "step": 0}, **options)
        return sorted(path.name for path in names.iterdir()), (names / "best").resolve().name

    assert save(1) == (["best", "epoch-0001", "last"], "epoch-0001")
    assert save(2, best=True) == (["best", "epoch-0001", "epoch-0002", "last"], "epoch-0002")
    save(3)
    assert save(4) == (["best", "epoch-0002", "epoch-0003", "epoch-0004", "last"], "epoch-0002")
    assert save(5, keep=1) == (["best", "epoch-0002", "epoch-0005", "last"], "epoch-0002")
    # A run that went on from epoch 1 gives up what lies beyond it, the best one included.
    assert save(1) == (["best", "epoch-0001", "last"], "epoch-0001")
    assert checkpoint.find_checkpoint(tmp_path).name == "epoch-0001"


def test_resume_into_another_directory_and_of_a_finished_run(copied, capsys):
    other = str(copied.parent / "other")
    common = ["--device", "cpu", "--threads", "1"]
    assert main(["--resume", str(copied), "--out", other, *common]) == 0
    assert [row["epoch"] for row in rows_of(copied.parent / "other")] == [1, 2]
    assert [row["epoch"] for row in rows_of(copied)] == [1]
    first = capsys.readouterr().out.splitlines()[-1]
    assert main(["--resume", other, *common]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first


# Requests


def test_requests_that_contradict_a_run(copied, capsys, tmp_path):
    new = ["--out", str(tmp_path / "new")]
    for arguments, message in (
        (["--resume", str(copied), "--lr", "0.5"], "--lr must be 0.001 as in the checkpoint, got 0.5"),
        (["--resume", "nowhere"], "nowhere must be a run directory or a checkpoint"),
        (["--out", str(copied)], "already holds a run"),
        ([*new, "--batch-size", "2000"], "--batch-size must be at most the 1438 training images"),
        (
            [*new, "--data", "synthetic", "--image-size", "10", "--model", "vit_cifar"],
            "--model vit_cifar does not fit images of 10 pixels",
        ),
        ([*new, "--freeze", "stom.*"], "--freeze 'stom.*' matches no parameter"),
        ([*new, "--freeze", "*"], "leaves nothing to train"),
        ([*new, "--engine", "apex", "--norm", "apex-sync"], "--engine apex needs"),
    ):
        assert message in fails(capsys, *arguments)
    assert [row["epoch"] for row in rows_of(copied)] == [1]


def test_another_number_of_ranks_cannot_resume(copied, capsys):
    path = copied / "checkpoints" / "epoch-0001" / "state.pt"
    torch.save(torch.load(path, weights_only=True) | {"world": 2}, path)
    assert "must go on with the 2 rank(s) that wrote it, got 1" in fails(capsys, "--resume", str(copied))


def test_missing_packages_are_named(monkeypatch):
    missing = {"tqdm", "PIL", "timm"}
    monkeypatch.setattr("fastvit.training.errors.find_spec", lambda name: None if name in missing else name)
    with pytest.raises(MissingPackage, match=r"needs tqdm, which .*pip install 'fastvit\[train\]'"):
        check_packages(Config())
    with pytest.raises(MissingPackage, match="needs tqdm, pillow"):
        check_packages(Config(data="folder", data_path="."))
    missing -= {"tqdm"}
    with pytest.raises(MissingPackage, match="--model timm/resnet18 needs timm"):
        check_packages(Config(model="timm/resnet18"))
