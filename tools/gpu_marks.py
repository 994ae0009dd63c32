"""Statements about GPUs that nobody has seen on one: their list, and the mark they carry.

`python tools/gpu_marks.py` lists them; `--check` fails if the prose and the list disagree, or if a
recorded run has shown one; `--write` removes the marks of those. What is documented elsewhere, or
what fake tensors show with an assert, needs no mark.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
WORDS = "(not yet seen on a GPU)"


@dataclass(frozen=True)
class Statement:
    """Something that only a GPU can show."""

    name: str
    parts: tuple[str, ...]  # of tools/first_gpu.py, which together show it


# Those but 12, Keras, which has a part of its own.
_NOTEBOOKS = tuple(f"{n:02}" for n in (*range(1, 12), *range(13, 20)))
STATEMENTS = {
    "notebooks": Statement("the notebooks run there", tuple(f"notebook-{n}" for n in _NOTEBOOKS)),
    "clock-too-early": Statement("a clock read too early sees too little", ("notebook-04",)),
    "memory-limit": Statement("what fits under a limit of 6 GiB", ("notebook-06",)),
    "real-rows": Statement("ops on fake CUDA tensors are those of a real run", ("xray",)),
    "memory-forecast": Statement("forecasts are what the allocator counts", ("memory",)),
    "small-ops": Statement("small ops leave a GPU waiting for its host", ("notebook-10",)),
    "triton-tiles": Statement("the step in tiles runs there, in Triton", ("tiles",)),
    "apex-o1": Statement("O1 and autocast agree within four roundings", ("notebook-13",)),
}
_GAP = r"[\s#]+"  # a blank, or the end of a line in a comment
_WORDS = re.escape(WORDS).replace(r"\ ", _GAP)
_LINK = re.compile(rf'\[\*{_WORDS}\*\]\((?P<to>\S*){_GAP}"(?P<key>[^"]*)"\)')


def mark(key: str, place: Path) -> str:
    """The Markdown that a statement carries in the file at `place`."""
    to = Path(*[".."] * (len(place.relative_to(ROOT).parts) - 1), "data", "results", "README.md")
    return f'[*{WORDS}*]({to.as_posix()} "{key}")'


def seen(results: Iterable[Path], statements: Mapping[str, Statement]) -> dict[str, str]:
    """The statements that a recorded run on a GPU has shown whole, each with the file's name."""
    shown: dict[str, str] = {}
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["tiny"] or found["device"].partition(":")[0] in ("cpu", "pretend"):
            continue  # a rehearsal
        held = {part["part"] for part in found["parts"] if part["status"] == "held"}
        shown |= {key: path.name for key, one in statements.items() if held.issuperset(one.parts)}
    return shown


def complaints(
    texts: Mapping[Path, str], statements: Mapping[str, Statement], shown: Mapping[str, str]
) -> list[str]:
    """What is wrong, a line each: unknown keys, and marks that are missing or to be removed."""
    said, marked = [], set()
    for place, text in texts.items():
        links = list(_LINK.finditer(text))
        for link in links:
            key = link["key"]
            marked.add(key)
            where = f"{place.name}:{text.count(chr(10), 0, link.start()) + 1}"
            if key not in statements:
                said.append(f"{where}: no statement {key!r} in tools/gpu_marks.py")
            elif key in shown:
                said.append(f"{where}: {shown[key]} has shown {key!r}: remove its mark (--write)")
            elif f"]({link['to']} " not in mark(key, place):
                said.append(f"{where}: should be {mark(key, place)}")
        if len(links) != len(re.findall(_WORDS, text)):
            said.append(f"{place.name}: a mark is not written as {mark('KEY', place)}")
    without = [key for key in statements if key not in marked and key not in shown]
    return said + [
        f"{key!r} is in tools/gpu_marks.py and no text carries its mark" for key in without
    ]


def without_marks(text: str, keys: Iterable[str]) -> str:
    """The text without the marks of `keys`, and without the blank before each."""
    gone = set(keys)

    def kept(found: re.Match) -> str:
        return "" if found["key"] in gone else found[0]

    # What ends a sentence after it stays where the sentence ends, also over the end of a line.
    for around in (rf"(?: |\n(?:# )?){_LINK.pattern}(?=[.,;:)])", rf" {_LINK.pattern}"):
        text = re.sub(around, kept, text)
    return re.sub(rf"{_LINK.pattern} ?", kept, text)


def read() -> dict[Path, str]:
    """The texts that may carry marks: the notebooks' sources and the pages."""
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CHEATSHEET.md", ROOT / "README.md"]
    places = [*notebooks, *pages]
    return {place: place.read_text(encoding="utf-8") for place in places}


def main(argv: list[str] | None = None) -> int:
    """Run this tool; return 0, or 2 if something is to be put right."""
    parser = argparse.ArgumentParser(prog="gpu_marks", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail if marks and list disagree")
    what.add_argument("--write", action="store_true", help="remove the marks of what was seen")
    options = parser.parse_args(argv)
    texts, shown = read(), seen(sorted(RESULTS.glob("*gpu-*.json")), STATEMENTS)
    if options.write:
        for place, text in texts.items():
            if (new := without_marks(text, shown)) != text:
                place.write_text(new, encoding="utf-8")
                print(f"{place.name}: look at the sentences, then make its pair")
    elif options.check:
        said = complaints(texts, STATEMENTS, shown)
        for line in said:
            print(f"gpu_marks: {line}", file=sys.stderr)
        return 2 if said else 0
    else:
        for key, one in STATEMENTS.items():
            state = f"seen: {shown[key]}" if key in shown else f"shown by {', '.join(one.parts)}"
            print(f"{key:<16} {one.name}; {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
