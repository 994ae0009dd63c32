"""How much a line of code says: syntax nodes, and the habits that pack several steps into one.

`python tools/measure_code.py` prints it for this project, `python tools/density.py FOLDER…` a row
for each folder in others. Nodes are `ast.expr` and `ast.stmt`. Docstrings, of attributes too, count
neither as nodes nor as lines. Lines are counted after `ruff format`, so that other projects can be
compared.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Density:
    """Counts of one file, or of several added up."""

    nodes: int = 0
    statements: int = 0
    lines: int = 0
    """With code on them: neither blank, nor a comment or docstring alone."""
    tuple_assignments: int = 0
    """Such as ``a, b = 1, 2``; unpacking what a call returns is none."""
    conditional_expressions: int = 0
    dict_calls: int = 0
    """Such as ``f(**options)``."""
    texts_times_flag: int = 0
    """Such as ``"s" * (n > 1)``."""
    nested_comprehensions: int = 0
    """With two ``for`` in one, or one comprehension inside another."""
    comments: int = 0

    def __add__(self, other: "Density") -> "Density":
        return Density(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def nodes_per_statement(self) -> float:
        """The measure that line breaks do not change."""
        return self.nodes / max(1, self.statements)

    @property
    def nodes_per_line(self) -> float:
        """Of the lines that `ruff format` leaves."""
        return self.nodes / max(1, self.lines)

    def per_1000_lines(self, name: str) -> float:
        """One of the counts, for 1,000 lines of code."""
        return 1000 * getattr(self, name) / max(1, self.lines)


def density(source: str) -> Density:
    """The counts of one file's text, which has to be valid Python."""
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    documented = {id(part) for node in docstrings for part in (node, node.value)}
    nodes = [node for node in ast.walk(tree) if id(node) not in documented]
    return Density(
        nodes=_count(nodes, ast.expr | ast.stmt),
        statements=_count(nodes, ast.stmt),
        lines=len(_code_lines(source, docstrings)),
        tuple_assignments=sum(map(_is_tuple_assignment, nodes)),
        conditional_expressions=_count(nodes, ast.IfExp),
        dict_calls=sum(map(_passes_a_dict, nodes)),
        texts_times_flag=sum(map(_multiplies_a_text, nodes)),
        nested_comprehensions=sum(map(_is_nested, nodes)),
        comments=sum(token.type == tokenize.COMMENT for token in _tokens(source)),
    )


def density_of(paths: Iterable[Path]) -> Density:
    """The counts of files together, each as `ruff format` would write it."""
    total = Density()
    for path in paths:
        total += density(formatted(path))
    return total


def formatted(path: Path) -> str:
    """A file's text as `ruff format` writes it with this project's settings."""
    settings = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", path.name]
    process = subprocess.run(
        [sys.executable, "-m", "ruff", "format", *settings, "-"],
        input=path.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout


def by_folder(root: Path) -> dict[str, list[Path]]:
    """The Python files under each folder of `root`; those beside the folders are named `.`."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        folder = inside[0] if len(inside) > 1 else "."
        folders.setdefault(folder, []).append(path)
    return folders


def _count(nodes: list[ast.AST], kind) -> int:
    return sum(isinstance(node, kind) for node in nodes)


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """The statements that are a text alone: docstrings of modules, classes, functions, fields."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def _code_lines(source: str, docstrings: list[ast.Expr]) -> set[int]:
    """The numbers of the lines with code on them, without those of `docstrings`."""
    lines: set[int] = set()
    layout = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    for token in _tokens(source):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings:
        assert node.end_lineno is not None  # the parser always sets it
        lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def _is_tuple_assignment(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    has_tuple_target = any(isinstance(target, ast.Tuple) for target in node.targets)
    return has_tuple_target and isinstance(node.value, ast.Tuple)


def _passes_a_dict(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)


def _multiplies_a_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return _is_text(node.left) or _is_text(node.right)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_nested(node: ast.AST) -> bool:
    """Whether a node is a comprehension with several ``for``, or with another one inside."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    if len(node.generators) > 1:
        return True
    inside = (child for child in ast.walk(node) if child is not node)
    return any(isinstance(child, COMPREHENSIONS) for child in inside)


RATES = {
    "tuple_assignments": "a, b =",
    "conditional_expressions": "if-else",
    "dict_calls": "f(**d)",
    "texts_times_flag": "text*flag",
    "nested_comprehensions": "nested",
    "comments": "comments",
}
"""The counts that are shown for 1,000 lines of code, with their headings."""


def print_table(roots: list[Path]) -> None:
    """A row for each folder of each root, and one for the whole of a root with several."""
    print(f"{'':<24}{'nodes':>9}{'/statement':>12}{'/line':>8}{_headings()}")
    for root in roots:
        total = Density()
        for folder, paths in by_folder(root).items():
            density = density_of(paths)
            total += density
            _print_row(f"  {folder}", density)
        _print_row(root.name, total)


def _headings() -> str:
    return "".join(f"{heading:>11}" for heading in RATES.values())


def _print_row(name: str, density: Density) -> None:
    rates = "".join(f"{density.per_1000_lines(rate):11.1f}" for rate in RATES)
    print(
        f"{name:<24}{density.nodes:>9,}{density.nodes_per_statement:>12.2f}"
        f"{density.nodes_per_line:>8.2f}{rates}"
    )


if __name__ == "__main__":
    print_table([Path(name) for name in sys.argv[1:]])
