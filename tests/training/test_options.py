"""The options of a run: flags, TOML files, values from Python, and the saved configuration."""

from dataclasses import asdict

import pytest

from fastvit.training.__main__ import main
from fastvit.training.command_line import merge_saved, parse_arguments
from fastvit.training.config import (
    NUMBER_LIMITS,
    OPTION_TYPES,
    Config,
    ConfigError,
    check_packages,
    option_flag,
)


def usage_error(capsys, *arguments):
    """Returns the message with which the command line refuses its arguments."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


WRONG_FLAGS = {
    "--norm batch": "--norm must be one of torch, torch-sync, ",
    "--epochs 3.0": "--epochs must be a whole number, got '3.0'",
    "--lr fast": "--lr must be a finite number, got 'fast'",
    "--clip-norm inf": "--clip-norm must be a finite number, got inf",
    "--lr -1": "--lr must be above 0, got -1.0",
    "--weight-decay -1": "--weight-decay must be at least 0, got -1.0",
    "--timeout 1e9": "--timeout must be at most 2000000, got 1000000000.0",
    "--ema 1": "--ema must be below 1, got 1.0",
    "--amp O1 --loss-scale static": "--loss-scale must be auto, dynamic or a number above 0, got 'static'",
    "--epoch 3": "unrecognized arguments: --epoch 3",
    "--data cifar10": "--data cifar10 needs --data-path",
    "--model resnet50": "--model must be auto, one of vit_digits, ",
}


@pytest.mark.parametrize("arguments", WRONG_FLAGS)
def test_a_wrong_flag_is_named_with_what_is_expected(capsys, arguments):
    assert WRONG_FLAGS[arguments] in usage_error(capsys, *arguments.split())


OPTIONS_WITHOUT_EFFECT = {
    "--data-path here": "--data-path here is for --data cifar10, cifar100 and folder",
    "--data synthetic --data-path here": "--data-path here is for --data cifar10, cifar100 and folder",
    "--data folder --data-path . --data-seed 1": "--data-seed 1 is for --data digits and synthetic",
    "--synthetic-images 3": "--synthetic-images 3 is for --data synthetic",
    "--image-size 64": "--image-size 64 is for --data folder and synthetic",
    "--loss-scale 128": "--loss-scale 128 is for --amp O0 to O3",
    "--pretrained timm": "--pretrained timm is for --model timm/<name>",
    "--model timm/resnet18 --mlp-norm none": "--mlp-norm none is for fastvit's models",
    "--evaluate a --out b": "--out b is for training; --evaluate ends before it",
    "--evaluate a --resume b": "--resume b is for training",
    "--evaluate a --stop-after 1": "--stop-after 1 is for training",
}


def test_an_option_without_an_effect_is_refused(capsys):
    for arguments, message in OPTIONS_WITHOUT_EFFECT.items():
        assert message in usage_error(capsys, *arguments.split())


WRONG_FILES = {
    "epoch = 3": "unknown key 'epoch'",
    "[recipe]\nepochs = 3": "unknown key 'recipe'",
    "epochs = ": "cannot read",
    "epochs = 3.5": "run.toml: epochs must be a whole number, got 3.5",
    "epochs = true": "run.toml: epochs must be a whole number, got True",
    "batch-size = '8'": "run.toml: batch-size must be a whole number, got '8'",
    "lr = '0.1'": "run.toml: lr must be a finite number, got '0.1'",
    "lr = false": "run.toml: lr must be a finite number, got False",
    "lr = 1979-05-27": "run.toml: lr must be a finite number, got datetime.date",
    f"lr = 1{400 * '0'}": "run.toml: lr must be a finite number, got inf",
    "ema = 1": "run.toml: ema must be below 1, got 1.0",
    "compile = 1": "run.toml: compile must be true or false, got 1",
    "norm = 3": "run.toml: norm must be text, got 3",
    "freeze = ['a', 1]": "run.toml: freeze must be texts, got ['a', 1]",
    "freeze = 1": "run.toml: freeze must be texts, got 1",
}


def test_a_wrong_file_is_named_with_its_key(capsys, tmp_path):
    path = tmp_path / "run.toml"
    for text, message in WRONG_FILES.items():
        path.write_text(text)
        assert message in usage_error(capsys, "--config", str(path))


def test_a_wrong_value_from_python_is_named():
    for name, value, message in (
        ("epochs", 2.0, "--epochs must be a whole number, got 2.0"),
        ("epochs", None, "--epochs must be a whole number, got None"),
        ("compile", "no", "--compile must be true or false, got 'no'"),
        ("out", "\udcfc", "--out must be UTF-8, which TensorBoard's files need, got '.udcfc'"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            Config(**{name: value})


def test_whole_numbers_beside_their_limits_are_refused():
    for name, (low, high) in NUMBER_LIMITS.items():
        if OPTION_TYPES[name] is float:
            continue
        for value, expected in ((low - 1, f"at least {low}"), (high + 1, f"at most {high}")):
            with pytest.raises(ConfigError, match=f"^{option_flag(name)} must be {expected}, got {value}$"):
                Config(**{name: value})


def test_memory_takes_the_budgets_of_convert():
    budgets = {"least": "least", "2GiB": "2GiB", "10 MB": "10 MB", "0.2": 0.2, "1": 1, "4096": 4096}
    for text, budget in budgets.items():
        for prefix in ("", "budget="):
            assert Config(memory=prefix + text).budget == budget


def test_memory_refuses_what_is_no_budget():
    message = r"--memory must be one of off, convert, matmuls, or a budget: .* budget=least; .* got '"
    for text in ("2.0", "0", "-0.5", "nan", "2 G", "less", "", "budget=2.0", "budget="):
        with pytest.raises(ConfigError, match=f"{message}{text}'$"):
            Config(memory=text)


def test_a_flag_beats_the_file_which_beats_the_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'epochs = 5\nbatch-size = 8\nlr = 1\nfreeze = ["stem.*", "head.*"]\nema = 0.5\ncompile = true\n'
    )
    config, explicit = parse_arguments(["--config", str(path), "--batch-size", "16", "--no-compile"])
    assert (config.epochs, config.batch_size, config.lr, config.seed) == (5, 16, 1.0, 0)
    assert config.freeze == ("stem.*", "head.*") and not config.compile
    assert set(explicit) == {"epochs", "batch_size", "lr", "freeze", "ema", "compile"}


def test_numbers_in_a_file_may_stand_for_texts_and_a_text_for_a_list(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('amp = "O1"\nloss_scale = 128\nmemory = 0.5\nfreeze = "head.*"\n')
    config, _ = parse_arguments(["--config", str(path)])
    assert (config.loss_scale, config.budget, config.freeze) == ("128", 0.5, ("head.*",))


def test_the_flag_of_torchs_launcher_is_ignored():
    for flag in (["--local_rank", "1"], ["--local-rank=1"]):
        assert parse_arguments(flag) == parse_arguments([])


def test_a_file_may_have_a_byte_order_mark_and_any_line_end(tmp_path):
    path = tmp_path / "run.toml"
    for content in (b"\xef\xbb\xbfepochs = 1\r\n", b"epochs = 1"):
        path.write_bytes(content)
        assert parse_arguments(["--config", str(path)])[1] == {"epochs": 1}


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


def test_the_saved_configuration_is_whole_and_can_be_given_back(tmp_path):
    path = 'a "b" \\ ü \udcff'  # The last character is a byte that is no text.
    config = Config(data="folder", data_path=path, optimizer="sgd", freeze=("a.*", "b"), compile=True)
    assert (config.lr, config.weight_decay, config.workers, config.image_size) == (0.05, 5e-4, None, 224)
    config.save(tmp_path / "config.toml")
    assert parse_arguments(["--config", str(tmp_path / "config.toml")])[0] == config


def test_a_resumed_run_keeps_what_defines_it(tmp_path):
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


def test_missing_packages_are_named(monkeypatch):
    missing = {"tqdm", "PIL", "timm"}
    monkeypatch.setattr("fastvit.training.config.find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ConfigError, match=r"needs tqdm, which .*pip install '.\[train\]'"):
        check_packages(Config())
    with pytest.raises(ConfigError, match="needs tqdm, pillow"):
        check_packages(Config(data="folder", data_path="."))
    missing.remove("tqdm")
    with pytest.raises(ConfigError, match=r"needs timm, which .*pip install '.\[train\]' timm"):
        check_packages(Config(model="timm/resnet18"))
