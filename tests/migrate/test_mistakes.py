"""The mistakes that are found in source: all of the wrong examples, none of the right ones."""

import pytest
from migrate_snippets import snippets

from amp_lab.migrate import migrate_source

RIGHT = snippets("right")
TOLD = {("mistake", title): code for title, code in snippets("wrong").items()}
TOLD |= {("note", title): code for title, code in snippets("notes").items()}  # of what is harmless


def reported_mistakes(code: str) -> list[tuple[str, int]]:
    findings = migrate_source(code)[1]
    return [(f.kind, f.line) for f in findings if f.kind in ("mistake", "note")]


@pytest.mark.parametrize("title", RIGHT)
def test_right_code_gives_no_alarm(title):
    compile(RIGHT[title], title, "exec")
    assert reported_mistakes(RIGHT[title]) == []


@pytest.mark.parametrize(("kind", "title"), TOLD)
def test_a_mistake_is_told_at_its_line_and_alone(kind, title):
    code = TOLD[kind, title]
    compile(code, title, "exec")
    assert reported_mistakes(code) == [(kind, int(title.rpartition(": ")[2]))]


@pytest.mark.parametrize(("kind", "title"), TOLD)
def test_a_mistake_is_still_told_after_the_names_are_rewritten(kind, title):
    code = TOLD[kind, title]
    assert reported_mistakes(migrate_source(code)[0]) == reported_mistakes(code)


@pytest.mark.parametrize(("kind", "title"), TOLD)
def test_a_mistake_in_a_function_of_a_longer_file_is_told_too(kind, title):
    header, *lines = TOLD[kind, title].splitlines()
    imports = [line for line in lines if line.startswith(("import", "from"))]
    body = [line for line in lines if line not in imports]
    moved = "\n".join([header, *imports, "def main():", *(f"    {line}" for line in body), ""])
    assert [found for found, _ in reported_mistakes(moved)] == [kind]
