"""Selections of cases from the product of a test's factors."""

import itertools
from collections.abc import Collection, Iterable


def add_in_turn(cases: Iterable[tuple], *factors: Collection) -> list[tuple]:
    """Returns each case with the next value of each factor. After its last value a factor starts again."""
    turns = map(itertools.cycle, factors)
    return [(*case, *values) for case, *values in zip(cases, *turns, strict=False)]


def select_each_value(*factors: Collection) -> list[tuple]:
    """Returns as many cases as the longest factor has values. Each value of each factor occurs in one."""
    return add_in_turn([()] * max(map(len, factors)), *factors)


def select_each_pair(*factors: Collection) -> list[tuple]:
    """Returns a few cases in which each pair of values of two factors occurs."""

    def pairs_of(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases = {case: pairs_of(case) for case in itertools.product(*factors)}
    missing, selected = set().union(*cases.values()), []
    while missing:
        case = max(cases, key=lambda case: len(cases[case] & missing))
        selected.append(case)
        missing -= cases[case]
    return selected
