"""Settings for the whole test run, and the count of notebook cells that ran."""

import os

import pytest

# What the committed outputs were made with.
SETTINGS = {"AMP_LAB_DEVICE": "cpu", "AMP_LAB_SCALE": "quick"}


class CellCount:
    """Notes which notebook cells passed.

    A plugin of its own, because pytest calls the hooks of a conftest.py only for tests below it.
    """

    def __init__(self):
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if ".ipynb::" in report.nodeid and report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    for name, value in SETTINGS.items():
        asked = os.environ.setdefault(name, value) or value
        if asked != value:
            message = f"{name}={asked!r}: the tests run with {name}={value}; unset it"
            pytest.exit(message, returncode=2)
    config.pluginmanager.register(CellCount(), "cell-count")


@pytest.fixture
def cells_passed(pytestconfig: pytest.Config) -> set[str]:
    """Node ids of the notebook cells that have run and passed so far."""
    return pytestconfig.pluginmanager.get_plugin("cell-count").passed
