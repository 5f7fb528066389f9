"""Faults of a run: bad data, bad checkpoints, bad options; error messages and intact checkpoints."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image

from fastvit import _library
from fastvit.training import loop
from fastvit.training.command_line import parse_arguments
from fastvit.training.config import Config, ConfigError, check_packages, option_flag
from training.runs import (
    COMMON,
    FOLDER,
    LIMIT_SECONDS,
    SIX_BATCHES,
    TWO_EPOCHS,
    after_each_step,
    background_run,
    error_of_run,
    make_folder,
    run_here,
    state_of,
    train_on_rank,
)

# Data


def _loses_its_data(rank, world, path, arguments):
    def act(step):
        if rank == 1 and step == 6:
            shutil.rmtree(path / "1" / "train")

    with after_each_step(act) as steps:
        return train_on_rank(rank, world, [*arguments, "--data-path", str(path / str(rank))]), len(steps)


def test_a_rank_that_loses_its_data_stops_every_rank_and_leaves_the_checkpoint(ranks, tmp_path):
    for rank in (0, 1):  # four steps an epoch
        make_folder(tmp_path / "data" / str(rank), images=16)
    arguments = [*FOLDER, "--epochs", "3", "--out", str(tmp_path / "run")]
    (said, steps), other = ranks.run(2, _loses_its_data, tmp_path / "data", arguments)
    assert (said, steps) == other and steps == 6  # and none with images that are not there
    assert said.startswith("rank 1: cannot read the data: ") and "No such file or directory" in said
    assert str(tmp_path / "data" / "1" / "train") in said
    state = state_of(tmp_path / "run")
    assert state["epoch"] == 1 and all(value.isfinite().all() for value in state["model"].values())


@pytest.mark.parametrize(("split", "workers"), [("train", "0"), ("val", "1")])
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
    said = error_of_run(capsys, *arguments, "--out", str(tmp_path / "run"))
    assert f"{image} is damaged: broken PNG file" in said


def test_a_run_that_cannot_read_ends_with_its_workers(tmp_path):
    path = make_folder(tmp_path / "data", images=40)
    image = path / "train" / "dog" / "9.png"
    image.unlink()
    os.mkfifo(image)  # opening it waits for a writer, as a lost network file system would
    options = ["--data-path", str(path), "--workers", "2", "--timeout", "2", "--epochs", "2", "--out", "run"]
    # A worker that is left behind holds the pipes open, and then this call times out.
    done = subprocess.run(
        [sys.executable, *COMMON, *FOLDER, *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1 and "timed out after 2.0 seconds" in done.stderr


def test_an_interrupt_of_the_rank_alone_ends_its_workers(tmp_path):
    def default():  # a shell's background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with background_run(tmp_path, preexec_fn=default) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # until the workers, too, have closed their ends
    assert process.returncode == 130 and "KeyboardInterrupt: --resume run continues the run after" in err
    assert "Traceback" not in err


def test_folder_trains_and_another_number_of_classes_cannot_resume(tmp_path, capsys):
    path = make_folder(tmp_path / "data")
    start = [*FOLDER, "--epochs", "2", "--data-path", str(path), "--workers", "1"]
    out = str(tmp_path / "run")
    for name in ("@eaDir", ".cache"):
        (path / "train" / name).mkdir()
    assert run_here(*start, "--out", out, "--stop-after", "1") == 0
    found = "16 training and 16 test images of 2 classes; left out: 1 x .cache, 1 x @eaDir\n"
    assert found in capsys.readouterr().out
    for split in ("train", "val"):
        shutil.copytree(path / split / "cat", path / split / "cow")
    said = error_of_run(capsys, "--resume", out)
    assert "trained on 2 classes (cat, dog), the data has 3 (cat, cow, dog)" in said
    shutil.rmtree(path / "val" / "cow")
    assert "train and val must hold the same classes; cow are in one" in error_of_run(capsys, "--resume", out)
    shutil.rmtree(path)
    assert f"{path / 'train'} is no folder; train, and val or test, are" in error_of_run(
        capsys, "--resume", out
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Caught OSError in worker\nOSError: [Errno 28] No space left on device\n"),
        RuntimeError(
            "worker is killed by signal: Bus error. It is possible that workers are out of shared memory."
        ),
    ],
)
def test_a_full_dev_shm_is_named(error):
    def batches():
        raise error
        yield

    with pytest.raises(OSError, match=r"cannot read the data: .*/dev/shm, which is full: --workers 0 "):
        next(loop.read_batches(batches()))


def test_a_run_whose_dev_shm_is_full_ends_at_once(tmp_path):
    """The rank learns of it, and does not wait for the batch until the timeout."""
    namespace = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "sh",
        "-c",
    ]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if not shutil.which("unshare") or subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    options = "--image-size 32 --synthetic-images 192 --batch-size 48 --workers 1 --epochs 1".split()
    command = [sys.executable, *COMMON, *SIX_BATCHES, *options, "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*namespace, f'{mount} && exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 1 and "/dev/shm, which is full: --workers 0" in done.stderr, done.stderr


def test_without_kernels_the_norm_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_library, "NOT_BUILT_REASON", "FASTVIT_KERNELS=0 says that none are loaded")
    said = error_of_run(capsys, "--out", str(tmp_path / "run"))
    assert (
        "--norm inplace-abn-sync needs fastvit's kernels: FASTVIT_KERNELS=0 says" in said
        and "--norm torch" in said
    )
    assert run_here(*TWO_EPOCHS, "--epochs", "1", "--out", str(tmp_path / "torch")) == 0


def test_names_that_stdout_cannot_encode_do_not_end_a_run(tmp_path):
    """Neither text in a terminal of ASCII, nor bytes that are no text; the saved configuration has them."""
    path = make_folder(tmp_path / "r\udcfcn", ("a", "ü"))
    arguments = [*COMMON, *FOLDER, "--epochs", "1", "--data-path", str(path), "--out", "ö", "--freeze"]
    for freeze, status in (("nö", 1), ("stem.*", 0)):
        done = subprocess.run(
            [sys.executable, *arguments, freeze, "--resume", "auto"],
            cwd=tmp_path, capture_output=True, timeout=LIMIT_SECONDS,
            env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        assert done.returncode == status and b"Traceback" not in done.stderr, done.stderr
        assert (rb"--freeze 'n\xf6'" in done.stderr) == status and rb"run in \xf6" in done.stdout
    config, _ = parse_arguments(["--config", str(tmp_path / "ö" / "config.toml")])
    assert (config.data_path, config.out) == (str(path), "ö")
    with pytest.raises(
        ConfigError, match="--out must be UTF-8, which TensorBoard's files need, got '.udcfc'"
    ):
        Config(out="\udcfc")


# Hosts that were told or have different things


def _told(rank, world, *arguments):
    return train_on_rank(rank, world, arguments[rank])


@pytest.mark.parametrize(
    ("option", "one", "other"),
    [("lr", 0.001, 0.01), ("resume", "", "auto")],
)
def test_options_that_differ_between_ranks_are_an_error_on_all(ranks, tmp_path, option, one, other):
    common = [*TWO_EPOCHS, "--out", str(tmp_path / "run")]
    told = [[*common, f"--{option.replace('_', '-')}={value}"] for value in (one, other)]
    said = ranks.run(2, _told, *told)
    assert said[0] == said[1] and f"{option_flag(option)} differs: rank 0: {one}; rank 1: {other}" in said[0]
    assert not (tmp_path / "run").exists()


def test_an_option_of_a_host_and_versions(ranks, tmp_path):
    own = [["--threads", str(n)] for n in (2, 0)]  # 0: all ranks tell each other their cores
    common = [*TWO_EPOCHS, "--epochs", "1", "--out", str(tmp_path / "run")]
    assert ranks.run(2, _told, *([*common, *options] for options in own)) == [None, None]
    said = ranks.run(2, _of_versions, [*common[:-1], str(tmp_path / "other")])
    assert said[0] == said[1] and "torch differs: rank 0: 2.0; rank 1: 2.1" in said[0]


def _of_versions(rank, world, arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.{rank}")
        return train_on_rank(rank, world, arguments)


@pytest.mark.parametrize(
    ("classes", "images", "said"),
    [
        (("cat", "dog", "fox"), 8, r"the classes of the data differs: rank 0: 3 \(bee, cat, dog\), checksum "
         r"\d+; rank 1: 3 \(cat, dog, fox\)"),
        (("bee", "cat", "dog"), 9, "the training set differs: rank 0: 24 images, .*; rank 1: 27 images"),
    ],
)  # fmt: skip
def test_data_that_differ_between_hosts_are_an_error_on_all(ranks, tmp_path, classes, images, said):
    make_folder(tmp_path / "0", ("bee", "cat", "dog"))
    make_folder(tmp_path / "1", classes, images)
    common = [*FOLDER, "--epochs", "1", "--out", str(tmp_path / "run")]
    got = ranks.run(2, _told, *([*common, "--data-path", str(tmp_path / rank)] for rank in "01"))
    assert got[0] == got[1] and re.search(said, got[0])


# Requests


def test_missing_packages_are_named(monkeypatch):
    missing = {"tqdm", "PIL", "timm"}
    monkeypatch.setattr("fastvit.training.config.find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ConfigError, match=r"needs tqdm, which .*pip install '.\[train\]'"):
        check_packages(Config())
    with pytest.raises(ConfigError, match="needs tqdm, pillow"):
        check_packages(Config(data="folder", data_path="."))
    missing.remove("tqdm")
    with pytest.raises(ConfigError, match=r"needs timm, which .*pip install '.\[train\]' timm"):
        check_packages(Config(model="timm/resnet18"))
