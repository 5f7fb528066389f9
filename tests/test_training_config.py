"""Options and launchers: flags, TOML files, environment variables."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from training_runs import free_port

from fastvit.sync.teardown import destroy_process_group
from fastvit.training import command_line, distributed
from fastvit.training.__main__ import main
from fastvit.training.command_line import merge_saved, parse
from fastvit.training.config import LIMITS, Config, ConfigError, flag, kind_of
from fastvit.training.launch import MPI, Launch, find_launch


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--norm", "batch"], "--norm: invalid choice: 'batch'"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--seed", str(2**64)], f"--seed must be at most {2**63 - 1}, got {2**64}"),
        (["--timeout", "1e9"], "--timeout must be above 0, up to 2000000, got 1000000000.0"),
        (["--out", "run\udcff"], "--out must be text in UTF-8 without NUL, got 'run\\udcff'"),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0, got -1.0"),
        (["--ema", "1"], "--ema must be at least 0 and below 1, got 1.0"),
        (
            ["--amp", "O1", "--loss-scale", "static"],
            "--loss-scale must be auto, dynamic or a number above 0, got static",
        ),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--data", "cifar10"], "--data cifar10 needs --data-path"),
        (["--model", "resnet50"], "--model must be auto, one of vit_digits, "),
        (["--pretrained", "timm"], "--pretrained timm is for --model timm/<name>, got --model auto"),
        (["--image-size", "64"], "--image-size is for --data folder and synthetic, got --image-size 64"),
        (["--loss-scale", "128"], "--loss-scale is for --amp O0 to O3, got --loss-scale 128"),
        (
            ["--model", "timm/resnet18", "--mlp-norm", "none"],
            "--mlp-norm is for fastvit's models, got --mlp-norm none",
        ),
    ],
)
def test_wrong_flags(capsys, arguments, message):
    assert message in complaint(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "unknown key 'epoch'"),
        ("colour = 3", "unknown key 'colour'\n"),
        ("epochs = '3'", "epochs must be of type int, got '3'"),
        ("epochs = true", "epochs must be of type int, got True"),
        ("freeze = 'stem.*'", "freeze must be a list of strings, got 'stem.*'"),
        ("norm = 'batch'", "--norm must be one of torch, "),
        ("[recipe]\nepochs = 3", "unknown key 'recipe'"),
        ("lr = 1" + 400 * "0", "--lr must be above 0, got inf"),
        ("epochs = ", "cannot read"),
        ("epochs = " + 5000 * "9", "cannot read"),
    ],
)
def test_wrong_files(capsys, tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in complaint(capsys, "--config", str(path))


def test_every_whole_number_has_limits():
    assert {name for name, item in command_line.FIELDS.items() if kind_of(item) is int} == set(LIMITS)
    for name, (low, high) in LIMITS.items():
        for value, takes in ((low - 1, f"at least {low}"), (high + 1, f"at most {high}")):
            with pytest.raises(ConfigError, match=f"^{flag(name)} must be {takes}, got {value}$"):
                Config(**{name: value})
        with pytest.raises(ConfigError, match=f"^{flag(name)} must be of type int, got 1.0$"):
            Config(**{name: 1.0})


def test_flag_beats_file_beats_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('epochs = 5\nbatch-size = 8\nlr = 1\nfreeze = ["stem.*", "head.*"]\n')
    config, given = parse(["--config", str(path), "--batch-size", "16"])
    assert (config.epochs, config.batch_size, config.lr, config.seed) == (5, 16, 1.0, 0)
    assert config.freeze == ("stem.*", "head.*")
    assert set(given) == {"epochs", "batch_size", "lr", "freeze"}
    assert parse(["--local_rank", "1"]) == parse(["--local-rank=1"]) == parse([])  # LOCAL_RANK says the same


def test_saved_configuration_is_whole_and_can_be_given_back(tmp_path):
    path = 'a "b" \\ ü\x7f'
    config = Config(data="folder", data_path=path, optimizer="sgd", freeze=("a.*", "b"), compile=True)
    assert (config.lr, config.weight_decay, config.workers, config.image_size) == (0.05, 5e-4, 4, 224)
    config.save(tmp_path / "config.toml")
    assert parse(["--config", str(tmp_path / "config.toml")])[0] == config


def test_old_python_without_tomli_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command_line.sys, "version_info", (3, 10))
    monkeypatch.setitem(sys.modules, "tomli", None)
    assert "tomli" in complaint(capsys, "--config", str(tmp_path))


def test_every_field_is_a_flag_with_help():
    text = command_line.make_parser().format_help()
    assert all(flag(name) in text for name in Config.__dataclass_fields__)


def test_a_resumed_run_keeps_what_defines_it(tmp_path):
    from dataclasses import asdict

    saved = asdict(Config(epochs=7, freeze=("a",), data_path="there", threads=4, out="old", keep=5))
    saved = saved | {"freeze": ["a"], "option_of_another_version": 1}
    config = merge_saved({"threads": 2, "epochs": 7, "freeze": ("a",)}, saved, tmp_path)
    assert (config.epochs, config.threads, config.out, config.keep) == (7, 2, str(tmp_path), 5)
    assert (config.freeze, config.data_path) == (("a",), "there")
    assert merge_saved({"out": "new"}, saved, tmp_path).threads == 0
    with pytest.raises(ConfigError, match="--epochs must be 7 as in the checkpoint, got 8"):
        merge_saved({"epochs": 8}, saved, tmp_path)


# Launchers

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[003-007,9],login1",
}  # fmt: skip


def test_launchers():
    found = find_launch(TORCHRUN)
    assert (found.rank, found.world, found.local_rank) == (5, 8, 1)
    assert (found.address, found.port, found.launcher) == ("head", 1234, "torchrun")
    found = find_launch(SRUN)
    assert (found.rank, found.world, found.local_rank) == (5, 8, 1)
    assert (found.address, found.port, found.launcher) == ("gpu003", 23456, "srun")
    assert find_launch(SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "9"}).address == "a"
    assert find_launch(SRUN | TORCHRUN).launcher == "torchrun"  # torchrun inside a job
    assert find_launch({}) is None
    assert find_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    # a step has tasks of its own, more or fewer than the job was given
    assert find_launch(SRUN | {"SLURM_NTASKS": "1"}).world == 8
    assert find_launch(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS"):
        find_launch(SRUN | {"SLURM_STEP_NUM_TASKS": "many"})
    assert find_launch(SRUN | {"WORLD_SIZE": "8"}).launcher == "srun"  # of a script that exports it


def test_steps_of_a_job_have_ports_and_names_of_their_own():
    steps = [find_launch(SRUN | {"SLURM_STEP_ID": str(step)}) for step in range(3)]
    assert [step.run for step in steps] == ["123456.0", "123456.1", "123456.2"]
    assert len({step.port for step in steps}) == 3 and steps[0].port == 23456
    assert find_launch(TORCHRUN | {"TORCHELASTIC_RUN_ID": "mine"}).run == "mine"


def test_mpirun():
    values = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    one, other = ({names[key]: value for key, value in enumerate(values.values())} for names in MPI.values())
    for environment in (one, other):
        with pytest.raises(ConfigError, match="several hosts; set MASTER_ADDR to the host of rank 0"):
            find_launch(environment)
        found = find_launch(environment | {"MASTER_ADDR": "head"})
        assert (found.rank, found.world, found.local_rank, found.address) == (3, 4, 1, "head")
    here = one | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert find_launch(here).address == "127.0.0.1" and find_launch(here).launcher == "mpirun"
    assert find_launch(here | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE is set, but not RANK"),
        ({"SLURM_PROCID": "3"}, "variable SLURM_NTASKS must be a whole number, got None"),
        (TORCHRUN | {"RANK": "8"}, "the rank must be below the number of ranks, got 8 of 8"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT must be a port, 1 to 65535, got 99999"),
        (SRUN | {"SLURM_JOB_NODELIST": ""}, "SLURM_PROCID is set but SLURM_JOB_NODELIST is not"),
    ],
)
def test_half_a_launcher_is_an_error(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_launch(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("a,b", "a"), ("n[12,14]", "n12"), ("n[01-04]-ib,x", "n01-ib"), ("gpu-a[7]", "gpu-a7"),
     ("rack[1-2]node[03-04]", "rack1node03"), ("r[1,3]n[03-04],x[1-2]", "r1n03")],
)  # fmt: skip
def test_first_host_of_a_slurm_list(nodes, host):
    assert find_launch(SRUN | {"SLURM_JOB_NODELIST": nodes}).address == host
    assert find_launch(SRUN | {"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": nodes}).address == host


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
    answers = {
        "options": lambda answer: {answer: [0, 1]},
        "GPUs": lambda answer: dict.fromkeys([gpus[0], answer]),
    }
    agreement = SimpleNamespace(ask=lambda question, answer: answers[question](answer))
    monkeypatch.setattr(distributed, "Agreement", lambda *_: agreement)
    monkeypatch.setattr(distributed, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(distributed, "_choose_interface", lambda *_: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus[1]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[1]))
    try:
        got = str(distributed.init(launch, device).device)
    except ConfigError as error:
        got = str(error)
    assert got == want


def test_incomplete_environment(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(["--device", "cpu"]) == 1
    assert "variable LOCAL_RANK must be a whole number, got None" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "one")
    assert main(["--device", "cpu"]) == 1
    assert "environment variable RANK must be a whole number, got 'one'" in capsys.readouterr().err


def test_ranks_that_do_not_come_are_missed(monkeypatch, capsys):
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    assert main(["--device", "cpu", "--timeout", "1"]) == 1
    said = capsys.readouterr().err
    assert f"the 2 ranks did not meet at 127.0.0.1:{port} within 1 s: rank 1 did not come in time" in said


def _init(rank, world, port, run, options):
    launch = Launch(rank, world, rank, "127.0.0.1", port, "torchrun", run[rank])
    destroy_process_group()  # of the pool
    begin = time.monotonic()
    try:
        return distributed.init(launch, options[rank], 3), time.monotonic() - begin
    except ConfigError as error:
        return str(error), time.monotonic() - begin


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        (("7.0", "7.1"), ("cpu", "cpu"), "rank 0 is of run '7.0' and rank 1 of run '7.1'"),
        (("", ""), ("cpu", "auto"), "the ranks differ in their options: rank 0: --device cpu; rank 1: "
         "--device auto"),
        (("7.0", "7.0"), ("cpu", "cpu"), "Ranks(rank=1, world=2, device=device(type='cpu'))"),
    ],
)  # fmt: skip
def test_ranks_of_two_runs_or_with_other_options_do_not_meet(ranks, run, options, said):
    got, seconds = ranks.run(2, _init, free_port(), run, options, breaks=True)[1]
    assert said in str(got) and seconds < 2.5
