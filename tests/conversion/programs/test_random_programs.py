"""fastvit.convert on random programs: the same bits, or an error where the original has one too."""

import dataclasses

import pytest
import torch

from conversion.programs.kinds import KINDS
from conversion.programs.run_programs import (
    FAULTS,
    Execution,
    Outcome,
    draw_program,
    run_program,
    run_programs,
)
from fastvit.memory import live_bytes

SLOW = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("programs", [60, pytest.param(2000, marks=SLOW)])
@pytest.mark.parametrize("option", ["convert", "products", "some", "across"])
def test_random_programs(option, programs):
    tally = run_programs(range(programs), ["plain"], option)
    assert not tally.faults, "\n\n".join([*tally.faults, str(tally)])
    assert tally.counts[Outcome.SAME] > programs / 2, tally


@pytest.mark.parametrize("programs", [24, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_random_programs_of_a_kind(kind, programs):
    tally = run_programs(range(programs), [kind])
    assert not tally.faults, "\n\n".join([*tally.faults, str(tally)])
    assert tally.counts[Outcome.SAME] > programs / 3, tally


@pytest.mark.parametrize("programs", [60, pytest.param(10000, marks=SLOW)])
def test_random_programs_that_mix_kinds(programs):
    tally = run_programs(range(programs))
    assert not tally.faults, "\n\n".join([*tally.faults, str(tally)])
    assert tally.counts[Outcome.SAME] > programs / 2, tally


def test_less_is_kept():
    less = compared = 0
    for seed in range(0, 60, 6):
        program = dataclasses.replace(draw_program(seed, ["plain"]), option="convert", dtype="float32")
        kept = []
        for is_converted in (False, True):
            execution = Execution(program, is_converted)
            execution.model(execution.x)
            kept.append(live_bytes(lambda execution=execution: execution.model(execution.x))[0])
        less += kept[1] < kept[0]
        compared += 1
    assert less > compared / 2, (less, compared)


def test_a_fault_is_found():
    """Tells an output that is doubled from eager."""

    class Faulty(Execution):
        def take_step(self, number):
            left = super().take_step(number)
            return {name: 2 * value if name == "output 0" else value for name, value in left.items()}

    program = draw_program(2, ["plain"])
    assert run_program(program)[0] is Outcome.SAME
    assert run_program(program, converted_execution=Faulty)[0] is Outcome.SILENT


def test_outcomes_that_are_faults():
    assert FAULTS == (Outcome.CRASHED, Outcome.LEFT_OPEN, Outcome.SILENT)
    assert torch._C._len_torch_function_stack() == 0
