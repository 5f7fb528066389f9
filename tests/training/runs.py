"""Runs the trainer for tests: under torchrun, in this process, or on the processes of the fixture `ranks`."""

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from fastvit.training import checkpoint, loop, run
from fastvit.training.__main__ import main
from fastvit.training.command_line import parse_arguments

LIMIT_SECONDS = 110  # A run that takes longer hangs.
COMMON = ["-m", "fastvit.training", "--device", "cpu", "--threads", "1"]
# An epoch has six batches of 16 images, and takes less than a second.
SIX_BATCHES = (
    "--data synthetic --model vit_digits --image-size 8 --synthetic-images 96 --batch-size 16".split()
)
# This script trains, but kills rank 1 after four steps of the first start. With KILLED=host it kills the
# torchrun process of rank 1 too, as if the host had failed.
KILL_ONCE_SCRIPT = """
import os, signal, sys
from pathlib import Path
from fastvit.training import loop
from fastvit.training.__main__ import main

steps = []
def step_and_kill(train_state, original_step=loop._optimizer_step):
    original_step(train_state)
    steps.append(1)
    if len(steps) == 4 and os.environ["RANK"] == "1" and not Path("killed").exists():
        Path("killed").touch()
        if os.environ.get("KILLED") == "host":
            os.kill(os.getppid(), signal.SIGKILL)  # the torchrun process
        os.kill(os.getpid(), signal.SIGKILL)
loop._optimizer_step = step_and_kill
sys.exit(main(sys.argv[1:]))
"""
# These options train with torch's norms on SIX_BATCHES.
TWO_EPOCHS = [*SIX_BATCHES, "--epochs", "2", "--norm", "torch"]
TINY_MODEL = ["--image-size", "8", "--model", "vit_digits", "--batch-size", "4"]
FOLDER = ["--data", "folder", "--workers", "0", *TINY_MODEL]  # Tests add --data-path, from make_image_folder.


def make_image_folder(path, classes=("cat", "dog"), images=8, side=12):
    for split in ("train", "val"):
        for number, name in enumerate(classes):
            (path / split / name).mkdir(parents=True)
            for index in range(images):
                colour = (40 * number + index, 255 - index, 17 * index)
                Image.new("RGB", (side + index, side), colour).save(path / split / name / f"{index}.png")
    return path


def run_program(*command, text=True, **options):
    """Runs a program to its end, within LIMIT_SECONDS. Returns the completed process with its output."""
    return subprocess.run(command, capture_output=True, text=text, timeout=LIMIT_SECONDS, **options)


def torchrun(directory, *arguments):
    """Runs a script, or "-m" and a module, on two ranks. Returns exit status, stdout and stderr."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    process = run_program(*command, "--nproc_per_node=2", *arguments, cwd=directory)
    return process.returncode, process.stdout, process.stderr


@contextlib.contextmanager
def after_each_step(act):
    """Calls `act(n)` after the n-th step of the optimizer."""

    def step_and_act(train_state, original_step=loop._optimizer_step):
        original_step(train_state)
        steps.append(1)
        act(len(steps))

    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_optimizer_step", step_and_act)
        yield steps


@contextlib.contextmanager
def background_run(directory, *arguments, data=SIX_BATCHES, **options):
    """Yields the process of a long run with a worker, after its first epoch. Kills the process at the end."""
    arguments = [*COMMON, *data, "--epochs", "5000", "--workers", "1", "--out", "run", *arguments]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    try:
        while "[epoch 1]" not in process.stdout.readline():
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait(timeout=60)


def train_on_rank(rank, world, arguments):
    """Trains, as a function that `ranks.run` calls. Returns the message of TrainingError, or None."""
    config, explicit_options = parse_arguments(["--device", "cpu", "--threads", "1", *arguments])
    try:
        run.run_training(config, explicit_options, torch.device("cpu"))
    except run.TrainingError as error:
        return str(error)


def run_here(*arguments):
    """Runs the trainer in this process and restores the number of threads. Returns the exit status."""
    threads = torch.get_num_threads()
    try:
        return main([*arguments, "--device", "cpu", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)


def error_of_run(capsys, *arguments):
    """Returns the error message of a run in this process, which must fail."""
    assert run_here(*arguments) == 1
    return capsys.readouterr().err


def state_of(directory):
    return checkpoint.load_checkpoint(directory / "checkpoints" / "last.pt")


def weights_of(directory):
    return state_of(directory)["model"]


def rows_of(directory):
    """Returns the rows of metrics.jsonl without what is measured: times and memory."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    measured = {"time", "images_per_second", "data_wait", "memory"}
    return [{key: value for key, value in row.items() if key not in measured} for row in rows]


def assert_equal_runs(actual, expected):
    """Asserts that two runs have bitwise equal weights and averages, and equal `rows_of`."""
    for key in ("model", "average"):
        weights, expected_weights = (state_of(run_dir).get(key, {}) for run_dir in (actual, expected))
        assert list(weights) == list(expected_weights)
        assert [name for name in weights if not torch.equal(weights[name], expected_weights[name])] == []
    assert rows_of(actual) == rows_of(expected)
