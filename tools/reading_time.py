"""How long a notebook takes to read: `python tools/reading_time.py [NAME …]`.

220 words a minute, and 4 s for a line of code; exercises, and sections that say "(optional)" in
their heading, are left out. Lines are those of the whole source. `--write` puts the minutes into
the README's table.
"""

import argparse
import re
from pathlib import Path

import build_pairs

WORDS_A_MINUTE, SECONDS_A_CODE_LINE = 220, 4
WORD = re.compile(r"\w[\w'’.-]*")
LINK = re.compile(r"\]\([^)]*\)")
COMMENT = re.compile(r"<!--.*?-->")  # which nobody sees
README = build_pairs.FOLDER.parent / "README.md"
# A row of its table: | [title](notebooks/NAME.ipynb) | … | minutes to read | time to run |
ROW = re.compile(
    r"^(\| \[[^]]+\]\(notebooks/(\w+)\.ipynb\) \|.*\| )\d+ min( \|[^|]*\|)$", re.MULTILINE
)


def minutes(source: Path) -> float:
    """Minutes for text and code of a notebook, without exercises and optional sections."""
    words, lines, counts = 0, 0, True
    for cell in build_pairs.read_source(source).cells:
        if cell.cell_type == "code":
            lines += counts * sum(1 for line in cell.source.splitlines() if line.strip())
            continue
        beginning, *sections = re.split(r"^(?=## )", cell.source, flags=re.MULTILINE)
        words += counts * _words(beginning)
        for section in sections:
            heading = section.splitlines()[0]
            if heading == "## Exercises":
                return words / WORDS_A_MINUTE + lines * SECONDS_A_CODE_LINE / 60
            counts = not heading.endswith("(optional)")
            words += counts * _words(section)
    return words / WORDS_A_MINUTE + lines * SECONDS_A_CODE_LINE / 60


def _words(text: str) -> int:
    return len(WORD.findall(LINK.sub("]", COMMENT.sub("", text))))


def with_minutes(readme: str) -> str:
    """The README with the minutes of its table as they are."""

    def row(match: re.Match[str]) -> str:
        return f"{match[1]}{round(minutes(build_pairs.FOLDER / f'{match[2]}.py'))} min{match[3]}"

    return ROW.sub(row, readme)


def main() -> None:
    """Print minutes and lines of the notebooks asked for, or write the minutes into the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 04 (default: all)")
    parser.add_argument("--write", action="store_true", help="put them into the README's table")
    options = parser.parse_args()
    if options.write:
        README.write_text(with_minutes(README.read_text(encoding="utf-8")), encoding="utf-8")
    for source in build_pairs.find(options.names):
        lines = len(source.read_text(encoding="utf-8").splitlines())
        print(f"{source.stem:<30} {minutes(source):4.0f} min {lines:6} lines")


if __name__ == "__main__":
    main()
