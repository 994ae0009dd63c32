"""Which cases of a kind run each time, and which in the weekly run alone."""

import pytest


def some_of(first: object, *others: object) -> list[object]:
    """The first of several cases for `pytest.mark.parametrize`; the others run weekly.

    For cases that each take seconds and differ in little: see `pdm run test` in CONTRIBUTING.
    """
    return [first, *map(_weekly, others)]


def _weekly(case: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.weekly)
