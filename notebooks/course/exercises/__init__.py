"""Checks of the notebooks' exercises, a file for each notebook, of its name.

A check takes an answer and prints one line: that it is right and why, or what is wrong with it and
why. It never gives the answer away, and it never stops a notebook that is run from top to bottom.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def checks_of(notebook: str) -> ModuleType:
    """The checks of a notebook such as ``01_number_formats``: a module with a function for each.

    Its name begins with a digit, so it cannot stand in an import statement.
    """
    return importlib.import_module(f"{__name__}.{notebook}")


class NotYetError(Exception):
    """What is wrong with an answer, and why: whole sentences for the reader."""


class _UnansweredError(Exception):
    """The dots of the stub are still there."""


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Make a check of a function that returns why an answer is right, or raises `NotYetError`.

    An answer that is still ``...`` has not been given, and what else the function raises comes from
    the reader's own code; both are told.
    """

    @functools.wraps(check)
    def told(*answers: Any) -> None:
        try:
            if any(answer is ... for answer in answers):
                raise _UnansweredError
            print(f"Right. {check(*answers)}")
        except _UnansweredError:
            print("Not answered yet: put your answer in place of the dots, and run the cell again.")
        except NotYetError as wrong:
            print(f"Not yet. {wrong}")
        except Exception as error:  # the reader's code may raise anything
            print(f"Not yet. Your answer raises {type(error).__name__}: {error}")

    return told


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the reader's function returns, which must no longer be the dots of the stub."""
    result = function(*args, **kwargs)
    if result is ...:
        raise _UnansweredError
    return result


def need(holds: bool, why: str) -> None:
    """Raise `NotYetError` with this reason unless it holds."""
    if not holds:
        raise NotYetError(why)
