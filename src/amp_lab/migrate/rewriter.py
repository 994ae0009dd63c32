"""What every rule is built on: it looks at one file, and gathers edits and findings."""

import re
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate import nodes
from amp_lab.migrate.python_tree import Tree


class Finding(NamedTuple):
    """Something about a line: what was changed, what is to be done by hand, or what is wrong."""

    line: int
    kind: str
    """``rewritten``, ``by hand``, ``mistake``; ``left`` or ``note`` where nothing is to be done."""
    message: str
    cell: int | None = None  # of a notebook, from 1; the line is one of this cell

    def __str__(self) -> str:
        text = f"{self.line}: {self.kind}: {self.message}"
        if self.cell is None:
            return text
        return f"cell {self.cell}:{text}"


class Edit(NamedTuple):
    """A piece of the text, from `start` to `end`, and what takes its place."""

    start: int
    end: int
    text: str


class Rewriter:
    """A rule at work on one file: `run` fills `edits` and `findings`.

    `mark` asks for comments above what is left.
    """

    def __init__(self, tree: Tree, mark: bool = False):
        self.tree = tree
        self.mark = mark
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []

    def run(self) -> None:
        """Look at the file."""
        raise NotImplementedError

    def say(self, node: cst.CSTNode, kind: str, message: str) -> None:
        """Report something about the line on which a node starts; `Finding` lists the kinds."""
        self.findings.append(Finding(self.tree.line(node), kind, message))

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Put a text in the place of a node."""
        start, end = self.tree.span(node)
        self.edits.append(Edit(start, end, text))

    def insert(self, at: int, text: str) -> None:
        """Put a text before the character at an offset."""
        self.edits.append(Edit(at, at, text))

    def remove_names(self, node: cst.Import | cst.ImportFrom, gone: list[cst.ImportAlias]) -> None:
        """Take names out of an import, each with its comma, or the whole of it with its line."""
        text = self.tree.text
        aliases = nodes.aliases_of(node)
        if len(gone) == len(aliases):
            self._remove_statement(node)
            return
        spans = [self.tree.span(alias) for alias in aliases]
        node_start, node_end = self.tree.span(node)
        has_comments = "#" in text[node_start:node_end]
        last_kept = max(i for i, alias in enumerate(aliases) if alias not in gone)
        for i, alias in enumerate(aliases):
            if alias not in gone:
                continue
            start, end = spans[i]
            if has_comments:  # which stay where they are, in their brackets
                rest = text[end:].lstrip().removeprefix(",")  # the comma goes with the name
                end = len(text) - len(rest)
            elif i < last_kept:
                end, _ = spans[i + 1]
            else:
                _, start = spans[i - 1]
            self.edits.append(Edit(start, end, ""))

    def _remove_statement(self, node: cst.CSTNode) -> None:
        """Take a small statement out with its line, or put `pass` where something has to stand."""
        tree = self.tree
        line = tree.parents[node]
        block = tree.parents[line]
        start, end = tree.span(node)
        indent = tree.indent(start)
        ends = re.compile(r"[ \t]*(?:#[^\r\n]*)?(?:\r\n?|\n|$)").match(tree.text, end)
        is_alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
        if is_alone or indent is None or ends is None:
            self.replace(node, "pass")
        else:
            self.edits.append(Edit(start - len(indent), ends.end(), ""))


def apply(text: str, edits: list[Edit]) -> str:
    """The text with every edit made; they may touch, but not overlap."""
    parts: list[str] = []
    done = 0
    # The same edit may be asked for twice, such as an import for each of its uses.
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            raise ValueError(f"two edits overlap at {edit.start}: {edit.text!r}")
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*parts, text[done:]])
