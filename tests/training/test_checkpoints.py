"""The directory of a run: checkpoints that are damaged, copied or of another run, and two runs at once."""

import errno
import fcntl
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from on_ranks import on_ranks

from fastvit.training import checkpoint
from training.runs import (
    SIX_BATCHES,
    TWO_EPOCHS,
    background_run,
    error_of_run,
    rows_of,
    run_here,
    state_of,
    train_on_rank,
)


def epochs_of(run):
    return [row["epoch"] for row in rows_of(run)]


# Files


def test_a_damaged_checkpoint_is_named(copied_run, capsys, monkeypatch):
    monkeypatch.chdir(copied_run / "checkpoints")
    path = copied_run / "checkpoints" / "epoch-0001.pt"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b""):
        path.write_bytes(damaged)
        for name in (copied_run, path, path.name):
            error = error_of_run(capsys, "--resume", str(name))
            assert f"{path} is missing, cut off or damaged" in error
    path.unlink()
    error = error_of_run(capsys, "--resume", str(copied_run))
    assert f"{copied_run} must be a run directory or a checkpoint" in error
    assert epochs_of(copied_run) == [1]


def test_a_checkpoint_that_does_not_fit_is_named(copied_run, capsys):
    path = copied_run / "checkpoints" / "epoch-0001.pt"
    state = torch.load(path, weights_only=True)
    for content, message in (
        ({"model": {}}, f"{path} is no checkpoint of fastvit-train"),
        (state | {"config": state["config"] | {"ema": 0.5}}, "average of the checkpoint does not fit"),
        (state | {"optimizer": {"state": {}, "param_groups": [1]}}, "optimizer of the checkpoint does not"),
        (state | {"model": {}}, "model of the checkpoint does not fit"),
    ):
        torch.save(content, path)
        assert message in error_of_run(capsys, "--resume", str(copied_run))
    assert epochs_of(copied_run) == [1]


@pytest.mark.parametrize("name", ["auto", "the run", "last.pt"])
def test_a_copy_that_followed_the_links_is_resumed(run_of_one_epoch, tmp_path, name):
    copy = shutil.copytree(run_of_one_epoch, tmp_path / "copy")
    last = copy / "checkpoints" / "last.pt"
    assert not last.is_symlink()
    arguments = {
        "auto": [*TWO_EPOCHS, "--resume", "auto", "--out", str(copy)],
        "the run": ["--resume", str(copy)],
        "last.pt": ["--resume", str(last)],
    }
    assert run_here(*arguments[name]) == 0
    assert epochs_of(copy) == [1, 2] and rows_of(copy)[:1] == rows_of(run_of_one_epoch)
    assert last.is_symlink() and last.resolve().name == "epoch-0002.pt"


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    folder = tmp_path / "checkpoints"

    def save(epoch, **options):
        checkpoint.save_checkpoint(tmp_path, {"epoch": epoch, "progress": {"step": 0}}, **options)
        assert (folder / "last.pt").resolve().stem == f"epoch-000{epoch}"
        names = sorted(path.stem for path in folder.iterdir())
        return names, (folder / "best.pt").resolve().stem

    assert save(1) == (["best", "epoch-0001", "last"], "epoch-0001")
    assert save(2, best=True) == (["best", "epoch-0001", "epoch-0002", "last"], "epoch-0002")
    save(3)
    assert save(4) == (["best", "epoch-0002", "epoch-0003", "epoch-0004", "last"], "epoch-0002")
    assert save(5, keep=1) == (["best", "epoch-0002", "epoch-0005", "last"], "epoch-0002")
    # A run that goes on from epoch 1 gives up all later checkpoints, the best one included.
    assert save(1) == (["best", "epoch-0001", "last"], "epoch-0001")
    assert checkpoint.find_checkpoint(tmp_path).stem == "epoch-0001"


