"""Options and launchers: flags, TOML files, environment variables."""

import os
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fastvit.sync.teardown import destroy_process_group
from fastvit.training import __main__ as trainer
from fastvit.training import distributed, run
from fastvit.training.__main__ import main
from fastvit.training.command_line import merge_saved, parse_arguments
from fastvit.training.config import (
    NUMBER_LIMITS,
    OPTION_TYPES,
    Config,
    ConfigError,
    TrainingError,
    option_flag,
)
from fastvit.training.launcher import MPI_VARIABLES, LaunchInfo, detect_launcher
from training.runs import free_port


def usage_error(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--norm batch", "--norm must be one of torch, torch-sync, "),
        ("--epochs many", "--epochs must be a whole number, got 'many'"),
        ("--epochs 3.0", "--epochs must be a whole number, got '3.0'"),
        ("--lr fast", "--lr must be a finite number, got 'fast'"),
        ("--timeout 1e9", "--timeout must be at most 2000000, got 1000000000.0"),
        ("--lr nan", "--lr must be a finite number, got nan"),
        ("--clip-norm inf", "--clip-norm must be a finite number, got inf"),
        ("--lr -1", "--lr must be above 0, got -1.0"),
        ("--weight-decay -1", "--weight-decay must be at least 0, got -1.0"),
        ("--ema 1", "--ema must be below 1, got 1.0"),
        (
            "--amp O1 --loss-scale static",
            "--loss-scale must be auto, dynamic or a number above 0, got 'static'",
        ),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--data cifar10", "--data cifar10 needs --data-path"),
        ("--model resnet50", "--model must be auto, one of vit_digits, "),
        # Options without an effect
        ("--data-path here", "--data-path here is for --data cifar10, cifar100 and folder"),
        ("--data synthetic --data-path here", "--data-path here is for --data cifar10, cifar100 and folder"),
        ("--data folder --data-path . --data-seed 1", "--data-seed 1 is for --data digits and synthetic"),
        ("--synthetic-images 3", "--synthetic-images 3 is for --data synthetic"),
        ("--pretrained timm", "--pretrained timm is for --model timm/<name>"),
        ("--image-size 64", "--image-size 64 is for --data folder and synthetic"),
        ("--loss-scale 128", "--loss-scale 128 is for --amp O0 to O3"),
        ("--model timm/resnet18 --mlp-norm none", "--mlp-norm none is for fastvit's models"),
        ("--evaluate a --out b", "--out b is for training; --evaluate ends before it"),
        ("--evaluate a --resume b", "--resume b is for training"),
        ("--evaluate a --stop-after 1", "--stop-after 1 is for training"),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    assert message in usage_error(capsys, *arguments.split())


@pytest.mark.parametrize("before", ["", "budget="])
@pytest.mark.parametrize(
    ("text", "budget"),
    [("least", "least"), ("2GiB", "2GiB"), ("10 MB", "10 MB"), ("0.2", 0.2), ("1", 1), ("4096", 4096),
     ("2.0", None), ("1.5", None), ("1e9", None), ("0", None), ("-0.5", None), ("nan", None), ("2 G", None),
     ("less", None), ("", None), ("True", None)],
)  # fmt: skip
def test_budgets_are_those_of_convert(before, text, budget):
    if budget is not None:
        assert Config(memory=before + text).budget == budget
        return
    said = r"--memory must be one of off, convert, matmuls, or a budget: .* budget=least; .* got '"
    with pytest.raises(ConfigError, match=f"{said}{before}{text}'$"):
        Config(memory=before + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown key 'epoch'"),
        ("epochs = 3.5", "run.toml: epochs must be a whole number, got 3.5"),
        ("epochs = true", "run.toml: epochs must be a whole number, got True"),
        ("batch-size = '8'", "run.toml: batch-size must be a whole number, got '8'"),
        ("batch-size = 0", "run.toml: batch-size must be at least 1, got 0"),
        ("lr = '0.1'", "run.toml: lr must be a finite number, got '0.1'"),
        ("lr = false", "run.toml: lr must be a finite number, got False"),
        ("clip_norm = nan", "run.toml: clip_norm must be a finite number, got nan"),
        ("timeout = -inf", "run.toml: timeout must be a finite number, got -inf"),
        ("ema = 1", "run.toml: ema must be below 1, got 1.0"),
        ("compile = 1", "run.toml: compile must be true or false, got 1"),
        ("scale_lr = 'false'", "run.toml: scale_lr must be true or false, got 'false'"),
        ("norm = 'batch'", "run.toml: norm must be one of torch, "),
        ("norm = 3", "run.toml: norm must be text, got 3"),
        ("out = ['a']", "run.toml: out must be text, got ['a']"),
        ("freeze = ['a', 1]", "run.toml: freeze must be texts, got ['a', 1]"),
        ("freeze = 1", "run.toml: freeze must be texts, got 1"),
        ("lr = 1979-05-27", "run.toml: lr must be a finite number, got datetime.date"),
        ("[recipe]\nepochs = 3", "unknown key 'recipe'"),
        ("recipe.epochs = 3", "unknown key 'recipe'"),
        ("lr = 1" + 400 * "0", "run.toml: lr must be a finite number, got inf"),
        ("epochs = ", "cannot read"),
    ],
)
def test_wrong_files(capsys, tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in usage_error(capsys, "--config", str(path))


def test_limits_of_whole_numbers():
    for name, (low, high) in NUMBER_LIMITS.items():
        if OPTION_TYPES[name] is float:
            continue
        for value, takes in ((low - 1, f"at least {low}"), (high + 1, f"at most {high}")):
            with pytest.raises(ConfigError, match=f"^{option_flag(name)} must be {takes}, got {value}$"):
                Config(**{name: value})


def test_flag_beats_file_beats_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'epochs = 5\nbatch-size = 8\nlr = 1\nfreeze = ["stem.*", "head.*"]\nema = 0.5\ncompile = true\n'
    )
    config, explicit = parse_arguments(["--config", str(path), "--batch-size", "16", "--no-compile"])
    assert (config.epochs, config.batch_size, config.lr, config.seed) == (5, 16, 1.0, 0)
    assert config.freeze == ("stem.*", "head.*") and not config.compile
    assert set(explicit) == {"epochs", "batch_size", "lr", "freeze", "ema", "compile"}
    path.write_text('amp = "O1"\nloss_scale = 128\nmemory = 0.5\nfreeze = "head.*"\n')
    config, _ = parse_arguments(["--config", str(path)])  # texts that may be numbers, and a list of one
    assert (config.loss_scale, config.budget, config.freeze) == ("128", 0.5, ("head.*",))
    assert (
        parse_arguments(["--local_rank", "1"]) == parse_arguments(["--local-rank=1"]) == parse_arguments([])
    )  # LOCAL_RANK says the same


