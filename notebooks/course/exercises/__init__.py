"""Checks of the notebooks' exercises: the file of a notebook has its name.

A check takes an answer and prints one line: that it is right and why, or what is wrong with it and
why. It never reveals the answer, and never raises, so a notebook can be run from top to bottom.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def checks_of(notebook: str) -> ModuleType:
    """Import the checks of a notebook such as ``01_number_formats``.

    An import statement cannot do it, since the name of the module begins with a digit.
    """
    return importlib.import_module(f"{__name__}.{notebook}")


class NotYetError(Exception):
    """An answer is wrong; the message says what is wrong and why, in sentences for the reader."""


class _UnansweredError(Exception):
    """An answer is still the ``...`` of the exercise."""


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Decorate a function that returns why an answer is right, or raises `NotYetError` if not.

    The decorated function prints the outcome. It also reports an answer that is still ``...``, and
    any other exception, which comes from the reader's code.
    """

    @functools.wraps(check)
    def print_outcome(*answers: Any) -> None:
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

    return print_outcome


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the reader's function; if it returns ``...``, the exercise counts as unanswered."""
    result = function(*args, **kwargs)
    if result is ...:
        raise _UnansweredError
    return result


def need(condition: bool, reason: str) -> None:
    """Raise `NotYetError` with this reason unless the condition is true."""
    if not condition:
        raise NotYetError(reason)
