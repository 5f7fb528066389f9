"""Whole runs of the trainer: their files, and a resumed run that equals an uninterrupted one."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from fastvit.models import create_vit
from fastvit.training import run_log
from fastvit.training.config import MAX_TIMEOUT_SECONDS, NUMBER_LIMITS, option_flag
from training.runs import (
    COMMON,
    FOLDER,
    KILL_ONCE_SCRIPT,
    LIMIT_SECONDS,
    SIX_BATCHES,
    after_each_step,
    assert_equal_runs,
    background_run,
    free_port,
    make_folder,
    rows_of,
    run_here,
    state_of,
    torchrun,
    train_on_rank,
    weights_of,
)

RECIPE = [*SIX_BATCHES, "--epochs", "3", "--warmup-epochs", "1"]  # 3 steps of 2 ranks an epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three epochs at once on two ranks of torchrun."""
    directory = tmp_path_factory.mktemp("runs")
    outputs = torchrun(directory, *COMMON, *RECIPE, "--out", "whole")
    assert outputs[0] == 0, outputs[1] + outputs[2]
    return directory / "whole", outputs


def test_a_run_reports_and_leaves_its_files(whole):
    run, (_, out, err) = whole
    row = rows_of(run)[-1]
    assert out.splitlines()[-1] == f"test accuracy {row['test_accuracy']:.3f}"
    assert row["train_loss"] < rows_of(run)[0]["train_loss"]
    assert row["gradient_norm"] > 0 and row["loss_scale"] == 1
    assert err.count("[epoch 1]") >= 1 and "mean loss" in err  # the progress bar
    assert not re.search("terminate|abort|Traceback|was not destroyed", err, re.I)
    assert "batch_size = 16\n" in (run / "config.toml").read_text()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == sorted(
        {"last.pt", "best.pt", "epoch-0002.pt", "epoch-0003.pt", os.readlink(run / "checkpoints" / "best.pt")}
    )
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert state["world"] == 2
    keys = "model optimizer precision epoch progress config classes world history".split()  # and average
    assert list(state) == keys and list(state["progress"]) == "step loss gradient_norm gradient_norms".split()
    # No prefix of DDP is in the names.
    create_vit("vit_digits", 8, 3, 10, "torch").load_state_dict(weights_of(run))


def _says(rank, world, arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train_on_rank(rank, world, arguments) is None
    return out.getvalue().splitlines()


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_is_evaluated(ranks, whole, world):
    """Gives the numbers of its epoch on any number of ranks, and leaves the run as it is."""
    run, _ = whole
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for row, named in ((rows_of(run)[2], run), (rows_of(run)[1], run / "checkpoints" / "epoch-0002.pt")):
        said = ranks.run(world, _says, ["--evaluate", str(named)])
        assert said[0][-1] == f"test loss {row['test_loss']:.4f}, test accuracy {row['test_accuracy']:.3f}"
        assert said[1:] == [[]] * (world - 1)
    assert files == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_averaged_weights_are_evaluated_too(tmp_path, capsys):
    run = str(tmp_path / "run")
    options = ["--ema", "0.9", "--norm", "torch", "--memory", "convert", "--out", run]
    assert run_here(*SIX_BATCHES, "--epochs", "1", *options) == 0
    row = rows_of(tmp_path / "run")[0]
    capsys.readouterr()
    assert run_here("--evaluate", run) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("averaged weights: test loss ") and last.endswith(f"{row['average_accuracy']:.3f}")


def test_tensorboard_has_every_curve(whole):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(whole[0]))
    events.Reload()
    averaged = {run_log.TENSORBOARD_TAGS["average_accuracy"]}  # with --ema
    assert set(events.Tags()["scalars"]) == {*run_log.TENSORBOARD_TAGS.values()} - averaged
    assert [event.step for event in events.Scalars("loss/train")] == [1, 2, 3]


RESTARTED = ["once.py", *RECIPE, "--device", "cpu", "--threads", "1", "--resume", "auto", "--out", "again"]


def test_a_killed_rank_is_started_again(whole, tmp_path):
    """With torchrun's default store, which the ranks of all attempts share."""
    (tmp_path / "once.py").write_text(KILL_ONCE_SCRIPT)
    status, out, err = torchrun(tmp_path, "--max-restarts=1", *RESTARTED)
    assert status == 0 and "resumed after epoch 1 of 3" in out and (tmp_path / "killed").exists(), err
    assert "rank 0 failed and exits; the other ranks stop too, and --resume again continues" in err
    assert_equal_runs(tmp_path / "again", whole[0])


