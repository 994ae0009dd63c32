"""List the paragraphs that state what PyTorch does, without support near them.

    python tools/list_statements.py

A paragraph makes such a statement if it names an op, a function or a dtype. It is supported by

- an assertion or a check: in a notebook, in the code cells of its section that stand next to it
  (up to two before it and two after it);
- a source: a link to another site, to a section, or to a file of this project;
- the mark of what nobody has seen on a GPU;
- a comment that names the test which holds it: `<!-- tests/train/test_run.py -->`. In a
  notebook, `<!-- code -->` says that the paragraph only describes the code next to it.

Exit code 1 if a paragraph has none of these, or a comment names a test that does not exist.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import build_pairs
from gpu_marks import WORDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CHEATSHEET.md", *sorted((ROOT / "docs").glob("*.md")))

_DTYPE = r"fp16|bf16|fp32|fp64|FP8|MXFP[48]|NVFP4|E4M3|E5M2|TF32|tf32|INT8|float16|bfloat16"
_NAMES = re.compile(rf"`[^`]*[A-Za-z_][^`]*`|\b(?:{_DTYPE})\b")
_LINK = re.compile(r"\]\((?:https?:|[^)\s]*#|[^)\s]*\.(?:ipynb|md|json|py))")
_ASSERTION = re.compile(r"\bassert\b|\bcheck_|raise AssertionError")
_COMMENT = re.compile(r"<!-- (code|(?:docker/)?tests/\S+\.py) -->")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_NOT_PROSE = ("#", "|", "![", "<details", "**What you")  # the last announces what follows
_CELLS_NEAR = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of prose, and the code cells near it."""

    place: str  # the file's name
    text: str
    code: tuple[str, ...] = ()

    @property
    def states_behaviour(self) -> bool:
        """Whether it names an op, a function or a dtype, and does more than introduce code."""
        introduces = self.text.endswith(":") and "\n" not in self.text
        return _NAMES.search(self.text) is not None and not introduces

    @property
    def support(self) -> str:
        """What supports it: a word, or an empty text."""
        if _COMMENT.search(self.text):
            return "comment"
        if WORDS in " ".join(self.text.split()):
            return "mark"
        if _LINK.search(self.text):
            return "source"
        if any(_ASSERTION.search(code) for code in self.code):
            return "assertion"
        return ""


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of prose in a Markdown text: no headings, tables or code."""
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("", text)):
        paragraph = paragraph.strip()
        if paragraph and not paragraph.startswith(_NOT_PROSE):
            yield paragraph


def in_notebook(source: Path) -> Iterator[Paragraph]:
    """The paragraphs of a notebook, each with the code cells next to it in its section."""
    cells = build_pairs.read_source(source).cells
    for index, cell in enumerate(cells):
        if cell.cell_type != "markdown":
            continue
        code = (*_code_before(cells[:index]), *_code_after(cells[index + 1 :]))
        for text in paragraphs(cell.source):
            yield Paragraph(source.name, text, code)


def _code_before(cells: list) -> list[str]:
    """The last code cells, back to the heading of the section."""
    near: list[str] = []
    for cell in reversed(cells):
        if cell.cell_type == "code":
            near.append(cell.source)
        starts_section = cell.cell_type == "markdown" and _HEADING.search(cell.source)
        if starts_section or len(near) == _CELLS_NEAR:
            break
    return near


def _code_after(cells: list) -> list[str]:
    """The next code cells, up to the heading of the next section."""
    near: list[str] = []
    for cell in cells:
        starts_section = cell.cell_type == "markdown" and _HEADING.search(cell.source)
        if starts_section or len(near) == _CELLS_NEAR:
            break
        if cell.cell_type == "code":
            near.append(cell.source)
    return near


def on_page(page: Path) -> Iterator[Paragraph]:
    """The paragraphs of a page."""
    for text in paragraphs(page.read_text(encoding="utf-8")):
        yield Paragraph(page.name, text)


def all_paragraphs() -> list[Paragraph]:
    """Every paragraph of the pages and the notebooks."""
    found = [paragraph for page in PAGES for paragraph in on_page(page)]
    for source in build_pairs.find([]):
        found += in_notebook(source)
    return found


def complaints(found: list[Paragraph]) -> list[str]:
    """A line for each paragraph without support, and for each comment that leads nowhere."""
    lines = []
    for paragraph in found:
        beginning = f"{paragraph.place}: {' '.join(paragraph.text.split())[:120]}"
        if paragraph.states_behaviour and not paragraph.support:
            lines.append(f"without support: {beginning}")
        comment = _COMMENT.search(paragraph.text)
        if comment and comment[1] != "code" and not (ROOT / comment[1]).is_file():
            lines.append(f"no such test {comment[1]}: {beginning}")
    return lines


def main() -> int:
    """Print the list; return 0, or 1 if it is not empty."""
    found = all_paragraphs()
    lines = complaints(found)
    print("\n".join(lines))
    stating = sum(paragraph.states_behaviour for paragraph in found)
    print(f"{stating} paragraphs state behaviour, {len(lines)} have no support")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
