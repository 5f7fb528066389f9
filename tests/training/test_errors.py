"""Faults of a run end it on all ranks, with a message for the user: requests, data, hosts that differ."""

import errno
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from on_ranks import on_ranks
from PIL import Image

from fastvit import _library
from fastvit.training import loop
from fastvit.training.command_line import parse_arguments
from fastvit.training.config import option_flag
from training.runs import (
    COMMON,
    FOLDER,
    SIX_BATCHES,
    TWO_EPOCHS,
    after_each_step,
    background_run,
    error_of_run,
    make_image_folder,
    rows_of,
    run_here,
    run_program,
    state_of,
    train_on_rank,
)

# Requests


def test_requests_that_contradict_a_run_or_the_data_are_named(copied_run, capsys, tmp_path):
    new = f"--out {tmp_path / 'new'}"
    for arguments, message in (
        (f"--resume {copied_run} --lr 0.5", "--lr must be 0.001 as in the checkpoint, got 0.5"),
        ("--resume nowhere", "nowhere must be a run directory or a checkpoint"),
        (f"--out {copied_run}", "already holds a run"),
        (f"{new} --batch-size 2000", "--batch-size must be at most the 1438 training images"),
        (f"{new} --data synthetic --image-size 10 --model vit_cifar", "does not fit 10 x 10 pixels"),
        (f"{new} --freeze stom.*", "--freeze 'stom.*' matches no parameter"),
        (f"{new} --freeze *", "leaves nothing to train"),
        (f"{new} --classes 5", "--classes must be at least the 10 classes of the data, got 5"),
        (f"{new} --pretrained nosuch.pt", "--pretrained: cannot read nosuch.pt: No such file or directory"),
        (f"{new} --pretrained {tmp_path}", f"--pretrained: cannot read {tmp_path}: Is a directory"),
        ("--evaluate nowhere", "nowhere must be a run directory or a checkpoint"),
        (f"--evaluate {copied_run}/config.toml", "--evaluate: "),
        (f"--evaluate {copied_run} --lr 0.5", "--evaluate: --lr must be 0.001 as in the checkpoint, got 0.5"),
        (f"{new} --norm torch-sync", "--norm torch-sync trains on CUDA only"),
    ):
        assert message in error_of_run(capsys, *arguments.split())
    assert [row["epoch"] for row in rows_of(copied_run)] == [1]


def test_without_kernels_the_norm_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_library, "NOT_BUILT_REASON", "FASTVIT_KERNELS=0 says that none are loaded")
    error = error_of_run(capsys, "--out", str(tmp_path / "run"))
    assert "--norm inplace-abn-sync needs fastvit's kernels: FASTVIT_KERNELS=0 says" in error
    assert "--norm torch" in error
    assert run_here(*TWO_EPOCHS, "--epochs", "1", "--out", str(tmp_path / "torch")) == 0


@pytest.mark.nightly
def test_names_that_stdout_cannot_encode_do_not_end_a_run(tmp_path):
    """The names are text that a terminal of ASCII lacks, and bytes that are no text."""
    path = make_image_folder(tmp_path / "r\udcfcn", ("a", "ü"))
    arguments = [*COMMON, *FOLDER, "--epochs", "1", "--data-path", str(path), "--out", "ö", "--freeze"]
    ascii_variables = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    for freeze, status in (("nö", 1), ("stem.*", 0)):
        command = [sys.executable, *arguments, freeze, "--resume", "auto"]
        done = run_program(*command, text=False, cwd=tmp_path, env=os.environ | ascii_variables)
        assert done.returncode == status and b"Traceback" not in done.stderr, done.stderr
        assert (rb"--freeze 'n\xf6'" in done.stderr) == status and rb"run in \xf6" in done.stdout
    config, _ = parse_arguments(["--config", str(tmp_path / "ö" / "config.toml")])
    assert (config.data_path, config.out) == (str(path), "ö")


def test_an_interrupt_of_the_rank_alone_ends_its_workers(tmp_path):
    def obey_interrupts():  # Shells let background jobs ignore them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with background_run(tmp_path, preexec_fn=obey_interrupts) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # The pipes are open until the workers end.
    assert process.returncode == 130 and "KeyboardInterrupt: --resume run continues the run after" in err
    assert "Traceback" not in err


