"""Whole runs of the trainer: their files, and a resumed run that equals an uninterrupted one."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from on_ranks import on_ranks

from fastvit.models import create_vit
from fastvit.training import run_log
from fastvit.training.config import MAX_TIMEOUT_SECONDS, NUMBER_LIMITS, option_flag
from training.runs import (
    COMMON,
    FOLDER,
    KILL_ONCE_SCRIPT,
    SIX_BATCHES,
    after_each_step,
    assert_equal_runs,
    background_run,
    make_image_folder,
    rows_of,
    run_here,
    run_program,
    state_of,
    torchrun,
    train_on_rank,
    weights_of,
)

RECIPE = [*SIX_BATCHES, "--epochs", "3", "--warmup-epochs", "1"]  # An epoch has 3 steps of 2 ranks.
nightly = pytest.mark.nightly


class TorchrunOutput(NamedTuple):
    directory: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns what two ranks of torchrun leave and print, which train three epochs at once."""
    directory = tmp_path_factory.mktemp("runs")
    status, out, err = torchrun(directory, *COMMON, *RECIPE, "--out", "uninterrupted")
    assert status == 0, out + err
    return TorchrunOutput(directory / "uninterrupted", out, err)


def test_a_run_reports_and_leaves_its_files(uninterrupted):
    run = uninterrupted.directory
    row = rows_of(run)[-1]
    assert uninterrupted.stdout.splitlines()[-1] == f"test accuracy {row['test_accuracy']:.3f}"
    assert row["train_loss"] < rows_of(run)[0]["train_loss"]
    assert row["gradient_norm"] > 0 and row["loss_scale"] == 1
    errors = uninterrupted.stderr
    assert "[epoch 1]" in errors and "mean loss" in errors  # the progress bar
    assert not re.search("terminate|abort|Traceback|was not destroyed", errors, re.I)
    assert "batch_size = 16\n" in (run / "config.toml").read_text()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        {"last.pt", "best.pt", "epoch-0002.pt", "epoch-0003.pt", os.readlink(run / "checkpoints" / "best.pt")}
    )
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert state["world"] == 2
    keys = "model optimizer precision epoch progress config classes world history".split()  # without --ema
    assert list(state) == keys and list(state["progress"]) == "step loss gradient_norm gradient_norms".split()
    # No prefix of DDP is in the names.
    create_vit("vit_digits", 8, 3, 10, "torch").load_state_dict(weights_of(run))


def test_tensorboard_has_every_curve(uninterrupted):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(uninterrupted.directory))
    events.Reload()
    averaged = {run_log.TENSORBOARD_TAGS["average_accuracy"]}  # with --ema
    assert set(events.Tags()["scalars"]) == {*run_log.TENSORBOARD_TAGS.values()} - averaged
    assert [event.step for event in events.Scalars("loss/train")] == [1, 2, 3]


