"""SPIN visits every state of a model of the protocol between ranks, and finds the fault of every mutant."""

import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("exchange.pml")
NEEDS = [tool for tool in ("spin", "cc") if not shutil.which(tool)]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(NEEDS), reason=f"no {' and no '.join(NEEDS)} (Debian: spin, gcc)"),
]
NEVER = 99
ONE, ALL = 1, 7  # which ranks may abandon an exchange: rank 0, or all of three
BOUNDS = {
    "CPU": 0,
    "RANKS": 2,
    "RANGES": 1,
    "EXCHANGES": 4,
    "FIRST": 3,  # epochs are 4, 5, 2 and 3
    "REPLAYS": 0,
    "MISMATCH": NEVER,
    "ABANDONING": 0,
    "WHOLE_PACKETS": 0,
}
WAITS_FOREVER = "invalid end state"
OVERWRITES = "assertion violated (kernels_ended[receiver]>="
MERGES_ANOTHER_EXCHANGE = "assertion violated ((inbox["
GOES_ON = "assertion violated (first_failed[rank]>n)"
IS_PARTLY_VALID = "assertion violated (result["
MISSES_A_MISMATCH = "assertion violated (failed||(n!="
FAILS_WITHOUT_CAUSE = "assertion violated (( !(failed)||"
MUTANTS = {
    "ONE_SLOT": (OVERWRITES, {}),
    "WRAP_TO_ONE": (WAITS_FOREVER, {}),
    "EPOCH_OF_CAPTURE": (FAILS_WITHOUT_CAUSE, {}),
    "NO_EPOCH_CHECK": (FAILS_WITHOUT_CAUSE, {}),  # the tag is that of another exchange
    "ONE_FLAG": (MERGES_ANOTHER_EXCHANGE, {}),
    "FLAG_BEFORE_DATA": (MERGES_ANOTHER_EXCHANGE, {}),
    "NO_FENCE": (MERGES_ANOTHER_EXCHANGE, {"CPU": 1}),
    "NO_TAG_CHECK": (MISSES_A_MISMATCH, {"MISMATCH": 2}),
    "SILENT_ABANDON": (WAITS_FOREVER, {"ABANDONING": ONE}),
    "NOT_STICKY": (GOES_ON, {"ABANDONING": ONE}),
    "OWN_FAULT_ONLY": (IS_PARTLY_VALID, {"ABANDONING": ONE, "RANGES": 2, "EXCHANGES": 1}),
}


def search_states(folder: Path, **macros: int) -> str:
    """Returns the report on states that violate a property, or from which a rank never ends."""
    values = BOUNDS | dict.fromkeys(MUTANTS, 0) | macros
    define = [f"-D{name}={value}" for name, value in values.items()]
    compiler = ["cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c"]
    for command in ["spin", *define, "-a", str(MODEL)], compiler, ["./pan", "-m5000"]:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "macros",
    [
        {"ABANDONING": ALL},
        {"EXCHANGES": 3, "RANGES": 2, "WHOLE_PACKETS": 1},
        {"EXCHANGES": 2, "RANGES": 2, "WHOLE_PACKETS": 1, "ABANDONING": ONE},
        {"EXCHANGES": 3, "RANGES": 2, "WHOLE_PACKETS": 1, "MISMATCH": 2},
        {"RANKS": 3, "WHOLE_PACKETS": 1, "ABANDONING": ONE},
        {"RANKS": 3, "WHOLE_PACKETS": 1, "ABANDONING": ALL, "FIRST": 0},
        {"RANKS": 3, "WHOLE_PACKETS": 1, "MISMATCH": 2},
        {"CPU": 1, "ABANDONING": ALL},
        {"CPU": 1, "RANKS": 3},
        {"CPU": 1, "RANKS": 3, "EXCHANGES": 2, "ABANDONING": ONE},
        {"CPU": 1, "RANKS": 3, "EXCHANGES": 3, "MISMATCH": 2},
    ],
    ids=lambda macros: "-".join(f"{name}{value}" for name, value in macros.items()),
)
def test_spin_finds_no_error_in_the_protocol(tmp_path, macros):
    report = search_states(tmp_path, **macros)
    assert "errors: 0" in report and "Full statespace search" in report, report
    # SPIN says so where it ran out of memory, or left states out that are too deep.
    assert "not completed" not in report and "too small" not in report, report


@pytest.mark.parametrize("mutant", MUTANTS)
def test_spin_finds_the_fault_of_each_mutant(tmp_path, mutant):
    fault, macros = MUTANTS[mutant]
    report = search_states(tmp_path, **{mutant: 1}, **macros)
    assert "errors: 1" in report and fault in report, report
