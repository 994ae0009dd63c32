"""The rules of `migrate`, and their joint edits and findings for a Python text.

Each module in this folder is a rule, and so is each folder in it. To add a rule, write a file as
the docstring of `amp_lab.migrate` shows. No other file has to name the new file.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate.tree.nesting import check_nesting, with_room_to_recurse
from amp_lab.migrate.tree.python_tree import Tree
from amp_lab.migrate.tree.rewriter import Edit, Finding, Rewriter, apply

RULES = [
    importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
]
SELECTIONS = ("torch", "apex", "mistakes")


class Wanted(NamedTuple):
    """The options of a migration."""

    select: tuple[str, ...] = SELECTIONS
    """The parts to run, by the `PART` of a rule: ``torch``, ``apex`` and ``mistakes``."""
    mark: bool = False
    """Whether to put a comment above Apex code that you have to change by hand."""
    patch: bool = False
    """Whether each result gets a patch."""


# All rules, without comments and patches.
EVERYTHING = Wanted()


def triggered_rules(data: bytes) -> list[ModuleType]:
    """The rules with a trigger in a file, given as bytes. Without a trigger, nothing is parsed."""
    return [rule for rule in RULES if any(_has_all(data, words) for words in rule.TRIGGERS)]


def _has_all(data: bytes, words: str) -> bool:
    """Whether a file has all words of a trigger."""
    return all(word in data for word in words.encode().split())


def edits_and_findings(text: str, wanted: Wanted = EVERYTHING) -> tuple[list[Edit], list[Finding]]:
    """The edits of a Python text, and the findings about its lines, in the order of the lines.

    Raises `libcst.ParserSyntaxError` if the text is not Python, `OptionError` if it is nested too
    deeply (see `nesting`), `ValueError` if the edits do not fit together.
    """
    check_nesting(text)
    return with_room_to_recurse(_edits_and_findings, text, wanted)


def _edits_and_findings(text: str, wanted: Wanted) -> tuple[list[Edit], list[Finding]]:
    """As `edits_and_findings`, without the check of the nesting."""
    file = Rewriter(Tree(text), wanted.mark)
    # Triggers count for a text too: so the tests of a rule show that its triggers suffice.
    for rule in triggered_rules(text.encode(errors="replace")):
        if rule.PART in wanted.select:
            rule.run(file)
    if file.edits:
        _check_python(apply(text, file.edits))
    return file.edits, sorted(dict.fromkeys(file.findings))  # two rules may find the same


def migrate_source(text: str, mark: bool = False) -> tuple[str, list[Finding]]:
    """The migrated text, and the findings about the lines of the old one.

    With `mark`, Apex code that you have to change by hand gets a comment with the advice.

    Raises what `edits_and_findings` raises.
    """
    edits, findings = edits_and_findings(text, Wanted(mark=mark))
    return apply(text, edits), findings


def _check_python(text: str) -> None:
    """Raise `ValueError` if a migrated text does not parse: then a rule has a bug."""
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise ValueError("the migrated code is not valid Python") from error
