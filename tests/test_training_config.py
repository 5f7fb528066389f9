"""Options and launchers: flags, TOML files, environment variables."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from training_runs import free_port

from fastvit.sync.teardown import destroy_process_group
from fastvit.training import distributed
from fastvit.training.__main__ import main
from fastvit.training.command_line import merge_saved, parse
from fastvit.training.config import LIMITS, Config, ConfigError, flag
from fastvit.training.launch import MPI, Launch, find_launch


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--norm batch", "--norm: invalid choice: 'batch'"),
        ("--epochs many", "--epochs: invalid int value: 'many'"),
        ("--timeout 1e9", "--timeout must be above 0, up to 2000000, got 1000000000.0"),
        ("--lr nan", "--lr must be above 0, got nan"),
        ("--weight-decay -1", "--weight-decay must be at least 0, got -1.0"),
        ("--ema 1", "--ema must be at least 0 and below 1, got 1.0"),
        (
            "--amp O1 --loss-scale static",
            "--loss-scale must be auto, dynamic or a number above 0, got static",
        ),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--data cifar10", "--data cifar10 needs --data-path"),
        ("--model resnet50", "--model must be auto, one of vit_digits, "),
        ("--memory less", "--memory must be one of off, convert, products, or budget=<share or bytes>"),
        ("--memory convert --compile", "--memory convert is for models that are not compiled"),
        ("--pretrained timm", "--pretrained timm is for --model timm/<name>"),
        ("--image-size 64", "--image-size 64 is for --data folder and synthetic"),
        ("--loss-scale 128", "--loss-scale 128 is for --amp O0 to O3"),
        ("--model timm/resnet18 --mlp-norm none", "--mlp-norm none is for fastvit's models"),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    assert message in complaint(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown key 'epoch'"),
        ("epochs = 3.5", "--epochs: invalid int value: '3.5'"),
        ("epochs = true", "--epochs: expected one argument"),
        ("compile = 1", "--compile/--no-compile: ignored explicit argument '1'"),
        ("norm = 'batch'", "--norm: invalid choice: 'batch'"),
        ("[recipe]\nepochs = 3", "unknown key 'recipe'"),
        ("lr = 1" + 400 * "0", "--lr must be above 0, got inf"),
        ("epochs = ", "cannot read"),
    ],
)
def test_wrong_files(capsys, tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in complaint(capsys, "--config", str(path))


def test_limits_of_whole_numbers():
    for name, (low, high) in LIMITS.items():
        for value, takes in ((low - 1, f"at least {low}"), (high + 1, f"at most {high}")):
            with pytest.raises(ConfigError, match=f"^{flag(name)} must be {takes}, got {value}$"):
                Config(**{name: value})


def test_flag_beats_file_beats_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'epochs = 5\nbatch-size = 8\nlr = 1\nfreeze = ["stem.*", "head.*"]\nema = 0.5\ncompile = true\n'
    )
    config, given = parse(["--config", str(path), "--batch-size", "16", "--no-compile"])
    assert (config.epochs, config.batch_size, config.lr, config.seed) == (5, 16, 1.0, 0)
    assert config.freeze == ("stem.*", "head.*") and not config.compile
    assert set(given) == {"epochs", "batch_size", "lr", "freeze", "ema", "compile"}
    assert parse(["--local_rank", "1"]) == parse(["--local-rank=1"]) == parse([])  # LOCAL_RANK says the same


def test_saved_configuration_is_whole_and_can_be_given_back(tmp_path):
    path = 'a "b" \\ ü'
    config = Config(data="folder", data_path=path, optimizer="sgd", freeze=("a.*", "b"), compile=True)
    assert (config.lr, config.weight_decay, config.workers, config.image_size) == (0.05, 5e-4, 4, 224)
    config.save(tmp_path / "config.toml")
    assert parse(["--config", str(tmp_path / "config.toml")])[0] == config


def test_a_resumed_run_keeps_what_defines_it(tmp_path):
    from dataclasses import asdict

    saved = asdict(Config(epochs=7, freeze=("a",), data_path="there", threads=4, out="old", keep=5))
    saved["option_of_another_version"] = 1
    config = merge_saved({"threads": 2, "epochs": 7, "freeze": ("a",)}, saved, tmp_path)
    assert (config.epochs, config.threads, config.out, config.keep) == (7, 2, str(tmp_path), 5)
    assert (config.freeze, config.data_path) == (("a",), "there")
    assert merge_saved({"out": "new"}, saved, tmp_path).threads == 0
    with pytest.raises(ConfigError, match="--epochs must be 7 as in the checkpoint, got 8"):
        merge_saved({"epochs": 8}, saved, tmp_path)


# Launchers

RUN = "123456.0"
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "MASTER_ADDR": "head",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, Launch(5, 8, 1, "head", 1234)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine"}, Launch(5, 8, 1, "head", 1234, "mine")),
        (SRUN, Launch(5, 8, 1, "head", 23456, RUN)),
        (SRUN | {"SLURM_STEP_ID": "2"}, Launch(5, 8, 1, "head", 25474, "123456.2")),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}, Launch(5, 8, 1, "a", 9, RUN)),
        (SRUN | {"MASTER_ADDR": "", "SLURM_STEP_NUM_NODES": "1"}, Launch(5, 8, 1, "127.0.0.1", 23456, RUN)),
        (SRUN | TORCHRUN, Launch(5, 8, 1, "head", 1234)),  # torchrun inside a job
        (SRUN | {"WORLD_SIZE": "9"}, Launch(5, 8, 1, "head", 23456, RUN)),  # exported by a script
        # A step has tasks of its own, more or fewer than the job was given.
        (SRUN | {"SLURM_NTASKS": "1"}, Launch(5, 8, 1, "head", 23456, RUN)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_launchers(environment, expected):
    assert find_launch(environment) == expected


@pytest.mark.parametrize("names", MPI.values(), ids=MPI)
def test_mpirun(names):
    several = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    with pytest.raises(ConfigError, match="several hosts; set MASTER_ADDR to the host of rank 0"):
        find_launch(several)
    assert find_launch(several | {"MASTER_ADDR": "head"}) == Launch(3, 4, 1, "head", 29500)
    assert find_launch(several | {names[3]: "4"}) == Launch(3, 4, 1, "127.0.0.1", 29500)
    assert find_launch(several | {names[1]: "1"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE is set, but not RANK"),
        ({"SLURM_PROCID": "3"}, "variable SLURM_NTASKS must be a whole number, got None"),
        (TORCHRUN | {"RANK": "8"}, "the rank must be below the number of ranks, got 8 of 8"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT must be a port, 1 to 65535, got 99999"),
        (
            SRUN | {"MASTER_ADDR": ""},
            "several hosts; set MASTER_ADDR to the host of rank 0: export MASTER_ADDR=",
        ),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS must be a whole number, got 'many'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "variable LOCAL_RANK must be a whole number, got None"),
    ],
)
def test_half_a_launcher_is_an_error(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_launch(environment)


@pytest.mark.parametrize(
    ("visible", "gpus", "device", "want"),
    [
        (1, ["A", "B"], "auto", "cuda:0"),  # each rank sees its own, as Kubernetes shows them
        (2, ["A", "B"], "auto", "cuda:1"),
        (1, ["A", "A"], "auto", "cpu"),
        (1, ["A", ""], "auto", "cpu"),
        (1, ["A", "A"], "cuda", "--device cuda needs one GPU for each rank, got 1 on this host"),
    ],
)
def test_the_gpu_of_a_rank(monkeypatch, visible, gpus, device, want):
    """Of the second of two: its own vote is the UUID of its GPU."""
    launch = find_launch(TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"})
    agreement = SimpleNamespace(
        ask=lambda question, answer: dict.fromkeys([gpus[0] if question == "GPUs" else answer, answer])
    )
    monkeypatch.setattr(distributed, "Agreement", lambda *_: agreement)
    monkeypatch.setattr(distributed, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "_choose_interface", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus[1]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[1]))
    try:
        got = str(distributed.init(launch, device))
    except ConfigError as error:
        got = str(error)
    assert got == want


def test_ranks_that_do_not_come_are_missed(monkeypatch, capsys):
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    assert main(["--device", "cpu", "--timeout", "1"]) == 1
    said = capsys.readouterr().err
    assert f"the 2 ranks did not meet at 127.0.0.1:{port} within 1 s: rank 1 did not come in time" in said


def _init(rank, world, port, runs):
    destroy_process_group()  # of the pool
    begin = time.monotonic()
    try:
        got = distributed.init(Launch(rank, world, rank, "127.0.0.1", port, runs[rank]), "cpu", 3)
    except ConfigError as error:
        got = error
    return str(got), time.monotonic() - begin


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (("7.0", "7.1"), "rank 0 is of run '7.0' and rank 1 of run '7.1'"),
        (("7.0", "7.0"), "cpu"),
    ],
)
def test_ranks_of_two_runs_do_not_meet(ranks, runs, said):
    got, seconds = ranks.run(2, _init, free_port(), runs, breaks=True)[1]
    assert said in got and seconds < 2.5
