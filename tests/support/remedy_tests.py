"""Which test does what a remedy says: `does(code, …)` stands above each such test."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from amp_lab.core.remedies import REMEDIES

FOLDER = Path(__file__).parent.parent / "remedies"
_PLACE = re.compile(r"\\\{\w+[^}]*\\\}")  # of a fact, as `re.escape` leaves it
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


def says(code: str, text: str) -> bool:
    """Whether a text has the sentence of a remedy, with whatever facts."""
    pattern = _PLACE.sub(".*?", re.escape(REMEDIES[code].text))
    return bool(re.search(pattern, text, re.DOTALL))
