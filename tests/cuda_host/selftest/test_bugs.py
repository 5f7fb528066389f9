"""Bugs seeded in small kernels, with the builds that must report each, and correct controls."""

import os
import re
import subprocess

import pytest

from cuda_host.build import HERE, MODES, OUT, build

pytestmark = [
    pytest.mark.cuda_model("nightly"),
    pytest.mark.skipif(
        os.environ.get("FASTVIT_CUDA_HOST", "plain") != "plain",
        reason="these tests build every mode themselves",
    ),
]
NAMES = re.findall(r'^    \{"([^"]+)",', (HERE / "selftest/bugs.cu").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def expected_modes() -> dict[str, str]:
    """Returns for each bug the modes that must report it, or none."""
    build(*(f"{mode}/seeded" for mode in MODES))
    text = subprocess.run([OUT / "plain/seeded"], capture_output=True, text=True, check=True).stdout
    modes, names = zip(*(line.split(": ", 1) for line in text.splitlines()), strict=True)
    assert list(names) == NAMES
    return dict(zip(names, modes, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_seeded_bugs_are_reported_in_the_modes_that_they_name(expected_modes, name):
    """A report, a wrong result or a sanitizer's abort ends the program."""
    expected = expected_modes[name]
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
