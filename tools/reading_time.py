"""How long a notebook takes to read: `python tools/reading_time.py [NAME …]`.

The notebooks 08a, 08b and so on are a reference, which nobody reads from beginning to end, so the
sum leaves them out. The rows of the index in notebook 08 are searched, so they do not count.

220 words a minute, and 4 s for a line of code, without exercises. Sections that say "(optional)" in
their heading are counted apart. Lines are those of the whole source. `--write` puts the minutes
into the README's table.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import build_pairs

WORDS_A_MINUTE, SECONDS_A_CODE_LINE = 220, 4
WORD = re.compile(r"\w[\w'’.-]*")
LINK = re.compile(r"\]\([^)]*\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # which nobody sees
INDEX_ROW = re.compile(r"^\|.*`AMP\d{4}`.*$", re.MULTILINE)
README = build_pairs.FOLDER.parent / "README.md"
# A row of its table: | [title](notebooks/NAME.ipynb) | … | minutes to read |
ROW = re.compile(r"^(\| \[[^]]+\]\(notebooks/(\w+)\.ipynb\) \|.*\| )\d+ min( \|)$", re.MULTILINE)


class Minutes(NamedTuple):
    """Minutes for text and code of a notebook, without exercises."""

    core: float
    optional: float  # of sections that only some readers need


def minutes(source: Path) -> Minutes:
    """How long the notebook takes to read."""
    core = 0.0
    optional = 0.0
    is_optional = False  # whether the present section is; code cells belong to it too
    for cell_type, text in _parts_before_the_exercises(source):
        if cell_type == "code":
            amount = _code_minutes(text)
        else:
            heading = text.partition("\n")[0]
            if heading.startswith("## "):
                is_optional = heading.endswith("(optional)")
            amount = _words(text) / WORDS_A_MINUTE
        if is_optional:
            optional += amount
        else:
            core += amount
    return Minutes(core, optional)


def _parts_before_the_exercises(source: Path) -> Iterator[tuple[str, str]]:
    """Cell type and text of each code cell and of each section of a Markdown cell."""
    for cell in build_pairs.read_source(source).cells:
        if cell.cell_type == "code":
            yield "code", cell.source
            continue
        for section in re.split(r"^(?=## )", cell.source, flags=re.MULTILINE):
            if section.startswith("## Exercises"):
                return
            yield cell.cell_type, section


def _code_minutes(code: str) -> float:
    lines = sum(1 for line in code.splitlines() if line.strip())
    return lines * SECONDS_A_CODE_LINE / 60


def _words(text: str) -> int:
    """The number of words that are read in Markdown: no comments, index rows and addresses."""
    text = COMMENT.sub("", text)
    text = INDEX_ROW.sub("", text)
    text = LINK.sub("]", text)
    return len(WORD.findall(text))


def with_minutes(readme: str) -> str:
    """The README with the minutes of its table as they are."""

    def row(match: re.Match[str]) -> str:
        source = build_pairs.FOLDER / f"{match[2]}.py"
        rounded = round(minutes(source).core)
        return f"{match[1]}{rounded} min{match[3]}"

    return ROW.sub(row, readme)


def main() -> None:
    """Print minutes and lines of the notebooks asked for, or write the minutes into the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 04 (default: all)")
    parser.add_argument("--write", action="store_true", help="put them into the README's table")
    options = parser.parse_args()
    if options.write:
        README.write_text(with_minutes(README.read_text(encoding="utf-8")), encoding="utf-8")
    total = Minutes(0, 0)
    for source in build_pairs.find(options.names):
        lines = len(source.read_text(encoding="utf-8").splitlines())
        needed = minutes(source)
        optional = f"{needed.optional:6.1f} min optional" if needed.optional else ""
        print(f"{source.stem:<30} {needed.core:5.1f} min {lines:6} lines{optional}")
        if not build_pairs.is_reference(source):
            total = Minutes(total.core + needed.core, total.optional + needed.optional)
    both = total.core + total.optional
    print(f"together {total.core:.0f} min, with optional text {both:.0f} min, without 08a to 08h")


if __name__ == "__main__":
    main()
