"""Bugs seeded in small kernels, with the builds that must report each, and correct controls."""

import os
import re
import subprocess

import pytest

from cuda_host.build import HERE, MODES, OUT, build

pytestmark = pytest.mark.cuda_model
NAMES = re.findall(r'^    \{"([^"]+)",', (HERE / "selftest/bugs.cu").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def listing():
    build(*(f"{mode}/seeded" for mode in MODES))
    text = subprocess.run([OUT / "plain/seeded"], capture_output=True, text=True, check=True).stdout
    return [line.split(": ", 1) for line in text.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_seeded_bug(listing, name):
    """A report, a wrong result or a sanitizer's abort, in every build that bugs.cu lists."""
    expected, listed = listing[NAMES.index(name)]
    assert listed == name
    for mode in MODES:
        run = subprocess.run(
            [OUT / mode / "seeded", str(NAMES.index(name))],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )
        if expected == "none":
            assert run.returncode == 0, f"{mode} complains about a correct kernel:\n{run.stderr}"
        elif mode in expected.split():
            assert run.returncode != 0, f"{mode} does not notice"
