"""What every rule is built on: it looks at one file, and gathers edits and findings."""

from pathlib import Path
from typing import NamedTuple

import libcst as cst

from amp_lab.migrate.python_tree import Tree


class Finding(NamedTuple):
    """Something about a line: what was changed, what is to be done by hand, or what is wrong."""

    line: int
    kind: str
    """``rewritten``, ``by hand``, ``mistake``; ``left`` or ``note`` where nothing is to be done."""
    message: str
    cell: int | None = None
    """Of a notebook, from 1; the line is one of this cell."""

    def __str__(self) -> str:
        where = f"{self.line}" if self.cell is None else f"cell {self.cell}:{self.line}"
        return f"{where}: {self.kind}: {self.message}"


class Edit(NamedTuple):
    """A piece of the text, from `start` to `end`, and what takes its place."""

    start: int
    end: int
    text: str


class Rewriter:
    """A rule at work on one file: `run` fills `edits` and `findings`.

    `path` is where the file lies, or None for a text that is in no file.
    """

    def __init__(self, tree: Tree, path: Path | None = None):
        self.tree = tree
        self.path = path
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
        self.edits.append(Edit(*self.tree.span(node), text))

    def insert(self, at: int, text: str) -> None:
        """Put a text before the character at an offset."""
        self.edits.append(Edit(at, at, text))


def apply(text: str, edits: list[Edit]) -> str:
    """The text with every edit made; they may touch, but not overlap."""
    parts, done = [], 0
    # The same edit may be asked for twice, such as an import for each of its uses.
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: (edit.start, edit.end)):
        if edit.start < done:
            raise ValueError(f"two edits overlap at {edit.start}: {edit.text!r}")
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*parts, text[done:]])
