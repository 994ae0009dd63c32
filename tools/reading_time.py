"""How long a notebook takes to read, in minutes: `python tools/reading_time.py [NAME …]`.

220 words a minute, and 4 s for a line of code; exercises, and sections that say "(optional)" in
their heading, are left out. Lines are those of the whole source. The README's table has these
minutes, and a test compares them.
"""

import argparse
import re
from pathlib import Path

import build_pairs

WORDS_A_MINUTE, SECONDS_A_CODE_LINE = 220, 4
WORD = re.compile(r"\w[\w'’.-]*")
LINK = re.compile(r"\]\([^)]*\)")


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
    return len(WORD.findall(LINK.sub("]", text)))


def main() -> None:
    """Print minutes and lines of the notebooks asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="e.g. 04 (default: all)")
    for source in build_pairs.find(parser.parse_args().names):
        lines = len(source.read_text(encoding="utf-8").splitlines())
        print(f"{source.stem:<30} {minutes(source):4.0f} min {lines:6} lines")


if __name__ == "__main__":
    main()
