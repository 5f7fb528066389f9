"""The fixtures of several files: runs that were stopped."""

import shutil

import pytest

from training.runs import TWO_EPOCHS, run_here


@pytest.fixture(scope="session")
def run_of_one_epoch(tmp_path_factory):
    """Returns the directory of a run of TWO_EPOCHS that stopped after the first. Tests copy it."""
    directory = tmp_path_factory.mktemp("one_epoch") / "run"
    assert run_here(*TWO_EPOCHS, "--stop-after", "1", "--out", str(directory)) == 0
    return directory


@pytest.fixture
def copied_run(run_of_one_epoch, tmp_path):
    """Returns the directory of a copy of `run_of_one_epoch`, with its links."""
    return shutil.copytree(run_of_one_epoch, tmp_path / "run", symlinks=True)
