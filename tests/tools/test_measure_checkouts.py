"""`tools/measure/checkouts.py` times the package of the checkout that it is told to."""

from pathlib import Path

import pytest

from measure import checkouts


def test_the_ratio_is_that_of_this_checkout_to_the_old_one(monkeypatch):
    asked = []

    def in_process(task, checkout):
        asked.append(checkout)
        return 3.0 if checkout == checkouts.ROOT else 2.0

    monkeypatch.setattr(checkouts, "in_process", in_process)
    found = checkouts.compare("xray", Path("old"), turns=4)
    assert found["ratio"] == found["interval"][0] == found["interval"][1] == 1.5
    assert asked[0] == asked[3] == Path("old")  # in turns: old new, new old
    assert asked[1] == asked[2] == checkouts.ROOT


@pytest.mark.slow
@pytest.mark.parametrize("task", ["fit", "memory"])
def test_a_task_runs_in_a_process_of_its_own(task):
    assert checkouts.in_process(task, checkouts.ROOT) > 0
