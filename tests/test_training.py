"""The trainer: its parts in this process, and whole runs under torchrun."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from fastvit.models import vit_digits
from fastvit.training import checkpoint, data, distributed, loop
from fastvit.training.__main__ import main
from fastvit.training.config import Config, parse
from fastvit.training.errors import MissingPackage, TrainingError, check_packages

LIMIT = 120  # seconds; a run that takes longer hangs


def torchrun(directory, *arguments, ranks=2):
    """Run under torchrun and return (status, stdout, stderr)."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        *arguments,
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Run the trainer in this process, as a single rank, and leave torch's settings as they were."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    yield lambda *arguments: main([*arguments, "--device", "cpu"])
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


def weights_of(run, epoch):
    return checkpoint.load_checkpoint(run / "checkpoints" / f"epoch-{epoch:04d}")[0]


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# Whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four epochs at once in ``whole``, and two and two in ``parts``, on two ranks."""
    directory = tmp_path_factory.mktemp("runs")
    common = ["-m", "fastvit.training", "--device", "cpu", "--threads", "1"]
    start = [
        *common,
        "--norm",
        "inplace-abn-sync",
        "--epochs",
        "4",
        "--batch-size",
        "64",
        "--warmup-epochs",
        "1",
    ]
    outputs = [
        torchrun(directory, *start, "--out", "whole"),
        torchrun(directory, *start, "--out", "parts", "--stop-after", "2"),
        torchrun(directory, *common, "--resume", "parts"),
    ]
    for status, out, err in outputs:
        assert status == 0, out + err
    return directory / "whole", directory / "parts", outputs


def test_a_run_reports_and_leaves_its_files(runs):
    whole, _, outputs = runs
    _, out, err = outputs[0]
    accuracy = rows_of(whole)[-1]["test_accuracy"]
    assert out.splitlines()[-1] == f"test accuracy {accuracy:.3f}"
    assert accuracy > 0.5
    assert err.count("[epoch 1]") >= 1 and "mean loss" in err  # the progress bar
    assert json.loads((whole / "config.json").read_text())["batch_size"] == 64
    assert [path.name for path in (whole / "checkpoints").iterdir()] == ["epoch-0004"]
    state = torch.load(whole / "checkpoints" / "epoch-0004" / "state.pt", weights_only=True)
    assert state["world"] == len(state["rng"]) == 2
    vit_digits("torch").load_state_dict(weights_of(whole, 4))  # no prefix of DDP in the names


def test_resume_continues_bitwise(runs):
    whole, parts, outputs = runs
    assert "stopped after epoch 2 of 4" in outputs[1][1]
    assert "resumed after epoch 2 of 4" in outputs[2][1]
    expected, got = weights_of(whole, 4), weights_of(parts, 4)
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    timing = {"time", "images_per_second"}
    expected, got = (
        [{k: v for k, v in row.items() if k not in timing} for row in rows_of(r)] for r in (whole, parts)
    )
    assert got == expected
    assert outputs[2][1].splitlines()[-1] == outputs[0][1].splitlines()[-1]


def test_tensorboard_curves_are_whole_after_resume(runs):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = []
    for run in runs[:2]:
        events = accumulator.EventAccumulator(str(run))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {
            "loss/train",
            "loss/validation",
            "accuracy/validation",
            "learning rate",
            "images per second",
        }
        curves.append(
            [[(e.step, e.value) for e in events.Scalars(tag)] for tag in ("loss/train", "learning rate")]
        )
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0][0]] == [1, 2, 3, 4]


