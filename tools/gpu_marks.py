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
_NUMBERS = (*range(1, 12), *range(13, 20))
_FAILURES = tuple(f"notebook-08{letter}" for letter in "abcdefgh")
_NOTEBOOKS = (*(f"notebook-{number:02}" for number in _NUMBERS), *_FAILURES)
STATEMENTS = {
    "notebooks": Statement("the notebooks run there", _NOTEBOOKS),
    "clock-too-early": Statement("a clock read too early sees too little", ("notebook-04",)),
    "real-rows": Statement("ops on fake CUDA tensors are those of a real run", ("xray",)),
    "small-ops": Statement("small ops leave a GPU waiting for its host", ("notebook-10",)),
    "triton-tiles": Statement("the step in tiles runs there, in Triton", ("tiles",)),
    "apex-o1": Statement("O1 and autocast agree within four roundings", ("notebook-13",)),
}
_GAP = r"[\s#]+"  # a blank, or the end of a line in a comment
_WORDS = re.escape(WORDS).replace(r"\ ", _GAP)
_LINK = re.compile(rf'\[\*{_WORDS}\*\]\((?P<to>\S*){_GAP}"(?P<key>[^"]*)"\)')


def mark(key: str, place: Path) -> str:
    """The Markdown that a statement carries in the file at `place`."""
    folders = place.relative_to(ROOT).parts[:-1]
    up = "../" * len(folders)
    return f'[*{WORDS}*]({up}data/results/README.md "{key}")'


def seen(results: Iterable[Path], statements: Mapping[str, Statement]) -> dict[str, str]:
    """The statements that recorded runs on GPUs have shown, each with the names of their files.

    A statement is shown if each of its parts held in one of the runs.
    """
    file_of_part: dict[str, str] = {}
    for path in results:
        result = json.loads(path.read_text(encoding="utf-8"))
        device_type = result["device"].partition(":")[0]
        if result["tiny"] or device_type in ("cpu", "pretend"):
            continue  # a rehearsal
        for part in result["parts"]:
            if part["status"] == "held":
                file_of_part[part["part"]] = path.name
    files_of: dict[str, str] = {}
    for key, statement in statements.items():
        if all(part in file_of_part for part in statement.parts):
            files = {file_of_part[part] for part in statement.parts}
            files_of[key] = ", ".join(sorted(files))
    return files_of


def complaints(
    texts: Mapping[Path, str], statements: Mapping[str, Statement], shown: Mapping[str, str]
) -> list[str]:
    """What is wrong, a line each: unknown keys, and marks that are missing or to be removed."""
    problems = []
    marked = set()
    for place, text in texts.items():
        links = list(_LINK.finditer(text))
        for link in links:
            key = link["key"]
            marked.add(key)
            line = text.count("\n", 0, link.start()) + 1
            where = f"{place.name}:{line}"
            if key not in statements:
                problems.append(f"{where}: no statement {key!r} in tools/gpu_marks.py")
            elif key in shown:
                files = shown[key]
                problems.append(f"{where}: {key!r} was shown in {files}: remove its mark (--write)")
            elif f"]({link['to']} " not in mark(key, place):
                problems.append(f"{where}: should be {mark(key, place)}")
        if len(links) != len(re.findall(_WORDS, text)):
            problems.append(f"{place.name}: a mark is not written as {mark('KEY', place)}")
    for key in statements:
        if key not in marked and key not in shown:
            problems.append(f"{key!r} is in tools/gpu_marks.py and no text carries its mark")
    return problems


def without_marks(text: str, keys: Iterable[str]) -> str:
    """The text without the marks of `keys`, and without the blank before each."""
    keys_to_remove = set(keys)

    def without_mark(mark_and_blank: re.Match) -> str:
        if mark_and_blank["key"] in keys_to_remove:
            return ""
        return mark_and_blank[0]

    link = _LINK.pattern
    marks_with_blanks = (
        # Before the end of a sentence: with the blank or the line end before it, so that the full
        # stop follows the last word.
        rf"(?: |\n(?:# )?){link}(?=[.,;:)])",
        rf" {link}",  # inside of a sentence
        rf"{link} ?",  # at the start of a line
    )
    for pattern in marks_with_blanks:
        text = re.sub(pattern, without_mark, text)
    return text


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
    texts = read()
    results = sorted(RESULTS.glob("*gpu-*.json"))
    shown = seen(results, STATEMENTS)
    if options.check:
        problems = complaints(texts, STATEMENTS, shown)
        for line in problems:
            print(f"gpu_marks: {line}", file=sys.stderr)
        return 2 if problems else 0
    if options.write:
        _remove_marks(texts, shown)
    else:
        _print_list(shown)
    return 0


def _remove_marks(texts: Mapping[Path, str], shown: Mapping[str, str]) -> None:
    """Write the texts without the marks of what a run has shown, and print which have changed."""
    for place, text in texts.items():
        new = without_marks(text, shown)
        if new != text:
            place.write_text(new, encoding="utf-8")
            print(f"{place.name}: look at the sentences, then make its pair")


def _print_list(shown: Mapping[str, str]) -> None:
    """Print each statement with the file of the run that has shown it, or the parts that would."""
    for key, statement in STATEMENTS.items():
        if key in shown:
            state = f"seen: {shown[key]}"
        else:
            state = f"shown by {', '.join(statement.parts)}"
        print(f"{key:<16} {statement.name}; {state}")


if __name__ == "__main__":
    sys.exit(main())
