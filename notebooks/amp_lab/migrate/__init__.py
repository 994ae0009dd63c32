"""The way from old mixed-precision code to today's: ``amp-lab migrate``.

    from amp_lab.migrate import migrate_source

    new, findings = migrate_source(old)

Files and notebooks are in `amp_lab.migrate.files`.
"""

import ast
import re
import warnings
from pathlib import Path

import libcst as cst

from amp_lab.migrate import apex, mistakes, other_files, torch_amp
from amp_lab.migrate.python_tree import Edit, Finding, Tree, apply

__all__ = ["Finding", "edits_and_findings", "migrate_source"]


_MOST_BRACKETS = 100  # within each other
_LONGEST_LINE = 20_000


def _may_be_too_deep(text: str) -> bool:
    depth = most = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = max(0, depth + (1 if bracket in "([{" else -1))  # those in strings count too
        most = max(most, depth)
    return most > _MOST_BRACKETS or max(map(len, text.splitlines()), default=0) > _LONGEST_LINE


def _check_depth(text: str) -> None:
    """Raise `RecursionError` where Python's own parser gives up: that of libcst would crash."""
    try:
        _parse(text)
    except (SyntaxError, MemoryError) as error:
        raise RecursionError("too deep, or no Python") from error


def _check_python(text: str) -> None:
    """Raise `ValueError` if the text, which this module wrote, is no Python."""
    try:
        _parse(text)  # ten times as fast as libcst, but it knows no syntax of later versions
    except SyntaxError:
        try:
            cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            raise ValueError("what would be written is no Python") from error


def _parse(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an escape that is none
        ast.parse(text)


def edits_and_findings(text: str, path: Path | None = None) -> tuple[list[Edit], list[Finding]]:
    """What to change in a Python text, and what there is to say about its lines, in their order.

    `path` is where it lies, if it is a file: those that it imports from are looked at too.

    Raises `libcst.ParserSyntaxError` if the text is no Python, `RecursionError` if it is nested
    too deeply, `ValueError` if the edits do not fit together.
    """
    if _may_be_too_deep(text):
        _check_depth(text)
    tree = Tree(text)
    edits, findings = torch_amp.rewrite(tree)
    of_apex = apex.Rule(tree)
    of_apex.run()
    edits, findings = edits + of_apex.edits, findings + of_apex.findings + mistakes.find(tree)
    if path is not None:
        findings += other_files.find(tree, path)
    if edits:
        _check_python(apply(text, edits))
    return edits, sorted(dict.fromkeys(findings))


def migrate_source(text: str) -> tuple[str, list[Finding]]:
    """The text as it is written today, and what there is to say about the lines of the old one.

    Raises what `edits_and_findings` raises.
    """
    edits, findings = edits_and_findings(text)
    return apply(text, edits), findings
