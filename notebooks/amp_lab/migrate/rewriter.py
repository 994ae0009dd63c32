"""What every rule is built on: it looks at one file, and gathers edits and findings."""

from pathlib import Path

import libcst as cst

from amp_lab.migrate.python_tree import Edit, Finding, Tree


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