def test_a_killed_host_is_replaced(whole, tmp_path):
    """Two agents of torchrun as hosts. One that comes later is not told rank 0's address by the default."""
    (tmp_path / "once.py").write_text(KILL_ONCE_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    own = {"KILLED": "host", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []

    def agent(is_host):
        log = (tmp_path / f"log{len(agents)}").open("w")
        agents.append(
            subprocess.Popen(
                [*command, f"--rdzv-conf=is_host={is_host},last_call_timeout=1", *RESTARTED],
                cwd=tmp_path, stdout=log, stderr=log, start_new_session=True, env=os.environ | own,
            )
        )  # fmt: skip

    try:
        agent(True), agent(False)
        assert agents[1].wait(50) == -signal.SIGKILL
        agent(False)  # the new host
        assert [agents[0].wait(50), agents[2].wait(10)] == [0, 0], (tmp_path / "log0").read_text()
    finally:
        for process in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert "resumed after epoch 1 of 3" in (tmp_path / "log0").read_text() + (tmp_path / "log2").read_text()
    assert_equal_runs(tmp_path / "again", whole[0])


def _stopped_by_a_signal(rank, world, arguments, step_of_signal, number):
    def act(step):
        if step == step_of_signal and rank == 1:
            os.kill(os.getpid(), number)

    with after_each_step(act) as steps:
        assert train_on_rank(rank, world, arguments) is None
    return len(steps)


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGUSR1, []),
        (signal.SIGTERM, ["--accumulate", "2", "--ema", "0.9", "--norm", "fastvit-sync"]),
    ],
)
def test_a_signal_to_one_rank_saves_all_and_resumes_within_the_epoch(ranks, tmp_path, number, options):
    # Two steps an epoch: 3 batches are one step of two and one of one when two are accumulated.
    start = [*RECIPE, *options]
    ranks.run(2, train_on_rank, [*start, "--out", str(tmp_path / "whole")])
    per_epoch = 2 if options else 3
    stopped = [*start, "--out", str(tmp_path / "stopped")]
    assert ranks.run(2, _stopped_by_a_signal, stopped, per_epoch + 1, number) == [per_epoch + 2] * 2
    state = state_of(tmp_path / "stopped")
    # With the options the signal came to be known in the last step of the epoch.
    assert (state["epoch"], state["progress"]["step"]) == ((2, 0) if options else (1, 2))
    ranks.run(2, train_on_rank, ["--resume", str(tmp_path / "stopped")])
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


def in_folder(directory):
    path = make_folder(directory / "data", images=16)
    return [*FOLDER, "--data-path", str(path)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("data", [None, in_folder])
def test_a_signal_to_every_process_of_a_job_ends_it_with_a_checkpoint(tmp_path, data, threads, number):
    """A rank with several threads has workers with threads of torch's own, which must not take the signal."""
    data = data(tmp_path) if data else SIX_BATCHES
    with background_run(tmp_path, "--threads", threads, data=data, start_new_session=True) as process:
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert f"stopped by {number.name} in epoch" in out and "continue it with --resume run" in out
    state = state_of(tmp_path / "run")
    assert state["epoch"] >= 1 and len(state["history"]) == state["epoch"]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, "--norm inplace-abn"),
        (2, "--memory convert --ema 0.9 --norm torch"),
        (1, "--amp bf16 --optimizer sgd --clip-norm 1 --label-smoothing 0.1 --channels-last"),
        (1, "--amp O1 --accumulate 2 --optimizer fused-adam --ema 0.99 --norm torch --memory convert"),
    ],
)
def test_stop_after_and_resume_is_bitwise(ranks, tmp_path, world, options):
    start = [*SIX_BATCHES, "--epochs", "2", "--warmup-epochs", "1", *options.split()]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks.run(world, train_on_rank, [*start, "--out", str(whole)])
    ranks.run(world, train_on_rank, [*start, "--out", str(parts), "--stop-after", "1"])
    ranks.run(world, train_on_rank, ["--resume", str(parts)])
    assert_equal_runs(parts, whole)
    assert rows_of(parts)[-1]["loss_scale"] == (65536 if "O1" in options else 1)
    if "--memory" in options:
        report = (parts / "memory.txt").read_text()
        first = "--memory convert, a batch of 16 images on one rank\n\na training forward keeps"
        assert report.startswith(first) and "stem.layers.*" in report and "less (measured)" in report


def test_resume_auto_begins_and_then_goes_on(tmp_path, capsys):
    """Without the link `last` too, which a copy of a run may have lost."""
    run = tmp_path / "auto"
    start = [*SIX_BATCHES, "--epochs", "2", "--stop-after", "1", "--resume", "auto", "--out", str(run)]
    assert run_here(*start) == 0
    assert f"no checkpoint in {run}: a new run\n" in capsys.readouterr().out
    (run / "checkpoints" / "last.pt").unlink()
    assert run_here(*start) == 0
    assert "resumed after epoch 1 of 2" in capsys.readouterr().out and len(rows_of(run)) == 2


def test_the_largest_numbers_train(tmp_path):
    names = ("seed", "data_seed", "accumulate", "keep", "warmup_epochs", "stop_after")
    options = [part for name in names for part in (option_flag(name), str(NUMBER_LIMITS[name][1]))]
    options += [
        "--epochs",
        "1",
        "--batch-size",
        "512",
        "--workers",
        "1",
        "--timeout",
        str(MAX_TIMEOUT_SECONDS),
    ]
    assert run_here(*options, "--out", str(tmp_path)) == 0 and len(rows_of(tmp_path)) == 1


def test_import_is_light():
    code = "import fastvit, fastvit.training, sys; print([m for m in {} if m in sys.modules])"
    heavy = ["tensorboard", "sklearn", "matplotlib", "safetensors", "PIL"]
    done = subprocess.run(
        [sys.executable, "-c", code.format(heavy)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    assert done.stdout.strip() == "[]"
