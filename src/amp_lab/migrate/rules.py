"""The rules, which files they are for, and what they make of a Python text together.

A rule is a module beside this one with a `Rule` and its `TRIGGERS`: to add one, write it as the
door's docstring shows, and add it to `RULES`.
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
    """Whether a file has a text of any rule's `TRIGGERS`: most have none, and are not parsed."""
    for rule in RULES:
        for trigger in rule.TRIGGERS:
            if all(word in data for word in trigger.encode().split()):
                return True
    return False


class Wanted(NamedTuple):
    """What is looked at: the old names of torch, those of Apex, mistakes; some or all of them."""

    select: tuple[str, ...] = SELECTIONS
    mark: bool = False  # whether what is left of Apex gets a comment above it
    patch: bool = False  # whether each result gets a patch

    def includes(self, rule: ModuleType) -> bool:
        """Whether a rule is one of those that were selected."""
        names: dict[ModuleType, str] = {apex: "apex", mistakes: "mistakes"}
        return names.get(rule, "torch") in self.select


EVERYTHING = Wanted()


def edits_and_findings(text: str, wanted: Wanted = EVERYTHING) -> tuple[list[Edit], list[Finding]]:
    """What to change in a Python text, and what there is to say about its lines, in their order.

    Raises `libcst.ParserSyntaxError` if the text is not Python, `OptionError` if it is nested too
    deeply (see `nesting`), `ValueError` if the edits do not fit together.
    """
    check_nesting(text)
    return with_room_to_recurse(_edits_and_findings, text, wanted)


def _edits_and_findings(text: str, wanted: Wanted) -> tuple[list[Edit], list[Finding]]:
    tree = Tree(text)
    if not is_triggered(text.encode(errors="replace")):
        return [], []  # as in a file, so that a rule whose triggers lack something fails its tests
    edits: list[Edit] = []
    findings: list[Finding] = []
    for rule in filter(wanted.includes, RULES):
        rewriter = rule.Rule(tree, wanted.mark)
        rewriter.run()
        edits += rewriter.edits  # they may touch, but not overlap: `apply` checks it
        findings += rewriter.findings
    if edits:
        _check_python(apply(text, edits))
    return edits, sorted(dict.fromkeys(findings))  # two rules may say the same


def migrate_source(text: str, mark: bool = False) -> tuple[str, list[Finding]]:
    """The text as it is written today, and what there is to say about the lines of the old one.

    With `mark`, what is left of Apex has a comment above it that says what to do.

    Raises what `edits_and_findings` raises.
    """
    edits, findings = edits_and_findings(text, Wanted(mark=mark))
    return apply(text, edits), findings


def _check_python(text: str) -> None:
    """Raise `ValueError` if the text, which the rules wrote, is no Python."""
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise ValueError("what would be written is no Python") from error