def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path):
    script = tmp_path / "poisoned.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            import fastvit.training.run as run
            from fastvit.training.__main__ import main

            def poisoned(seed, load=run.load_digits):
                split = load(seed)
                if os.environ["RANK"] == "1":
                    split.train_images.fill_(float("nan"))
                return split

            run.load_digits = poisoned
            status = main(sys.argv[1:])
            print(f"rank {os.environ['RANK']} ends with {status}", flush=True)
            sys.exit(status)
            """
        )
    )
    # The statistics of this norm are local, so the poison stays on its rank.
    status, out, err = torchrun(
        tmp_path, str(script), "--norm", "inplace-abn", "--epochs", "1", "--device", "cpu"
    )
    assert status == 1
    assert "epoch 1, step 1: the loss is nan on rank 1;" in err
    assert "rank 0 ends with 1" in out and "rank 1 ends with 1" in out


def test_what_ranks_say_to_each_other(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from fastvit.training import distributed, loop
            from fastvit.training.data import EveryImageOnce
            from fastvit.training.errors import TrainingError

            ranks = distributed.init("cpu", 60)
            rank = ranks.rank
            assert (ranks.world, ranks.backend, distributed.get_rank()) == (2, "gloo", rank)
            assert distributed.is_main_process() == (rank == 0)

            value = torch.tensor([1.0 + rank])
            assert distributed.reduce_value(value).item() == 1.5
            assert distributed.reduce_value(value, average=False).item() == 3 and value.item() == 1.0 + rank
            assert distributed.all_losses(torch.tensor(float(rank)))() == [0.0, 1.0]
            assert distributed.gather_objects(rank) == [0, 1]

            assert distributed.on_main(lambda: rank) == 0
            def fail():
                raise OSError("disk full")
            try:
                distributed.on_main(fail)
            except TrainingError as error:
                assert str(error) == "disk full"
            else:
                raise AssertionError("no error on rank %d" % rank)

            norm = torch.nn.BatchNorm1d(3)
            norm.running_mean.fill_(rank)
            distributed.average_running_statistics(norm)
            assert norm.running_mean.tolist() == [0.5] * 3 and norm.running_var.tolist() == [1.0] * 3

            # Seven images on two ranks: each counts once.
            torch.manual_seed(0)
            images, labels = torch.randn(7, 4), torch.arange(7) % 4
            mine = list(EveryImageOnce(7, rank, 2))
            model = torch.nn.Identity()
            loss, accuracy = loop.evaluate(model, [(images[mine], labels[mine])], ranks.device)
            expected = torch.nn.functional.cross_entropy(images, labels).item()
            assert abs(loss - expected) < 1e-6
            assert accuracy == (images.argmax(1) == labels).double().mean().item()
            del model
            distributed.shutdown()
            print("rank", rank, "done", flush=True)
            """
        )
    )
    status, out, err = torchrun(tmp_path, str(script))
    assert status == 0, err
    assert "rank 0 done" in out and "rank 1 done" in out