def test_an_old_value_of_memory_warns(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('memory = "products"\n')
    for arguments, label in (
        (["--memory", "products"], "--memory"),
        (["--config", str(path)], f"{path}: memory"),
    ):
        with pytest.warns(FutureWarning, match=f"{label} products is matmuls now; the old value is gone in"):
            config, explicit = parse_arguments(arguments)
        assert config.memory == explicit["memory"] == "matmuls" and config.budget is None


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbfepochs = 1\n", b"\xef\xbb\xbfepochs = 1\r\n", b"epochs = 1"]
)
def test_files_of_other_editors(tmp_path, content):
    (path := tmp_path / "run.toml").write_bytes(content)
    assert parse_arguments(["--config", str(path)])[1] == {"epochs": 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 2.0}, "--epochs must be a whole number, got 2.0"),
        ({"epochs": None}, "--epochs must be a whole number, got None"),
        ({"model": 5}, "--model must be text, got 5"),
        ({"lr": float("nan")}, "--lr must be a finite number, got nan"),
        ({"compile": "no"}, "--compile must be true or false, got 'no'"),
    ],
)
def test_wrong_values_from_python(options, said):
    with pytest.raises(ConfigError, match=f"^{said}$"):
        Config(**options)


def test_saved_configuration_is_whole_and_can_be_given_back(tmp_path):
    path = 'a "b" \\ ü \udcff'  # the last is a byte that is no text
    config = Config(data="folder", data_path=path, optimizer="sgd", freeze=("a.*", "b"), compile=True)
    assert (config.lr, config.weight_decay, config.workers, config.image_size) == (0.05, 5e-4, None, 224)
    config.save(tmp_path / "config.toml")
    assert parse_arguments(["--config", str(tmp_path / "config.toml")])[0] == config


