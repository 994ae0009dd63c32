"""The mistakes that are found in source: all of the wrong examples, none of the right ones."""

import pytest
from migrate_snippets import snippets

from amp_lab.migrate import migrate_source

RIGHT, WRONG = snippets("right"), snippets("wrong")


def mistakes(code: str) -> list[int]:
    return [finding.line for finding in migrate_source(code)[1] if finding.kind == "mistake"]


def test_there_are_forty_of_each():
    assert len(RIGHT) >= 40
    assert len(WRONG) >= 40


@pytest.mark.parametrize("title", RIGHT)
def test_right_code_gives_no_alarm(title):
    compile(RIGHT[title], title, "exec")
    assert mistakes(RIGHT[title]) == []


@pytest.mark.parametrize("title", WRONG)
def test_a_mistake_is_told_at_its_line_and_alone(title):
    compile(WRONG[title], title, "exec")
    assert mistakes(WRONG[title]) == [int(title.rpartition(": ")[2])]


@pytest.mark.parametrize("title", WRONG)
def test_a_mistake_is_still_told_after_the_names_are_rewritten(title):
    new, _ = migrate_source(WRONG[title])
    assert mistakes(new) == mistakes(WRONG[title])


@pytest.mark.parametrize("title", WRONG)
def test_a_mistake_in_a_function_of_a_longer_file_is_told_too(title):
    header, *lines = WRONG[title].partition("\n")[0], *WRONG[title].splitlines()[1:]
    imports = [line for line in lines if line.startswith(("import", "from"))]
    body = [line for line in lines if line not in imports]
    moved = "\n".join([header, *imports, "def main():", *(f"    {line}" for line in body), ""])
    assert len(mistakes(moved)) == 1