@pytest.mark.parametrize(
    ("fault", "epoch", "numbers"),
    [
        ("No space left on device", 1, 0),
        ("No space left on device", 2, 1 << 20),
        ("File too large", 2, 0),
        ("File too large", 1, 1 << 10),
        ("File too large", 2, 1 << 20),
        ("cannot rename", 1, 0),
        ("cannot rename", 2, 0),
    ],
)
def test_a_checkpoint_that_cannot_be_written_says_why_and_leaves_the_one_before(
    tmp_path, monkeypatch, fault, epoch, numbers
):
    """Writing fails at the first write, in the middle or at the last one; torch's writer adds own errors."""
    state = {"epoch": 1, "progress": {"step": 0}}
    before = checkpoint.save_checkpoint(tmp_path, state)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail_to_replace(*_):
        raise OSError(errno.EIO, "cannot rename")

    if fault == "cannot rename":
        monkeypatch.setattr(os, "replace", fail_to_replace)
    elif fault == "No space left on device":
        (tmp_path / "checkpoints" / f"epoch-{epoch:04d}.pt.tmp").symlink_to("/dev/full")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * numbers if numbers else 100, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write the checkpoint .*{fault}.*epoch-0001.pt is intact$"):
            checkpoint.save_checkpoint(tmp_path, state | {"epoch": epoch, "model": torch.zeros(numbers)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(before) == state
    assert sorted(path.name for path in before.parent.iterdir()) == ["best.pt", before.name, "last.pt"]


# Resumed runs


def test_a_run_is_resumed_into_another_directory_and_once_more_at_its_end(copied_run, capsys):
    other = copied_run.parent / "other"
    assert run_here("--resume", str(copied_run), "--out", str(other)) == 0
    assert epochs_of(other) == [1, 2] and epochs_of(copied_run) == [1]
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert run_here("--resume", str(other)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last_line


def test_a_run_that_was_started_with_an_old_value_is_resumed(tmp_path, capsys):
    run = tmp_path / "run"
    assert run_here(*TWO_EPOCHS, "--memory", "matmuls", "--stop-after", "1", "--out", str(run)) == 0
    path = run / "checkpoints" / "epoch-0001.pt"
    state = state_of(run)
    torch.save(state | {"config": state["config"] | {"memory": "products"}}, path)
    with pytest.warns(FutureWarning, match="--resume: the checkpoint's --memory products is matmuls now"):
        assert run_here("--resume", str(run), "--memory", "matmuls") == 0
    assert epochs_of(run) == [1, 2] and state_of(run)["config"]["memory"] == "matmuls"
    assert "--memory matmuls: " in capsys.readouterr().out


def test_another_number_of_ranks_goes_on_from_the_end_of_an_epoch(ranks, tmp_path, capsys):
    start = [*SIX_BATCHES, "--epochs", "3", "--norm", "torch", "--warmup-epochs", "1"]
    run, one = tmp_path / "run", tmp_path / "one"
    ranks.run(2, train_on_rank, [*start, "--out", str(run), "--stop-after", "1"])
    assert run_here(*start, "--out", str(one), "--stop-after", "2") == 0
    capsys.readouterr()
    assert run_here("--resume", str(run), "--stop-after", "1") == 0
    message = "1 of 3; 2 rank(s) wrote the checkpoint, learning rate and schedule are those of 1"
    assert f"resumed after epoch {message}" in capsys.readouterr().out
    assert state_of(run)["world"] == 1 and rows_of(run)[1]["lr"] == rows_of(one)[1]["lr"]
    assert rows_of(run)[0]["lr"] == 2 * rows_of(one)[0]["lr"]

    folder = run / "checkpoints"
    within_epoch = state_of(run) | {"world": 2, "progress": {"step": 2}}
    torch.save(within_epoch, folder / "epoch-0002-step-000002.pt")
    assert run_here("--resume", str(run), "--stop-after", "1") == 0
    assert "resumed after epoch 2 of 3\n" in capsys.readouterr().out
    for path in folder.iterdir():
        path.unlink()
    torch.save(within_epoch, folder / "epoch-0002-step-000002.pt")
    error = error_of_run(capsys, "--resume", str(run))
    assert "is within an epoch, so the 2 rank(s) that wrote it must continue it, got 1" in error


@on_ranks(2)
def test_a_run_whose_checkpoints_another_host_has_does_not_begin_anew(rank, world, tmp_path):
    """Each rank has a disk of its own, and rank 0 writes."""
    arguments = [*TWO_EPOCHS, "--stop-after", "1", "--resume", "auto", "--out", "run"]
    errors = []
    for host in (rank, 1 - rank, rank):
        (tmp_path / str(host)).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / str(host))
            errors.append(train_on_rank(rank, world, arguments))
    assert errors[0] is None and errors[2] is None
    assert "rank 1 sees a newer checkpoint in run than rank 0" in errors[1]
    return errors


@test_a_run_whose_checkpoints_another_host_has_does_not_begin_anew.check
def _(results, tmp_path):
    assert results[0] == results[1] and epochs_of(tmp_path / "0" / "run") == [1, 2]


# Two runs at once


def test_a_directory_in_use_is_refused_until_its_run_ends_or_dies(tmp_path, capsys):
    run = str(tmp_path / "run")
    with background_run(tmp_path) as first:
        for arguments in (["--out", run], ["--out", run, "--resume", "auto"], ["--resume", run]):
            error = error_of_run(capsys, *arguments)
            assert f"--out {run} is in use by another run (process {first.pid} on " in error
        assert first.poll() is None
        # The worker of the killed run sees the death only after some seconds. It must not keep the directory.
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=60)
        assert run_here("--resume", run, "--stop-after", "1") == 0
    epochs = epochs_of(Path(run))
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) > 1


def test_a_file_system_without_locks_is_reported(copied_run, capsys, monkeypatch):
    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert run_here("--resume", str(copied_run)) == 0
    assert f"{copied_run} cannot be locked" in capsys.readouterr().out