# Checkpoints and flags, in this process


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run of one epoch out of two; tests copy it."""
    directory = tmp_path_factory.mktemp("started")
    command = [
        sys.executable,
        "-m",
        "fastvit.training",
        "--device",
        "cpu",
        "--norm",
        "torch",
        "--epochs",
        "2",
    ]
    command += ["--stop-after", "1", "--batch-size", "256", "--threads", "1", "--out", "run"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=LIMIT)
    return directory / "run"


@pytest.fixture
def copied(started, tmp_path):
    import shutil

    return shutil.copytree(started, tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("share", [0.5, 0.0, None])
def test_damaged_checkpoint(alone, copied, capsys, name, share):
    path = copied / "checkpoints" / "epoch-0001" / name
    whole = path.read_bytes()
    if share is None:
        path.unlink()
    else:
        path.write_bytes(whole[: int(len(whole) * share)])
    assert alone("--resume", str(copied)) == 1
    assert f"{path} is missing, cut off or damaged" in capsys.readouterr().err
    assert [row["epoch"] for row in rows_of(copied)] == [1]


def test_resume_of_a_finished_run_and_into_another_directory(alone, copied, capsys):
    assert alone("--resume", str(copied), "--out", "other", "--threads", "1") == 0
    assert [row["epoch"] for row in rows_of(copied.parent / "other")] == [1, 2]
    assert [row["epoch"] for row in rows_of(copied)] == [1]
    first = capsys.readouterr().out.splitlines()[-1]
    assert alone("--resume", "other", "--threads", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == first


def test_requests_that_contradict_a_run(alone, copied, capsys):
    for arguments, message in (
        (["--resume", str(copied), "--lr", "0.5"], "--lr must be 0.002 as in the checkpoint, got 0.5"),
        (["--resume", "nowhere"], "nowhere must be a run directory or a checkpoint"),
        (["--out", str(copied)], "already holds a run"),
        (["--out", "new", "--batch-size", "2000"], "--batch-size must be at most the 1438 training images"),
        (["--out", "new2", "--norm", "torch-sync", "--device", "auto"], "--norm torch-sync"),
    ):
        with_device = arguments if "--device" in arguments else [*arguments, "--device", "cpu"]
        assert main(with_device) == 1
        assert message in capsys.readouterr().err
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["epoch-0001"]


def test_another_number_of_ranks_cannot_resume(alone, copied, capsys):
    path = copied / "checkpoints" / "epoch-0001" / "state.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | {"world": 2}, path)
    assert alone("--resume", str(copied)) == 1
    assert "must go on with the 2 rank(s) that wrote it, got 1" in capsys.readouterr().err


def test_failed_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    checkpoint.save_checkpoint(tmp_path, 1, model, {"epoch": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device.*epoch-0001 is intact"):
        checkpoint.save_checkpoint(tmp_path, 2, model, {"epoch": 2})
    assert checkpoint.find_checkpoint(tmp_path).name == "epoch-0001"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-0001"]
    assert checkpoint.load_checkpoint(tmp_path / "checkpoints" / "epoch-0001")[1] == {"epoch": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--norm", "batch"], "--norm: invalid choice: 'batch'"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0, got -1.0"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--norm", "torch-sync", "--device", "cpu"], "--norm torch-sync trains on CUDA only"),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_every_field_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in Config.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    config, given = parse(["--batch-size", "8", "--deterministic"])
    assert given == {"batch_size": 8, "deterministic": True}
    assert config == Config(batch_size=8, deterministic=True)


def test_incomplete_environment(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["--device", "cpu"]) == 1
    assert "LOCAL_RANK is not; start the ranks with torchrun" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("fastvit.training.errors.find_spec", lambda name: None if name == "tqdm" else name)
    with pytest.raises(MissingPackage, match=r"needs tqdm, .*pip install 'fastvit\[train\]'"):
        check_packages()


def test_import_is_light():
    code = "import fastvit, fastvit.training, sys; print([m for m in {} if m in sys.modules])"
    heavy = ["tensorboard", "sklearn", "matplotlib", "safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", code.format(heavy)], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout.strip() == "[]"


# Parts


def test_split_is_reproducible_and_disjoint():
    split, again, other = data.load_digits(0), data.load_digits(0), data.load_digits(1)
    assert (len(split.train_images), len(split.test_images)) == (1438, 359)
    assert torch.equal(split.test_images, again.test_images)
    assert not torch.equal(split.test_images, other.test_images)
    every = torch.cat([split.train_images, split.test_images])
    assert every.shape == (1797, 1, 8, 8) and every.min() == -1 and every.max() == 1
    everything = torch.cat([other.train_images, other.test_images])
    assert torch.equal(every.flatten(1).sum(1).sort().values, everything.flatten(1).sum(1).sort().values)


def test_random_shift_moves_by_at_most_a_pixel():
    torch.manual_seed(0)
    images = torch.full((200, 2, 5, 6), -1.0)
    images[:, 0, 2, 3] = 1.0
    images[:, 1, 0, 0] = 0.5
    moved = data.random_shift(images)
    assert moved.shape == images.shape and moved.is_contiguous()
    rows, columns = (
        (moved[:, 0] == 1).flatten(1).int().argmax(1) // 6,
        (moved[:, 0] == 1).flatten(1).int().argmax(1) % 6,
    )
    places = {(r, c) for r, c in zip(rows.tolist(), columns.tolist(), strict=True)}
    assert places == {(r, c) for r in (1, 2, 3) for c in (2, 3, 4)}
    assert (moved[:, 0] == 1).flatten(1).sum(1).eq(1).all()
    # The corner pixel leaves the image or stays in its corner; what comes in is background.
    assert set(moved[:, 1].unique().tolist()) == {-1.0, 0.5}
    assert torch.equal(data.random_shift(images, 0), images)


@pytest.mark.parametrize(("length", "world"), [(7, 2), (8, 3), (2, 4)])
def test_every_image_once(length, world):
    shares = [list(data.EveryImageOnce(length, rank, world)) for rank in range(world)]
    assert sorted(sum(shares, [])) == list(range(length))


def test_schedule_rises_then_falls_to_zero():
    optimizer = loop.make_optimizer(torch.nn.Linear(2, 2), "sgd", 0.1, 0.01)
    scheduler, rates = loop.make_scheduler(optimizer, 10, 4), []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_leaves_vectors_alone(name):
    model = vit_digits("torch")
    optimizer = loop.make_optimizer(model, name, 0.1, 0.01)
    decayed, free = (group["params"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert all(parameter.ndim >= 2 for parameter in decayed)
    assert any(parameter is model.position for parameter in free)
    assert len(decayed) + len(free) == len(list(model.parameters()))


def test_one_process_needs_no_group():
    value = torch.tensor(2.0)
    assert distributed.reduce_value(value) is value
    assert distributed.all_losses(value)() == [2.0]
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)
    with pytest.raises(TrainingError, match="no such"):
        distributed.on_main(lambda: (_ for _ in ()).throw(ValueError("no such")))