@on_ranks()
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_is_evaluated_on_any_number_of_ranks_and_its_run_stays(rank, world, uninterrupted):
    run, last_lines = uninterrupted.directory, []
    modified = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for name in (run, run / "checkpoints" / "epoch-0002.pt"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert train_on_rank(rank, world, ["--evaluate", str(name)]) is None
        last_lines += out.getvalue().splitlines()[-1:]
    rows = [rows_of(run)[2], rows_of(run)[1]] if rank == 0 else []  # Other ranks print nothing.
    assert last_lines == [
        f"test loss {row['test_loss']:.4f}, test accuracy {row['test_accuracy']:.3f}" for row in rows
    ]
    assert modified == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_averaged_weights_are_evaluated_too(tmp_path, capsys):
    run = str(tmp_path / "run")
    options = ["--ema", "0.9", "--norm", "torch", "--memory", "convert", "--out", run]
    assert run_here(*SIX_BATCHES, "--epochs", "1", *options) == 0
    row = rows_of(tmp_path / "run")[0]
    capsys.readouterr()
    assert run_here("--evaluate", run) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("averaged weights: test loss ") and last.endswith(f"{row['average_accuracy']:.3f}")


RESTARTED = ["once.py", *RECIPE, "--device", "cpu", "--threads", "1", "--resume", "auto", "--out", "again"]


@nightly
def test_a_killed_rank_is_started_again(uninterrupted, tmp_path):
    """torchrun has its default store, which the ranks of all attempts share."""
    (tmp_path / "once.py").write_text(KILL_ONCE_SCRIPT)
    status, out, err = torchrun(tmp_path, "--max-restarts=1", *RESTARTED)
    assert status == 0 and "resumed after epoch 1 of 3" in out and (tmp_path / "killed").exists(), err
    assert "rank 0 failed and exits; the other ranks stop too, and --resume again continues" in err
    assert_equal_runs(tmp_path / "again", uninterrupted.directory)


@nightly
def test_a_killed_host_is_replaced(uninterrupted, tmp_path, port):
    """The hosts are agents of torchrun. A later agent is not told the address of rank 0 by default."""
    (tmp_path / "once.py").write_text(KILL_ONCE_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    variables = {"KILLED": "host", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []

    def start_agent(is_host):
        log = (tmp_path / f"log{len(agents)}").open("w")
        agents.append(
            subprocess.Popen(
                [*command, f"--rdzv-conf=is_host={is_host},last_call_timeout=1", *RESTARTED],
                cwd=tmp_path, stdout=log, stderr=log, start_new_session=True, env=os.environ | variables,
            )
        )  # fmt: skip

    try:
        start_agent(True), start_agent(False)
        assert agents[1].wait(50) == -signal.SIGKILL
        start_agent(False)  # the new host
        assert [agents[0].wait(50), agents[2].wait(10)] == [0, 0], (tmp_path / "log0").read_text()
    finally:
        for process in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert "resumed after epoch 1 of 3" in (tmp_path / "log0").read_text() + (tmp_path / "log2").read_text()
    assert_equal_runs(tmp_path / "again", uninterrupted.directory)


@pytest.mark.timeout(240)
@on_ranks(2, limit=200)
@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(signal.SIGUSR1, [], id="USR1 in an epoch"),
        pytest.param(
            signal.SIGTERM,
            ["--accumulate", "2", "--ema", "0.9", "--norm", "fastvit-sync"],
            id="TERM at its end",
            marks=nightly,
        ),
    ],
)
def test_a_signal_to_one_rank_saves_all_and_resumes_within_the_epoch(rank, world, tmp_path, number, options):
    # Two steps an epoch with --accumulate: 3 batches are a step of two and a step of one.
    steps_per_epoch = 2 if options else 3

    def send_signal(step):
        if step == steps_per_epoch + 1 and rank == 1:
            os.kill(os.getpid(), number)

    uninterrupted, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    assert train_on_rank(rank, world, [*RECIPE, *options, "--out", str(uninterrupted)]) is None
    with after_each_step(send_signal) as steps:
        assert train_on_rank(rank, world, [*RECIPE, *options, "--out", str(stopped)]) is None
    assert len(steps) == steps_per_epoch + 2
    state = state_of(stopped)
    # With the options the ranks learn of the signal in the last step of the epoch.
    assert (state["epoch"], state["progress"]["step"]) == ((2, 0) if options else (1, 2))
    assert train_on_rank(rank, world, ["--resume", str(stopped)]) is None


@test_a_signal_to_one_rank_saves_all_and_resumes_within_the_epoch.check
def _(tmp_path):
    assert_equal_runs(tmp_path / "stopped", tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("data", "threads", "number"),
    [
        pytest.param("synthetic", 2, signal.SIGTERM, id="synthetic-2 threads-TERM"),
        pytest.param("folder", 2, signal.SIGTERM, id="folder-2 threads-TERM"),
        pytest.param("synthetic", 1, signal.SIGUSR1, id="synthetic-1 thread-USR1", marks=nightly),
        pytest.param("folder", 1, signal.SIGUSR1, id="folder-1 thread-USR1", marks=nightly),
    ],
)
def test_a_signal_to_every_process_of_a_job_ends_it_with_a_checkpoint(tmp_path, data, threads, number):
    """A rank with several threads has workers with threads of torch's own, which must not take the signal."""
    options = SIX_BATCHES
    if data == "folder":
        options = [*FOLDER, "--data-path", str(make_image_folder(tmp_path / "data", images=16))]
    with background_run(tmp_path, "--threads", str(threads), data=options, start_new_session=True) as process:
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert f"stopped by {number.name} in epoch" in out and "continue it with --resume run" in out
    state = state_of(tmp_path / "run")
    assert state["epoch"] >= 1 and len(state["history"]) == state["epoch"]


@nightly
@pytest.mark.timeout(240)
@on_ranks(limit=200)
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, "--norm inplace-abn"),
        (2, "--memory convert --ema 0.9 --norm torch"),
        (1, "--amp bf16 --optimizer sgd --clip-norm 1 --label-smoothing 0.1 --channels-last"),
        (1, "--amp O1 --accumulate 2 --optimizer fused-adam --ema 0.99 --norm torch --memory convert"),
    ],
    ids=["3 ranks, in place", "2 ranks, average", "bf16", "O1"],
)
def test_a_run_that_stops_after_an_epoch_and_is_resumed_has_the_same_bits(rank, world, tmp_path, options):
    start = [*SIX_BATCHES, "--epochs", "2", "--warmup-epochs", "1", *options.split()]
    uninterrupted, parts = str(tmp_path / "uninterrupted"), str(tmp_path / "parts")
    for arguments in (
        [*start, "--out", uninterrupted],
        [*start, "--out", parts, "--stop-after", "1"],
        ["--resume", parts],
    ):
        assert train_on_rank(rank, world, arguments) is None


