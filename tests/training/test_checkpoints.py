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


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of one epoch out of two; tests copy it."""
    directory = tmp_path_factory.mktemp("started")
    assert run_here(*TWO_EPOCHS, "--stop-after", "1", "--out", str(directory / "run")) == 0
    return directory / "run"


@pytest.fixture
def copied(started, tmp_path):
    return shutil.copytree(started, tmp_path / "run", symlinks=True)


# Checkpoints


def test_damaged_checkpoint(copied, capsys, monkeypatch):
    monkeypatch.chdir(copied / "checkpoints")
    path = copied / "checkpoints" / "epoch-0001.pt"
    state = torch.load(path, weights_only=True)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        for named in (copied, path, path.name):
            said = error_of_run(capsys, "--resume", str(named))
            assert f"{path} is missing, cut off or damaged" in said
    for content, message in (
        ({"model": {}}, f"{path} is no checkpoint of fastvit-train"),
        (state | {"config": state["config"] | {"ema": 0.5}}, "average of the checkpoint does not fit"),
        (state | {"optimizer": {"state": {}, "param_groups": [1]}}, "optimizer of the checkpoint does not"),
        (state | {"model": {}}, "model of the checkpoint does not fit"),
    ):
        torch.save(content, path)
        assert message in error_of_run(capsys, "--resume", str(copied))
    path.unlink()
    assert f"{copied} must be a run directory or a checkpoint" in error_of_run(
        capsys, "--resume", str(copied)
    )
    assert [row["epoch"] for row in rows_of(copied)] == [1]


@pytest.mark.parametrize("named", [None, "checkpoints/last.pt"])
def test_a_copy_that_followed_the_links_is_resumed(started, tmp_path, named):
    copy = shutil.copytree(started, tmp_path / "copy")
    last = copy / "checkpoints" / "last.pt"
    assert not last.is_symlink()
    auto = [*TWO_EPOCHS, "--resume", "auto", "--out", str(copy)]
    assert run_here(*(["--resume", str(copy / named)] if named else auto)) == 0
    assert [row["epoch"] for row in rows_of(copy)] == [1, 2] and rows_of(copy)[:1] == rows_of(started)
    assert last.is_symlink() and last.resolve().name == "epoch-0002.pt"


def test_newest_and_best_are_kept(tmp_path):
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
    # A run that went on from epoch 1 gives up what lies beyond it, the best one included.
    assert save(1) == (["best", "epoch-0001", "last"], "epoch-0001")
    assert checkpoint.find_checkpoint(tmp_path).stem == "epoch-0001"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("full disk", "No space left on device"),
        ("size", "File too large"),
        ("no rename", "input/output error"),
    ],
)
@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("numbers", [0, 1 << 10, 1 << 20])
def test_a_checkpoint_that_cannot_be_written_says_why_and_leaves_the_one_before(
    tmp_path, monkeypatch, fault, said, epoch, numbers
):
    """At the first write, in the middle or at the last one; torch's writer has errors of its own then."""
    state = {"epoch": 1, "progress": {"step": 0}}
    before = checkpoint.save_checkpoint(tmp_path, state)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def replace(*_):
        raise OSError(errno.EIO, "input/output error")

    if fault == "no rename":
        monkeypatch.setattr(os, "replace", replace)
    elif fault == "full disk":
        (tmp_path / "checkpoints" / f"epoch-{epoch:04d}.pt.tmp").symlink_to("/dev/full")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * numbers if numbers else 100, hard))
    try:
        with pytest.raises(OSError, match=f"cannot write the checkpoint .*{said}.*epoch-0001.pt is intact$"):
            checkpoint.save_checkpoint(tmp_path, state | {"epoch": epoch, "model": torch.zeros(numbers)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(before) == state
    assert sorted(path.name for path in before.parent.iterdir()) == ["best.pt", before.name, "last.pt"]


def test_resume_into_another_directory_and_of_a_finished_run(copied, capsys):
    other = str(copied.parent / "other")
    assert run_here("--resume", str(copied), "--out", other) == 0
    assert [row["epoch"] for row in rows_of(copied.parent / "other")] == [1, 2]
    assert [row["epoch"] for row in rows_of(copied)] == [1]
    first = capsys.readouterr().out.splitlines()[-1]
    assert run_here("--resume", other) == 0
    assert capsys.readouterr().out.splitlines()[-1] == first


# Requests


def test_requests_that_contradict_a_run(copied, capsys, tmp_path):
    new = f"--out {tmp_path / 'new'}"
    for arguments, message in (
        (f"--resume {copied} --lr 0.5", "--lr must be 0.001 as in the checkpoint, got 0.5"),
        ("--resume nowhere", "nowhere must be a run directory or a checkpoint"),
        (f"--out {copied}", "already holds a run"),
        (f"{new} --batch-size 2000", "--batch-size must be at most the 1438 training images"),
        (f"{new} --data synthetic --image-size 10 --model vit_cifar", "does not fit 10 x 10 pixels"),
        (f"{new} --freeze stom.*", "--freeze 'stom.*' matches no parameter"),
        (f"{new} --freeze *", "leaves nothing to train"),
        (f"{new} --classes 5", "--classes must be at least the 10 classes of the data, got 5"),
        (f"{new} --pretrained nosuch.pt", "--pretrained: cannot read nosuch.pt: No such file or directory"),
        (f"{new} --pretrained {tmp_path}", f"--pretrained: cannot read {tmp_path}: Is a directory"),
        ("--evaluate nowhere", "nowhere must be a run directory or a checkpoint"),
        (f"--evaluate {copied}/config.toml", "--evaluate: "),
        (f"--evaluate {copied} --lr 0.5", "--evaluate: --lr must be 0.001 as in the checkpoint, got 0.5"),
        (f"{new} --norm torch-sync", "--norm torch-sync trains on CUDA only"),
    ):
        assert message in error_of_run(capsys, *arguments.split())
    assert [row["epoch"] for row in rows_of(copied)] == [1]


def test_a_run_that_was_started_with_an_old_value_is_resumed(tmp_path, capsys):
    run = tmp_path / "run"
    assert run_here(*TWO_EPOCHS, "--memory", "matmuls", "--stop-after", "1", "--out", str(run)) == 0
    path = run / "checkpoints" / "epoch-0001.pt"
    state = state_of(run)
    torch.save(state | {"config": state["config"] | {"memory": "products"}}, path)
    with pytest.warns(FutureWarning, match="--resume: the checkpoint's --memory products is matmuls now"):
        assert run_here("--resume", str(run), "--memory", "matmuls") == 0
    assert [row["epoch"] for row in rows_of(run)] == [1, 2] and state_of(run)["config"]["memory"] == "matmuls"
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
    within = state_of(run) | {"world": 2, "progress": {"step": 2}}
    torch.save(within, folder / "epoch-0002-step-000002.pt")
    assert run_here("--resume", str(run), "--stop-after", "1") == 0
    assert "resumed after epoch 2 of 3\n" in capsys.readouterr().out
    for path in folder.iterdir():
        path.unlink()
    torch.save(within, folder / "epoch-0002-step-000002.pt")
    said = error_of_run(capsys, "--resume", str(run))
    assert "is within an epoch, so the 2 rank(s) that wrote it must continue it, got 1" in said


def _on_a_disk_of_its_own(rank, world, folder, first):
    with pytest.MonkeyPatch.context() as patch:
        (host := folder / str((rank + first) % 2)).mkdir(exist_ok=True)
        patch.chdir(host)
        return train_on_rank(
            rank, world, [*TWO_EPOCHS, "--stop-after", "1", "--resume", "auto", "--out", "run"]
        )


def test_a_run_whose_checkpoints_another_host_has_does_not_begin_anew(ranks, tmp_path):
    assert ranks.run(2, _on_a_disk_of_its_own, tmp_path, 0) == [None, None]
    said = ranks.run(2, _on_a_disk_of_its_own, tmp_path, 1)
    assert said[0] == said[1] and "rank 1 sees a newer checkpoint in run than rank 0" in said[0]
    assert ranks.run(2, _on_a_disk_of_its_own, tmp_path, 0) == [None, None]  # where rank 0 has them
    assert [row["epoch"] for row in rows_of(tmp_path / "0" / "run")] == [1, 2]


# Two runs at once


def test_a_directory_in_use_is_refused_until_its_run_ends_or_dies(tmp_path, capsys):
    run = str(tmp_path / "run")
    with background_run(tmp_path) as first:
        for arguments in (["--out", run], ["--out", run, "--resume", "auto"], ["--resume", run]):
            said = error_of_run(capsys, *arguments)
            assert f"--out {run} is in use by another run (process {first.pid} on " in said
        assert first.poll() is None
        # Its worker, which sees the death only after some seconds, must not keep the directory.
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=60)
        assert run_here("--resume", run, "--stop-after", "1") == 0
    epochs = [row["epoch"] for row in rows_of(Path(run))]
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) > 1


def test_a_file_system_without_locks_is_said(copied, capsys, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert run_here("--resume", str(copied)) == 0
    assert f"{copied} cannot be locked" in capsys.readouterr().out
