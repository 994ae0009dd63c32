"""The notebooks' exercises: a stub is said to be one, a solution is right, a wrong answer told why.

The wrong answers to those of a notebook are in a file of its name in `wrong_answers`.
"""

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from definitions import definitions

import build_pairs

FOLDER = Path(__file__).parent / "wrong_answers"


@dataclass
class Exercise:
    """One of a notebook: its stub cell, what stands above it, and what is folded away below."""

    source: Path
    stub: str
    above: str
    below: str

    @property
    def call(self) -> str:
        """The last line of the stub, which calls the check."""
        return self.stub.rstrip().rpartition("\n")[2]

    @property
    def check(self) -> str:
        return self.call.partition("(")[0].removeprefix("exercises.")

    def run(self, answer: str) -> None:
        """Run an answer as the reader would, in place of the stub, and the check after it."""
        names = definitions(self.source, ["exercises"], device=torch.device("cpu"))
        exec(f"{answer}\n{self.call}", names)


def exercises(source: Path) -> Iterator[Exercise]:
    """Those of a notebook, in their order: cells with dots that end with a check."""
    cells = build_pairs.read_source(source).cells
    for above, stub, below in zip(cells, cells[1:], [*cells[2:], None], strict=False):
        dots = stub.cell_type == "code" and re.search(r"(=|return|:) \.\.\.", stub.source)
        if dots and stub.source.rstrip().rpartition("\n")[2].startswith("exercises.check_"):
            yield Exercise(source, stub.source, above.source, below.source if below else "")


def wrong_answers(source: Path) -> dict[str, list[tuple[str, str]]]:
    """For each check of a notebook some answers, and words of the line that each gets."""
    file = FOLDER / source.name
    return runpy.run_path(str(file))["WRONG_ANSWERS"] if file.exists() else {}


ALL = [e for source in build_pairs.find() for e in exercises(source)]
WRONG = [
    pytest.param(e, answer, why, id=f"{e.source.stem[:2]} {e.check} {i}")
    for e in ALL
    for i, (answer, why) in enumerate(wrong_answers(e.source).get(e.check, []))
]
each_exercise = pytest.mark.parametrize(
    "exercise", ALL, ids=[f"{e.source.stem[:2]} {e.check}" for e in ALL]
)


def test_every_notebook_has_exercises():
    lessons = [source for source in build_pairs.find() if not build_pairs.is_reference(source)]
    counts = {source.stem: sum(e.source == source for e in ALL) for source in lessons}
    short = {name for name, count in counts.items() if count < (2 if name[:2] == "00" else 4)}
    assert not short, f"write exercises that answer for {short}"


@each_exercise
def test_an_untouched_stub_is_said_to_be_one(exercise, capsys):
    exercise.run(exercise.stub.rpartition("\n")[0])
    assert capsys.readouterr().out.startswith("Not answered yet")


@each_exercise
def test_the_solution_is_right(exercise, capsys):
    folded = exercise.below.partition("<summary>Solution</summary>")[2].partition("</details>")[0]
    (solution,) = re.findall(r"```python\n(.*?)```", folded, re.DOTALL)
    exercise.run(solution)
    said = capsys.readouterr().out
    assert re.fullmatch(r"Right\. .+\n", said), said


@each_exercise
def test_it_has_a_title_a_hint_and_two_wrong_answers(exercise):
    assert re.search(r"^### \d\. .+", exercise.above, re.MULTILINE), "write '### 1. Title' above"
    assert "<summary>Hint</summary>" in exercise.below, "fold a hint away below the stub"
    file = FOLDER / exercise.source.name
    answers = wrong_answers(exercise.source).get(exercise.check, [])
    assert len(answers) >= 2, f"write two plausible wrong answers into {file}"


@pytest.mark.parametrize(("exercise", "answer", "why"), WRONG)
def test_a_wrong_answer_is_told_why(exercise, answer, why, capsys):
    exercise.run(answer)
    said = capsys.readouterr().out
    assert re.fullmatch(r"Not yet\. .+\n", said), said
    assert why in said


def test_every_wrong_answer_belongs_to_an_exercise():
    checks = [(e.source.name, e.check) for e in ALL]
    assert len(checks) == len(set(checks)) > 0
    given = {(file.name, name) for file in FOLDER.glob("*.py") for name in wrong_answers(file)}
    assert given <= set(checks)