def test_a_resumed_run_keeps_what_defines_it(tmp_path):
    from dataclasses import asdict

    options = {"data": "cifar10", "data_path": "there", "threads": 4, "out": "old", "keep": 5}
    saved = asdict(Config(epochs=7, freeze=("a",), **options))
    saved["option_of_another_version"] = 1
    config = merge_saved({"threads": 2, "epochs": 7, "freeze": ("a",)}, saved, tmp_path)
    assert (config.epochs, config.threads, config.out, config.keep) == (7, 2, str(tmp_path), 5)
    assert (config.freeze, config.data_path) == (("a",), "there")
    assert merge_saved({"out": "new"}, saved, tmp_path).threads == 0
    with pytest.raises(ConfigError, match="--epochs must be 7 as in the checkpoint, got 8"):
        merge_saved({"epochs": 8}, saved, tmp_path)
    with pytest.raises(ConfigError, match="^--evaluate: --norm must be 'inplace-abn-sync' as in the check"):
        merge_saved({"evaluate": "run", "norm": "torch"}, saved, tmp_path)


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
        (TORCHRUN, LaunchInfo(5, 8, 1, "head", 1234)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine"}, LaunchInfo(5, 8, 1, "head", 1234, "mine")),
        (SRUN, LaunchInfo(5, 8, 1, "head", 23456, RUN)),
        (SRUN | {"SLURM_STEP_ID": "2"}, LaunchInfo(5, 8, 1, "head", 25474, "123456.2")),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}, LaunchInfo(5, 8, 1, "a", 9, RUN)),
        (
            SRUN | {"MASTER_ADDR": "", "SLURM_STEP_NUM_NODES": "1"},
            LaunchInfo(5, 8, 1, "127.0.0.1", 23456, RUN),
        ),
        (SRUN | TORCHRUN, LaunchInfo(5, 8, 1, "head", 1234)),  # torchrun inside a job
        (SRUN | {"WORLD_SIZE": "9"}, LaunchInfo(5, 8, 1, "head", 23456, RUN)),  # exported by a script
        # A step has tasks of its own, more or fewer than the job was given.
        (SRUN | {"SLURM_NTASKS": "1"}, LaunchInfo(5, 8, 1, "head", 23456, RUN)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_each_launcher_gives_rank_and_address(environment, expected):
    assert detect_launcher(environment) == expected


@pytest.mark.parametrize("names", MPI_VARIABLES.values(), ids=MPI_VARIABLES)
def test_mpirun_needs_an_address_for_several_hosts_alone(names):
    several = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    with pytest.raises(ConfigError, match="several hosts; set MASTER_ADDR to the host of rank 0"):
        detect_launcher(several)
    assert detect_launcher(several | {"MASTER_ADDR": "head"}) == LaunchInfo(3, 4, 1, "head", 29500)
    assert detect_launcher(several | {names[3]: "4"}) == LaunchInfo(3, 4, 1, "127.0.0.1", 29500)
    assert detect_launcher(several | {names[1]: "1"}) is None


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
        detect_launcher(environment)


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
    """The rank is the second of two; the UUID of its GPU is its answer."""
    launch = detect_launcher(TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"})
    consensus = SimpleNamespace(
        gather_answers=lambda question, answer: dict.fromkeys(
            [gpus[0] if question == "GPUs" else answer, answer]
        )
    )
    monkeypatch.setattr(distributed, "StoreConsensus", lambda *_: consensus)
    monkeypatch.setattr(distributed, "open_rendezvous_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "_set_gloo_interface", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus[1]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[1]))
    try:
        got = str(distributed.init_distributed(launch, device))
    except ConfigError as error:
        got = str(error)
    assert got == want


@pytest.mark.parametrize(("address", "family"), [("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)])
def test_the_interface_that_reaches_rank_0_where_the_own_name_is_of_the_loopback(
    monkeypatch, address, family
):
    """As Debian has it. Only the answers of resolver and ranks are made up."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1234))
        except OSError:
            pytest.skip(f"no network of {family.name} here")
    names = {socket.gethostname(): "127.0.1.1", "head": "fd77::1"}
    found = lambda host, *_, **__: [(family, None, 0, "", (names[host], 0))]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "other")
    asked = []
    consensus = SimpleNamespace(gather_answers=lambda _, own: asked.append(own) or {"": [0], address: [1]})
    launch = LaunchInfo(1, 2, 0, "head", 1234)
    distributed._set_gloo_interface(launch, consensus)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "other" and asked == ["fd77::1"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    distributed._set_gloo_interface(launch, consensus)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    names[socket.gethostname()] = "fd77::2"  # gloo finds it by itself
    distributed._set_gloo_interface(launch, consensus)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("rank", "local_rank", "speaks"), [(0, 0, True), (1, 1, False), (4, 0, True), (5, 1, False)]
)
def test_one_rank_of_each_host_says_why_all_end(monkeypatch, capsys, rank, local_rank, speaks):
    def train(*_):
        raise TrainingError("every rank must have the same")

    monkeypatch.setattr(trainer, "detect_launcher", lambda: LaunchInfo(rank, 8, local_rank, "head", 1234))
    monkeypatch.setattr(distributed, "init_distributed", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run, "run_training", train)
    assert main([]) == 1
    assert capsys.readouterr().err == speaks * "fastvit-train: error: every rank must have the same\n"


def test_ranks_that_do_not_come_are_missed(monkeypatch, capsys):
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    assert main(["--device", "cpu", "--timeout", "1"]) == 1
    said = capsys.readouterr().err
    assert f"the 2 ranks did not meet at 127.0.0.1:{port} within 1 s: rank 1 did not join the" in said


def _init(rank, world, port, runs):
    destroy_process_group()  # of the pool
    begin = time.monotonic()
    try:
        got = distributed.init_distributed(
            LaunchInfo(rank, world, rank, "127.0.0.1", port, runs[rank]), "cpu", 3
        )
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
