"""fastvit.convert on random programs: the same bits, or an error where the original has one too."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conversion.programs.kinds import KINDS
from conversion.programs.run_programs import FAULTS, Execution, Outcome, run_program
from conversion.programs.source import draw_program
from fastvit.memory import live_bytes


@st.composite
def draw_programs(draw, kinds=None, option=None):
    # Hypothesis repeats draws of separate strategies within an example, which makes many programs alike.
    return draw_program(draw(st.randoms()).randrange, kinds, option)


def check_programs(programs, num_programs, least_same):
    """Raises if a program has a fault, or if less than a share of the programs give eager's bits."""
    counts = Counter()

    @settings(max_examples=num_programs)
    @given(program=programs)
    def check_program(program):
        outcome, detail = run_program(program)
        counts[outcome] += 1
        assert outcome not in FAULTS, f"{outcome.value}, {detail}\n{program}"

    check_program()
    assert counts[Outcome.SAME] > least_same * counts.total(), counts


@pytest.mark.timeout(600)  # hypothesis takes minutes to shrink a program that fails
@pytest.mark.parametrize("num_programs", [20, pytest.param(60, marks=pytest.mark.nightly)])
def test_programs_that_mix_kinds_give_the_same_bits(num_programs):
    check_programs(draw_programs(), num_programs, 1 / 2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", ["convert", "products", "some", "across"])
def test_plain_programs_give_the_same_bits(option):
    check_programs(draw_programs(["plain"], option), 60, 1 / 2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_programs_of_a_kind_give_the_same_bits(kind):
    check_programs(draw_programs([kind]), 24, 1 / 3)


def draw_plain_program(seed):
    return draw_program(random.Random(seed).randrange, ["plain"], "convert")


def test_most_converted_programs_keep_less():
    def measure_kept_bytes(program, is_converted):
        execution = Execution(program, is_converted)
        execution.model(execution.x)
        return live_bytes(lambda: execution.model(execution.x))[0]

    programs = [draw_plain_program(seed) for seed in range(10)]
    num_less = sum(measure_kept_bytes(p, True) < measure_kept_bytes(p, False) for p in programs)
    assert num_less > 5


def double_output(results):
    results["output 0"] = results["output 0"] * 2


def raise_error(results):
    raise RuntimeError("a fault")


def leave_mode_open(results):
    torch.overrides.BaseTorchFunctionMode().__enter__()


@pytest.mark.parametrize(
    "make_fault,expected",
    [(double_output, Outcome.SILENT), (raise_error, Outcome.CRASHED), (leave_mode_open, Outcome.LEFT_OPEN)],
    ids=["silent", "crashed", "left open"],
)
def test_a_fault_is_found(make_fault, expected, monkeypatch):
    def take_faulty_step(execution, step_index):
        results = take_step(execution, step_index)
        if execution.is_converted:
            make_fault(results)
        return results

    program, take_step = draw_plain_program(2), Execution.take_step
    assert run_program(program)[0] is Outcome.SAME
    monkeypatch.setattr(Execution, "take_step", take_faulty_step)
    assert run_program(program)[0] is expected
