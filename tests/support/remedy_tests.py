"""Which test does what a remedy says: `does(code, …)` stands above each such test."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FOLDER = Path(__file__).parent.parent / "remedies"
_Test = TypeVar("_Test", bound=Callable)
_TESTS: dict[str, list[str]] = {}


def does(*codes: str) -> Callable[[_Test], _Test]:
    """Say that a test makes the situation of these remedies, and does what each says."""

    def mark(test: _Test) -> _Test:
        for code in codes:
            _TESTS.setdefault(code, []).append(f"{test.__module__}::{test.__name__}")
        return test

    return mark


def remedies_tested() -> dict[str, list[str]]:
    """The tests of each remedy by its code; every test file of `tests/remedies` is imported."""
    for path in sorted(FOLDER.glob("test_*.py")):
        importlib.import_module(path.stem)
    return _TESTS