@test_a_run_that_stops_after_an_epoch_and_is_resumed_has_the_same_bits.check
def _(tmp_path, options):
    parts = tmp_path / "parts"
    assert_equal_runs(parts, tmp_path / "uninterrupted")
    assert rows_of(parts)[-1]["loss_scale"] == (65536 if "O1" in options else 1)
    if "--memory" in options:
        report = (parts / "memory.txt").read_text()
        first = "--memory convert, a batch of 16 images on one rank\n\na training forward keeps"
        assert report.startswith(first) and "stem.layers.*" in report and "less (measured)" in report


def test_resume_auto_begins_and_then_goes_on(tmp_path, capsys):
    """It needs no link `last.pt`, which a copy of a run may have lost."""
    run = tmp_path / "auto"
    start = [*SIX_BATCHES, "--epochs", "2", "--stop-after", "1", "--resume", "auto", "--out", str(run)]
    assert run_here(*start) == 0
    assert f"no checkpoint in {run}: a new run\n" in capsys.readouterr().out
    (run / "checkpoints" / "last.pt").unlink()
    assert run_here(*start) == 0
    assert "resumed after epoch 1 of 2" in capsys.readouterr().out and len(rows_of(run)) == 2


def test_the_largest_numbers_train(tmp_path):
    numbers = {"epochs": 1, "batch_size": 512, "workers": 1, "timeout": MAX_TIMEOUT_SECONDS}
    for name in ("seed", "data_seed", "accumulate", "keep", "warmup_epochs", "stop_after"):
        numbers[name] = NUMBER_LIMITS[name][1]
    options = [part for name, number in numbers.items() for part in (option_flag(name), str(number))]
    assert run_here(*options, "--out", str(tmp_path)) == 0 and len(rows_of(tmp_path)) == 1


def test_the_import_of_the_trainer_imports_no_heavy_package():
    code = "import fastvit, fastvit.training, sys; print([m for m in {} if m in sys.modules])"
    heavy = ["tensorboard", "sklearn", "matplotlib", "safetensors", "PIL"]
    done = run_program(sys.executable, "-c", code.format(heavy), check=True)
    assert done.stdout.strip() == "[]"
