"""The registry of the rules, and their joint edits and findings for a Python text.

A rule is a module beside this one with a `Rule` and its `TRIGGERS`. To add one, write it as the
docstring of `amp_lab.migrate` shows, and add it to `RULES`.
"""

from types import ModuleType
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate import apex, mistakes, torch_amp
from amp_lab.migrate.nesting import check_nesting, with_room_to_recurse
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Edit, Finding, apply

RULES = (torch_amp, apex, mistakes)
SELECTIONS = ("torch", "apex", "mistakes")


def is_triggered(data: bytes) -> bool:
    """Whether the bytes of a file have all words of a rule's trigger; else it is not parsed."""
    for rule in RULES:
        for trigger in rule.TRIGGERS:
            if all(word in data for word in trigger.encode().split()):
                return True
    return False


class Wanted(NamedTuple):
    """Options of a migration."""

    select: tuple[str, ...] = SELECTIONS
    """The rules to run: ``torch`` and ``apex`` for old names, ``mistakes``."""
    mark: bool = False
    """Whether code of Apex that is to be changed by hand gets a comment above it."""
    patch: bool = False
    """Whether each result gets a patch."""

    def includes(self, rule: ModuleType) -> bool:
        """Whether a rule is selected; a rule that is not in `names` belongs to ``torch``."""
        names: dict[ModuleType, str] = {apex: "apex", mistakes: "mistakes"}
        return names.get(rule, "torch") in self.select


# All rules, without comments and patches.
EVERYTHING = Wanted()


def edits_and_findings(text: str, wanted: Wanted = EVERYTHING) -> tuple[list[Edit], list[Finding]]:
    """The edits of a Python text, and the findings about its lines, in the order of the lines.

    Raises `libcst.ParserSyntaxError` if the text is not Python, `OptionError` if it is nested too
    deeply (see `nesting`), `ValueError` if the edits do not fit together.
    """
    check_nesting(text)
    return with_room_to_recurse(_edits_and_findings, text, wanted)


def _edits_and_findings(text: str, wanted: Wanted) -> tuple[list[Edit], list[Finding]]:
    """As `edits_and_findings`, without the check of the nesting."""
    tree = Tree(text)
    # Also for a text, not only for files: so the tests of a rule show that its triggers suffice.
    if not is_triggered(text.encode(errors="replace")):
        return [], []
    edits: list[Edit] = []
    findings: list[Finding] = []
    for rule in filter(wanted.includes, RULES):
        rewriter = rule.Rule(tree, wanted.mark)
        rewriter.run()
        edits += rewriter.edits
        findings += rewriter.findings
    if edits:
        _check_python(apply(text, edits))
    return edits, sorted(dict.fromkeys(findings))  # two rules may have the same finding


def migrate_source(text: str, mark: bool = False) -> tuple[str, list[Finding]]:
    """The migrated text, and the findings about the lines of the old one.

    With `mark`, code of Apex that is to be changed by hand gets a comment that says what to do.

    Raises what `edits_and_findings` raises.
    """
    edits, findings = edits_and_findings(text, Wanted(mark=mark))
    return apply(text, edits), findings


def _check_python(text: str) -> None:
    """Raise `ValueError` if a migrated text does not parse: then a rule has a bug."""
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise ValueError("what would be written is no Python") from error
