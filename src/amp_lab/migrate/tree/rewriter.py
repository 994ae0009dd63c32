"""The results of the rules for one file: edits of its text, and findings about its lines."""

import functools
import re
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate.tree import nodes
from amp_lab.migrate.tree.code_reader import CodeReader, Mistakes
from amp_lab.migrate.tree.python_tree import Tree


class Finding(NamedTuple):
    """A message about a line: a change, a change to make by hand, or a mistake."""

    line: int
    kind: str
    """``rewritten``, ``by hand``, ``mistake``; ``left`` and ``note`` need no action."""
    message: str
    cell: int | None = None
    """In a notebook, the number of the cell, from 1. `line` is counted within this cell."""

    def __str__(self) -> str:
        text = f"{self.line}: {self.kind}: {self.message}"
        if self.cell is None:
            return text
        return f"cell {self.cell}:{text}"


class Edit(NamedTuple):
    """Replaces the characters of a file from index `start` to before `end` by `text`."""

    start: int
    end: int
    text: str


class Rewriter:
    """One file, with the edits and findings that the rules add.

    With `mark`, rules put comments above the code that you have to change by hand.
    """

    def __init__(self, tree: Tree, mark: bool = False):
        self.tree = tree
        self.mark = mark
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []

    @functools.cached_property
    def code(self) -> CodeReader:
        """The training steps in the file. Reading them takes as long as parsing."""
        return CodeReader(self.tree)

    def say(self, node: cst.CSTNode, kind: str, message: str) -> None:
        """Add a finding for the line on which a node starts; `Finding` lists the kinds."""
        self.findings.append(Finding(self.tree.line(node), kind, message))

    def report(self, kind: str, found: Mistakes) -> None:
        """Add a finding for each mistake, but not in code that is expected to fail."""
        for node, message in found:
            if not any(_expects_error(parent) for parent, _ in self.tree.ancestors(node)):
                self.say(node, kind, message)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace the code of a node by a text."""
        start, end = self.tree.span(node)
        self.edits.append(Edit(start, end, text))

    def insert(self, at: int, text: str) -> None:
        """Insert a text before the character at an offset."""
        self.edits.append(Edit(at, at, text))

    def put_before(self, statement: cst.CSTNode, line: str) -> None:
        """Put a line before a statement, or ``line;`` if other code is before it on its line."""
        start = self.tree.span(statement)[0]
        indent = self.tree.indent(start)
        separator = "; "
        if indent is not None:
            separator = self.tree.newline + indent
        self.insert(start, line + separator)

    def remove_names(
        self, node: cst.Import | cst.ImportFrom, removed: list[cst.ImportAlias]
    ) -> None:
        """Remove names from an import, each with its comma; the whole import if none remains."""
        text = self.tree.text
        aliases = nodes.aliases_of(node)
        if len(removed) == len(aliases):
            self._remove_statement(node)
            return
        spans = [self.tree.span(alias) for alias in aliases]
        node_start, node_end = self.tree.span(node)
        has_comments = "#" in text[node_start:node_end]
        last_remaining = max(i for i, alias in enumerate(aliases) if alias not in removed)
        for i, alias in enumerate(aliases):
            if alias not in removed:
                continue
            start, end = spans[i]
            if has_comments:  # remove no more than the name and its comma
                rest = text[end:].lstrip().removeprefix(",")
                end = len(text) - len(rest)
            elif i < last_remaining:  # up to the next name
                end, _ = spans[i + 1]
            else:  # from the end of the name before, so that no comma is left at the end
                _, start = spans[i - 1]
            self.edits.append(Edit(start, end, ""))

    def _remove_statement(self, node: cst.CSTNode) -> None:
        """Remove a statement with its line and comment; put `pass` where a line has to stay.

        A line has to stay if the statement is alone in its block, or on a line with others.
        """
        tree = self.tree
        line = tree.parents[node]
        block = tree.parents[line]
        start, end = tree.span(node)
        indent = tree.indent(start)
        rest_of_line = re.compile(r"[ \t]*(?:#[^\r\n]*)?(?:\r\n?|\n|$)").match(tree.text, end)
        is_alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
        if is_alone or indent is None or rest_of_line is None:
            self.replace(node, "pass")
        else:
            self.edits.append(Edit(start - len(indent), rest_of_line.end(), ""))


def _expects_error(block: cst.CSTNode) -> bool:
    """Whether a node is ``with pytest.raises(…)`` or ``with self.assertRaises(…)``."""
    if not isinstance(block, cst.With):
        return False
    return any("raises" in name.lower() for name in nodes.context_names(block))


def apply(text: str, edits: list[Edit]) -> str:
    """The text after all edits; equal edits are made once.

    Raises `ValueError` if two edits overlap. Edits may touch.
    """
    parts: list[str] = []
    copied = 0  # how many characters of the old text are done with
    # Two uses may add the same edit, such as an import that both need.
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < copied:
            raise ValueError(f"two edits overlap at {edit.start}: {edit.text!r}")
        parts += [text[copied : edit.start], edit.text]
        copied = edit.end
    return "".join([*parts, text[copied:]])