ENDS_WHILE_A_BATCH_IS_SENT = """
import os, sys
from multiprocessing import current_process, resource_sharer
from multiprocessing.connection import Client
from fastvit.training.__main__ import main

def connect_and_end(identifier):
    Client(identifier[0], authkey=current_process().authkey)
    os._exit(3)

resource_sharer._resource_sharer.get_connection = connect_and_end
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_a_worker_prints_nothing_of_a_rank_that_has_ended(tmp_path):
    arguments = [*SIX_BATCHES, "--workers", "1", "--out", "run"]
    done = run_program(sys.executable, "-c", ENDS_WHILE_A_BATCH_IS_SENT, *arguments, cwd=tmp_path)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr


# Data


@on_ranks(2)
def test_a_rank_that_loses_its_data_stops_every_rank_and_leaves_the_checkpoint(rank, world, tmp_path):
    def remove_data(step):
        if rank == 1 and step == 6:
            shutil.rmtree(path / "train")

    path, run = tmp_path / str(rank), tmp_path / "run"
    make_image_folder(path, images=16)  # An epoch has four steps.
    arguments = [*FOLDER, "--epochs", "3", "--out", str(run), "--data-path", str(path)]
    with after_each_step(remove_data) as steps:
        error = train_on_rank(rank, world, arguments)
    assert len(steps) == 6  # No step has images that are not there.
    assert error.startswith("rank 1: cannot read the data: ") and "No such file or directory" in error
    assert str(tmp_path / "1" / "train") in error
    state = state_of(run)
    assert state["epoch"] == 1 and all(value.isfinite().all() for value in state["model"].values())


@pytest.mark.parametrize(("split", "workers"), [("train", "0"), ("val", "1")])
def test_a_damaged_image_is_named(tmp_path, capsys, split, workers):
    path = make_image_folder(tmp_path / "data")
    image = path / split / "cat" / "0.png"
    Image.effect_noise((300, 300), 50).save(image)  # large enough for two chunks of pixels
    pixels = bytearray(image.read_bytes())
    pixels[pixels.rindex(b"IDAT")] = 0
    image.write_bytes(pixels)
    with pytest.raises(SyntaxError), Image.open(image) as file:  # This is no OSError.
        file.load()
    arguments = [*FOLDER, "--epochs", "1", "--data-path", str(path), "--workers", workers]
    error = error_of_run(capsys, *arguments, "--out", str(tmp_path / "run"))
    assert f"{image} is damaged: broken PNG file" in error


@pytest.mark.nightly
def test_a_run_that_cannot_read_ends_with_its_workers(tmp_path):
    path = make_image_folder(tmp_path / "data", images=40)
    image = path / "train" / "dog" / "9.png"
    image.unlink()
    os.mkfifo(image)  # Opening it waits for a writer, as a lost network file system would.
    options = ["--data-path", str(path), "--workers", "2", "--timeout", "2", "--epochs", "2", "--out", "run"]
    # A worker that is left behind holds the pipes open, and then this call times out.
    done = run_program(sys.executable, *COMMON, *FOLDER, *options, cwd=tmp_path)
    assert done.returncode == 1 and "timed out after 2.0 seconds" in done.stderr


def test_a_folder_trains_and_a_run_with_other_classes_cannot_resume(tmp_path, capsys):
    path, out = make_image_folder(tmp_path / "data"), str(tmp_path / "run")
    start = [*FOLDER, "--epochs", "2", "--data-path", str(path), "--workers", "1"]
    for name in ("@eaDir", ".cache"):
        (path / "train" / name).mkdir()
    assert run_here(*start, "--out", out, "--stop-after", "1") == 0
    found = "16 training and 16 test images of 2 classes; left out: 1 x .cache, 1 x @eaDir\n"
    assert found in capsys.readouterr().out
    for split in ("train", "val"):
        shutil.copytree(path / split / "cat", path / split / "cow")
    error = error_of_run(capsys, "--resume", out)
    assert "trained on 2 classes (cat, dog), the data has 3 (cat, cow, dog)" in error
    shutil.rmtree(path / "val" / "cow")
    error = error_of_run(capsys, "--resume", out)
    assert "train and val must hold the same classes; cow are in one" in error
    shutil.rmtree(path)
    error = error_of_run(capsys, "--resume", out)
    assert f"{path / 'train'} is no folder; train, and val or test, are" in error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Caught OSError in worker\nOSError: [Errno 28] No space left on device\n"),
        RuntimeError("killed by signal: Bus error. It is possible that workers are out of shared memory."),
    ],
    ids=["in the rank", "in a worker", "killed worker"],
)
def test_a_full_dev_shm_is_named(error):
    def read_batches():
        raise error
        yield

    with pytest.raises(OSError, match=r"cannot read the data: .*/dev/shm, which is full: --workers 0 "):
        next(loop.read_batches(read_batches()))


def test_a_run_whose_dev_shm_is_full_ends_at_once(tmp_path):
    """The rank learns of it, and does not wait for the batch until the timeout."""
    namespace = "unshare --user --map-root-user --mount --pid --fork --kill-child sh -c".split()
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if not shutil.which("unshare") or run_program(*namespace, mount).returncode:
        pytest.skip("no namespaces here")
    options = "--image-size 32 --synthetic-images 192 --batch-size 48 --workers 1 --epochs 1".split()
    command = [sys.executable, *COMMON, *SIX_BATCHES, *options, "--out", str(tmp_path / "run")]
    done = run_program(*namespace, f'{mount} && exec "$@"', "sh", *command)
    assert done.returncode == 1 and "/dev/shm, which is full: --workers 0" in done.stderr, done.stderr


# Hosts that differ


@on_ranks(2)
@pytest.mark.parametrize(
    ("option", "values"), [("lr", ("0.001", "0.01")), ("resume", ("", "auto"))], ids=["lr", "resume"]
)
def test_options_that_differ_between_ranks_are_an_error_on_all(rank, world, tmp_path, option, values):
    run, flag = tmp_path / "run", option_flag(option)
    error = train_on_rank(rank, world, [*TWO_EPOCHS, "--out", str(run), f"{flag}={values[rank]}"])
    assert f"{flag} differs: rank 0: {values[0]}; rank 1: {values[1]}" in error and not run.exists()


@on_ranks(2)
def test_threads_may_differ_between_ranks(rank, world, tmp_path):
    threads = ["2", "0"][rank]  # With 0 all ranks tell each other their cores.
    arguments = [*TWO_EPOCHS, "--epochs", "1", "--out", str(tmp_path / "run"), "--threads", threads]
    assert train_on_rank(rank, world, arguments) is None


@on_ranks(2)
def test_versions_that_differ_between_ranks_are_an_error_on_all(rank, world, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", f"2.{rank}")
        error = train_on_rank(rank, world, [*TWO_EPOCHS, "--out", str(tmp_path / "run")])
    assert "torch differs: rank 0: 2.0; rank 1: 2.1" in error


@on_ranks(2)
@pytest.mark.parametrize(
    ("classes", "images", "message"),
    [
        (("cat", "dog", "fox"), 8, r"the classes of the data differs: rank 0: 3 \(bee, cat, dog\), checksum "
         r"\d+; rank 1: 3 \(cat, dog, fox\)"),
        (("bee", "cat", "dog"), 9, "the training set differs: rank 0: 24 images, .*; rank 1: 27 images"),
    ],
    ids=["classes", "images"],
)  # fmt: skip
def test_data_that_differ_between_hosts_are_an_error_on_all(rank, world, tmp_path, classes, images, message):
    path = tmp_path / str(rank)
    if rank == 0:
        make_image_folder(path, ("bee", "cat", "dog"))
    else:
        make_image_folder(path, classes, images)
    arguments = [*FOLDER, "--epochs", "1", "--out", str(tmp_path / "run"), "--data-path", str(path)]
    assert re.search(message, train_on_rank(rank, world, arguments))
