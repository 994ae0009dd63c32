"""The rules, which files they are for, and what they make of a Python text together.

A rule is a module beside this one with a `Rule` and its `TRIGGERS`: to add one, write it as the
door's docstring shows, and add it to `RULES`.
"""

import io
import tokenize
from types import ModuleType
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate import apex, mistakes, torch_amp
from amp_lab.migrate.python_tree import Tree
from amp_lab.migrate.rewriter import Edit, Finding, apply

RULES = (torch_amp, apex, mistakes)
SELECTIONS = ("torch", "apex", "mistakes")
_MOST_TOKENS, _MOST_BRACKETS, _MOST_ELIFS = 2_000, 100, 500


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
        name = "apex" if rule is apex else "mistakes" if rule is mistakes else "torch"
        return name in self.select


EVERYTHING = Wanted()


def edits_and_findings(text: str, wanted: Wanted = EVERYTHING) -> tuple[list[Edit], list[Finding]]:
    """What to change in a Python text, and what there is to say about its lines, in their order.

    Raises `libcst.ParserSyntaxError` if the text is no Python, `RecursionError` if it is nested
    too deeply, `ValueError` if the edits do not fit together.
    """
    _check_depth(text)
    tree = Tree(text)
    if not is_triggered(text.encode(errors="replace")):
        return [], []  # as in a file, so that a rule whose triggers lack something fails its tests
    edits, findings = [], []
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


def _check_depth(text: str) -> None:
    """Raise `RecursionError` for code that the parser would follow so deep that the process ends.

    Each operator of a long sum, or name of a long chain, is a level of the tree; items of a list
    and arguments, which commas part, are not. Python itself takes 200 brackets within each other.
    """
    tokens, elifs = [0], 0  # the tokens since the last comma, inside each of the open brackets
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            tokens[-1] += 1
            if token.type == tokenize.NEWLINE:
                tokens = [0]
            elif token.string == ",":
                tokens[-1] = 0
            elif token.string in ("(", "[", "{"):
                tokens.append(0)
            elif token.string in (")", "]", "}"):
                tokens = tokens[:-1] or [0]
            elifs += token.string == "elif"
            if max(tokens) > _MOST_TOKENS or len(tokens) > _MOST_BRACKETS or elifs > _MOST_ELIFS:
                raise RecursionError("too deep")
    except (tokenize.TokenError, SyntaxError):  # no Python, of which the parser tells
        return


def _check_python(text: str) -> None:
    """Raise `ValueError` if the text, which the rules wrote, is no Python."""
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise ValueError("what would be written is no Python") from error
